"""Steps of a task that run uncompiled, from equal state, each with one thing changed."""

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from ..core import structures
from ..core.randomness import random_states, set_random_states
from ..core.tracebacks import in_one_line
from ..data.arrays import ArraySource
from ..data.leaves import window_of
from ..loop import Loop
from ..steps.compiled_step import CompiledStep
from ..steps.probes import APPLY, GRADIENTS, LAYER, SLOPES, Key, probing, shadowed
from ..steps.state import State
from ..steps.task import has_eval_step
from .numbers import Array, as_floats, norm_of, scalar
from .recording import Change, Event, StepRecorder

STEPS: Final = 2
"""The steps that run one after another: some gradients are zero in the first one alone."""

AHEAD: Final = 32
"""How many batches are read at most, for their shapes and values."""

SECONDS: Final = 2.0
LARGE: Final = 64 * 2**20
"""The seconds and bytes after which no more batches are read than the steps need."""

ROUNDING: Final = 1e-5
"""The difference, relative to the largest entry, up to which arrays are equal."""


@dataclass(frozen=True, eq=False)
class TriedStep:
    """What one step started from, so that it can be repeated, and what it did.

    Attributes:
        step: The step.
        batch: Its batch.
        number: The number of steps before it.
        random: The states of random generators before it.
        before: Every variable before it.
        values: The values that it returned.
        events: The calls that it made.
        after: Every variable after it.
    """

    step: CompiledStep
    batch: Any
    number: int
    random: Mapping[str, Any]
    before: Mapping[str, Array]
    values: Mapping[str, Array]
    events: Sequence[Event]
    after: Mapping[str, Array]

    def of(self, kind: str) -> list[Event]:
        """Return the calls of one kind."""
        return [event for event in self.events if event.call.kind == kind]

    @cached_property
    def losses(self) -> list[float]:
        """The losses that the step differentiates; of a native step those that it returns."""
        named = [x for name, x in self.values.items() if "loss" in name.lower()]
        found = [event.arrays["loss"] for event in self.of(GRADIENTS)] or named
        return [scalar(x) for x in found if x.size == 1]

    @cached_property
    def gradients(self) -> dict[str, Array]:
        """The gradient of each variable, summed over the calls of `gradients`."""
        return _summed(self.of(GRADIENTS))

    @cached_property
    def applied(self) -> dict[str, Array]:
        """The gradients that optimizers get for each variable, summed over their calls."""
        return _summed(self.of(APPLY))

    @cached_property
    def outer(self) -> dict[Key, Event]:
        """The calls of layers that no other layer made and that return floats, by number."""
        return {
            event.call.key: event
            for event in self.of(LAYER)
            if event.call.facts["outer"] and event.floats()
        }

    @cached_property
    def outputs(self) -> dict[tuple[Key, str], Array]:
        """The float outputs of `outer`, by number and by their keys in it."""
        return {(k, name): x for k, e in self.outer.items() for name, x in e.floats().items()}

    @cached_property
    def slopes(self) -> dict[tuple[int, Key, str], Array]:
        """The gradients of each loss, by its number, with respect to outputs of `outer`."""
        found: dict[tuple[int, Key, str], Array] = {}
        calls = {event.call.key: event for event in self.of(SLOPES)}
        for number, loss in enumerate(self.of(GRADIENTS)):
            for event in calls.values():
                same = event.call.facts["objective"] == loss.call.facts["objective"]
                if not same or event.call.path != loss.call.path:
                    continue
                for i, (key, name) in enumerate(event.call.facts["taps"]):
                    slope = event.get(f"outputs[{i}]")
                    if slope is None and (key, name) in self.outputs:
                        slope = np.zeros_like(self.outputs[key, name])
                    if slope is not None:
                        found[number, key, name] = slope
        return found

    def changed(self, path: str) -> bool:
        """Return whether the step changed a variable that it started with."""
        if path not in self.before:
            return False
        before, after = as_floats(self.before[path]), as_floats(self.after[path])
        return not np.array_equal(before, after, equal_nan=True)


