"""Trials: single uncompiled steps from a chosen state and batch, and what they did."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from ...backends.step_context import recorded_by
from ...backends.window import Window
from ...core import structures
from ...core.randomness import random_states, set_random_states
from ...data.arrays import ArraySource
from ...data.leaves import named
from ...loop import Loop
from ...steps.compiled_step import CompiledStep
from ...steps.state import State
from ...steps.task import has_eval_step
from ..numbers import Array, as_floats, norm_of
from .recording import APPLY, GRADIENTS, Event, StepRecorder
from .spying import spying

STEPS: Final = 3
"""The steps that run one after another. Some gradients are zero only in the first one."""

AHEAD: Final = 32
"""How many batches are read, to compare their forms and their labels."""

ENOUGH: Final = 2.0
LARGE: Final = 64 * 2**20
"""The seconds and bytes after which no more batches are read than the steps need."""


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
        """The gradients of each variable, summed over the calls of `gradients`.

        Of a native step, which differentiates by itself, those that optimizers get.
        """
        return _summed(self.of(GRADIENTS)) or self.applied

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
        task: The task.
        state: The state of the task.
        steps: The number of steps so far.
        base: The trials of the first steps, one after another.
        evaluation: The trial of `eval_step` on the first validation batch; None without one.
        ahead: The first batches of the source, at most `AHEAD`, those of `base` included.
        seconds_of_reading: How long it took to read them.
        moving: Descriptions of the Python values of the task that the first steps changed.
        failed: The checks that could not run, or whose changed steps failed, with the reason.
        raised: The last exception that a step of the task raised; None without one.
        assigned: Paths of variables that training may change in any branch.
        applied: Ids of the optimizers that training applies in any branch.
    """

    def __init__(self, loop: Loop, train: Any, validation: Any) -> None:
        self._loop, self.task, self.steps = loop, loop.task, 0
        self.failed: dict[str, str] = {}
        self.raised: Exception | None = None
        loop.prepare(train)
        few = train.closed_loop or isinstance(train, ArraySource)
        started = time.monotonic()
        windows = _first_windows(train, loop, STEPS, STEPS if few else AHEAD)
        self.seconds_of_reading = time.monotonic() - started
        self.ahead = [window.batch(0) for window in windows]
        windows = windows[:STEPS]
        self._train = CompiledStep(
            loop.task, self._train_step, windows[0].batch(0), loop.options, "train_step"
        )
        self._eval: CompiledStep | None = None
        self._kept = State.discover(loop.task).keep()
        self._random = random_states()
        try:
            self.base = self._one_after_another(windows)
            self.moving = self._train.changed_constants()
            self.assigned, self.applied = self._train.assigned, self._train.applied
            windows = [] if validation is None else _first_windows(validation, loop, 1)
            self.evaluation = self._evaluated(windows[0].batch(0)) if windows else None
        except BaseException:
            self.restore()
            raise

    def _train_step(self, batch: Any) -> Any:
        return self.task.train_step(batch)

    @property
    def state(self) -> State:
        """The state, with the variables that steps have created so far."""
        return self._train.state

    def restore(self) -> None:
        """Put back every variable and random state as before the first trial."""
        known = State.discover(self.task)
        known.put_back({p: v for p, v in self._kept.items() if p in known.variables})
        set_random_states(self._random)

    def _one_after_another(self, windows: Sequence[Window]) -> list[Trial]:
        trials: list[Trial] = []
        for number, window in enumerate(windows):
            self._from = self._train.state.arrays(), random_states(), number
            trials.append(self._run(self._train, window, number))
        return trials

    @property
    def evaluates(self) -> bool:
        """Whether the task has an `eval_step`, which may not have run for lack of data."""
        return has_eval_step(self.task)

    @property
    def updated_metrics(self) -> set[str]:
        """The names of the metrics that a training or evaluation step updates in any branch."""
        return {*self._train.metrics, *(self._eval.metrics if self._eval is not None else ())}

    @property
    def last(self) -> Trial:
        """The last step of `base`, which `again` repeats."""
        return self.base[-1]

    def again(
        self,
        batch: Any = None,
        variables: Mapping[str, Array] | None = None,
        inlined: bool = False,
        step: int | None = None,
    ) -> Trial:
        """Repeat the last step of `base` from equal state and random numbers, with changes.

        Args:
            batch: The batch; default: the same.
            variables: New values of some variables, by path.
            inlined: Whether to record in branches of `cond` and in `for_each`, too.
            step: Another number of the step.

        Raises:
            Exception: What the step raises for such a batch.
        """
        arrays, random, number = self._from
        number = number if step is None else step
        batch = self.last.batch if batch is None else batch
        window = window_of(batch)
        self._train.prepare(window.batch(0))
        state = self._train.state
        known = [path for path in state.variables if path in arrays]
        state.assign({**arrays, **(variables or {})}, among=known)
        set_random_states(random)
        return self._run(self._train, window, number, inlined)

    def attempt(
        self,
        code: str,
        batch: Any,
        variables: Mapping[str, Array] | None = None,
        inlined: bool = False,
    ) -> Trial | None:
        """Repeat the last step with changes that the user's code may not accept.

        Args:
            code: The check that needs it, which is listed in `failed` if the step fails.
            batch: The batch.
            variables: New values of some variables, by path.
            inlined: Whether to record in branches of `cond` and in `for_each`, too.

        Returns:
            The trial; None if the step failed.
        """
        try:
            return self.again(batch, variables, inlined)
        except Exception as error:
            text = str(error).strip().partition("\n")[0]
            self.failed[code] = f"the changed step ends with {type(error).__name__}: {text}"
            return None

    def _run(self, step: CompiledStep, window: Window, number: int, inlined: bool = False) -> Trial:
        window = window.streamed()
        step.prepare(window.batch(0))
        before, recorder = step.state.arrays(), StepRecorder()
        state = step.state
        with (
            recorded_by(recorder),
            spying(recorder, state.layer_paths, state.metrics, state.optimizers, inlined),
        ):
            try:
                values, _, _ = step.run(window, number).fetch()
            except Exception as error:
                self.raised = error
                raise
            events = recorder.events()
            for event in events:
                _ = event.arrays  # now, since PyTorch changes tensors in place
        self.steps += 1
        return Trial(
            window.batch(0), {n: x[0] for n, x in values.items()}, events, before, state.arrays()
        )

    def _evaluated(self, batch: Any) -> Trial | None:
        if not has_eval_step(self.task):
            return None
        # As many rows as in training: on JAX, operations on other shapes are compiled again.
        most, rows = rows_of(self.last.batch), rows_of(batch)
        if most is not None and rows is not None and rows > most:
            batch = structures.mapped(lambda x: x[:most], batch)
        window = window_of(batch)
        step = self._eval = CompiledStep(
            self.task,
            lambda batch: self.task.eval_step(batch),
            window.batch(0),
            self._loop.options,
            "eval_step",
            late=True,
        )
        self._random_of_evaluation = random_states()
        return self._run(step, window, 0)

    def evaluated_again(self, variables: Mapping[str, Array], batch: Any = None) -> Trial:
        """Repeat the evaluation from equal state, with other values of variables or another batch.

        Raises:
            ValueError: There was no evaluation.
        """
        if self.evaluation is None or self._eval is None:
            raise ValueError("there was no evaluation")
        before = self.evaluation.before
        self._eval.state.assign({**before, **variables}, among=list(before))
        set_random_states(self._random_of_evaluation)
        batch = self.evaluation.batch if batch is None else batch
        return self._run(self._eval, window_of(batch), 0)

    def evaluated_with_other_seeds(self) -> Trial | None:
        """Repeat the evaluation from equal state, with other states of its random generators."""
        if self.evaluation is None:
            return None
        paths = {self.state.path_of(variable) for variable in self.state.seeds}
        before = self.evaluation.before
        seeds = {
            path: before[path] + np.ones_like(before[path]) for path in paths if path in before
        }
        return self.evaluated_again(seeds) if seeds else None

    def until_applied(self, most: int, times: int = 1) -> list[Trial]:
        """Repeat the last batch, from the state before the first step, until gradients are applied.

        The branches of `cond` that are taken are recorded.

        Args:
            most: The largest number of steps.
            times: How often gradients are to be applied.

        Returns:
            The steps; empty if they did not apply gradients so often.
        """
        set_random_states(self._random)
        self.state.assign(self.base[0].before, among=list(self.base[0].before))
        window = window_of(self.last.batch)
        done: list[Trial] = []
        for number in range(most):
            done.append(self._run(self._train, window, number, inlined=True))
            times -= bool(done[-1].applied)
            if not times:
                return done
        return []


