"""Evaluation and prediction: `evaluate`, `predict` and `call` change no variable."""

from collections import deque
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

import numpy as np

from ..backends.base import Caller, active, start_each
from ..backends.step_context import Effects
from ..backends.window import Window, form_of
from ..checkpoint.batch_forms import MissingClassError, zeros
from ..core import structures
from ..core.hook import LoopView
from ..core.options import Options, run_seed
from ..core.processes import process_group
from ..core.progress import Progress
from ..data import as_source, random_states
from ..data.leaves import native
from ..data.source import EndExpected, ReadRequest, Source, check_it_ends, read_from
from ..errors import DataError, TreadleError
from ..steps.building import build
from ..steps.compiled_step import CompiledStep
from ..steps.constants import fingerprints
from ..steps.planning import Pace, places
from ..steps.programs import program_of
from ..steps.rare_forms import RareForms
from ..steps.snapshot import Snapshot
from ..steps.state import State
from ..steps.task import check_eval_step
from .epoch_values import epoch_values
from .explanations import explaining
from .predictions import Predictions
from .prefetch import Feed

# The number of compiled functions that `loop.call` keeps; the least recently used one is dropped.
# Without a limit, a lambda written in a hook would add a new function in every call.
MOST_CALLERS: Final = 16

# The number of batches whose rows are looked up together to predict on arrays.
ROWS_AT_ONCE: Final = 16

# Limits of the batches of a prediction that run at a time: their number, and the bytes of their
# inputs and outputs. Waiting for each batch takes as long as a small network.
MOST_RUNNING: Final = 32
MOST_RUNNING_BYTES: Final = 16 * 2**20

# The most bytes of a batch of zeros with which `eval_step` is checked.
MOST_ZEROS: Final = 2**24


EachBatch = Callable[[int, "Mapping[str, float] | None"], None]


