"""The training loop.

All training goes through `Loop._windows`, which repeats these phases in this order:

    plan      choose how many steps run as one window: up to the next event or the end of the call
    read      read that many batches, unless they were prefetched while the previous window ran;
              batches excluded by a rollback are skipped
    run       notify the hooks, then run the window as one compiled call
    account   update the progress: steps, batches, examples, seconds
    log       fetch the values of every step at once, add them to the history, notify the hooks
    validate  if due
    hooks     run those that are due
    save      write a checkpoint if due; it includes the effects of everything above and of the body
              of the user's own `for` loop
    stop?     if requested by a hook or a signal, or at the end of the call

At the end of an epoch, the order is: validation, hooks scheduled by epochs, the epoch's record, a
checkpoint. When training ends: a checkpoint, averaged weights (see `steps.averages`), the `end`
methods of the hooks.

Calls that train are numbered. When the same script runs again, calls that an earlier process
completed do nothing, and the interrupted call resumes from the checkpoint (see `run.resume`). A
rollback by `fit` restores a checkpoint within one process in the same way (see `hooks.nonfinite`).

The parts of a run, the interface for hooks, and saving and restoring are in `run`.
"""

import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from .backends.window import Window
from .core.error_notes import noting
from .core.identity import source_facts
from .core.logs import History, Logs
from .core.progress import Progress
from .core.rollback import RolledBack
from .core.signals import handled_signals, missing_handlers
from .core.tracebacks import shortened
from .core.triggers import Span, When
from .data import as_source
from .data.source import Source
from .errors import ConfigurationError, StateError, TreadleWarning
from .run.arguments import checked_count
from .run.base import Run
from .run.call import Call
from .run.evaluation import Validation
from .run.explanations import explaining
from .run.resume import Resuming, lost_guarantee
from .run.training import stacked
from .steps.averages import averaged
from .steps.planning import check_end