def _summed(events: Sequence[Event]) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for event in events:
        for path, array in event.by_path.items():
            new = as_floats(array)
            found[path] = found[path] + new if path in found else new
    return found


def distance(a: Array | float, b: Array | float) -> float:
    """Return the norm of the difference of two arrays, relative to the larger norm."""
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape:
        return float("inf")
    x, y = as_floats(a), as_floats(b)
    other = ~((x == y) | (np.isnan(x) & np.isnan(y)))  # infinities and NaN may be intended
    finite = np.isfinite(x) & np.isfinite(y)
    if not other.any():
        return 0.0
    if (other & ~finite).any():
        return float("inf")
    return norm_of(x[finite] - y[finite]) / max(norm_of(x[finite]), norm_of(y[finite]))


def differs(a: Array | float, b: Array | float) -> bool:
    """Return whether two arrays differ by more than rounding."""
    return distance(a, b) > ROUNDING


class Trials:
    """Runs steps of a task uncompiled, each from a state that was kept, and counts them.

    Attributes:
        task: The task.
        steps: The number of steps so far.
        base: The trials of the first steps, one after another.
        repeated: The last of them again.
        usual: The last of them again, with slopes; here and in steps with changes optimizers update
            nothing, so that what is computed first does not influence the rest by the weights.
        evaluation: The trial of `eval_step` on the first validation batch, without validation data
            on the first training batch; None if there is none, or it takes no training batch.
        ahead: The first batches of the source, at most `AHEAD`, those of `base` included.
        moving: Descriptions of the Python values of the task that the first steps changed.
        failed: What could not be measured, with the reason.
        assigned: Paths of variables that training may change in any branch.
        applied: Ids of the optimizers that training applies in any branch.
    """

    def __init__(self, loop: Loop, train: Any, validation: Any) -> None:
        self._loop, self.task, self.steps = loop, loop.task, 0
        self._taps: dict[Key, dict[str, Array]] = {}
        self.train, self.validation = train, validation
        self.failed: dict[str, str] = {}
        few = train.closed_loop or isinstance(train, ArraySource)
        self.ahead = first_batches(train, loop, STEPS, STEPS if few else AHEAD)
        # The task's method is looked up in each step: a test or a hook may replace it.
        self._train = CompiledStep(
            loop.task,
            lambda batch: self.task.train_step(batch),
            self.ahead[0],
            loop.view.options,
            "train_step",
        )
        self.base = [self._run(self._train, x, i) for i, x in enumerate(self.ahead[:STEPS])]
        self.moving = self._train.changed_constants()
        self.assigned, self.applied = self._train.assigned, self._train.applied
        self.repeated = self.again(updates=True)
        self.usual = self._with_slopes()
        self.evaluation = None
        if has_eval_step(self.task):
            self.evaluation = self._evaluated()

    @property
    def state(self) -> State:
        """The state, with the variables that steps have created so far."""
        return self._train.state

    @property
    def validated(self) -> TriedStep | None:
        """The evaluation of validation data; None for one of a batch that is meant for training."""
        return self.evaluation if self.validation is not None else None

    @property
    def last(self) -> TriedStep:
        """The last step of `base`, which `again` repeats."""
        return self.base[-1]

    @property
    def rows(self) -> int | None:
        """The number of rows of the batch; None if its arrays have different numbers."""
        return rows_of(self.last.batch)

    def metrics_of(self, paths: Sequence[str]) -> list[str]:
        """Return the names of the metrics that hold some of these variables."""
        of_metrics = {
            self.state.path_of(variable): name
            for name, metric in self.state.metrics.items()
            for variable in metric.variables
        }
        return list(dict.fromkeys(of_metrics[path] for path in paths if path in of_metrics))

    @property
    def updated_metrics(self) -> set[str]:
        """The names of the metrics that a training or evaluation step updates in any branch."""
        return {*self._train.metrics, *(self.evaluation.step.metrics if self.evaluation else ())}

    def read_again(self) -> list[Any]:
        """Return the first batches of another pass over the training source."""
        return first_batches(self.train, self._loop, STEPS)

    def _with_slopes(self) -> TriedStep:
        taps = {
            key: {name: np.zeros_like(x) for name, x in event.floats().items()}
            for key, event in self.last.outer.items()
            if len(key) > 1
        }
        trial = self.attempt("slopes", taps=taps)
        if trial is None:
            return self.again()
        repeats = not any(map(differs, self.repeated.losses, self.last.losses))
        # The first loss is computed before any update.
        if repeats and any(map(differs, trial.losses[:1], self.last.losses)):
            # Keras reads from some outputs which values a softmax was computed of.
            self.failed["slopes"] = "with zeros added to the outputs of layers it is another loss"
            return self.again()
        self._taps = taps
        return trial

    def _evaluated(self) -> TriedStep | None:
        if self.validation is not None:
            return self._evaluated_on(first_batches(self.validation, self._loop, 1))
        try:
            return self._evaluated_on(self.ahead[:1])
        except Exception as error:  # the task may evaluate other batches than it trains on
            self.failed["evaluation"] = f"without validation data, {in_one_line(error)}"
            return None

    def _evaluated_on(self, batches: Sequence[Any]) -> TriedStep | None:
        if not batches:
            return None
        # As many rows as in training: on JAX, operations on other shapes are compiled again.
        batch, most, rows = batches[0], self.rows, rows_of(batches[0])
        if most is not None and rows is not None and rows > most:
            batch = structures.mapped(lambda x: x[:most] if np.ndim(x) else x, batch)
        step = CompiledStep(
            self.task,
            lambda batch: self.task.eval_step(batch),
            batch,
            self._loop.view.options,
            "eval_step",
            late=True,
        )
        return self._run(step, batch, 0)

    def again(
        self,
        of: TriedStep | None = None,
        *,
        batch: Any = None,
        variables: Mapping[str, Array] | None = None,
        changes: Mapping[tuple[str, Key], Change] | None = None,
        taps: Mapping[Key, Mapping[str, Array]] | None = None,
        updates: bool = False,
    ) -> TriedStep:
        """Repeat a step from equal state and random numbers, with changes.

        Args:
            of: The trial that is repeated; default: the last one of `base`.
            batch: The batch; default: the same.
            variables: New values of some variables, by path.
            changes: Changes of the outputs of calls, by kind and number.
            taps: Zeros for the outputs whose slopes are recorded; default: those of `usual`.
            updates: Whether optimizers update variables.

        Raises:
            Exception: What the step raises for such a batch.
        """
        of = self.last if of is None else of
        batch = of.batch if batch is None else batch
        of.step.prepare(batch)
        state = of.step.state
        known = [path for path in state.variables if path in of.before]
        state.assign({**of.before, **(variables or {})}, among=known)
        set_random_states(of.random)
        taps = self._taps if taps is None else taps
        with ExitStack() as stack:
            for optimizer in () if updates else state.optimizers.values():
                stack.enter_context(shadowed(optimizer, "apply", lambda *args, **kwargs: None))
            return self._run(of.step, batch, of.number, changes or {}, taps)

    def attempt(self, what: str, of: TriedStep | None = None, **changes: Any) -> TriedStep | None:
        """Repeat a step with changes; if the task does not accept them, list `what` in `failed`."""
        try:
            return self.again(of, **changes)
        except Exception as error:
            text = str(error).strip().partition("\n")[0]
            self.failed[what] = f"the changed step ends with {type(error).__name__}: {text}"
            return None

    def evaluated_again(self, what: str, **changes: Any) -> TriedStep | None:
        """Repeat the evaluation, if there is one, as `attempt` repeats the training step."""
        if self.evaluation is None:
            return None
        # Its batches may have other shapes than those whose slopes are measured.
        return self.attempt(what, self.evaluation, updates=True, taps={}, **changes)

    def until_applied(self, most: int) -> list[TriedStep]:
        """Repeat the last batch, from the state before all steps, until gradients are applied."""
        first, done = self.base[0], list[TriedStep]()
        set_random_states(first.random)
        self.state.assign(first.before, among=list(first.before))
        while len(done) < most and not (done and done[-1].applied):
            done.append(self._run(self._train, self.last.batch, len(done)))
        return done

    def _run(
        self,
        step: CompiledStep,
        batch: Any,
        number: int,
        changes: Mapping[tuple[str, Key], Change] = {},
        taps: Mapping[Key, Mapping[str, Array]] = {},
    ) -> TriedStep:
        stacked = structures.mapped(lambda x: np.asarray(x)[None], batch)
        window = window_of(stacked, 1).streamed()
        batch, random = window.batch(0), random_states()
        step.prepare(batch)
        before = step.state.arrays()
        recorder = StepRecorder(changes, taps, detailed=True)
        with probing(recorder, step.state):
            found, _, _ = step.run(window, number).fetch()
            events = recorder.events()
        self.steps += 1
        values = {n: x[0] for n, x in found.items()}
        after = step.state.arrays()
        return TriedStep(step, batch, number, random, before, values, events, after)


