"""A run: its state, its parts, and what hooks see of it.

`Run` holds what changes while a task is trained. `Engine` trains it window by window, `Calls`
begins and ends the calls of the loop, and `Loop.step` counts its batch: they change its attributes.
`Resume`, one of its parts, restores the state of the task.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..backends.plans import Execution
from ..backends.step_context import Effects
from ..backends.window import Window
from ..checkpoint import SavedState
from ..core.history import History
from ..core.logs import Record, StepLogs, loggable
from ..core.options import Options
from ..core.processes import is_chief, process_group
from ..core.progress import Costs, Progress
from ..core.randomness import random_states
from ..core.tracebacks import noting
from ..data.source import Source
from ..hooks.run_record import RunRecord
from ..steps.averages import Averages
from ..steps.constants import too_large_text
from ..steps.layer_statistics import StepStatistics
from ..steps.planning import as_recorded
from ..steps.python_values import PythonValues
from ..steps.state import State
from .call import Call
from .circumstances import circumstances
from .epoch_source import EpochSource
from .evaluation import Evaluation
from .explanations import explaining
from .recorded_history import recorded_history
from .resume import Resume
from .services import Services
from .state import RunState
from .training import Training
from .unchanged_weights import WeightCheck
from .validation import Validation


class _Untrainable:
    """A stand-in for a training method of `Loop`, which raises an error in the view of hooks."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, run: Any, owner: type) -> Any:
        """Raise an error, because hooks cannot train.

        Raises:
            ConfigurationError: A hook is running.
            AttributeError: None is.
        """
        if run is not None:
            run.services.hooks.refuse_training(self._name)
        raise AttributeError(f"the view of a loop has no {self._name!r}: call it on the loop")