class Loop(Run):
    """Trains a task.

    Args:
        task: A `treadle.Task`.
        directory: The run directory, for the configuration, checkpoints, logs, final model and
            learning curve. If None, the default hooks write no files.
        hooks: Functions scheduled with `treadle.every(…)`, `at` or `after`, and `treadle.Hook`
            objects. A hook replaces the default hook of the same class or of a base class.
        options: Execution options.
        configuration: Additional settings of the run, as JSON types. They are recorded and compared
            on resume, in addition to the task's name and settings, the backend, the seed and the
            precision.
        fresh: Start from scratch in a directory that already holds a run.
        override: Resume the run in the directory although its configuration differs: True, or the
            names of the settings that may differ, such as `["epochs"]`.
        console: Whether to show progress in the console.

    Attributes:
        task: The task.
        options: Execution options.
        progress: The current step, epoch, batch, examples and seconds.
        history: All logged values.

    Raises:
        DirectoryError: If the directory holds another run, or is not writable.
        ConfigurationError: If the task is not valid, a hook is neither a `Hook` nor scheduled, or
            `options` is not a `treadle.Options`.

    Example:
        >>> import keras, numpy as np, treadle
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> task = treadle.Supervised(model, "mse", "sgd")
        >>> data = treadle.data.from_arrays(np.ones((8, 2)), np.ones((8, 1)), batch_size=4)
        >>> with treadle.Loop(task, console=False) as loop:
        ...     history = loop.fit(data, epochs=2)
        >>> len(history["loss"]), loop.progress.step
        (2, 4)
    """

    _depth = 0  # of nested calls that train
    _epoch_ended = _in_epochs = _entered = _hooks_started = _already_complete = False
    # The backend, device, versions and plan of the checkpoint, until they are compared.
    _saved_environment: Mapping[str, Any] | None = None

    def __enter__(self) -> "Loop":
        """Return the loop."""
        self._entered = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the hooks and close the source."""
        self._entered = False
        self._feed.close()
        self._end_hooks(error, final=True)

    def fit(
        self,
        train: Any,
        validation: Any = None,
        epochs: int | None = None,
        steps: int | None = None,
        until: str | None = None,
        validate_every: str = "1 epoch",
    ) -> History:
        """Train until `epochs`, `steps` or `until` is reached, whichever comes first.

        At the end, weights that an optimizer averages (`use_ema=True`) are replaced by their
        averages, as in Keras's `fit`. Checkpoints hold the raw weights.

        Args:
            train: A source of batches: `treadle.data`, tf.data, DataLoader, PyDataset, Grain, …
            validation: A source, or a dict of named sources. The results are logged as `val_…` or
                `val_<name>_…`.
            epochs: The number of epochs to train in this call.
            steps: The number of steps to train in this call.
            until: The time limit of this call, such as `"30 min"`. With `epochs` or `steps`, the
                run is saved at the time limit, and resumes when the same script runs again.
            validate_every: How often to validate, in epochs, steps, examples or time.

        Returns:
            The history of the run.

        Raises:
            ConfigurationError: If none of `epochs`, `steps` and `until` is given, if one of them is
                not positive, or if called from a hook.
        """
        self._dispatcher.refuse_training("fit")
        epochs, steps = checked_count("epochs", epochs), checked_count("steps", steps)
        check_end(epochs=epochs, steps=steps, until=until)
        source, validating = as_source(train), Validation.of(validation, validate_every)
        facts = source_facts(source)
        arguments = {"epochs": epochs, "steps": steps, "until": until, "train": facts}
        arguments |= validating.facts() if validating else {}
        if source.endless and epochs is not None:
            raise ConfigurationError(
                "the source never ends, so it has no epochs: use steps=… or until=…, or cut it "
                "into epochs with treadle.data.limited(source, batches)"
            )
        if self._skip_completed_call(arguments):
            self._build_and_assign(source)
            return self.history
        self._validation = validating
        self.steps_per_epoch = source.length
        deadline = self.progress.seconds + Span.parse(until).amount if until else None
        try:
            with shortened():
                while self._train_or_roll_back(self._fit, source, epochs, steps, deadline):
                    pass
        finally:
            self._validation = None
        return self.history

    def _fit(
        self, source: Source, epochs: int | None, steps: int | None, deadline: float | None
    ) -> None:
        """Train from the current progress to the end of the call."""
        with self._run(epochs, steps, deadline, whole=True):
            for _ in self.epochs(epochs):
                for _ in self.steps(source, every="auto"):
                    pass
            self._restore_completed_call(source)
            more_to_do = self.unfinished or not self.progress.batch
            if not more_to_do and self.progress.step != self._last_recorded_step:
                self._record("validation", {**self.metrics(), **self._validate()})

    def epochs(self, count: int | None = None) -> Iterator[int]:
        """Yield the number of each epoch, and record the epoch after the loop body.

        Args:
            count: The number of epochs in this call. If None, epochs continue until a hook, a
                signal or a `break` ends the call.

        Example:
            for epoch in loop.epochs(10):
                for logs in loop.steps(train, every="200 steps"):
                    print(logs.step, logs["loss"])
        """
        self._check_may_train("epochs")
        count = checked_count("epochs", count)
        if self._depth == 0 and self._skip_completed_call({"epochs": count}):
            return
        self._in_epochs = True
        try:
            with shortened(), self._run(count):
                last = self.epochs_planned
                while (last is None or self.progress.epoch < last) and not self._over():
                    self._epoch_ended = True
                    yield self.progress.epoch
                    if self._epoch_ended or not self._over():  # or the body ended with `break`
                        self._end_epoch()
                self._resuming.assign_what_exists(self.state)
                self._already_complete = self._resuming.found is not None
        finally:
            self._in_epochs = False

    def steps(self, source: Any, every: str = "1 step") -> Iterator[Logs]:
        """Train for one epoch of a source and yield logs at regular intervals.

        While the loop body runs, the state is exactly that after `logs.step`. Yielding after every
        step requires one compiled call per step, so `every="200 steps"` is faster.

        Args:
            source: A source of batches.
            every: The interval between yields, such as `"200 steps"`. `"auto"` yields after each
                window.

        Yields:
            The means of the steps since the previous yield.
        """
        self._check_may_train("steps")
        trigger = None if every == "auto" else When(Span.parse(every))
        train = as_source(source)
        if self._depth == 0:
            arguments = {"every": every, "train": source_facts(train)}
            if self._skip_completed_call(arguments):
                return
        with shortened(), self._run(None):
            before = self.progress
            if not self._in_epochs and before.epoch > self._resuming.begun.epoch:
                self._restore_completed_call(train)
                return
            for _ in self._windows(train, trigger):
                if trigger is None or trigger.due(before, self.progress):
                    before = self.progress
                    yield self._logs_since_last()
            # A time trigger may become due in the body: without a new step, nothing is yielded.
            new = self.progress.step > before.step or (trigger and trigger.span.of == "epoch")
            ended = self._epoch_ended
            if trigger is not None and new and trigger.due(before, self.progress, ended):
                yield self._logs_since_last()
            if self._epoch_ended and not self._in_epochs:
                self._end_epoch()

    def step(self, batch: Any) -> Logs:
        """Train on one batch and return the values that `train_step` returned."""
        self._check_may_train("step")
        with shortened(), self._run(None, counted=False):
            window, batches = stacked(batch), self.progress.batch
            self._begin(window)
            self._train(window)
            self.progress = replace(self.progress, batch=batches)  # not a batch of an epoch
        return self._logs_since_last()

    def evaluate(self, source: Any) -> dict[str, float]:
        """Evaluate a source with `eval_step` and return the means and metrics.

        The state is unchanged afterwards. Between the first step and the end of training, Keras
        callbacks are notified, so a callback that swaps weights for validation also does so here.
        """
        with shortened():
            if self._hooks_started:
                self._dispatcher.evaluation(self, None)
            results = super().evaluate(source)
            if self._hooks_started:
                self._dispatcher.evaluation(self, results)
            return results

    def save(self) -> None:
        """Save a checkpoint now, and wait until it is on disk.

        Raises:
            ConfigurationError: If the loop has no directory.
            CheckpointError: If the checkpoint cannot be written.
        """
        self._dispatcher.require_checkpoints()
        self._dispatcher.save(self)

    def prepare(self, source: Any) -> None:
        """Build and check `train_step` with the first batch of a source, without training."""
        with shortened():
            self._open(as_source(source))
            window = self._feed.first(self.progress)
            if window is not None:
                self._prepare(window)
            self._resuming.assign_what_exists(self.state)

    def _windows(self, source: Source, trigger: When | None) -> Iterator[None]:
        """Train to the end of the epoch, and yield after each window; see the module docstring."""
        self._epoch_ended = False
        if self._over():
            return
        self._open(source)
        if not self._hooks_started:
            first = self._feed.first(self.progress)
            if first is not None:
                self._begin(first)
            elif self._resuming.found is not None:  # saved at the end of an epoch
                self._begin_with_first_batch(source, self.progress)
            if source.inexact and self.directory is not None:
                self._dispatcher.warn(f"a resume of this run may not be exact: {source.inexact}")
        if self.progress.batch == 0:
            self._training.reset_metrics()
        events = [*self._dispatcher.events(), *([trigger] if trigger else [])]
        events += [self._validation.when] if self._validation else []

        def read_ahead(after: Progress, running: Callable[[], bool]) -> None:
            if self.steps_planned is None or after.step < self.steps_planned:
                size = self._window_size(after, events)
                self._feed.read_ahead(size, self._training.placed, running)

        while not self._over():
            before = self._last_trigger_check  # time triggers count hooks and the `for` body
            if self._skip_excluded_batch():
                continue
            size = self._window_size(self.progress, events)
            window = self._feed.take(size, self.progress)
            if window is None:
                self._epoch_ended = True
                return
            self._train(window, read_ahead)
            if self._validation and self._validation.due(before, self.progress):
                self._record("validation", {**self.metrics(), **self._validate()})
                if source.endless:
                    self._training.reset_metrics()
            self._dispatcher.run_due(self, before)
            self._last_trigger_check = self.progress
            yield
            self._dispatcher.save_if_due(self, before, self.progress)
        if self.progress.batch == source.length and not self._feed.take(1, self.progress):
            self._epoch_ended = True  # the call ends where the epoch does

    def _logs_since_last(self) -> Logs:
        """Return the logs since this was last called."""
        return Logs(self._training.look(), self.progress, self._training.metric_results)

    def _window_size(self, at: Progress, events: Sequence[When]) -> int:
        """Return how many steps may run before the next event or excluded batch."""
        size = self._training.window_size(at, events, self.steps_planned)
        passed = [batch for epoch, batch, _ in self._passed if epoch == at.epoch]
        return min([size, *(batch - at.batch for batch in passed if batch > at.batch)])

    def _skip_excluded_batch(self) -> bool:
        """Skip the next batch if a rollback excluded it; return whether it was skipped."""
        at = self.progress
        why = self._passed.get((at.epoch, at.batch, at.step))
        if why is None or self._feed.take(1, at) is None:
            return False
        self.progress = replace(at, batch=at.batch + 1)
        self.log({"warning": f"skipped batch {at.batch + 1} of epoch {at.epoch + 1}: {why}"})
        return True

    def _train(self, window: Window, meanwhile: Callable[..., None] | None = None) -> None:
        """Run one window, account for it, and log every step of it."""
        self._dispatcher.notify("before", self)  # first: a hook's change may require recompiling
        note = self._training.recompiled(window, self._restoring.recompile)
        self._restoring.recompile = []
        if note:
            self.log({"note": note})
        if not self._training.is_prepared(window):
            self._prepare(window)
        lost = self._training.steps_lost_on_error(window)
        try:
            with noting("train_step", self.progress, window.count, lost), explaining(window):
                logs = self._training.run(window, self.progress, meanwhile)
            self._feed.ran(until=self._training.ended)
            if self._saved_environment is not None:  # the plan is known only after the first window
                self._dispatcher.warn(lost_guarantee(self._saved_environment, self.plan))
                self._saved_environment = None
        except BaseException:  # these batches are read again by a later call
            self._feed.close()
            raise
        self.progress = self._call.timed(logs.progress)
        self.history.add_steps(logs)
        self._weights.ran(logs)
        with noting("train_step", self.progress):
            self._training.check_promises()
        self._dispatcher.notify("steps", self, logs)

    def _open(self, source: Source) -> None:
        """Open a source at the current progress."""
        if source.closed and self._resuming.waits:  # its batches need the restored weights
            self._resuming.assign_what_exists(self.state)
        position = self._resuming.found.source if self._resuming.found else None
        self._feed.open(source, self.progress, self, position)

    def _begin(self, window: Window) -> None:
        """Build the step, restore the state from a checkpoint, and start the hooks."""
        found, restoring = self._resuming.found, self._restoring
        if found is not None:
            call = self._resuming.call
            restoring.restore(found, call, self._training, lambda: self._prepare(window))
        elif self._training.prepared is None:
            self._prepare(window)
        later = self._resuming.is_later(self._resuming.call)
        try:
            found = self._resuming.take_over(self.state, self._initial())
        except StateError:
            restoring.refuse_lost()  # a replaced object may have other variables
            raise
        if not self._hooks_started:
            self._averages.begin(self.state)
        if found is not None:
            self._training.restore(found.loop["means"])
            if not later:  # the checkpoint is of this call
                self._averages.restore(found.loop.get("averages", {}))
            self._saved_environment = found.about
            if self._run_record is not None:
                self._dispatcher.warn(self._run_record.changed)
        if not self._hooks_started:
            self._hooks_started = True
            if found is not None and found.loop["call"] == self._resuming.call:
                self._weights.restore(found.loop.get("weights"))
            else:
                self._weights.start(self.state)
            restoring.before_start()
            self._dispatcher.notify("start", self)
            self._dispatcher.warn(
                restoring.after_start(self._training, lambda: self._prepare(window))
            )
            if self.directory is not None:
                self._dispatcher.warn(missing_handlers())

    def _build_and_assign(self, source: Source) -> None:
        """Build the model with the first batch of a source, and assign its restored variables."""
        with shortened():
            window = self._feed.sample(source, Progress(), self)
            if window is not None:
                self._restoring.build(self._training, lambda: self._prepare(window))
            self._resuming.assign_what_exists(self.state)

    def _restore_completed_call(self, source: Source) -> None:
        """Restore the state, if an earlier process ran all steps of this call but not its end."""
        if self._resuming.found is not None and not self.unfinished:
            self._begin_with_first_batch(source, Progress())

    def _begin_with_first_batch(self, source: Source, progress: Progress) -> None:
        """Begin with the first batch of an epoch, without training on it; rewind the source."""
        found = self._resuming.found
        first = self._feed.sample(source, progress, self)
        if first is not None:
            self._begin(first)
        if found is not None and found.source is not None:  # reading moved the source
            self._feed.open(source, self.progress, self, found.source)

    def _prepare(self, window: Window) -> None:
        """Build the steps; for a resumed run, for every batch form that the checkpoint lists."""
        forms, shown = self._resuming.forms, self._dispatcher.activity("building the step")
        with shown, self._constants.building():
            with noting("train_step", self.progress, running=1), explaining(window):
                self._training.prepare(window, forms.get("train_step", ()))
            with noting("eval_step", self.progress), explaining():
                self._evaluation.prepare(forms.get("eval_step", ()))

    def _end_epoch(self) -> None:
        """Validate, run the hooks that are due, record the epoch and save a checkpoint."""
        before, values = self.progress, self.metrics()
        if self._validation:
            due = self._validation.due(before, before, epoch_ended=True)
            values |= self._validate() if due else self._validation.results_of(before.step)
        self._feed.close()
        self._dispatcher.run_due(self, before, epoch_ended=True)
        self._record("epoch", values)
        self.progress = self.progress.at_epoch(before.epoch + 1)
        self._training.reset_metrics()
        self._dispatcher.save_if_due(self, before, before, epoch_ended=True)

    def _validate(self) -> dict[str, float]:
        """Evaluate the validation sets, or return the results of this step if they exist."""
        if self._validation is None:
            return {}
        results = self._validation.results_of(self.progress.step)
        if not results:
            self._dispatcher.notify("validation", self, None)
            results = self._validation.run(super().evaluate, self.progress)
            self._dispatcher.notify("validation", self, results)
        return results

    def _check_may_train(self, method: str) -> None:
        """Check that a method may train now.

        Raises:
            ConfigurationError: If called from a hook, or with rollback outside `fit`.
        """
        self._dispatcher.refuse_training(method)
        if self._depth == 0 and self._dispatcher.rolls_back:
            raise ConfigurationError(
                f"NonFinite(action='rollback') needs loop.fit, but loop.{method} was called: code "
                "of your own between the steps cannot be rolled back. Use loop.fit, or "
                "action='skip'"
            )

    def _over(self) -> bool:
        """Return whether this call has ended."""
        self.progress = self._call.timed(self.progress)
        return self._call.is_over(self.progress)

    @contextmanager
    def _run(
        self,
        epochs: int | None,
        steps: int | None = None,
        deadline: float | None = None,
        whole: bool = False,
        counted: bool = True,
    ) -> Generator[None]:
        """Start and end a call that trains; nested calls count as one.

        Hooks end after an error, after `fit`, or at the end of the `with` block around the loop.
        """
        if self._depth:
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
            return
        self._depth, error = 1, None
        if counted:
            self._resuming.begin(self.progress)
        begun, found = self._resuming.begun, self._resuming.found
        if counted and found is not None and found.loop["call"] == self._resuming.call:
            self._restoring.begin_call(found)
        self._call = call = Call(begun, self.progress, epochs, steps, deadline)
        if found is not None and not self._resuming.is_later(self._resuming.call):
            call.stop(found.loop["reason"])
            if self._validation and found.loop["validation"]:
                self._validation.restore(found.loop["validation"])
        try:
            with handled_signals() as call.request:
                yield
                call.heed_signals()  # those received during the last validation
                if call.unfinished and self._hooks_started:
                    self._dispatcher.save(self)
            if call.request.signal is not None:
                raise call.request.error()
        except GeneratorExit:  # the user's `for` ended early; `__exit__` gets the reason
            raise
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._depth = 0
            if whole or error or not self._entered:
                self._end_hooks(error, final=whole or self._in_epochs)

    def _end_hooks(self, error: BaseException | None, final: bool) -> None:
        """Save a checkpoint and end the hooks.

        At the final end of training, averaged weights (`use_ema=True`) are replaced by their
        averages. The checkpoint is saved first: it holds the raw weights, from which a longer run
        resumes exactly.

        Args:
            error: The exception that ended the call, or None.
            final: Whether training ends here, and not only this call.
        """
        if not self._hooks_started:
            found = self._resuming.found
            if final and error is None and self._already_complete and found is not None:
                self._resuming.end_with(averaged(found.state, found.loop.get("averages", {})))
                self._resuming.assign_what_exists(self.state)
            return
        try:
            if error is None:
                self._warn_unchanged()
                self._dispatcher.save(self)
                if final and not self.unfinished:
                    self._swapped_optimizers = self._dispatcher.swapped_optimizers
                    for warning in self._averages.finish(self.state, self._swapped_optimizers):
                        self.log({"warning": warning})
        finally:
            self._hooks_started = False
            try:
                self._dispatcher.end(self, error)
            finally:
                self._swapped_optimizers = None

    def _warn_unchanged(self) -> None:
        """Warn if this call changed no weight."""
        prepared = self._training.prepared
        text = self._weights.warning(prepared) if prepared and not self.unfinished else ""
        if text:
            self.log({"warning": text})
            if not self._dispatcher.has_console:
                warnings.warn(text, TreadleWarning, stacklevel=2)

    def _skip_completed_call(self, arguments: Mapping[str, Any]) -> bool:
        """Skip the next call that trains if an earlier process completed it.

        Args:
            arguments: The arguments of the call, as recorded in `run.json`.

        Returns:
            Whether the call was skipped.
        """
        record = self._run_record
        number = self._resuming.call + 1
        if record is None:
            return False
        done = record.call(number, arguments)
        if record.finished and not done and not self._resuming.is_later(number):
            self._restore_progress(record, at_end=False)  # resume with other arguments
        if not done and not self._resuming.over:
            return False
        self._resuming.begin(self.progress)
        lost = self._restoring.begin_call(self._resuming.found)
        self._resuming.assign_what_exists(self.state)
        if done:
            if lost:
                self._dispatcher.warn(
                    f"the finished run was not restored completely: {lost} during the run"
                )
            self._call.reason = "it was finished before"
            self._dispatcher.print(
                f"the run in {record.path} is already finished; nothing was done"
            )
            self._dispatcher.warn(record.changed)
        return True

    def _train_or_roll_back(self, train: Callable[..., None], *arguments: Any) -> bool:
        """Train, and return whether the run rolled back to a checkpoint instead of ending."""
        record = self._run_record
        try:
            train(*arguments)
        except RolledBack as back:
            assert record is not None  # `HookDispatcher` requires a directory for rollback
            if back.passed is not None:
                record.pass_over(back.passed, str(back))
                self._passed = record.passed_over()
            self._feed.close()
            self._restoring.rolled_back = True
            self._resuming = Resuming(self._dispatcher.newest_checkpoint(), self._resuming.call - 1)
            seconds = self.progress.seconds  # the time of the discarded steps counts too
            self._restore_progress(record, at_end=False)
            self.progress = self.progress.after_seconds(seconds)
            return True
        return False