def _first_windows(source: Any, loop: Loop, least: int, most: int = 0) -> list[Window]:
    """Return the first batches of a source, each as a window: more than `least` if it is fast."""
    reader = source.read(0, seed=0, loop=loop)
    windows: list[Window] = []
    started, size = time.monotonic(), 0

    def is_fast() -> bool:
        return len(windows) < most and time.monotonic() - started < ENOUGH and size < LARGE

    try:
        while (len(windows) < least or is_fast()) and (window := reader.take(1)) is not None:
            size += sum(leaf.array.nbytes for leaf in leaves_of(window.batch(0)))
            windows.append(window.streamed())
    finally:
        reader.close()
    return windows


def window_of(batch: Any) -> Window:
    """Return a window of one batch."""
    stacked = structures.mapped(lambda x: np.asarray(x)[None], batch)
    return Window(stacked, 1, rows_of(batch) or 1)


def rows_of(batch: Any) -> int | None:
    """Return the number of rows if all arrays of a batch have the same number, else None."""
    leaves = structures.flatten(batch)
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
    pairs = structures.with_paths(batch)
    found: list[Leaf] = []
    for i, (path, leaf) in enumerate(pairs):

        def with_(array: Array, i: int = i) -> Any:
            values = [x for _, x in pairs]
            values[i] = array
            return structures.pack(batch, values)

        found.append(Leaf(named(path), np.asarray(leaf), with_))
    return found
