"""A run in progress: its state and parts, and how it begins, resumes, rolls back and ends.

It is one file because all of its methods change the same few attributes of `Session`; what can be
separated is in the other modules of this package.
"""

import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..backends.base import active
from ..backends.hints import device_lost
from ..backends.step_context import Effects
from ..backends.window import Window
from ..checkpoint import Checkpoint
from ..checkpoint.run_files import averaged
from ..core.error_notes import noting
from ..core.history import History
from ..core.hook import LoopView
from ..core.identity import SHARDED, in_json_types
from ..core.logs import Record
from ..core.options import Options
from ..core.processes import process_group, require_equal
from ..core.progress import Progress
from ..core.randomness import random_states
from ..core.rollback import RolledBack
from ..core.signals import handled_signals, missing_handlers
from ..core.tracebacks import shortened
from ..data.same_source import is_same_source
from ..data.source import Source
from ..errors import ProcessError, StateError, TreadleWarning
from ..hooks.run_record import RunRecord
from ..steps.averages import Averages
from ..steps.constants import Changed, changes_text
from ..steps.optimizers import build_as_saved
from ..steps.planning import as_recorded
from ..steps.python_values import PythonValues
from ..steps.state import State
from .agreement import Agreement
from .call import Call, Kind
from .epoch_source import EpochSource
from .evaluation import Evaluation
from .explanations import examples_note, explaining, new_form_note
from .recorded_history import recorded_history
from .restoring import Restoring
from .resume import Resuming, circumstances, lost_guarantee
from .saved_state import LoopState
from .services import Services
from .training import Training
from .unchanged_weights import WeightCheck
from .validation import Validation


