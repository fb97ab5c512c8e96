"""Steps that run before the loop asks for them, and variables that are assigned when read.

JAX's arrays never change, so what a step computes depends on the body of the user's loop only
through Keras' variables and Python values. After a call, the variables have no `_value`, the one
attribute in which Keras keeps their arrays. To read a missing attribute Python calls `__getattr__`,
which assigns the state after the steps that the loop has taken so far: if a call ran n steps and
the loop took k, the first k run again from the state before them, with the same bits. A changed
Python value rebuilds the step, and the new program starts from the variables.

A variable has at most one owner, the `DeferredState` that assigns it. `_lock` guards the attributes
`_value` and `_OWNER` of all variables, and the steps of all owners. The loop's thread alone takes
and defers steps; any thread may read variables. Steps that call Python do not run ahead.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import repeat
from operator import contains, is_
from threading import RLock
from typing import Any, Final

import keras

from ..background import Results
from ..types import Tensor, Variable
from ..window import Following, Window

Outcome = tuple[Sequence[Tensor], Sequence[Mapping[str, Any]]]
"""The state after some steps, and values, explicit weights and violations of each step."""

MAX_STEPS: Final = 128
TARGET_SECONDS: Final = 0.03
"""Limits of a call that runs several short windows ahead. All of it is lost if the body of the loop
reads the state, and the first step is only available when the last one has run."""

MAX_WINDOW_SECONDS: Final = 0.25
"""Windows of several steps that take longer do not run ahead: the gain would be small."""

FIRST_PAUSE: Final = 8
MAX_PAUSE: Final = 1024
"""For how many windows nothing runs ahead after steps were lost, at first and at most."""

_NNX: Final[bool] = getattr(keras.config, "is_nnx_enabled", lambda: False)()  # since Keras 3.11
_OWNER: Final = "_treadle_deferred_state"
_lock = RLock()


class Steps:
    """Steps that run in one call, and how many of them the loop has taken.

    Args:
        run: `run(count)` runs the first steps. It is called again if the state is read before the
            loop has taken all steps.
        outcome: Waits for the result of `run(window.count)`, and for the seconds that it took.
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
        self._outcome, self._first = outcome, first
        self._run: Callable[[int], Outcome] | None = run
        self._window: Window | None = window
        self._taken, self.count = 0, window.count

    @cached_property
    def result(self) -> tuple[Outcome, float]:
        """The outcome of all steps and its seconds; the first access waits for them."""
        return self._outcome()

    @property
    def left(self) -> int:
        """The number of steps that the loop has not taken."""
        return self.count - self._taken

    @property
    def seconds(self) -> float:
        """The duration of one step."""
        return self.result[1] / self.count

    def next_are(self, window: Window, first_step: int | None = None) -> bool:
        """Return whether the next of these steps are those of a window."""
        end = self._taken + window.count
        if end > self.count or self._window is None:
            return False
        own, rows = self._window.rows, window.rows
        if own is None or rows is None or rows.owner is not own.owner:
            return False
        if first_step is not None and first_step != self._first + self._taken:
            return False
        indices = own.indices[self._taken : end]
        # `np.array_equal` takes three times as long for a short window.
        return rows.indices.shape == indices.shape and rows.indices.tobytes() == indices.tobytes()

    def take(self, count: int) -> Results:
        """Return values, explicit weights and violations of the next steps."""
        chosen = slice(self._taken, self._taken + count)
        (_, results), _ = self.result
        # Most steps have values only, and what is empty is left out: this runs in every step.
        values, weights, broken = [
            {k: x[chosen] for k, x in part.items()} if part else {} for part in results
        ]
        self._taken += count
        if self._taken == self.count:  # frees the state before these steps, and the data
            self._run = self._window = None
        violated = [m for m, flags in broken.items() if flags.any()] if broken else []
        return values, weights, violated

    def state(self) -> Sequence[Tensor]:
        """Return the state after the steps that were taken."""
        return self.result[0][0] if self._run is None else self._run(self._taken)[0]

    def final_state(self) -> tuple[Sequence[Tensor], int]:
        """Return the state after all steps, and the number of steps of the run until there."""
        return self.result[0][0], self._first + self.count


