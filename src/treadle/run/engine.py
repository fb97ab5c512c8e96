"""The engine: trains on a source window by window, and does everything else between the windows.

Training on a source goes through `Engine.windows`, which repeats these phases in this order.
`Loop.step` runs only `run`, `account` and `log`.

    size      choose how many steps run as one window: up to the next event, or the end of the epoch
              or of the call
    read      read that many batches, unless they were prefetched while the previous window ran;
              batches excluded by a rollback are skipped
    run       call `before` of the hooks, rebuild the step if it is out of date, then run the window
              as one compiled call; fetch the values of every step at once, for the means
    account   update the progress: steps, batches, examples, seconds; add the values to the history
    log       call `steps` of the hooks with the values
    validate  if due
    hooks     run those that are due
    yield     the body of the user's own `for` loop runs
    save      write a checkpoint if due; it includes the effects of everything above
    stop?     if requested by a hook or a signal, or at the end of the call

At the end of an epoch, the order is: validation, the epoch's record, hooks scheduled by epochs, a
checkpoint. When training ends (`Calls.end`): a checkpoint, averaged weights (see `steps.averages`),
the `end` methods of the hooks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ..backends.base import active
from ..backends.window import Following, Window
from ..core.logs import Logs
from ..core.progress import Progress
from ..core.tracebacks import add_note, noting
from ..core.triggers import Span, When
from ..data.arrays import note_contents
from ..data.source import Source
from ..steps.constants import Changed, changes_text
from ..steps.results import merged
from .accumulated import note_skipped_groups
from .circumstances import lost_guarantee
from .explanations import (
    examples_note,
    explain,
    left_out_note,
    left_out_warning,
    new_form_note,
    unsaved_warning,
)
from .run import Run

# Who returns the values of a record, for messages.
MERGED = ("train_step", "a validation")


class Engine:
    """Trains a run on sources.

    Args:
        run: The run, whose state the engine changes.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def epochs(self) -> Iterator[int]:
        """Yield the number of each epoch of the running call, and end the epoch after the body."""
        run, call = self._run, self._run.current
        while (call.epochs is None or run.progress.epoch < call.epochs) and not run.is_over():
            call.epoch_ended, call.has_opened = True, False
            if run.resume.state is not None and not run.progress.batch:
                note_contents()
            yield run.progress.epoch
            if call.epoch_ended or not run.is_over():  # or the body ended with `break`
                self.end_epoch()

    def windows(self, source: Source, trigger: When | None = None) -> Iterator[None]:
        """Train to the end of the epoch or the call; yield after each window.

        The call's `epoch_ended` says afterwards whether the epoch ended, and not only the call.

        Args:
            source: The source of batches.
            trigger: Windows end where it is due, in addition to the triggers of hooks.
        """
        run, feed = self._run, self._run.feed
        run.current.epoch_ended = False
        if run.is_over():
            return
        self._open(source)
        if self._exclude_finished_epoch():
            self.end_epoch()
            self._open(source)
        if run.progress.batch == 0:
            run.training.reset_metrics()
        sizes = _WindowSizes(run, trigger)
        while not run.is_over():
            before = run.trigger_check  # time triggers count hooks and the `for` body
            if self._skip_excluded_batch():
                continue
            window = feed.take(sizes.of(run.progress), run.progress)
            if window is None:
                run.current.epoch_ended = run.epoch_source.ended = True
                return
            if run.training.rare_forms.compiler:  # after these steps, the others run compiled
                window = feed.shortened(window, run.training.rare_steps(window))
            self.train(window, sizes.prefetch, partial(sizes.following, window))
            self._validate_if_due(before, source)
            run.services.hooks.run_due(run, before)
            run.trigger_check = run.progress
            yield
            run.services.save_if_due(run, before, run.progress)
        # The call may end where the epoch does.
        whole = run.progress.batch - run.epoch_source.began == source.length
        run.current.epoch_ended = whole and feed.first(run.progress) is None
        run.epoch_source.ended = run.current.epoch_ended

    def train(
        self,
        window: Window,
        meanwhile: Callable[..., None] | None = None,
        following: Following | None = None,
    ) -> None:
        """Run one window, account for it, and log every step of it.

        Args:
            window: The batches.
            meanwhile: Called while the steps run; see `Training.run`.
            following: A function that returns the next batches, whose steps may run too.
        """
        run, training, notify = self._run, self._run.training, self._run.services.hooks.notify
        notify("before", run)  # first: a hook's change may require recompiling
        self._recompile_if_changed(window)
        try:
            background = window.count > 1 or run.feed.slow
            logs = training.run(window, run.progress, meanwhile, background, following)
            run.feed.ran(until=training.ended)
            self._warn_after_window()
        except BaseException as error:
            if isinstance(error, Exception):  # not by `with`, which takes six calls of Python
                explain(error, window)
                lost = training.steps_lost_on_error(window)
                add_note(error, "train_step", run.progress, window.count, lost)
            run.feed.close()  # these batches are read again by a later call
            raise
        run.account(logs)
        if training.violations:
            with noting("train_step", run.progress):
                training.check_promises()
        notify("steps", run, logs)

    def end_epoch(self) -> None:
        """Validate, record the epoch, run the hooks that are due and save a checkpoint."""
        run, before, values = self._run, self._run.progress, self._run.training.metrics()
        if validation := run.current.validation:
            if validation.due(before, before, epoch_ended=True):
                self._validate()
            values = merged(values, validation.results_of(before.step), *MERGED)
        run.feed.close()
        # A hook that is due may have saved the state, and the run was resumed from there.
        if not run.has_recorded_epoch(before):
            run.record("epoch", values)
            note_skipped_groups(run)
        run.services.hooks.run_due(run, before, epoch_ended=True)
        run.progress = run.progress.at_epoch(before.epoch + 1)
        run.epoch_source.begin_epoch()
        run.training.reset_metrics()
        run.services.save_if_due(run, before, before, epoch_ended=True)

    def finish(self, source: Source) -> None:
        """Record the results of a `fit` that ended within an epoch after its last validation."""
        run = self._run
        self.restore_completed_call(source)
        within_epoch = run.progress.batch > 0
        recorded = run.progress.step == run.last_recorded_step
        if within_epoch and not recorded and not run.current.unfinished:
            run.record("validation", self._validated())

    def logs_since_last(self) -> Logs:
        """Return the logs since this was last called."""
        training = self._run.training
        return Logs(training.means_since_last(), self._run.progress, training.metric_results)

    # Validation

    def _validate_if_due(self, before: Progress, source: Source) -> None:
        """Validate within an epoch if due, and record the results."""
        run, validation = self._run, self._run.current.validation
        if validation is not None and validation.due(before, run.progress):
            run.record("validation", self._validated())
            if source.endless:
                run.training.reset_metrics()

    def _validated(self) -> dict[str, float]:
        """Return training means and metrics, and the results of a validation of this step."""
        return merged(self._run.training.metrics(), self._validate(), *MERGED)

    def _validate(self) -> Mapping[str, float]:
        """Evaluate the validation sets, or return the results of this step if they exist."""
        run, validation = self._run, self._run.current.validation
        if validation is None:
            return {}
        results = validation.results_of(run.progress.step)
        if not results:
            notify = run.services.hooks.notify
            notify("validation", run, None)
            with run.evaluation.timed():
                results = validation.run(run.validate, run.progress, run.training.names)
            run.warn_of_effects(run.evaluation.effects)
            notify("validation", run, results)
        return results

    # The source of the epoch

    def _open(self, source: Source) -> None:
        """Open a source at the current progress, and begin if hooks have not started.

        A source continues in the middle of an epoch only if the epoch began with it. If it is
        another one, the unfinished epoch ends first, with a record of its own; in the body of
        `loop.epochs`, another source of the same epoch begins.
        """
        run, recorded = self._run, self._run.epoch_source.recorded
        left = self._leave_epoch(source)
        run.open_source(source, trains=True)
        run.epoch_source.use(source, run.progress.step)
        run.current.has_opened = True
        if run.current.steps_per_epoch is not None:
            run.current.steps_per_epoch = source.length
        if not run.started:
            self._start_at_first_batch(source)
        if left is not None:
            run.add_record(*left, run.training.metrics())
            if recorded is not None and left[0] == "partial":
                self._warn_left_out(left[1], recorded.get("length"))

    def _exclude_finished_epoch(self) -> bool:
        """Do not count an epoch for this call if an earlier call stopped after its last batch.

        Returns:
            Whether it did: then the epoch ends now.
        """
        run, at, begun = self._run, self._run.progress, self._run.resume.begun
        if not at.batch or at.step != begun.step or run.feed.first(at) is not None:
            return False
        run.resume.begun = begun.at_epoch(begun.epoch + 1)
        run.current.epochs = None if run.current.epochs is None else run.current.epochs + 1
        return True

    def _leave_epoch(self, source: Source) -> tuple[str, Progress] | None:
        """End the epoch of another source; return the kind of its record and its progress."""
        run, before, call = self._run, self._run.progress, self._run.current
        current, begun = run.epoch_source, run.resume.begun
        in_body = call.kind == "epochs" and call.has_opened
        if not current.is_other(source) and not (in_body and current.ended):
            return None
        kind = "epoch" if current.is_whole(before.batch) else "partial"
        if before.batch and in_body:
            current.add(source, before.batch)
        elif before.batch:
            run.resume.begun = begun = begun.at_epoch(begun.epoch + 1)
            call.epochs = None if call.epochs is None else call.epochs + 1
            run.progress = before.at_epoch(before.epoch + 1)
            current.begin_epoch()
        # The sources of a body take turns: each continues in the next epoch.
        if call.kind != "epochs" or run.progress.epoch == begun.epoch:
            current.since = run.progress.epoch
        return (kind, before) if run.progress.epoch > before.epoch else None

    def _warn_left_out(self, at: Progress, length: int | None) -> None:
        """Warn that a resumed run leaves out the rest of an epoch of `length` batches."""
        run, reporter = self._run, self._run.services.reporter
        text = left_out_warning(at, length, run.services.record)
        run.record("log", {"warning": text})
        reporter.warn(text, logged=True)

    def _skip_excluded_batch(self) -> bool:
        """Skip the next batch if a rollback excluded it; return whether it was skipped."""
        run, at = self._run, self._run.progress
        why = run.excluded.get((at.epoch, at.batch, at.step)) if run.excluded else None
        if why is None or run.feed.take(1, at) is None:
            return False
        run.progress = replace(at, batch=at.batch + 1)
        warning = f"skipped batch {at.batch + 1} of epoch {at.epoch + 1}: {why}"
        run.record("log", {"warning": warning})
        return True

    # Beginning

    def _start_at_first_batch(self, source: Source) -> None:
        """Begin with the next batch of the open source."""
        run = self._run
        first = run.feed.first(run.progress)
        if first is not None:
            self.build_and_start(first)
        elif run.resume.state is not None or run.progress.batch:  # at the end of an epoch
            self._start_without_batches(source)
        if source.inexact and run.services.directory is not None:
            text = f"a resume of this run may not be exact: {source.inexact}"
            known = any(record.values.get("warning") == text for record in run.history.records)
            if run.services.reporter.warn(text, logged=not known) and not known:
                run.record("log", {"warning": text})

    def _start_without_batches(self, source: Source) -> None:
        """Begin where the open epoch has no further batch."""
        run = self._run
        window = run.training.zeros(run.resume.forms)
        if window is None:
            window = run.feed.sample(source, run.progress, run)
            run.open_source(source)  # again, since reading moved it
        if window is not None:
            self.build_and_start(window)

    def restore_completed_call(self, source: Source) -> None:
        """Restore the state, if an earlier process was killed after the last step of this call."""
        run = self._run
        if run.resume.is_of_this_call:
            run.epoch_source.recognize(source)
        if run.resume.state is not None and not run.current.unfinished:
            run.open_source(source)
            self._start_without_batches(source)

    def build_and_start(self, window: Window) -> None:
        """Build the step, restore the state that is resumed from, and start the hooks."""
        run, resume, training = self._run, self._run.resume, self._run.training
        training.use_compiler(active().compiler(self._steps_planned()))
        later, of_this_call = resume.is_later(resume.call), resume.is_of_this_call
        saved = resume.restore(window)
        if training.prepared is None:
            run.prepare(window)
        if not run.started:
            run.averages.begin(run.state)
        if saved is not None:
            if not later:
                run.averages.restore(saved.averaging_updates)
            run.saved_circumstances = {**saved.about, "execution": saved.execution}
            if run.services.record is not None:
                run.services.reporter.warn(run.services.record.changed)
        if not run.started:
            if saved is not None and of_this_call:
                run.weight_check.restore(saved.weight_checksums)
            else:
                run.weight_check.start(run.state)
            self._start_hooks(window)
            if run.progress.step and not of_this_call:
                run.services.save_beginning(run)  # no rollback may undo the code between two calls
            run.warn_of_effects()
            if run.current.validation is not None:
                run.prepare_validation(run.current.validation, window.examples)
            self._check_names()

    def _check_names(self) -> None:
        """Check the names of the values that records will contain, and let hooks do so in `fit`."""
        run, validation = self._run, self._run.current.validation
        trained, evaluated = run.training.names, run.evaluation.names
        values = dict.fromkeys(trained, 0.0)
        if validation is not None:
            results = validation.named(lambda _: dict.fromkeys(evaluated, 0.0), trained)
            values = merged(values, results, *MERGED)
        is_built = evaluated or validation is None  # else by the first validation
        if is_built and run.current.kind == "fit":
            run.services.hooks.notify("_check_names", run, values)

    def _steps_planned(self) -> int | None:
        """Return how many steps the call trains for, or None if unknown."""
        call, at, length = self._run.current, self._run.progress, self._run.current.steps_per_epoch
        ends = [] if call.steps is None else [call.steps - at.step]
        if call.epochs is not None and length is not None:
            ends.append((call.epochs - at.epoch) * length)
        return min(ends, default=None)

    def _start_hooks(self, window: Window) -> None:
        run, hooks = self._run, self._run.services.hooks
        early, reporter = run.take_early_records(), run.services.reporter
        run.started = True
        may_assign = hooks.start_users_code or bool(run.services.callbacks)
        with run.resume.starting(window, may_assign) as lost:
            hooks.notify("start", run)
        # The process that is resumed has logged them already if that code had run.
        for record in [] if run.resume.code_had_run else early:
            run.add(record)
        reporter.warn("; ".join(lost))
        self._note(examples_note(window, run.history))
        run.services.warn_of_signals()

    # Building again

    def _recompile_if_changed(self, window: Window) -> None:
        """Rebuild the step if a Python value changed or the batch form is new; log the reason."""
        run, training = self._run, self._run.training
        changed = training.changed_constants()
        if changed or run.resume.recompile:
            self._recompile(window, changed)
        if training.prepared is None or not training.prepared.knows(window):
            self._note(new_form_note(training.forms, window, run.history))
            self._note(examples_note(window, run.history))
            run.prepare(window)

    def _recompile(self, window: Window, changed: Changed) -> None:
        """Rebuild the step for changed Python values, and log them.

        Raises:
            StateError: A checkpoint could not hold them.
        """
        run = self._run
        if changed and run.services.checkpointer is not None:
            run.values.changes()  # at once, so that an earlier checkpoint stays the newest
            if unsaved := run.known_state.in_no_checkpoint(changed):
                run.services.reporter.warn(unsaved_warning(unsaved))
        # The step was already built for changes before the checkpoint, but they were not logged.
        before, run.resume.recompile = run.resume.recompile, {}
        joined = {p: [before.get(p, change)[0], change[1]] for p, change in changed.items()}
        joined = {**before, **joined}
        # In the order of an uninterrupted run.
        ordered = [path for path in run.known_state.constants() if path in joined]
        if changed:
            run.prepare(window)
        text = changes_text({path: joined[path] for path in dict.fromkeys([*ordered, *joined])})
        self._note(f"recompiled because {text}")

    def _note(self, text: str) -> None:
        """Log a note, unless it is empty."""
        if text:
            self._run.record("log", {"note": text})

    def _warn_after_window(self) -> None:
        """Warn once if a resumed run may not be exact; the plan is known after one window."""
        run, prepared = self._run, self._run.training.prepared
        if run.saved_circumstances is not None and prepared is not None and prepared.plan:
            warning = lost_guarantee(run.saved_circumstances, run.executed)
            run.services.reporter.warn(warning)
            run.saved_circumstances = None
        if prepared is not None and prepared.effects.news:  # of a branch that is traced only now
            run.warn_of_effects()
        if prepared is not None and prepared.left_out:
            left_out, prepared.left_out = prepared.left_out, []
            self._note(left_out_note(left_out))


