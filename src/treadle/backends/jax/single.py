"""A program without a loop for windows of one batch.

XLA starts a loop of one step about 0.2 ms later than the step alone. The step alone is usually the
same to the bit, but XLA may fuse or multiply in another order inside a loop (convolutions on a CPU
do so), and windows must give the same bits as single steps. So the program without a loop is used
only after it gave, for several steps, the bits of the loop: of all variables and results.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import jax
import numpy as np

STEPS_COMPARED: Final = 8
SAVED_SECONDS: Final = 2e-4
"""The time that a step saves without the loop, measured on two cores."""

# Convolutions round differently in a loop. A branch may first be taken after the comparison.
_NOT_COMPARABLE: Final = frozenset({"conv_general_dilated", "cond", "while"})


class SingleStep:
    """The program of a step without a loop, from when it pays until it is proven or refused.

    It is compiled when single steps have lost as much time as compiling the loop took: whoever
    runs a few single steps, or slow ones, does not pay for it.

    Args:
        compile_seconds: The time that compiling the loop took.
        updated: Whether the step assigns each variable of the state.
        primitives: The names of all operations of the step.

    Attributes:
        function: The compiled program; None before it pays, and after it was refused.
        proven: Whether it gave the bits of the loop for `STEPS_COMPARED` steps.
    """

    def __init__(
        self, compile_seconds: float, updated: Sequence[bool], primitives: Collection[str]
    ) -> None:
        self.function: Callable[..., Any] | None = None
        self.proven = False
        self._seconds_left, self._updated, self._compared = compile_seconds, updated, 0
        # A callback would be called twice for a step that is compared.
        self._refused = any(name in _NOT_COMPARABLE or "callback" in name for name in primitives)

    @property
    def is_due(self) -> bool:
        """Whether it should be compiled now."""
        return self.function is None and self._seconds_left <= 0 and not self._refused

    def compile(self, make: Callable[[], Callable[..., Any]]) -> None:
        """Compile the program; refuse it if that fails, since the loop can run every step."""
        try:
            self.function = make()
        except Exception:
            self._refuse()

    def ran_in_loop(self) -> None:
        """Count a single step that ran in the loop."""
        self._seconds_left -= SAVED_SECONDS

    def compare(self, before: Sequence[Any], looped: Any, run: Callable[[], Any]) -> None:
        """Run a step without the loop, and compare all bits with those of the loop.

        A step counts only if it changed every variable that it assigns: updates of zero would hide
        how they were rounded. If running it fails, as without memory for a second state, it is
        refused.

        Args:
            before: The variables before the step.
            looped: The new variables and the results of the loop.
            run: Runs the step without the loop, and returns the same structure.
        """
        try:
            alike = all(map(_same_bits, jax.tree.leaves(looped), jax.tree.leaves(run())))
        except Exception:
            alike = False
        if not alike:
            self._refuse()
            return
        pairs = zip(before, looped[0], self._updated, strict=True)
        if all(not _same_bits(old, new) for old, new, updated in pairs if updated):
            self._compared += 1
            self.proven = self._compared >= STEPS_COMPARED

    def _refuse(self) -> None:
        self.function, self.proven, self._refused = None, False, True


def _same_bits(x: Any, y: Any) -> bool:
    """Return whether two arrays have equal bytes; NaN equals itself."""
    return np.asarray(x).tobytes() == np.asarray(y).tobytes()