class Run:
    """The state and the parts of a run; hooks see it as `core.hook.LoopView`.

    If the services hold an earlier run, its progress, history and hooks are restored at once, and
    the values of variables as soon as the variables exist.

    Args:
        task: The task.
        options: Execution options.
        services: The run directory, checkpoints, messages and hooks.

    Attributes:
        task: The task.
        options: Execution options.
        services: The run directory, checkpoints, messages and hooks.
        directory: The run directory, or None.
        progress: The current step, epoch, batch, examples and seconds.
        history: All logged values.
        current: The current call that trains, or the last one.
        training: Runs the train step.
        evaluation: Runs the other steps.
        feed: Reads the training source.
        epoch_source: The source of the current epoch.
        values: The Python values of the task.
        resume: The number of the call, and what remains to be restored.
        averages: The averages of weights that optimizers keep.
        weight_check: Detects a call that changes no weight.
        agreement: What several processes agree on after each window; None in one process.
        excluded: The batches that rollbacks excluded; see `RunRecord.passed_over`.
        started: Whether hooks have started and not yet ended.
        ending: Whether hooks end now.
        trigger_check: The progress at which triggers were last checked.
        last_recorded_step: The step of the newest record that is not a user log.
        swapped_optimizers: While hooks end, the optimizers whose averages a callback has swapped
            into the weights; None before.
        saved_circumstances: What the exact values of the resumed run depend on, until it is
            compared with this process.
    """

    def __init__(self, task: Any, options: Options, services: Services) -> None:
        self.task, self.options, self.services = task, options, services
        self.directory = services.directory
        self.progress, self.history = Progress(), History()
        # What several processes agree on; None in one process: each call of a step costs time.
        self.agreement = process_group().agreement()
        self.current = Call("step", self.progress, self.progress, agreement=self.agreement)
        record, start = services.record, services.start
        self._takes_compilers = True
        if record is not None and record.from_before:
            before = record.facts.get("options", {})
            self._takes_compilers = options.compiler == before.get("compiler", "auto")
            options = as_recorded(options, before, record.facts.get("execution"))
        skips = any(guard.skips for guard in services.guards)
        self.training = Training(task, replace(options, skip_nonfinite=skips), process_group().size)
        # Evaluation is captured: its step is short, and takes as long to compile.
        self.evaluation = Evaluation(task, replace(options, compiler="auto"))
        self.feed, self.epoch_source = services.feed, EpochSource()
        self.started = self.ending = False
        self._early_records: list[Record] = []
        self.trigger_check, self.last_recorded_step = self.progress, 0
        self.swapped_optimizers: list[Any] | None = None
        self.averages, self.weight_check = Averages(), WeightCheck()
        self.saved_circumstances: Mapping[str, Any] | None = None
        self._saved_execution: Mapping[str, Any] | None = None  # of the checkpoint
        self.values = start.values if start is not None else PythonValues(task)
        self.resume = Resume(
            task, self.values, self.training, self.evaluation, record, self.prepare
        )
        self.excluded = dict(start.excluded) if start is not None else {}
        if record is not None:
            self.excluded = record.passed_over()
        if start is not None:
            self.resume.use(start.checkpoint, RunState.of(start.checkpoint).call - 1)
            self.resume.rolled_back = True  # an earlier replay may have changed the task
            self.restore_progress()
        elif record is not None and record.from_before:
            self._resume_earlier_run(record)

    # An earlier run

    def _resume_earlier_run(self, record: RunRecord) -> None:
        """Restore progress, history and hooks of the run in the directory."""
        self.services.reporter.warn(record.recovered)
        self.resume.use(self.services.newest_checkpoint(), call=-1)
        if record.finished:
            self._restore_end(record)
        else:
            self.restore_progress()
        if self.resume.state is not None and self.resume.state.call < 0:
            # The run only called `loop.step`: the script's next calls follow the checkpoint.
            self.resume.restore_python_values(early=True)

    def _restore_end(self, record: RunRecord) -> None:
        """Restore progress and history at the end of a finished run; hooks are not restored."""
        saved = self.resume.state
        arrays, note = record.final_state()
        self.services.reporter.warn(note)
        self.resume.use_final_state(arrays)
        self.progress = self.trigger_check = record.progress
        self.history = self._recorded_history()
        self.evaluation.calls = saved.function_calls if saved is not None else 0
        if saved is not None:  # a later call of this script may read from another source
            self.training.rare_forms.restore(saved.rare_forms)
            self.evaluation.restore_rare_forms(saved.rare_eval_forms)
            self.epoch_source.restore(saved.epoch_source, self.progress.step)

    def restore_progress(self) -> None:
        """Restore progress, history and hooks from the last checkpoint, if there is one."""
        saved = self.resume.use_last_checkpoint()
        if saved is None:
            return
        if saved.compiler is not None and self._takes_compilers:
            self.training.use_recorded_compilers(saved.compiler, saved.compilers)
        self.training.rare_forms.restore(saved.rare_forms)
        self.evaluation.restore_rare_forms(saved.rare_eval_forms)
        if self.training.prepared is not None:
            self.training.prepared.recount()
        self._saved_execution = saved.execution
        self.progress, self.last_recorded_step = saved.progress, saved.last_recorded_step
        self.trigger_check, self.evaluation.calls = saved.trigger_check, saved.function_calls
        self.epoch_source.restore(saved.epoch_source, self.progress.step)
        self.history = self._recorded_history(saved.checkpoint())
        text = self.services.hooks.restore(saved.checkpoint())
        if saved.progress.step:
            self.services.reporter.warn(text)

    def _recorded_history(self, at: SavedState | None = None) -> History:
        """Return the history of the run from its log, up to a checkpoint or to its end."""
        log, marks = self.services.recorded_log(at)
        if log is None:
            return History()
        step, last = (None, self.progress.step) if at is None else (at.progress.step, None)
        found, lost = recorded_history(log, marks, step, last)
        if lost:
            self.services.reporter.warn(lost)
        return found

    def is_over(self) -> bool:
        """Return whether the call has ended, and update the seconds of the progress."""
        self.progress = self.current.timed(self.progress)
        return self.current.is_over(self.progress)

    def account(self, logs: StepLogs) -> None:
        """Add the steps of a window to the progress and the history, and adapt the next windows.

        Several processes agree on the time that it took, and on signals.
        """
        if self.agreement is None:
            self.training.adapt()
        else:
            self._agree(logs.progress.step)
        self.progress = self.current.timed(logs.progress)
        self.history.add_steps(logs)
        self.weight_check.ran(logs)

    def _agree(self, step: int) -> None:
        """Agree with the other processes after a window that ended at a step."""
        training, received = self.training, self.current.request.signal
        seconds = self.agreement.after_window(step, training.seconds, self.feed.waited, received)
        if seconds is not None:
            training.adapt(seconds)

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        """Add a record to the history, and notify the hooks."""
        if kind != "log":  # count the time since the last window, mainly validation
            self.progress = self.current.timed(self.progress)
            self.last_recorded_step = self.progress.step
        self.add_record(kind, self.progress, values)

    def has_recorded_epoch(self, at: Progress) -> bool:
        """Return whether the history holds the record of the epoch that ends at a progress."""
        for record in reversed(self.history.records):
            if record.progress.step < at.step:
                break
            if record.kind == "epoch" and record.progress.epoch == at.epoch:
                return True
        return False

    def add_record(self, kind: str, at: Progress, values: Mapping[str, Any]) -> None:
        """Add a record of an earlier progress to the history, and notify the hooks."""
        record = Record(kind, at, dict(values))
        if self.started or self.ending:
            self.add(record)
        else:
            self.history.add(record)
            self._early_records.append(record)

    def add(self, record: Record) -> None:
        """Add a record to the history, and notify the hooks."""
        self.history.add(record)
        self.services.hooks.notify("record", self, record)

    def take_early_records(self) -> list[Record]:
        """Return the records that were added before hooks started, and remove them."""
        early, self._early_records = self._early_records, []
        known = set(map(id, early))
        self.history.records[:] = [x for x in self.history.records if id(x) not in known]
        return early

    # Reading and building

    def open_source(self, source: Source, trains: bool = False) -> None:
        """Open a source at the current progress, and at its position in a checkpoint.

        A position is of one source. Without training, as for `loop.prepare`, another source than
        that of the epoch is opened at its first batch.
        """
        if source.closed_loop:  # its batches need the restored weights
            self.resume.assign_what_exists()
        at, began, saved = self.progress, self.epoch_source.began, self.resume.state
        is_other = self.epoch_source.is_other(source)
        position = None if saved is None or is_other else saved.position
        since = self.epoch_source.since
        if is_other and at.batch and not trains:  # which leaves the epoch as it is
            at = at.at_epoch(at.epoch + 1)
            began, since = 0, at.epoch
        self.feed.open(source, at, self, position, began, since)

    def prepare(self, window: Window) -> None:
        """Build the steps; for a resumed run, for every batch form that the checkpoint lists."""
        forms, saved = self.resume.forms, self.resume.state
        shown = self.services.reporter.activity("building the step")
        with shown, self.values.building():
            with noting("train_step", self.progress, running=1), explaining(window):
                prepared = self.training.prepare(window, forms.get("train_step", ()))
            with noting("eval_step", self.progress):
                self.evaluation.prepare(forms.get("eval_step", ()))
        if saved is not None:
            prepared.effects.restore(saved.stores)
        if self.services.directory is not None:
            self.state.refuse_unsaved()

    def prepare_validation(self, validation: Validation, examples: int) -> None:
        """Build and check `eval_step` for validation sets, so that mistakes show at step 0.

        Reading from a set that is not stored may leave a trace: a generator that has drawn, an
        epoch that has begun. So it is checked with zeros if the form of its batches is known. An
        earlier process has checked the step if the run is resumed: then no batch is read.

        Args:
            validation: The validation sets.
            examples: The number of examples of a batch of training, for zeros.
        """
        if self.evaluation.names or self.progress.step or process_group().size > 1:
            return
        with noting("eval_step", self.progress):
            for source in validation.sources:
                if getattr(source, "is_stored", False):
                    self.evaluation.check(source, self)
                elif zeros := getattr(source, "zeros", None):
                    self.evaluation.check_form(zeros, examples)

    def warn_of_effects(self, of: Effects | None = None) -> None:
        """Warn of what a step does besides computing and changing variables.

        Args:
            of: The effects of another step than the train step.
        """
        prepared, reporter = self.training.prepared, self.services.reporter
        effects = of or (prepared.effects if prepared is not None else None)
        if effects is None:
            return
        reporter.warn(effects.repeated)
        if prepared is not None:
            reporter.warn(too_large_text(prepared.state.too_large))
        for text in effects.news if self.services.directory is not None else ():
            reporter.warn(text)
        effects.repeated, effects.news = "", []

    # The rest of `LoopView`

    fit, epochs, steps, step, find_learning_rate = (_Untrainable() for _ in range(5))

    @property
    def state(self) -> State:
        """All variables of the task by path."""
        return State.discover(self.task)

    @property
    def known_state(self) -> State:
        """The variables that the task had when its step was built: `state` without a search."""
        step = self.training.prepared
        return self.state if step is None else step.state

    @property
    def _execution(self) -> Execution | None:
        """How steps are executed; None before the first step."""
        prepared = self.training.prepared
        return None if prepared is None else prepared.execution(self.feed.shards or 1)

    @property
    def plan(self) -> str:
        """How steps are executed, in one line; empty before the first step."""
        return str(self._execution or "")

    @property
    def executed(self) -> Mapping[str, Any] | None:
        """How steps are executed, as the recorded fields; None before the first step."""
        execution = self._execution
        # A run that resumes after its last step compiles nothing.
        return execution.facts() if execution is not None else self._saved_execution

    @property
    def reads_shares(self) -> bool:
        """Whether each of several processes reads its own share of the data that is trained on."""
        return (self.feed.shards or 1) > 1

    @property
    def reason(self) -> str | None:
        """The reason given for stopping the call, or None."""
        return self.current.reason

    @property
    def unfinished(self) -> bool:
        """Whether the call was interrupted before its planned end, and is meant to be resumed."""
        return self.current.unfinished

    @property
    def epochs_planned(self) -> int | None:
        """The number of epochs of the run at the end of this call, or None if unknown."""
        return self.current.epochs

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of batches in an epoch of `fit`, or None if unknown."""
        return self.current.steps_per_epoch

    @property
    def steps_planned(self) -> int | None:
        """The step at which this call ends, or None if unknown."""
        return self.current.steps

    @property
    def optimizers(self) -> dict[str, Any]:
        """The optimizers that `train_step` applies, by path; empty before the first step."""
        prepared = self.training.prepared
        if prepared is None:
            return {}
        found = prepared.state.all_optimizers.items()
        return {path: optimizer for path, optimizer in found if id(optimizer) in prepared.applied}

    @property
    def compiling(self) -> bool:
        """Whether a window is being compiled now."""
        return self.training.prepared is not None and self.training.prepared.compiling

    @property
    def evaluated(self) -> tuple[int, int | None] | None:
        """Batches done by the running evaluation, and their total number if known."""
        return self.evaluation.position

    @property
    def costs(self) -> Costs:
        """The number of compiled programs, and the time spent compiling and waiting for data."""
        costs, saver = self.training.costs(), self.services.checkpointer
        return replace(
            costs,
            compiling=costs.compiling + self.evaluation.compile_seconds,
            waiting=self.feed.waited,
            validating=self.evaluation.seconds,
            saving=saver.waited if saver is not None else 0.0,
        )

    def metrics(self) -> dict[str, float]:
        """Return training means and metric results since they were last reset."""
        return self.training.metrics()

    def print(self, text: str) -> None:
        """Print a text in the console, if progress is shown."""
        self.services.reporter.print(text)

    def log(self, values: Mapping[str, Any]) -> None:
        """Log values at the current step: scalars of any library, strings or images.

        Raises:
            ConfigurationError: If a value is none of these. Nothing is logged then.
        """
        self.record("log", loggable(values, "loop.log"))

    def stop(self, why: str) -> None:
        """Stop training at this window boundary; the reason `why` is printed and recorded."""
        self.current.stop(why)

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of every variable's value, for `restore`."""
        return self.state.keep()

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Set every variable to the value it had when `snapshot` was taken."""
        self.state.put_back(snapshot)
        if self.swapped_optimizers is not None:  # training has ended: use averaged weights
            self.averages.finish(self.state, self.swapped_optimizers)

    def save(self) -> None:
        """Save a checkpoint now, and wait until it is on disk.

        Raises:
            ConfigurationError: If the run has no directory.
            CheckpointError: If the checkpoint cannot be written.
        """
        self.services.require_checkpoints()
        self.services.save(self)

    def capture(self, buffers: Mapping[str, Any], score: float | None = None) -> SavedState:
        """Return the complete state of the run at this window boundary, as a checkpoint.

        Args:
            buffers: The `state` of an earlier checkpoint that is no longer needed; it is
                overwritten.
            score: The value of the monitored metric, if the best checkpoints are kept.
        """
        state, training, call = self.state, self.training, self.current
        prepared, record, step = training.prepared, self.services.record, self.progress.step
        written = set(prepared.written if prepared is not None else state.variables)
        validation = call.validation if call.running else None
        # A run that restarts from step 0 calls the `start` of its hooks again.
        begun = self.resume.values_begun if step == 0 else None
        return RunState(
            progress=self.progress,
            arrays=state.stage(buffers, only_split=not is_chief()),
            fixed=frozenset(path for path in state.variables if path not in written),
            position=self.feed.position(),
            hooks=self.services.hooks.states(self),
            about={
                **circumstances(),
                "score": score,
                **(record.copy(step) if record is not None else {}),
            },
            execution=self.executed,
            call=self.resume.call,
            begun=self.resume.begun,
            ended_by=call.ended_by,
            random=random_states(),
            trigger_check=self.trigger_check,
            last_recorded_step=self.last_recorded_step,
            function_calls=self.evaluation.calls,
            validation=validation.last if validation is not None else None,
            means=training.means_state(),
            python_values=self.values.capture(begun),
            recompile=training.changed_constants(),
            forms={"train_step": training.forms, "eval_step": self.evaluation.forms},
            weight_checksums=self.weight_check.state(state),
            averaging_updates=self.averages.begun,
            compiler=training.compiler,
            compilers=training.compilers,
            rare_forms=training.rare_forms.saved(),
            rare_eval_forms=self.evaluation.rare_forms.saved(),
            epoch_source=self.epoch_source.state(),
            stores=training.stores(),
        ).checkpoint()

    @property
    def measured(self) -> StepStatistics | None:
        """The statistics of the layers in the first step of the last window, if measured."""
        return self.training.measured

    @property
    def unmeasured(self) -> str:
        """Why the layers were not measured although that was requested; else empty."""
        return self.training.unmeasured

    def measure_next_step(self) -> None:
        """Measure the layers in the first step of the next window; for hooks."""
        self.training.measure_next = True

    def batch_at(self, step: int) -> Any:
        """Return the batch of a step (from 1) of the window that ran last, as NumPy arrays."""
        return process_group().completed(self.training.window_at(step)).batch(0)

    def evaluate(self, source: Any) -> dict[str, float]:
        """Evaluate a source with `eval_step`; see `Loop.evaluate`."""
        if self.started:
            self.services.hooks.notify("evaluation", self, None)
        results = self.validate(source)
        if self.started:
            self.services.hooks.notify("evaluation", self, results)
        return results

    def validate(self, source: Any) -> dict[str, float]:
        """Evaluate a source; hooks are only notified of its batches."""
        self._restore_for("an evaluation")
        with noting("evaluation", self.progress):
            watching = [hook for hook in self.services.callbacks if hook.sees_test_batches]

            def each(batch: int, results: Mapping[str, float] | None) -> None:
                for hook in watching:
                    hook.test_batch(self, batch, results)

            return self.evaluation.evaluate(source, self, each if watching else None)

    def _restore_for(self, wanted: str) -> None:
        """Restore what is needed without training; several processes do this together."""
        self.resume.restore_without_training()
        process_group().exchange(None, wanted)

    def predict(self, source: Any) -> Any:
        """Run `predict_step` over a source; see `Loop.predict`."""
        self._restore_for("a prediction")
        return self.evaluation.predict(source, self)

    def call(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Run a function of the task compiled; see `Loop.call`."""
        # A source may call this for its first batch, before the build.
        self._restore_for("a call of a function")
        with explaining():
            return self.evaluation.call(function, *inputs)
