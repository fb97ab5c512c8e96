"""Steps that run before the loop asks for them, and variables that get their values when read.

What a step computes depends on the loop's body only if the body reads or assigns a variable (a
changed Python value rebuilds the step, which reads them all). So a loop that yields after every
step can still run many steps in one call, as long as no variable is touched. JAX' arrays never
change, and Keras keeps a variable's array in one attribute, `_value`. While that is missing, Python
calls `__getattr__`, and the steps that the loop has taken so far run again from the state before
them. Windows of all sizes give the same bits, and so does this.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from threading import RLock
from typing import Any, Final

import keras
import numpy as np

from ..background import Results
from ..types import Tensor, Variable
from ..window import Following, Window
from .patches import JaxVariable

Outcome = tuple[Sequence[Tensor], Sequence[Mapping[str, Any]]]
"""The state after some steps, and values, explicit weights and violations of each step."""

LONGEST: Final = 128
SECONDS: Final = 0.03
"""How many short windows run in one call ahead of the loop: up to so many steps and seconds. They
are lost if the loop's body reads the state."""

LONGEST_SECONDS: Final = 0.25
"""Windows that take longer run alone: they would gain little, and much could be lost."""

SHORTEST_PAUSE: Final = 8
LONGEST_PAUSE: Final = 1024
"""Windows that run alone after steps were lost, at first and at most."""

_LATE: Final = "_treadle_late_values"


class Steps:
    """Steps that run in one call, and how many of them the loop has taken.

    Args:
        run: `run(count)` runs the first steps, and returns the state after them and the values,
            explicit weights and violations of each step. It is called again if the loop's body
            reads the state before it has taken all steps.
        outcome: Waits for the result of `run(count)`, and for the seconds that it took.
        first: The number of steps before the first one.
        window: The batches of the steps.
    """

    def __init__(
        self,
        run: Callable[[int], Outcome],
        outcome: Callable[[], tuple[Outcome, float]],
        first: int,
        window: Window,
    ) -> None:
        self._run: Callable[[int], Outcome] | None = run
        self._outcome, self._window, self._first = outcome, window, first
        self._taken, self.count = 0, window.count

    @cached_property
    def _result(self) -> tuple[Outcome, float]:
        return self._outcome()

    @property
    def all_taken(self) -> bool:
        """Whether the loop has taken all of these steps."""
        return self._taken == self.count

    @property
    def left(self) -> int:
        """The number of steps that the loop has not taken."""
        return self.count - self._taken

    @property
    def seconds(self) -> float:
        """The duration of one step."""
        return self._result[1] / self.count

    def next_are(self, window: Window, first_step: int | None = None) -> bool:
        """Return whether the next of these steps are those of a window."""
        own, rows, end = self._window.rows, window.rows, self._taken + window.count
        return (
            end <= self.count
            and (first_step is None or first_step == self._first + self._taken)
            and own is not None
            and rows is not None
            and rows.owner is own.owner
            and np.array_equal(rows.indices, own.indices[self._taken : end])
        )

    def take(self, count: int) -> Results:
        """Wait, and return values, explicit weights and violations of the next steps."""
        chosen = slice(self._taken, self._taken + count)
        (_, results), _ = self._result
        values, weights, broken = ({k: x[chosen] for k, x in part.items()} for part in results)
        self._taken += count
        if self.all_taken:
            self._run = None  # frees the state before these steps
        return values, weights, [message for message, flags in broken.items() if flags.any()]

    def state(self) -> Sequence[Tensor]:
        """Return the state after the steps that were taken."""
        return self._result[0][0] if self._run is None else self._run(self._taken)[0]

    def after(self) -> tuple[Sequence[Tensor], int]:
        """Return the state after all steps, and the number of steps of the run until there."""
        return self._result[0][0], self._first + self.count