class _WindowSizes:
    """Sizes the windows of an epoch, and reads ahead of the running one.

    A window ends before the next event: a hook, a validation, a yield of the user's `for` loop, a
    batch that a rollback excluded, or the end of the call.

    Args:
        run: The run.
        trigger: When the user's `for` loop is due, or None.
    """

    def __init__(self, run: Run, trigger: When | None) -> None:
        self._run, self._window_size = run, run.training.window_size
        validation = run.current.validation
        events = list(run.services.hooks.events())
        if validation is not None:
            events.append(validation.when)
        # What is due after every step may read variables or not, as the body of the `for` loop: it
        # does not limit the steps that run ahead.
        self._ahead = [when for when in events if when.span != Span(1, "step")]
        self._all = events if trigger is None else [*events, trigger]

    def of(self, at: Progress) -> int:
        """Return how many steps the window that begins at a progress may run."""
        return self._size(at, self._all)

    def following(self, window: Window, count: int) -> Window | None:
        """Return up to `count` batches after a window, if they are read and no event is due."""
        most = self._size(self._run.progress, self._ahead, window.count + count)
        return self._run.feed.following(most - window.count)

    def prefetch(self, after: Progress, running: Callable[[], bool]) -> None:
        """Read the next window while one runs, unless the call ends after it."""
        run, last = self._run, self._run.current.steps
        if last is None or after.step < last:
            run.feed.read_ahead(partial(self.of, after), run.training.transferred, running)

    def _size(self, at: Progress, triggers: Sequence[When], most: int | None = None) -> int:
        size = self._window_size(at, triggers, self._run.current.steps, most)
        if self._run.excluded:
            batches = [batch for epoch, batch, _ in self._run.excluded if epoch == at.epoch]
            size = min([size, *(batch - at.batch for batch in batches if batch > at.batch)])
        return size
