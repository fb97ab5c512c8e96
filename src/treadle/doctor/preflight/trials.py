"""Trials: single uncompiled steps from a chosen state and batch, and what they did."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import numpy as np

from ...backends.step_context import recorded_by
from ...backends.window import Window
from ...core.randomness import random_states, set_random_states
from ...data.leaves import flattened, named, packed
from ...loop import Loop
from ...steps.compiled_step import CompiledStep
from ...steps.state import State
from ...steps.task import has_eval_step
from ..numbers import Array, as_floats, norm_of
from .recording import APPLY, GRADIENTS, Event, StepRecorder, spying

STEPS = 3
"""The steps that run one after another. Some gradients are zero only in the first one."""


@dataclass(frozen=True, eq=False)
class Trial:
    """What one step did.

    Attributes:
        batch: Its batch.
        values: The values that it returned.
        events: The calls that it made.
        before: Every variable before it.
        after: Every variable after it.
    """

    batch: Any
    values: Mapping[str, Array]
    events: Sequence[Event]
    before: Mapping[str, Array]
    after: Mapping[str, Array]

    def of(self, what: str) -> list[Event]:
        """Return the events of one kind."""
        return [event for event in self.events if event.what == what]

    @cached_property
    def gradients(self) -> dict[str, Array]:
        """The gradients of each variable, summed over the calls of `gradients`."""
        return _summed(self.of(GRADIENTS))

    @cached_property
    def applied(self) -> dict[str, Array]:
        """The gradients that optimizers got for each variable, summed over their calls."""
        return _summed(self.of(APPLY))

    def changed(self, path: str) -> bool:
        """Return whether the step changed a variable."""
        return not np.array_equal(
            as_floats(self.before[path]), as_floats(self.after[path]), equal_nan=True
        )

    def equals(self, other: "Trial", rounding: float = 1e-5) -> bool:
        """Return whether values, gradients and variables of two steps agree, within rounding."""
        parts = ((self.values, other.values), (self.gradients, other.gradients))
        return all(_agree(a, b, rounding) for a, b in (*parts, (self.after, other.after)))


def _summed(events: Sequence[Event]) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for event in events:
        for path, array in event.arrays.items():
            new = as_floats(array)
            found[path] = found[path] + new if path in found else new
    return found


def _agree(these: Mapping[str, Array], those: Mapping[str, Array], rounding: float) -> bool:
    return these.keys() == those.keys() and all(
        distance(array, those[name]) <= rounding for name, array in these.items()
    )


def distance(a: Array, b: Array) -> float:
    """Return the norm of the difference of two arrays, relative to the larger norm."""
    x, y = as_floats(a), as_floats(b)
    if x.shape != y.shape:
        return float("inf")
    other = ~((x == y) | (np.isnan(x) & np.isnan(y)))  # infinities and NaN may be intended
    if not other.any():
        return 0.0
    finite = np.isfinite(x) & np.isfinite(y)
    if (other & ~finite).any():
        return float("inf")
    largest = max(norm_of(x[finite]), norm_of(y[finite]))
    return norm_of(x[finite] - y[finite]) / largest


class Trials:
    """Runs steps of a task uncompiled, each from a state that was kept, and counts them.

    Args:
        loop: A loop of the task, which closed-loop sources read.
        train: The training source.
        validation: A source for `eval_step`, or None.

    Attributes:
        state: The state of the task.
        steps: The number of steps so far.
        base: The trials of the first steps, one after another.
        evaluation: The trial of `eval_step` on the first validation batch; None without one.
        failed: The checks whose changed steps failed, by code, with the error.
        assigned: Paths of variables that training may change in any branch.
        applied: Ids of the optimizers that training applies in any branch.
    """

    def __init__(self, loop: Loop, train: Any, validation: Any) -> None:
        self._loop, self._task, self.steps = loop, loop.task, 0
        self.failed: dict[str, str] = {}
        loop.prepare(train)
        windows = _first_windows(train, loop, STEPS)
        self._train = CompiledStep(
            loop.task, self._train_step, windows[0].batch(0), loop.options, "train_step"
        )
        self._eval: CompiledStep | None = None
        self._kept = State.discover(loop.task).keep()
        self._random = random_states()
        try:
            self.base = self._one_after_another(windows)
            self.assigned, self.applied = self._train.assigned, self._train.applied
            self.evaluation = self._evaluated(validation) if validation is not None else None
        except BaseException:
            self.restore()
            raise

    def _train_step(self, batch: Any) -> Any:
        return self._task.train_step(batch)

    @property
    def state(self) -> State:
        """The state, with the variables that steps have created so far."""
        return self._train.state

    def restore(self) -> None:
        """Put back every variable and random state as before the first trial."""
        known = State.discover(self._task)
        known.put_back({p: v for p, v in self._kept.items() if p in known.variables})
        set_random_states(self._random)

    def _one_after_another(self, windows: Sequence[Window]) -> list[Trial]:
        trials: list[Trial] = []
        for number, window in enumerate(windows):
            self._from = self._train.state.arrays(), random_states(), number
            trials.append(self._run(self._train, window, number))
        return trials

    @property
    def updated_metrics(self) -> set[str]:
        """The names of the metrics that a training or evaluation step updates in any branch."""
        return {*self._train.metrics, *(self._eval.metrics if self._eval is not None else ())}

    @property
    def last(self) -> Trial:
        """The last step of `base`, which `again` repeats."""
        return self.base[-1]

    def again(self, batch: Any = None, variables: Mapping[str, Array] | None = None) -> Trial:
        """Repeat the last step of `base` from equal state and random numbers, with changes.

        Args:
            batch: The batch; default: the same.
            variables: New values of some variables, by path.

        Raises:
            Exception: What the step raises for such a batch.
        """
        arrays, random, number = self._from
        batch = self.last.batch if batch is None else batch
        window = window_of(batch)
        self._train.prepare(window.batch(0))
        state = self._train.state
        known = [path for path in state.variables if path in arrays]
        state.assign({**arrays, **(variables or {})}, among=known)
        set_random_states(random)
        return self._run(self._train, window, number)

    def attempt(
        self, code: str, batch: Any, variables: Mapping[str, Array] | None = None
    ) -> Trial | None:
        """Repeat the last step with changes that the user's code may not accept.

        Args:
            code: The check that needs it, which is listed in `failed` if the step fails.
            batch: The batch.
            variables: New values of some variables, by path.

        Returns:
            The trial; None if the step failed.
        """
        try:
            return self.again(batch, variables)
        except Exception as error:
            text = str(error).strip().partition("\n")[0]
            self.failed[code] = f"the changed step ends with {type(error).__name__}: {text}"
            return None

    def _run(self, step: CompiledStep, window: Window, number: int) -> Trial:
        window = window.streamed()
        step.prepare(window.batch(0))
        before, recorder = step.state.arrays(), StepRecorder()
        state = step.state
        with (
            recorded_by(recorder),
            spying(recorder, state.layer_paths, state.metrics, state.optimizers),
        ):
            values, _, _ = step.run(window, number).fetch()
            events = recorder.events()
            for event in events:
                _ = event.arrays  # now, since PyTorch changes tensors in place
        self.steps += 1
        return Trial(
            window.batch(0), {n: x[0] for n, x in values.items()}, events, before, state.arrays()
        )

    def _evaluated(self, validation: Any) -> Trial | None:
        if not has_eval_step(self._task):
            return None
        windows = _first_windows(validation, self._loop, 1)
        step = self._eval = CompiledStep(
            self._task,
            lambda batch: self._task.eval_step(batch),
            windows[0].batch(0),
            self._loop.options,
            "eval_step",
            late=True,
        )
        return self._run(step, windows[0], 0)


def _first_windows(source: Any, loop: Loop, most: int) -> list[Window]:
    """Return the first batches of a source, each as a window."""
    reader = source.read(0, seed=0, loop=loop)
    windows: list[Window] = []
    try:
        while len(windows) < most and (window := reader.take(1)) is not None:
            windows.append(window.streamed())
    finally:
        reader.close()
    return windows


def window_of(batch: Any) -> Window:
    """Return a window of one batch."""
    stacked = keras.tree.map_structure(lambda x: None if x is None else np.asarray(x)[None], batch)
    return Window(stacked, 1, rows_of(batch) or 1)


def rows_of(batch: Any) -> int | None:
    """Return the number of rows if all arrays of a batch have the same number, else None."""
    leaves = [leaf for _, leaf in flattened(batch) if leaf is not None]
    if not leaves or any(np.ndim(leaf) == 0 for leaf in leaves):
        return None
    lengths = {len(leaf) for leaf in leaves}
    return lengths.pop() if len(lengths) == 1 else None


@dataclass(frozen=True, eq=False)
class Leaf:
    """An array of a batch.

    Attributes:
        name: Its name in messages.
        array: The array.
        with_: Returns the batch with another array in its place.
    """

    name: str
    array: Array
    with_: Callable[[Array], Any]


def leaves_of(batch: Any) -> list[Leaf]:
    """Return the arrays of a batch."""
    pairs = flattened(batch)
    found: list[Leaf] = []
    for i, (path, leaf) in enumerate(pairs):
        if leaf is not None:

            def with_(array: Array, i: int = i) -> Any:
                values = [x for _, x in pairs]
                values[i] = array
                return packed(batch, values)

            found.append(Leaf(named(path), np.asarray(leaf), with_))
    return found