class Ahead:
    """The newest steps of a program and its variables, whose values are assigned when read.

    Assigning hundreds of variables takes longer than a small step.

    Args:
        variables: The variables of the program.
    """

    def __init__(self, variables: Iterable[Variable]) -> None:
        self._variables = list(variables)
        self._attributes = [vars(variable) for variable in self._variables]
        self._steps: Steps | None = None  # those that the loop takes
        self._then: Steps | None = None  # those that run meanwhile
        self._late = False
        self._lock = RLock()  # another thread may read a variable
        self._windows, self._alone, self._pause = 1, 0, SHORTEST_PAUSE

    def holds(self, window: Window) -> bool:
        """Return whether the steps of a window already run, if no variable is touched."""
        steps = self._next_steps()
        return steps is not None and steps.next_are(window)

    def take(self, window: Window, first_step: int) -> tuple[Results, float] | None:
        """Return the results of steps that ran before, and their seconds; None if they must run."""
        with self._lock:
            steps = self._next_steps()
            if steps is None or not steps.next_are(window, first_step) or not self._untouched():
                return None
            try:
                results, seconds = steps.take(window.count), window.count * steps.seconds
            except Exception:
                return None  # the window fails too if it runs alone, unless memory was short
            if steps is self._then:
                self._steps, self._then = steps, None
                self._grow(steps.seconds, window.count)
            return results, seconds

    def _next_steps(self) -> Steps | None:
        return self._then if self._steps is None or self._steps.all_taken else self._steps

    def _untouched(self) -> bool:
        """Return whether no variable was read or assigned since the steps ran."""
        return self._late and not any("_value" in attributes for attributes in self._attributes)

    def _grow(self, seconds: float, count: int) -> None:
        most = max(1, min(LONGEST, int(SECONDS / max(seconds, 1e-9))) // count)
        if self._windows >= most:
            self._pause = SHORTEST_PAUSE
        self._windows = min(2 * self._windows, most)

    def further(self, count: int, following: Following) -> tuple[Window, Steps] | None:
        """Return the batches to run now, and the steps before them; None if nothing is to run.

        Args:
            count: The number of steps that the loop takes at a time.
            following: Returns the batches that the loop will take next.
        """
        steps = self._steps
        if steps is None or self._then is not None or self._alone or not self._late:
            return None
        if count * steps.seconds > LONGEST_SECONDS:
            return None
        read = following(steps.left + self._windows * count)
        if read is None or read.count < steps.left + count:
            return None
        _, window = read.split(steps.left)
        return window.split(window.count - window.count % count)[0], steps

    def start(self, steps: Steps) -> None:
        """Set the steps that run while the loop takes the others."""
        self._then = steps

    def state(self) -> Sequence[Tensor]:
        """Return the present values of the variables."""
        if self._steps is not None and self._steps.all_taken and self._untouched():
            return self._steps.state()
        self.assign()  # not by reading: all variables may have been assigned
        return [variable._value for variable in self._variables]

    def ran(self, steps: Steps) -> None:
        """Let the variables have the values after steps that the loop asked for."""
        with self._lock:
            if self._then is not None or (self._steps is not None and not self._steps.all_taken):
                self._windows, self._alone = 1, self._pause
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._alone = max(0, self._alone - 1)
            self._steps, self._then = steps, None
            if keras.config.is_nnx_enabled():  # its variables keep their values elsewhere
                for variable, value in zip(self._variables, steps.state(), strict=True):
                    variable._value = value
            elif not self._late:
                self._late = True
                for attributes in self._attributes:
                    attributes.pop("_value", None)
                    attributes[_LATE] = self

    def assign(self) -> None:
        """Assign the present values to all variables without one."""
        with self._lock:
            if self._late and self._steps is not None:
                for attributes, value in zip(self._attributes, self._steps.state(), strict=True):
                    attributes.setdefault("_value", value)
                    del attributes[_LATE]
                self._late = False


def _read(variable: Any, name: str) -> Any:
    """Return a missing attribute of a variable: its value, if that is assigned late."""
    late = vars(variable).get(_LATE) if name == "_value" else None
    if late is None:
        raise AttributeError(
            f"{type(variable).__name__!r} object has no attribute {name!r}", name=name, obj=variable
        )
    late.assign()
    return vars(variable)["_value"]


def _state_to_copy(variable: Any) -> dict[str, Any]:
    """Return what copies and pickles of a variable hold."""
    late = vars(variable).get(_LATE)
    if late is not None:
        late.assign()
    return vars(variable)


if not keras.config.is_nnx_enabled():
    JaxVariable.__getattr__ = _read
    JaxVariable.__getstate__ = _state_to_copy