@contextmanager
def unchanged(task: Any) -> Generator[None]:
    """Restore every variable and random state of a task afterwards."""
    kept, random = State.discover(task).keep(), random_states()
    try:
        yield
    finally:
        state = State.discover(task)
        state.put_back({p: value for p, value in kept.items() if p in state.variables})
        set_random_states(random)


def first_batches(source: Any, loop: Loop, least: int, most: int = 0) -> list[Any]:
    """Return the first batches of a source: more than `least`, up to `most`, if it is fast."""
    reader = source.read(0, seed=0, loop=loop)
    batches: list[Any] = []
    started, size = time.monotonic(), 0

    def is_fast() -> bool:
        return len(batches) < most and time.monotonic() - started < SECONDS and size < LARGE

    with closing(reader):
        while (len(batches) < least or is_fast()) and (window := reader.take(1)) is not None:
            batches.append(window.streamed().batch(0))
            size += sum(leaf.array.nbytes for leaf in leaves_of(batches[-1]))
    return batches


def rows_of(batch: Any) -> int | None:
    """Return the number of rows if all arrays of a batch have the same number, else None."""
    lengths = {len(leaf) for leaf in structures.flatten(batch) if np.ndim(leaf)}
    return lengths.pop() if len(lengths) == 1 else None


@dataclass(frozen=True, eq=False)
class Leaf:
    """An array of a batch.

    Attributes:
        name: Its name, as `batch[0]`.
        array: The array.
        batch: The batch.
        place: Its place among the arrays of the batch.
    """

    name: str
    array: Array
    batch: Any
    place: int

    def with_(self, array: Array) -> Any:
        """Return the batch with another array in its place."""
        values = [x for _, x in structures.with_paths(self.batch)]
        values[self.place] = array
        return structures.pack(self.batch, values)


def leaves_of(batch: Any) -> list[Leaf]:
    """Return the arrays of a batch."""
    pairs = enumerate(structures.with_paths(batch))
    return [
        Leaf(f"batch{structures.text_of(path)}", np.asarray(leaf), batch, i)
        for i, (path, leaf) in pairs
    ]


def paired(these: Mapping[Any, Array], others: Mapping[Any, Array]) -> list[tuple[Array, Array]]:
    """Return the arrays that have the same name in both."""
    return [(x, others[key]) for key, x in these.items() if key in others]