class Evaluation:
    """Runs a task's `eval_step`, `predict_step` and other methods, compiled.

    Attributes:
        rare_forms: How often forms of batch came that are not compiled so far.
        calls: The number of calls of `call`, each of which uses a new random stream.
        position: Batches done by a running `evaluate`, and their total number if known.
        seconds: Seconds spent in `timed` blocks, without compiling.
    """

    def __init__(self, task: Any, options: Options) -> None:
        self._task, self._options = task, options
        self._prepared: CompiledStep | None = None
        self.rare_forms = RareForms(as_python=False)
        self._callers: dict[Any, dict[Hashable, _Caller]] = {}
        # What several processes know about predicting rows, for each form of batch.
        self._divides: dict[Hashable, Any] = {}
        self.calls, self._pace = 0, Pace(options.window)
        self.seconds = 0.0
        self.position: tuple[int, int | None] | None = None

    @property
    def compile_seconds(self) -> float:
        """Seconds spent tracing and compiling `eval_step`."""
        return self._prepared.compile_seconds if self._prepared is not None else 0.0

    @contextmanager
    def timed(self) -> Generator[None]:
        """Add the seconds that a block takes to `seconds`, but for those of compiling."""
        started, compiled = monotonic(), self.compile_seconds
        try:
            yield
        finally:
            self.seconds += monotonic() - started - (self.compile_seconds - compiled)

    def evaluate(
        self, source: Any, loop: LoopView, each: EachBatch | None = None
    ) -> dict[str, float]:
        """Return the means of the values of `eval_step`, and the results of the metrics it updated.

        Metrics are reset at the start. Metrics and all other variables that the step changes are
        restored afterwards, so training is not affected.

        Args:
            source: A source of batches.
            loop: The running loop, for the source.
            each: Called before each batch with its number, and after it with the results so far as
                well. Then each batch is a compiled call of its own.

        Raises:
            ConfigurationError: If the task has no `eval_step`.
            DataError: If the source has no batch, or is known never to end.
        """
        check_eval_step(self._task)
        feed = Feed(even=process_group().size > 1, evaluates_at=loop.progress)
        source = check_it_ends(as_source(source), "evaluate")
        feed.open(source, Progress(), loop)
        self.position = 0, source.length
        try:
            window = feed.first(Progress())
            if window is None:
                raise DataError("the source to evaluate on gave no batch")
            prepared = self._prepare_for(window.batch(0))
            ends = EndExpected("evaluate", source.length, loop.steps_per_epoch)
            return self._evaluate_all(feed, prepared, ends, each)
        finally:
            self.position = None
            feed.close()

    def restore_rare_forms(self, saved: Mapping[str, Any]) -> None:
        """Restore how often forms of batch came that are not compiled."""
        self.rare_forms.restore(saved)
        if self._prepared is not None:
            self._prepared.recount()

    @property
    def effects(self) -> Effects | None:
        """What `eval_step` does besides computing and changing variables; None before it runs."""
        return self._prepared.effects if self._prepared else None

    @property
    def forms(self) -> list[Any]:
        """Descriptions of the batch forms for which `eval_step` created variables, in order."""
        return self._prepared.forms if self._prepared else []

    @property
    def names(self) -> Sequence[str]:
        """Names of the values of `eval_step`; none before it was built."""
        return self._prepared.names if self._prepared else []

    @property
    def initial(self) -> Mapping[str, Any]:
        """The initial values of the variables that `eval_step` created, by path."""
        return self._prepared.initial if self._prepared else {}

    def prepare(self, forms: Sequence[Any]) -> None:
        """Build `eval_step` for the batch forms that a checkpoint lists."""
        for form in forms:
            if form is not None:  # of batches that a checkpoint cannot describe
                with suppress(MissingClassError):
                    self._prepare_for(zeros(form))

    def check(self, source: Source, loop: LoopView) -> None:
        """Build and check `eval_step` for the first batch of a source."""
        window = Feed(evaluates_at=loop.progress).sample(source, Progress(), loop)
        if window is not None:
            self._prepare_for(window.batch(0))

    def check_form(self, zeros: Callable[[int], Any], examples: int) -> None:
        """Build and check `eval_step` for a batch of zeros.

        Args:
            zeros: Makes a batch of so many examples.
            examples: The number of examples in a batch. If they need much memory, one is used.

        Raises:
            TreadleError: The step makes a mistake. Other errors, and those about data, may be due
                to the zeros: the first evaluation raises them again if they are not.
        """
        try:
            one = zeros(1)
            size = sum(x.nbytes for x in structures.flatten(one)) * examples
            self._prepare_for(zeros(examples) if size <= MOST_ZEROS else one)
        except Exception as error:
            if isinstance(error, TreadleError) and not isinstance(error, DataError):
                raise

    def _prepare_for(self, batch: Any) -> CompiledStep:
        """Return `eval_step` prepared for batches of this form."""
        with explaining():
            if self._prepared is None:
                step, rare = self._task.eval_step, self.rare_forms
                self._prepared = CompiledStep(
                    self._task, step, batch, self._options, "eval_step", True, rare_forms=rare
                )
            if self._prepared.changed_constants():
                self._prepared.start_over()
            self._prepared.prepare(batch)
        return self._prepared

    def _evaluate_all(
        self, feed: Feed, prepared: CompiledStep, ends: EndExpected, each: EachBatch | None
    ) -> dict[str, float]:
        """Evaluate every window of an opened source from reset metrics, and restore the state."""
        values_so_far = epoch_values(self._task, "eval_step")
        progress, pace = Progress(), self._pace
        kept: dict[str, Any] = {}
        begun: set[Hashable] = set()
        names: set[str] = set()

        def begin(window: Window) -> None:
            """Save the variables that batches of this form change, and reset their metrics."""
            state, written, updated = prepared.state, *prepared.changes(window)
            metrics = {name: state.metrics[name] for name in updated if name not in names}
            chosen = {*written, *map(state.path_of, values_so_far.variables(metrics))}
            new = [path for path in state.variables if path in chosen and path not in kept]
            kept.update(state.keep(new))
            values_so_far.begin(metrics)
            names.update(updated)
            begun.add(window.form)

        def results() -> dict[str, float]:
            metrics = prepared.state.metrics
            return values_so_far.result({n: m for n, m in metrics.items() if n in names})

        def most() -> int:
            return pace.size if each is None else 1

        try:
            with active().own_random():
                while (window := feed.take(most(), progress)) is not None:
                    if each is not None:
                        each(progress.batch, None)
                    with explaining(window):
                        window = feed.shortened(window, prepared.rare_steps(window))
                        window = prepared.placed(window)
                        prepared.compile(window)
                        if window.form not in begun:
                            begin(window)
                        outputs = prepared.run(window, progress.step)
                        try:  # errors of the source are raised by `feed.take`
                            feed.read_ahead(most, prepared.placed, outputs.running)
                        finally:
                            values, weights, broken = outputs.fetch()
                        prepared.raise_out_of_range(broken)
                        prepared.finish_window()
                    examples = np.full(window.count, float(window.examples))
                    values_so_far.add(values, {n: weights.get(n, examples) for n in values})
                    at = "a window of an evaluation"
                    seconds = process_group().slowest(outputs.seconds, at)
                    pace.ran(window, seconds, prepared.largest)
                    if each is not None:
                        each(progress.batch, results())
                    progress = progress.advanced(window.count, window.count * window.examples)
                    ends.add(window.count)
                    self.position = progress.batch, ends.length
                return results()
        finally:
            prepared.state.put_back(kept)

    def predict(self, source: Any, loop: LoopView) -> Any:
        """Return the outputs of `predict_step` for all batches, joined on the first axis."""
        source = check_it_ends(as_source(source), "predict")
        reader = read_from(source, ReadRequest(0, seed=run_seed(), loop=loop, ordered=True))
        predictions: Predictions = process_group().divided(
            Predictions(source.length), lambda batch: self._predicting(batch).call, self._divides
        )
        running: deque[Callable[[], list[Any]]] = deque()
        most, most_running = 1, 0  # until the outputs of the first batch are known
        ends = EndExpected("predict", source.length, loop.steps_per_epoch)
        with closing(reader):
            while (window := reader.take(most)) is not None:
                ends.add(window.count)
                with explaining(window):  # not of errors of the source
                    window = predictions.own_part(window)
                    batch = next(window.views())
                    caller = self._predicting(batch).call
                    running.append(self._started(caller, window))
                    if len(running) * window.count > most_running:
                        half = [running.popleft() for _ in range(len(running) // 2 or 1)]
                        outputs = _fetched(half)
                        predictions.add_all(outputs)
                        most_running = most_running or _most_running(batch, outputs[0])
                # Batches that are not in memory already are read one by one.
                most = 1 if window.rows is None else min(ROWS_AT_ONCE, most_running)
            with explaining():
                predictions.add_all(_fetched(running))
        if not predictions:
            raise DataError("the source to predict on gave no batch")
        return predictions.joined()

    def _predicting(self, batch: Any) -> "_Caller":
        return self._caller(self._task.predict_step, [batch], (None,), True)

    def _started(self, caller: Caller, window: Window) -> Callable[[], list[Any]]:
        """Start `predict_step` for each batch of a window."""
        if window.rows is None or places(window.rows.nbytes, self._options):
            return caller.start_window(window)
        return start_each(caller.start, window)

    def call(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Run a function compiled and return NumPy arrays; each call has a new random stream."""
        stream = random_states.stream()
        if stream is None:  # not called by a source, which may draw a batch again
            self.calls += 1
            stream = self.calls
        constants = tuple(x if isinstance(x, (bool, int, str)) else None for x in inputs)
        arrays = [
            None
            if isinstance(x, (bool, int, str))
            else x  # the usual input, and nothing to convert
            if type(x) is np.ndarray and x.dtype.isnative
            else structures.mapped(lambda leaf: native((), active().to_numpy(leaf)), x)
            for x in inputs
        ]
        return self._caller(function, arrays, constants, False).call.start(arrays, stream)()

    def _caller(
        self,
        function: Callable[..., Any],
        arrays: Sequence[Any],
        constants: tuple[Any, ...],
        many: bool,
    ) -> "_Caller":
        """Return a function compiled for arrays of one form and Python (constant) arguments.

        Args:
            function: The function.
            arrays: An array, or a structure of arrays, for each argument that is no constant.
            constants: Its constant arguments, and None for others.
            many: Whether it is called for many batches, so that a compilation pays that takes long.
        """
        kinds = tuple(type(x) for x in constants)  # True == 1, but they are different constants
        of = getattr(function, "__func__", function)
        key = (of, id(getattr(function, "__self__", None)), constants, kinds, many)
        callers = self._callers.pop(key, {})
        self._callers[key] = callers  # most recently used last
        if len(self._callers) > MOST_CALLERS:
            del self._callers[next(iter(self._callers))]
        form = form_of(arrays)
        caller = callers.get(form)
        if caller is None or not caller.is_current():
            caller = callers[form] = self._compiled(function, arrays, constants, many)
        return caller

    def _compiled(
        self,
        function: Callable[..., Any],
        arrays: Sequence[Any],
        constants: tuple[Any, ...],
        many: bool,
    ) -> "_Caller":
        def bound(arrays: Any) -> Any:
            return function(
                *(a if c is None else c for a, c in zip(arrays, constants, strict=True))
            )

        name = getattr(function, "__name__", "the function")
        own = State.read_by(function, self._task)
        before = fingerprints(own)
        state, found = build(self._task, bound, arrays, name, self._options.preflight)
        state.add_constants(own, before)
        assigned = list(found.written.values())
        program = program_of(state, bound, self._options, name, native=False, assigned=assigned)
        draws = any(id(seed) in found.read for seed in state.seeds)
        pure = not draws and not found.written and self._options.execution != "eager"
        read = [v for v in program.variables if id(v) in found.read]
        call = active().caller(program, read if pure else None, soon=many)
        return _Caller(call, state, state.constants(), state.snapshot())


@dataclass(frozen=True)
class _Caller:
    """A compiled function for inputs of one form, and the constants it was compiled with."""

    call: Caller
    state: State
    constants: dict[str, Any]
    snapshot: Snapshot

    def is_current(self) -> bool:
        """Return whether the constants have the values that the function was compiled with."""
        return self.snapshot.is_current() or self.state.constants() == self.constants


def _fetched(running: Sequence[Callable[[], list[Any]]]) -> list[Any]:
    """Return the outputs of windows that run in order, waiting only once: for the last of them."""
    return [x for outputs in [fetch() for fetch in reversed(running)][::-1] for x in outputs]


def _most_running(batch: Any, outputs: Any) -> int:
    """Return how many batches like this one may run at a time."""
    nbytes = sum(getattr(x, "nbytes", 0) for x in structures.flatten((batch, outputs)))
    return max(1, min(MOST_RUNNING, MOST_RUNNING_BYTES // max(1, nbytes)))
