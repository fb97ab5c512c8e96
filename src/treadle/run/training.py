"""Execution of the train step: runs windows of batches, returns the values of every step."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..backends.window import Following, Window
from ..checkpoint.batch_forms import READING_ERRORS, described, example, refuse_other_structure
from ..core import structures
from ..core.logs import Means, StepLogs
from ..core.options import COMPILERS, Options
from ..core.progress import Costs, Progress
from ..core.triggers import When
from ..data.leaves import as_arrays, refuse_lists, window_of
from ..errors import DataError
from ..steps.compiled_step import CompiledStep
from ..steps.constants import Changed
from ..steps.layer_statistics import MeasuredOutputs, StepStatistics
from ..steps.planning import Pace, window_size
from ..steps.rare_forms import RareForms
from .epoch_values import epoch_values


class Training:
    """Runs a task's `train_step` and accumulates the means of its values.

    Attributes:
        prepared: The built and compiled step; None before the first batch.
        batch_examples: Examples in the largest batch so far.
        ended: When the last window ended, by the monotonic clock.
        measure_next: Whether to measure the layers in the first step of the next window.
        measured: The statistics of the first step of the last window, if they were measured.
        unmeasured: Why they were not measured, as a sentence; empty if they were.
        violations: What `Options(checked=True)` found in the last window.
        rare_forms: How often forms of batch came that are not compiled so far.
    """

    def __init__(self, task: Any, options: Options, processes: int = 1) -> None:
        self._task, self._options, self._processes = task, options, processes
        self.prepared: CompiledStep | None = None
        self.batch_examples, self.ended = 1, 0.0
        self.measure_next, self.unmeasured = False, ""
        self.measured: StepStatistics | None = None
        self._pace = Pace(options.window)
        self._timing: tuple[Window, float, int] | None = None
        self._epoch, self._since_last_logs = epoch_values(task, "train_step"), Means()
        self._last: tuple[int, Window] | None = None
        self.violations: list[str] = []
        self._compilers: Mapping[str, str] = {}
        self.rare_forms = RareForms()

    def use_compiler(self, compiler: str) -> None:
        """Use a compiler for the step, unless the options name one or it is built already."""
        if self._options.compiler == "auto" and self.prepared is None:
            self._options = replace(self._options, compiler=compiler)

    def use_recorded_compilers(self, compiler: str, compilers: Mapping[str, str]) -> None:
        """Use the compilers of a run that is resumed, unless the step is built already.

        Args:
            compiler: The compiler for new forms of batch.
            compilers: The compilers that the run used, by the text of the form.
        """
        if self.prepared is None and compiler in COMPILERS:
            self._options = replace(self._options, compiler=compiler)
            self._compilers = dict(compilers)

    @property
    def compiler(self) -> str | None:
        """The compiler that options or the backend chose; None if there is no choice."""
        return None if self._options.compiler == "auto" else self._options.compiler

    @property
    def compilers(self) -> Mapping[str, str]:
        """The compilers of the step's programs, by the text of the form."""
        return self.prepared.compilers if self.prepared else self._compilers

    def stores(self) -> list[Mapping[str, Any]]:
        """Return the contents of what the step changes besides variables, for a checkpoint."""
        return self.prepared.effects.contents() if self.prepared else []

    @property
    def forms(self) -> list[Any]:
        """Descriptions of the first batch form and of forms that created variables, in order."""
        return self.prepared.forms if self.prepared else []

    @property
    def names(self) -> Sequence[str]:
        """Names of the values of the step, which records contain."""
        return self.prepared.names if self.prepared else []

    @property
    def initial(self) -> Mapping[str, Any]:
        """The initial values of the variables that later batch forms created, by path."""
        return self.prepared.initial if self.prepared else {}

    def rare_steps(self, window: Window) -> int:
        """Return how many steps of this form run before it is compiled."""
        return self.prepared.rare_steps(window) if self.prepared else 0

    def prepare(self, window: Window, forms: Sequence[Any] = ()) -> CompiledStep:
        """Build and check the step for batches of this form, from scratch if constants changed.

        Args:
            window: The next batches.
            forms: Descriptions of the batch forms in the checkpoint, if the run is resumed. The
                step is built for these instead, so that it has the variables of the checkpoint.

        Raises:
            DataError: The step fails for a recorded form, and none has the structure of the batch.
        """
        batch = window.batch(0)
        known = described(batch)
        for form in forms:
            try:
                self._prepare(example(form, batch))
            except READING_ERRORS as error:
                refuse_other_structure(forms, known, error)
                raise
        if not forms:
            self._prepare(batch)
        self.batch_examples = max(self.batch_examples, window.examples)
        assert self.prepared is not None
        return self.prepared

    def zeros(self, forms: Mapping[str, Any]) -> Window | None:
        """Return a batch of zeros to build the step with; None if its form is unknown.

        Reading a batch that is not trained on moves a source, and some cannot go back.

        Args:
            forms: Descriptions of the batch forms in the checkpoint, by step.
        """
        known = forms.get("train_step") or self.forms
        batch = example(known[0], None) if known else None
        return None if batch is None else stacked(batch)

    def _prepare(self, batch: Any) -> None:
        prepared = self.prepared
        if prepared is None:
            prepared = CompiledStep(
                self._task,
                self._task.train_step,
                batch,
                self._options,
                "train_step",
                compilers=self._compilers,
                rare_forms=self.rare_forms,
            )
        else:
            known = set(prepared.metrics)
            if prepared.changed_constants():
                prepared.start_over()
            prepared.prepare(batch)
            for name in prepared.metrics:
                if name not in known:
                    prepared.state.metrics[name].reset_state()
        prepared.require_results()
        self.prepared = prepared

    def costs(self) -> Costs:
        """Return the number of compiled programs and the seconds spent compiling."""
        if self.prepared is None:
            return Costs()
        return Costs(self.prepared.programs, self.prepared.compile_seconds)

    def transferred(self, window: Window) -> Window:
        """Return the next window, placed in memory for execution, or on its way to the device."""
        return self.prepared.transferred(window) if self.prepared else window

    def window_size(
        self,
        progress: Progress,
        events: Sequence[When],
        last_step: int | None,
        most: int | None = None,
    ) -> int:
        """Return how many steps may run before the next event: `most`, or as many as are useful."""
        most = self._pace.size if most is None else most
        return window_size(most, progress, events, last_step, self.batch_examples)

    def run(
        self,
        window: Window,
        progress: Progress,
        meanwhile: Callable[[Progress, Callable[[], bool]], None] | None = None,
        background: bool = True,
        following: Following | None = None,
    ) -> StepLogs:
        """Run the steps of a window as one call.

        Args:
            window: The batches to train on.
            progress: The current progress.
            meanwhile: Called while the steps run, with the progress after them and a function that
                returns whether they are still running.
            background: Whether `meanwhile` takes longer than handing the window to another thread.
            following: A function that returns the next batches, whose steps may run too.

        Returns:
            The values of every step, and the new progress.
        """
        prepared = self.prepared or self.prepare(window)
        window = prepared.placed(window)
        after = progress.advanced(window.count, window.count * window.examples)
        background = background and meanwhile is not None
        self.measured, self.unmeasured, outputs = None, "", None
        if self.measure_next:
            outputs = self._measured_run(prepared, window, progress.step)
        if outputs is None:
            outputs = prepared.run(window, progress.step, background, following)
        try:  # `fetch` must run even on an error, because it waits for the steps
            if meanwhile is not None:
                meanwhile(after, outputs.running)
        finally:
            values, weights, self.violations = outputs.fetch()
        if isinstance(outputs, MeasuredOutputs):
            self.measured = outputs.statistics
        self.ended = outputs.ended
        self._timing = window, outputs.seconds, prepared.largest
        prepared.finish_window()
        if len(weights) < len(values):
            examples = np.empty(window.count)
            examples.fill(window.examples)
            weights = {name: weights.get(name, examples) for name in values}
        self._epoch.add(values, weights)
        self._since_last_logs.add(values, weights)
        self._last = progress.step, window
        return StepLogs(progress.step + 1, values, weights, window.examples, after)

    @property
    def seconds(self) -> float:
        """The seconds that the last window took."""
        return self._timing[1] if self._timing is not None else 0.0

    def adapt(self, seconds: float | None = None) -> None:
        """Adapt the size of the next windows to the time of the last one, or to another time."""
        if self._timing is not None:
            window, measured, largest = self._timing
            self._pace.ran(window, measured if seconds is None else seconds, largest)

    def _measured_run(
        self, prepared: CompiledStep, window: Window, step: int
    ) -> MeasuredOutputs | None:
        """Measure the layers in the first step of a window.

        Returns:
            The outputs of the window if its steps run as Python, which are measured while they run;
            None if the window has yet to run.
        """
        self.measure_next = False
        if self._processes > 1:
            self.unmeasured = (
                "the layers were not measured: that is possible in one process, and "
                f"{self._processes} train together"
            )
            return None
        prepared.compile(window)
        calls_python = prepared.runs_python(window)
        if calls_python is None:
            return prepared.run_measured(window, step)
        if calls_python:
            self.unmeasured = (
                "the layers were not measured: the compiled step calls Python functions (such as "
                "jax.pure_callback or tf.py_function), and measuring would call them twice"
            )
        else:
            self.measured = prepared.measure(window, step)
        return None

    def steps_lost_on_error(self, window: Window) -> int:
        """Return how many steps may have changed the state if running a window fails."""
        return 0 if self.prepared is None or self.prepared.is_whole(window) else window.count

    def check_promises(self) -> None:
        """Raise an error for what `Options(checked=True)` found in the last window."""
        if self.violations and self.prepared is not None:
            self.prepared.raise_violations(self.violations)

    def changed_constants(self) -> Changed:
        """Return which Python values of the task changed since the step was built, and how."""
        return self.prepared.changed_constants() if self.prepared else {}

    def metrics(self) -> dict[str, float]:
        """Return means and metric results since they were last reset."""
        return self._epoch.result(self._updated())

    def _updated(self) -> Mapping[str, Any]:
        """Return the metrics that the step updates, by name."""
        prepared = self.prepared
        return {n: prepared.state.metrics[n] for n in prepared.metrics} if prepared else {}

    def metric_results(self) -> dict[str, float]:
        """Return metric results since they were last reset, without the means."""
        return self._epoch.metric_results(self._updated())

    def reset_metrics(self) -> None:
        """Reset means and metrics."""
        self._epoch.reset(self._updated())

    def means_state(self) -> dict[str, Any]:
        """Return the state of the means, for checkpoints."""
        metrics = self.prepared.metrics if self.prepared else []
        return {
            **self._epoch.state(),
            "since_last_logs": self._since_last_logs.state(),
            "metrics": list(metrics),
        }

    def restore_means(self, sums: Mapping[str, Any]) -> None:
        """Restore the state that `means_state` returned."""
        self._epoch.restore(sums)
        self._since_last_logs.restore(sums["since_last_logs"])
        if self.prepared is not None:
            self.prepared.add_metrics(sums.get("metrics", ()))

    def begin_logs(self) -> None:
        """Begin new means: `means_since_last` then covers later steps only."""
        self._since_last_logs = Means()

    def means_since_last(self) -> dict[str, float]:
        """Return the means since the last call; NaN for names without a value in these steps."""
        means, self._since_last_logs = self._since_last_logs.result(empty=math.nan), Means()
        return means

    def window_at(self, step: int) -> Window:
        """Return a window with the batch of a step (from 1) of the last window.

        Raises:
            DataError: If the step is not in the last window.
        """
        if self._last is None or not 0 <= step - 1 - self._last[0] < self._last[1].count:
            raise DataError(
                f"the batch of step {step} is not available: only those of the last window are kept"
            )
        return self._last[1].split(step - 1 - self._last[0])[1].split(1)[0]


def stacked(batch: Any) -> Window:
    """Return one batch as a window.

    Raises:
        DataError: If the batch holds no array, or values that are not numbers.
    """
    refuse_lists(batch)
    if not structures.flatten(batch):
        raise DataError(
            f"the batch holds no array, it is {batch!r:.60}: pass a batch of arrays, such as "
            "loop.step((x, y))"
        )
    return window_of(structures.mapped(lambda leaf: leaf[None], as_arrays(batch)), 1)
