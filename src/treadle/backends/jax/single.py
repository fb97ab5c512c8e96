"""A program without a loop for windows of one batch.

XLA starts a loop of one step about 0.2 ms later than the step alone. The step alone is usually the
same to the bit, but XLA may fuse or multiply in another order inside a loop (convolutions on a CPU
do so), and windows must give the same bits as single steps. So the program without a loop is used
only after it gave, for several steps in a row, the bits of the loop: of all variables and results.
"""

from collections.abc import Callable
from typing import Any, Final

import jax
import numpy as np

STEPS_COMPARED: Final = 8


class SingleStep:
    """The program of a step without a loop, from when it pays until it is proven or refused.

    Compiling takes as long as it took for the loop, so it waits until single steps have taken as
    long as that: whoever runs a few single steps does not pay for it.

    Args:
        compile_seconds: The time that compiling the loop took.

    Attributes:
        function: The compiled program; None before it pays.
        proven: Whether it gave the bits of the loop for `STEPS_COMPARED` steps.
    """

    def __init__(self, compile_seconds: float) -> None:
        self.function: Callable[..., Any] | None = None
        self.proven = False
        self._seconds_left = compile_seconds
        self._compared, self._refused = 0, False

    @property
    def is_due(self) -> bool:
        """Whether it should be compiled now."""
        return self.function is None and self._seconds_left <= 0 and not self._refused

    def ran(self, seconds: float) -> None:
        """Count the time of a single step that ran as a loop."""
        self._seconds_left -= seconds

    def compare(self, looped: Any, single: Any) -> None:
        """Compare what the loop and this program returned for the same step: state and results.

        Args:
            looped: The arrays of the loop.
            single: Those of this program, in the same structure.
        """
        if all(map(_same_bits, jax.tree.leaves(looped), jax.tree.leaves(single))):
            self._compared += 1
            self.proven = self._compared >= STEPS_COMPARED
        else:
            self.function, self._refused = None, True


def _same_bits(x: Any, y: Any) -> bool:
    """Return whether two arrays have equal bytes; NaN equals itself."""
    return np.asarray(x).tobytes() == np.asarray(y).tobytes()