class DeferredState:
    """The newest steps of a program, and its variables, which are assigned when one is read.

    To assign hundreds of variables takes longer than a small step.

    Args:
        variables: The variables of the program.
    """

    def __init__(self, variables: Iterable[Variable]) -> None:
        self._variables = list(variables)
        self._attributes = [vars(variable) for variable in self._variables]
        self._steps: Steps | None = None  # those that the loop takes
        self._running: Steps | None = None  # those that run meanwhile
        self._windows_ahead, self._alone, self._pause = 1, 0, FIRST_PAUSE

    def has_results_for(self, window: Window) -> bool:
        """Return whether the steps of a window have run or run now, if no variable is touched."""
        steps = self._next_steps()
        return steps is not None and steps.next_are(window)

    def take(self, window: Window, first_step: int) -> tuple[Results, float] | None:
        """Return the results of steps that ran before, and their seconds; None if they must run."""
        steps = self._next_steps()
        if steps is None or not steps.next_are(window, first_step) or not self._untouched():
            return None
        try:
            seconds = window.count * steps.seconds
        except Exception:  # the window runs again, alone: a real error is raised there
            return None
        with _lock:
            if not self._untouched():  # another thread has read a variable meanwhile
                return None
            results = steps.take(window.count)
            if steps is self._running:
                self._steps, self._running = steps, None
                self._adapt(steps.seconds, window.count)
        return results, seconds

    def _next_steps(self) -> Steps | None:
        return self._steps if self._steps is not None and self._steps.left else self._running

    def _untouched(self) -> bool:
        """Return whether no variable was read or assigned since the steps were deferred."""
        if self._steps is None:
            return False
        # Without a Python loop, so that a step takes as long for a hundred times the variables.
        owners = map(dict[str, Any].get, self._attributes, repeat(_OWNER))
        return not any(map(contains, self._attributes, repeat("_value"))) and all(
            map(is_, owners, repeat(self))
        )

    def _adapt(self, seconds: float, count: int) -> None:
        """Run twice as many windows ahead after some were taken completely, up to the limits."""
        most = max(1, min(MAX_STEPS, int(TARGET_SECONDS / max(seconds, 1e-9))) // count)
        if self._windows_ahead >= most > 1:
            self._pause = FIRST_PAUSE
        self._windows_ahead = min(2 * self._windows_ahead, most)

    def next_to_run(self, count: int, following: Following) -> tuple[Window, Steps] | None:
        """Return the batches to run now, and the steps before them; None if nothing is to run.

        Args:
            count: The number of steps that the loop takes at a time.
            following: Returns the batches that the loop will take next.
        """
        steps = self._steps
        if steps is None or self._running is not None or self._alone or not self._untouched():
            return None
        if count * steps.seconds > (TARGET_SECONDS if count == 1 else MAX_WINDOW_SECONDS):
            return None
        read = following(steps.left + self._windows_ahead * count)
        if read is None or read.count < steps.left + count:
            return None
        _, window = read.split(steps.left)
        return window.split(window.count - window.count % count)[0], steps

    def start(self, steps: Steps) -> None:
        """Set the steps that run while the loop takes the others."""
        self._running = steps

    def state(self) -> Sequence[Tensor]:
        """Return the present values of the variables."""
        with _lock:
            if self._steps is not None and not self._steps.left and self._untouched():
                return self._steps.state()
        self.assign()  # not by reading: all variables may have been assigned
        return [variable._value for variable in self._variables]

    def defer(self, steps: Steps) -> None:
        """Become the owner of the variables: they have the state after the steps taken of these."""
        with _lock:
            if self._running is not None or (self._steps is not None and self._steps.left):
                self._windows_ahead, self._alone = 1, self._pause  # some steps were lost
                self._pause = min(2 * self._pause, MAX_PAUSE)
            self._alone = max(0, self._alone - 1)
            untouched = self._untouched()
            self._steps, self._running = steps, None
            if _NNX:  # its variables keep their values elsewhere
                for variable, value in zip(self._variables, steps.state(), strict=True):
                    variable._value = value
            elif not untouched:
                self._own()

    def _own(self) -> None:
        owners = {id(x): x for a in self._attributes if (x := a.get(_OWNER)) not in (None, self)}
        for owner in owners.values():
            owner.assign()
        for attributes in self._attributes:
            attributes[_OWNER] = self
            attributes.pop("_value", None)

    def assign(self) -> None:
        """Assign the present values to the variables that this owns, but not over other values."""
        with _lock:
            owned = [(i, a) for i, a in enumerate(self._attributes) if a.get(_OWNER) is self]
            if self._steps is not None and any("_value" not in a for _, a in owned):
                state = self._steps.state()
                for i, attributes in owned:
                    attributes.setdefault("_value", state[i])
            for _, attributes in owned:
                del attributes[_OWNER]


def _read(variable: Any, name: str) -> Any:
    """Handle a missing attribute: assign and return a deferred value, else raise an error."""
    if name == "_value":
        with _lock:
            attributes = _assigned(variable)
            if name in attributes:
                return attributes[name]
    raise AttributeError(
        f"{type(variable).__name__!r} object has no attribute {name!r}", name=name, obj=variable
    )


def _assigned(variable: Any) -> dict[str, Any]:
    """Return the attributes of a variable, with its value."""
    owner = vars(variable).get(_OWNER)
    if owner is not None:
        owner.assign()
    return vars(variable)


def _state_to_copy(variable: Any) -> dict[str, Any]:
    """Return what copies and pickles of a variable hold."""
    with _lock:
        return dict(_assigned(variable))


if not _NNX:
    _Variable: Any = keras.Variable
    _Variable.__getattr__ = _read
    _Variable.__getstate__ = _state_to_copy