class Session:
    """The state and the parts of a run, with which `Loop` trains.

    If the services hold an earlier run, its progress, history and hooks are restored at once, and
    the values of variables as soon as the variables exist.

    Args:
        loop: The loop as hooks see it.
        task: The task.
        options: Execution options.
        services: The run directory, checkpoints, messages and hooks.

    Attributes:
        progress: The current step, epoch, batch, examples and seconds.
        history: All logged values.
        call: The current call that trains, or the last one.
        services: The services.
        training: Runs the train step.
        evaluation: Runs the other steps.
        feed: Reads the training source.
        epoch_source: The source of the current epoch.
        resuming: The number of the call, and what remains to be restored.
        started: Whether hooks have started and not yet ended.
        in_context: Whether the loop's `with` block is active: hooks end with it.
        trigger_check: The progress at which triggers were last checked.
        last_recorded_step: The step of the newest record that is not a user log.
        swapped_optimizers: While hooks end, the optimizers whose averages a callback has swapped
            into the weights; None before.
    """

    def __init__(self, loop: LoopView, task: Any, options: Options, services: Services) -> None:
        self._loop, self._task, self.services = loop, task, services
        self.progress, self.history = Progress(), History()
        self.call = Call("step", self.progress, self.progress)
        record = services.record
        self._takes_compilers = True
        if record is not None and record.from_before:
            before, plan = record.facts.get("options", {}), record.facts.get("plan", "")
            self._takes_compilers = options.compiler == before.get("compiler", "auto")
            options = as_recorded(options, before, plan)
        self.training = Training(task, replace(options, skip_nonfinite=services.skips_nonfinite))
        # Evaluation is captured: its step is short, and takes as long to compile.
        self.evaluation = Evaluation(task, replace(options, compiler="auto"))
        self.feed, self.epoch_source = services.feed, EpochSource()
        self.started = self.in_context = False
        self.trigger_check, self.last_recorded_step = self.progress, 0
        self.swapped_optimizers: list[Any] | None = None
        self.averages, self._weights = Averages(), WeightCheck()
        # The arguments and the source of the call, and those of a call that raised an error.
        self._asked: tuple[Mapping[str, Any], Source | None] | None = None
        self._failed = self._asked
        self._agreement, self._is_alone = Agreement(), process_group().size == 1
        self.resuming = Resuming(None)
        # The circumstances and the plan of the checkpoint, until they are compared.
        self._saved_circumstances: Mapping[str, Any] | None = None
        self._saved_plan = ""  # the plan of the checkpoint
        start = services.start
        self._values = start.values if start is not None else PythonValues(task)
        self._restoring = Restoring(self._values, record)
        self._excluded = dict(start.excluded) if start is not None else {}
        if record is not None:
            self._excluded = record.passed_over()
        if start is not None:
            call = LoopState.decode(start.checkpoint).call
            self.resuming = Resuming(start.checkpoint, call - 1)
            self._restoring.rolled_back = True  # an earlier replay may have changed the task
            self._restore_progress()
        elif record is not None and record.from_before:
            self._resume_earlier_run(record)

    @property
    def state(self) -> State:
        """All variables of the task by path."""
        return State.discover(self._task)

    @property
    def known_state(self) -> State:
        """The variables that the task had when its step was built, found without a search."""
        step = self.training.prepared
        return self.state if step is None else step.state

    @property
    def plan(self) -> str:
        """How steps are executed, in one line; empty before the first step."""
        text = self.training.prepared.plan_text() if self.training.prepared else ""
        shards = self.feed.shards or 1
        return f"{text}, {SHARDED.format(shards)}" if text and shards > 1 else text

    # Resuming

    def _resume_earlier_run(self, record: RunRecord) -> None:
        """Restore progress, history and hooks of the run in the directory."""
        self.services.reporter.warn(record.recovered)
        self.resuming = Resuming(self.services.newest_checkpoint())
        if record.finished:
            self._restore_end(record)
        else:
            self._restore_progress()
        if self.resuming.saved is not None and self.resuming.saved.call < 0:
            # The run only called `loop.step`: the script's next calls follow the checkpoint.
            self._restoring.begin_call(self.resuming)

    def _restore_end(self, record: RunRecord) -> None:
        """Restore progress and history at the end of a finished run; hooks are not restored."""
        saved = self.resuming.saved
        state, note = record.final_state()
        self.services.reporter.warn(note)
        self.resuming.use_final_state(state)
        self.progress = self.trigger_check = record.progress
        self.history = self._recorded_history()
        self.evaluation.calls = saved.function_calls if saved is not None else 0

    def _restore_progress(self) -> None:
        """Restore progress, history and hooks from the last checkpoint, if there is one."""
        found, saved = self.resuming.use_last_checkpoint(), self.resuming.saved
        if found is None or saved is None:
            return
        self.resuming.set_pending(found.state)
        if saved.compiler is not None and self._takes_compilers:
            self.training.use_recorded_compilers(saved.compiler, saved.compilers)
        self._saved_plan = str(found.about.get("plan") or "")
        self.progress, self.last_recorded_step = found.progress, saved.last_recorded_step
        self.trigger_check, self.evaluation.calls = saved.trigger_check, saved.function_calls
        self.epoch_source.restore(saved.source, self.progress.step)
        self.history = self._recorded_history(found)
        self.services.hooks.restore(found)

    def _recorded_history(self, at: Checkpoint | None = None) -> History:
        """Return the history of the run from its log, up to a checkpoint or to its end."""
        log, marks = self.services.recorded_log(at)
        if log is None:
            return History()
        step, last = (None, self.progress.step) if at is None else (at.progress.step, None)
        found, lost = recorded_history(log, marks, step, last)
        if lost:
            self.services.reporter.warn(lost)
        return found

    def skip_completed_call(
        self, arguments: Mapping[str, Any], source: Source | None = None
    ) -> bool:
        """Skip the next call that trains if an earlier process completed it.

        Args:
            arguments: The arguments of the call, as recorded in `run.json`.
            source: The source of the call, if it is known before the call begins.

        Returns:
            Whether the call was skipped.
        """
        require_equal("call of the loop", in_json_types(arguments))
        if self._repeats_failed_call(arguments, source):
            self.resuming.call -= 1
        self._asked, self._failed = (arguments, source), None
        record, reporter = self.services.record, self.services.reporter
        number = self.resuming.call + 1
        if record is None:
            return False
        done = record.call(number, arguments)
        if record.finished and not done and not self.resuming.is_later(number):
            self._restore_progress()  # resume with other arguments
        if not done and not self.resuming.next_call_was_complete:
            return False
        self.resuming.begin(self.progress)
        if source is not None and self.resuming.is_of_this_call:
            self.epoch_source.recognize(source)
        lost = self._restoring.begin_call(self.resuming)
        self.resuming.assign_what_exists(self.state)
        if done:
            if lost:
                reporter.warn(
                    f"the finished run was not restored completely: {lost} during the run"
                )
            self.call.reason = "it was finished before"
            reporter.print(f"the run in {record.path} is already finished; nothing was done")
            reporter.warn(record.changed)
        return True

    def _repeats_failed_call(self, arguments: Mapping[str, Any], source: Source | None) -> bool:
        """Return whether the call that raised an error is repeated: it keeps its number.

        A script that resumes the run makes the call once, unless it fails again.
        """
        if self._failed is None or arguments != self._failed[0]:
            return False
        failed = self._failed[1]
        return source is failed or bool(source and failed and is_same_source(source, failed))

    def roll_back(self, error: RolledBack) -> None:
        """Return to the newest checkpoint, and exclude the batch that the error names."""
        record = self.services.record
        assert record is not None  # `services_of` requires a directory for rollback
        if error.passed is not None:
            record.pass_over(error.passed, str(error))
            self._excluded = record.passed_over()
        self.feed.close()
        self._restoring.rolled_back = True
        self.resuming = Resuming(self.services.newest_checkpoint(), self.resuming.call - 1)
        seconds = self.progress.seconds  # the time of the discarded steps counts too
        self._restore_progress()
        self.progress = self.progress.after_seconds(seconds)

    def capture(self, buffers: Mapping[str, Any], score: float | None) -> Checkpoint:
        """Return the complete state of the run at this window boundary; see `LoopView.capture`."""
        state, prepared = self.state, self.training.prepared
        written = set(prepared.written if prepared is not None else state.variables)
        step, validation = self.progress.step, self.call.validation if self.call.running else None
        # A run that restarts from step 0 calls the `start` of its hooks again.
        begun = self._restoring.begun if step == 0 else None
        saved = LoopState(
            call=self.resuming.call,
            begun=self.resuming.begun,
            reason=self.call.ended_by,
            random=random_states(),
            trigger_check=self.trigger_check,
            last_recorded_step=self.last_recorded_step,
            function_calls=self.evaluation.calls,
            validation=validation.last if validation is not None else None,
            means=self.training.means_state(),
            constants=self._values.capture(begun),
            recompile=self.training.changed_constants(),
            forms={"train_step": self.training.forms, "eval_step": self.evaluation.forms},
            weights=self._weights.state(state),
            averages=self.averages.begun,
            compiler=self.training.compiler,
            compilers=self.training.compilers,
            source=self.epoch_source.state(),
            stores=self.training.stores(),
        )
        return Checkpoint(
            progress=self.progress,
            state=state.stage(buffers),
            fixed=frozenset(path for path in state.variables if path not in written),
            loop=saved.encode(),
            source=self.feed.position(),
            hooks=self.services.hooks.states(self._loop),
            about={
                **circumstances(),
                # A run that resumes after its last step compiles nothing.
                "plan": self.plan or self._saved_plan,
                "score": score,
                **(record.copy(step) if (record := self.services.record) is not None else {}),
            },
        )

    # The call

    @contextmanager
    def checking_arguments(self) -> Generator[None]:
        """Remove the run directory again if a call of a new run is rejected."""
        try:
            yield
        except BaseException:
            if not self.started:
                self._leave_directory()
            raise

    @contextmanager
    def calling(
        self,
        kind: Kind,
        epochs: int | None = None,
        steps: int | None = None,
        deadline: float | None = None,
        validation: Validation | None = None,
    ) -> Generator[Call]:
        """Begin and end a call that trains. Inside another call, yield that one.

        Hooks end after an error, after `fit`, or at the end of the `with` block around the loop.
        """
        if self.call.running:
            try:
                yield self.call
            except Exception:  # the call around it only gets to know that its body ended
                self._failed = self._asked
                raise
            self._failed = None
            return
        self.call = call = self._begin_call(kind, epochs, steps, deadline, validation)
        error: BaseException | None = None
        try:
            with handled_signals() as call.request:
                yield call
                self._failed = None
                self._agreement.at_end(call)
                call.heed_signals()  # those received during the last validation
                if call.unfinished and self.started:
                    self.services.save(self._loop)
            if call.signal is not None:
                raise call.request.error(call.signal)
        except GeneratorExit:  # the user's `for` ended early; the `with` block gets the reason
            raise
        except BaseException as raised:
            error, self._failed = raised, self._asked
            self.feed.close()  # a later call reads again, after the last batch trained on
            if device_lost(raised):
                raised.add_note(self.services.recovery())
            self.tell_others(raised)
            raise
        finally:
            try:
                if kind == "fit" or error or not self.in_context:
                    self.end(error, final=call.has_epochs)
            finally:
                call.running = False

    def _begin_call(
        self,
        kind: Kind,
        epochs: int | None,
        steps: int | None,
        deadline: float | None,
        validation: Validation | None,
    ) -> Call:
        resuming = self.resuming
        self._failed = None
        if kind != "step" and self.services.checkpointer is not None:
            self._values.begin_call()
        if kind == "step":  # calls of `loop.step` are not numbered
            self._asked = None
        else:
            resuming.begin(self.progress)
            if resuming.is_of_this_call:
                self._restoring.begin_call(resuming)
        call = Call(kind, resuming.begun, self.progress, epochs, steps, deadline, validation)
        call.running = True
        if kind == "epochs" and resuming.is_of_this_call:
            call.sources_to_skip = len(self.epoch_source.earlier)
        if resuming.saved is not None and not resuming.is_later(resuming.call):
            call.stop(resuming.saved.reason)
            if validation is not None and resuming.saved.validation:
                validation.restore(resuming.saved.validation)
        return call

    def is_over(self) -> bool:
        """Return whether the call has ended, and update the seconds of the progress."""
        self.progress = self.call.timed(self.progress)
        return self.call.is_over(self.progress)

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        """Add a record to the history, and notify the hooks."""
        if kind != "log":  # count the time since the last window, mainly validation
            self.progress = self.call.timed(self.progress)
            self.last_recorded_step = self.progress.step
        self._record(Record(kind, self.progress, dict(values)))

    def _record(self, record: Record) -> None:
        self.history.add(record)
        self.services.hooks.notify("record", self._loop, record)

    # Reading and building

    def open(self, source: Source) -> None:
        """Open a source at the current progress, and begin if hooks have not started.

        A source continues in the middle of an epoch only if the epoch began with it. If it is
        another one, the unfinished epoch ends first, with a record of its own; in the body of
        `loop.epochs`, another source of the same epoch begins.
        """
        left = self._leave_epoch(source)
        self.open_source(source, trains=True)
        self.epoch_source.use(source, self.progress.step)
        self.call.has_opened = True
        if not self.started:
            self._begin_with(source)
        if left is not None:
            self._record(Record(*left, self.training.metrics()))

    def leave_finished_epoch(self) -> bool:
        """Return whether an earlier call ended at the last batch of this epoch, which then ends.

        It is none of the epochs of this call.
        """
        at, begun = self.progress, self.resuming.begun
        if not at.batch or at.step != begun.step or self.feed.first(at) is not None:
            return False
        self.resuming.begun = begun.at_epoch(begun.epoch + 1)
        self.call.epochs = None if self.call.epochs is None else self.call.epochs + 1
        return True

    def _leave_epoch(self, source: Source) -> tuple[str, Progress] | None:
        """End the epoch of another source; return the kind of its record and its progress."""
        before, call, current = self.progress, self.call, self.epoch_source
        in_body = call.kind == "epochs" and call.has_opened
        if not current.is_other(source) and not (in_body and current.ended):
            return None
        kind = "epoch" if current.is_whole(before.batch) else "partial"
        if before.batch and in_body:
            current.add(source, before.batch)
        elif before.batch:
            self.resuming.begun = self.resuming.begun.at_epoch(self.resuming.begun.epoch + 1)
            call.epochs = None if call.epochs is None else call.epochs + 1
            self.progress = before.at_epoch(before.epoch + 1)
            current.begin_epoch()
        # The sources of a body take turns: each continues in the next epoch.
        if call.kind != "epochs" or self.progress.epoch == self.resuming.begun.epoch:
            current.since = self.progress.epoch
        return (kind, before) if self.progress.epoch > before.epoch else None

    def _begin_with(self, source: Source) -> None:
        """Begin with the next batch of the open source."""
        first = self.feed.first(self.progress)
        if first is not None:
            self.begin(first)
        elif self.resuming.found is not None or self.progress.batch:  # at the end of an epoch
            self._begin_without_training(source)
        if source.inexact and self.services.directory is not None:
            self.services.reporter.warn(f"a resume of this run may not be exact: {source.inexact}")

    def open_source(self, source: Source, trains: bool = False) -> None:
        """Open a source at the current progress, and at its position in a checkpoint.

        A position is of one source. Without training, as for `loop.prepare`, another source than
        that of the epoch is opened at its first batch.
        """
        # The batches of a closed loop need the restored weights.
        if source.closed_loop and self.resuming.has_pending:
            self.resuming.assign_what_exists(self.state)
        at, began, found = self.progress, self.epoch_source.began, self.resuming.found
        is_other = self.epoch_source.is_other(source)
        position = None if found is None or is_other else found.source
        since = self.epoch_source.since
        if is_other and at.batch and not trains:  # which leaves the epoch as it is
            at = at.at_epoch(at.epoch + 1)
            began, since = 0, at.epoch
        self.feed.open(source, at, self._loop, position, began, since)

    def window_size(self, at: Progress, size: int) -> int:
        """Return a window size that ends before the next excluded batch."""
        if not self._excluded:
            return size
        excluded = [batch for epoch, batch, _ in self._excluded if epoch == at.epoch]
        return min([size, *(batch - at.batch for batch in excluded if batch > at.batch)])

    def skip_excluded_batch(self) -> bool:
        """Skip the next batch if a rollback excluded it; return whether it was skipped."""
        at = self.progress
        why = self._excluded.get((at.epoch, at.batch, at.step))
        if why is None or self.feed.take(1, at) is None:
            return False
        self.progress = replace(at, batch=at.batch + 1)
        warning = f"skipped batch {at.batch + 1} of epoch {at.epoch + 1}: {why}"
        self.record("log", {"warning": warning})
        return True

    def prepare(self, window: Window) -> None:
        """Build the steps; for a resumed run, for every batch form that the checkpoint lists."""
        forms = self.resuming.forms
        shown = self.services.reporter.activity("building the step")
        with shown, self._values.building():
            with noting("train_step", self.progress, running=1), explaining(window):
                self.training.prepare(window, forms.get("train_step", ()))
            with noting("eval_step", self.progress), explaining():
                self.evaluation.prepare(forms.get("eval_step", ()))
        self._restore_stores()
        if self.services.directory is not None:
            self.state.refuse_unsaved()

    def _restore_stores(self) -> None:
        """Restore what the train step changes besides variables, if the run is resumed."""
        saved, prepared = self.resuming.saved, self.training.prepared
        if saved is not None and prepared is not None:
            prepared.effects.restore(saved.stores)

    def restore_without_training(self) -> None:
        """Assign the values of a checkpoint, if a run resumes, and check that none is missing."""
        resuming, saved = self.resuming, self.resuming.saved
        if saved is not None and saved.stores and self.training.prepared is None:
            window = self.training.zeros(resuming.forms)  # only the step knows what it changes
            if window is not None:
                self._restoring.build(self.training, lambda: self.prepare(window))
        if resuming.has_pending:
            resuming.assign_what_exists(self.state)
            resuming.check_built(self.state)

    def recompile_if_changed(self, window: Window) -> None:
        """Rebuild the step if a Python value changed or the batch form is new; log the reason."""
        changed = self.training.changed_constants()
        if changed or self._restoring.recompile:
            self._recompile(window, changed)
        if not self.training.is_prepared(window):
            self._note(new_form_note(self.training.forms, window, self.history))
            self._note(examples_note(window, self.history))
            self.prepare(window)

    def _recompile(self, window: Window, changed: Changed) -> None:
        """Rebuild the step for changed Python values, and log them.

        Raises:
            StateError: A checkpoint could not hold them.
        """
        if changed and self.services.checkpointer is not None:
            self._values.changes()  # at once, so that an earlier checkpoint stays the newest
        # The step was already built for changes before the checkpoint, but they were not logged.
        before, self._restoring.recompile = self._restoring.recompile, {}
        merged = {p: [before.get(p, change)[0], change[1]] for p, change in changed.items()}
        merged = {**before, **merged}
        # In the order of an uninterrupted run.
        ordered = [path for path in self.known_state.constants() if path in merged]
        if changed:
            self.prepare(window)
        text = changes_text({path: merged[path] for path in dict.fromkeys([*ordered, *merged])})
        self._note(f"recompiled because {text}")

    def _note(self, text: str) -> None:
        """Log a note, unless it is empty."""
        if text:
            self.record("log", {"note": text})

    def build_and_assign(self, source: Source) -> None:
        """Build the model with the first batch of a source, and assign its restored variables."""
        with shortened():
            window = self.training.zeros(self.resuming.forms)
            window = window or self.feed.sample(source, Progress(), self._loop)
            if window is not None:
                self._restoring.build(self.training, lambda: self.prepare(window))
            self.resuming.assign_what_exists(self.state)

    # Beginning and ending

    def begin(self, window: Window) -> None:
        """Build the step, restore the state from a checkpoint, and start the hooks."""
        saved = self.resuming.saved
        self.training.use_compiler(active().compiler(self._steps_planned()))
        if saved is not None:
            self._restoring.restore(self.resuming, self.training, lambda: self.prepare(window))
            found = self.resuming.found
            if found is not None and build_as_saved(self._task, found.state):
                self.training.prepared = None  # built without the new slots
                self.prepare(window)
        elif self.training.prepared is None:
            self.prepare(window)
        later, of_this_call = (
            self.resuming.is_later(self.resuming.call),
            self.resuming.is_of_this_call,
        )
        self._restore_stores()
        found = self._restore_variables()
        if not self.started:
            self.averages.begin(self.state)
        if found is not None and saved is not None:
            self.training.restore_means(saved.means)
            if not later:
                self.averages.restore(saved.averages)
            self._saved_circumstances = found.about
            if self.services.record is not None:
                self.services.reporter.warn(self.services.record.changed)
        if not self.started:
            if saved is not None and of_this_call:
                self._weights.restore(saved.weights)
            else:
                self._weights.start(self.state)
            self._start_hooks(window)
            self.warn_of_effects()

    def _steps_planned(self) -> int | None:
        """Return how many steps the call trains for, or None if unknown."""
        loop, at = self._loop, self.progress
        ends: list[int] = []
        if loop.steps_planned is not None:
            ends.append(loop.steps_planned - at.step)
        if loop.epochs_planned is not None and loop.steps_per_epoch is not None:
            ends.append((loop.epochs_planned - at.epoch) * loop.steps_per_epoch)
        return min(ends, default=None)

    def _restore_variables(self) -> Checkpoint | None:
        """Restore all variables and random states; return the checkpoint, or None."""
        initial = {**self.training.initial, **self.evaluation.initial}
        try:
            return self.resuming.restore_variables(self.state, initial)
        except StateError:
            self._restoring.check_none_lost()  # a replaced object may have other variables
            raise

    def _start_hooks(self, window: Window) -> None:
        self.started = True
        reporter = self.services.reporter
        with self._restoring.starting(self.training, lambda: self.prepare(window)) as lost:
            self.services.hooks.notify("start", self._loop)
        reporter.warn("; ".join(lost))
        self._note(examples_note(window, self.history))
        if self.services.directory is not None:
            reporter.warn(missing_handlers())

    def warn_of_lost_guarantee(self) -> None:
        """Warn once if a resumed run may not be exact; the plan is known after one window."""
        if self._saved_circumstances is not None:
            self.services.reporter.warn(lost_guarantee(self._saved_circumstances, self.plan))
            self._saved_circumstances = None
        prepared = self.training.prepared
        if prepared is not None and prepared.effects.news:  # of a branch that is traced only now
            self.warn_of_effects()

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
        for text in effects.news if self.services.directory is not None else ():
            reporter.warn(text)
        effects.repeated, effects.news = "", []

    def count(self, logs: Any) -> None:
        """Add the steps of a window to the progress and the history."""
        if self._is_alone:
            self.training.adapt()
        else:
            self._agree(logs.progress.step)
        self.progress = self.call.timed(logs.progress)
        self.history.add_steps(logs)
        self._weights.ran(logs)

    def _agree(self, step: int) -> None:
        """Agree with the other processes after a window that ended at a step."""
        training = self.training
        seconds = self._agreement.after_window(self.call, step, training.seconds, self.feed)
        if seconds is not None:
            training.adapt(seconds)

    def restore_completed_call(self, source: Source) -> None:
        """Restore the state, if an earlier process ran all steps of this call but not its end."""
        found = self.resuming.found
        if self.resuming.is_of_this_call:
            self.epoch_source.recognize(source)
        if found is not None and not self.call.unfinished:
            self.open_source(source)
            self._begin_without_training(source)

    def _begin_without_training(self, source: Source) -> None:
        """Begin where the open epoch has no further batch."""
        window = self.training.zeros(self.resuming.forms)
        if window is None:
            window = self.feed.sample(source, self.progress, self._loop)
            self.open_source(source)  # again, since reading moved it
        if window is not None:
            self.begin(window)

    def end(self, error: BaseException | None, final: bool) -> None:
        """Save a checkpoint and end the hooks.

        At the final end of training, averaged weights (`use_ema=True`) are replaced by their
        averages. The checkpoint is saved first: it holds the raw weights, from which a longer run
        resumes exactly.

        Args:
            error: The exception that ended the call, or None.
            final: Whether training ends here, and not only this call.
        """
        if not self.started:
            if final and error is None:
                self._end_completed_run()
            self._leave_directory()
            return
        try:
            if error is None:
                self._warn_unchanged()
                self.services.save(self._loop)
                if final and not self.call.unfinished:
                    self.swapped_optimizers = self.services.swapped_optimizers
                    for warning in self.averages.finish(self.state, self.swapped_optimizers):
                        self.record("log", {"warning": warning})
        except BaseException as failure:
            self.tell_others(failure)
            raise
        finally:
            self.started = False
            try:
                self.services.hooks.end(self._loop, error)
            except BaseException as failure:
                self.tell_others(failure)
                raise
            finally:
                self.swapped_optimizers = None
        if error is None:  # all files are written before any process goes on
            require_equal("step at which training ended", self.progress.step)

    def tell_others(self, error: BaseException) -> None:
        """Tell the other processes of an error, so that they end and do not wait for this one.

        All of them heed the same signals, and roll back at the same step: these are no failures.

        Raises:
            ProcessError: Another process has failed, of which the error is a consequence.
        """
        if self.call.signal is None and not isinstance(error, (ProcessError, RolledBack)):
            process_group().fail(error)

    def _leave_directory(self) -> None:
        """Remove the run directory if this process created it and it is empty."""
        if self.services.record is not None:
            self.services.record.leave()

    def _end_completed_run(self) -> None:
        """Use averaged weights if an earlier process completed all epochs, but not their end."""
        found, saved = self.resuming.found, self.resuming.saved
        if self.call.was_complete and found is not None and saved is not None:
            self.resuming.use_final_state(averaged(found.state, saved.averages))
            self.resuming.assign_what_exists(self.state)

    def _warn_unchanged(self) -> None:
        """Warn if this call changed no weight."""
        prepared = self.training.prepared
        text = self._weights.warning(prepared) if prepared and not self.call.unfinished else ""
        if text:
            self.record("log", {"warning": text})
            if not self.services.reporter.has_console:
                warnings.warn(text, TreadleWarning, stacklevel=2)
