"""The only training loop, and the parts it is made of.

Everything that trains goes through `Loop._windows`, in one order:

    plan      how many steps run until somebody looks: an event, the end of the call
    read      that many batches, unless they were read while the window before ran; one that the
              run went back because of is passed over
    run       them as one compiled call, once hooks were told; the state is then that after the last
    account   progress: steps, batches, examples, seconds
    log       every step's values, fetched at once, go to the history and the hooks
    validate  where it is due
    hooks     that are due
    save      a checkpoint, where it is due: it holds all that came before, the body of a user's
              own `for` included
    stop?     asked for, by a signal, or at the end of the call

At the end of an epoch come validation, hooks due by epochs, the epoch's record, and a checkpoint,
in this order. When training ends: a checkpoint, averages of weights (see `averages`), the end of
hooks.

Calls that train are counted: the same script run again does nothing in those that an earlier
process has done, and goes on in the midst of the one that it was in (see `resuming`). `fit` may
also go back to a checkpoint within one process, which is the same (see `hooks.nonfinite`).

What a run consists of, what hooks see of it and how it is put down and taken up stands in `run`.
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
from .core.signals import deaf, noted
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
        directory: Where the run leaves its configuration, logs, final model and learning curve.
        hooks: `treadle.every(…)` and the like, and `treadle.Hook` objects; they replace default
            hooks of the same class, or of one that they are derived from.
        options: How steps are executed.
        configuration: What else the run is, in JSON's types: recorded and compared beside the
            task's name and settings, the backend, the seed and the precision.
        fresh: Start anew in a directory that holds a run.
        override: Go on with the run in the directory although its configuration differs: True, or
            the names of what may differ, as `["epochs"]`.
        console: Show progress.

    Attributes:
        task: The task.
        options: How steps are executed.
        progress: Where the run stands.
        history: All that was logged.

    Raises:
        DirectoryError: The directory holds another run, or cannot be written to.
        ConfigurationError: The task is none, a hook is neither a `Hook` nor scheduled, or the
            options are something else.

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

    _depth = 0  # of calls that train, inside one another
    _epoch_ended = _in_epochs = _entered = _watched = _nothing_left = False
    _before: Mapping[str, Any] | None = None  # what the run's bits depended on, until it is told

    def __enter__(self) -> "Loop":
        """Return the loop."""
        self._entered = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End hooks and let go of the source."""
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
        """Train; whichever of `epochs`, `steps` and `until` is reached first ends it.

        At the end, weights that an optimizer averages (`use_ema=True`) become their averages, as
        under `fit` of Keras. Checkpoints hold the raw weights.

        Args:
            train: A source of batches: `treadle.data`, tf.data, DataLoader, PyDataset, Grain, …
            validation: A source, or a dict of named ones, logged as `val_…` and `val_<name>_…`.
            epochs: Passes over `train` in this call.
            steps: Steps in this call.
            until: Time for this call, as `"30 min"`. Where epochs or steps are given too, it is a
                deadline: the run is saved, and goes on when the same script runs again.
            validate_every: When to validate: epochs, steps, examples or time.

        Returns:
            The history of the run.

        Raises:
            ConfigurationError: No end was given, or one that is not positive; a hook calls this.
        """
        self._watchers.refuse_training("fit")
        epochs, steps = checked_count("epochs", epochs), checked_count("steps", steps)
        check_end(epochs=epochs, steps=steps, until=until)
        source, validating = as_source(train), Validation.of(validation, validate_every)
        asked = {"epochs": epochs, "steps": steps, "until": until, "train": source_facts(source)}
        asked |= validating.facts() if validating else {}
        if source.endless and epochs is not None:
            raise ConfigurationError(
                "the source never ends, so it has no epochs: use steps=… or until=…, or cut it "
                "into epochs with treadle.data.limited(source, batches)"
            )
        if self._was_done(asked):
            self._look_at(source)
            return self.history
        self._validation = validating
        self.steps_per_epoch = source.length
        deadline = self.progress.seconds + Span.parse(until).amount if until else None
        try:
            with shortened():
                while self._went_back(self._fit, source, epochs, steps, deadline):
                    pass
        finally:
            self._validation = None
        return self.history

    def _fit(
        self, source: Source, epochs: int | None, steps: int | None, deadline: float | None
    ) -> None:
        """Train, from where the run stands to the end of the call."""
        with self._run(epochs, steps, deadline, whole=True):
            for _ in self.epochs(epochs):
                for _ in self.steps(source, every="auto"):
                    pass
            self._come_to_end(source)
            going_on = self.unfinished or not self.progress.batch
            if not going_on and self.progress.step != self._recorded:
                self._record("validation", {**self.metrics(), **self._validate()})

    def epochs(self, count: int | None = None) -> Iterator[int]:
        """Yield the number of each epoch; its record is made when the body is done.

        Args:
            count: Epochs in this call; None goes on until something stops it.

        Example:
            for epoch in loop.epochs(10):
                for logs in loop.steps(train, every="200 steps"):
                    print(logs.step, logs["loss"])
        """
        self._refuse("epochs")
        count = checked_count("epochs", count)
        if self._depth == 0 and self._was_done({"epochs": count}):
            return
        self._in_epochs = True
        try:
            with shortened(), self._run(count):
                last = self.epochs_planned
                while (last is None or self.progress.epoch < last) and not self._over():
                    self._epoch_ended = True
                    yield self.progress.epoch
                    if self._epoch_ended or not self._over():  # or the body was left by a break
                        self._end_epoch()
                self._resuming.assign_what_exists(self.state)
                self._nothing_left = self._resuming.found is not None
        finally:
            self._in_epochs = False

    def steps(self, source: Any, every: str = "1 step") -> Iterator[Logs]:
        """Train through one epoch of a source, yielding every so often.

        While the body runs, the state is exactly that after `logs.step`. Looking at every step
        means one compiled call for each: `every="200 steps"` is faster.

        Args:
            source: A source of batches.
            every: When to yield; `"auto"` yields when a window happens to end.
        """
        self._refuse("steps")
        look = None if every == "auto" else When(Span.parse(every))
        train = as_source(source)
        if self._depth == 0 and self._was_done({"every": every, "train": source_facts(train)}):
            return
        with shortened(), self._run(None):
            before = self.progress
            if not self._in_epochs and before.epoch > self._resuming.begun.epoch:
                self._come_to_end(train)
                return
            for _ in self._windows(train, look):
                if look is None or look.due(before, self.progress):
                    before = self.progress
                    yield self._look()
            # Time passes in the body as well: without a new step there is nothing to yield.
            new = self.progress.step > before.step or (look and look.span.of == "epoch")
            if look is not None and new and look.due(before, self.progress, self._epoch_ended):
                yield self._look()
            if self._epoch_ended and not self._in_epochs:
                self._end_epoch()

    def step(self, batch: Any) -> Logs:
        """Train on one batch and return what the step returned."""
        self._refuse("step")
        with shortened(), self._run(None, counted=False):
            window, batches = stacked(batch), self.progress.batch
            self._begin(window)
            self._train(window)
            self.progress = replace(self.progress, batch=batches)  # not one of a source's epoch
        return self._look()

    def evaluate(self, source: Any) -> dict[str, float]:
        """Run `eval_step` over a source; returns its means and metrics, and changes nothing.

        Between the first step and the end of training, Keras callbacks are notified: a callback
        that swaps weights for a validation does so here too.
        """
        with shortened():
            if self._watched:
                self._watchers.evaluation(self, None)
            results = super().evaluate(source)
            if self._watched:
                self._watchers.evaluation(self, results)
            return results

    def save(self) -> None:
        """Save a checkpoint now; returns when it is on the disk.

        Raises:
            ConfigurationError: The loop has no directory.
            CheckpointError: It cannot be written.
        """
        self._watchers.require_checkpoints()
        self._watchers.save(self)

    def prepare(self, source: Any) -> None:
        """Build and check `train_step` with the first batch of a source, without training."""
        with shortened():
            self._open(as_source(source))
            window = self._feed.first(self.progress)
            if window is not None:
                self._prepare(window)
            self._resuming.assign_what_exists(self.state)

    def _windows(self, source: Source, look: When | None) -> Iterator[None]:
        """Train through the rest of an epoch; see the top of this file."""
        self._epoch_ended = False
        if self._over():
            return
        self._open(source)
        if not self._watched:
            first = self._feed.first(self.progress)
            if first is not None:
                self._begin(first)
            elif self._resuming.found is not None:  # it was saved at the end of an epoch
                self._begin_with_sample(source, self.progress)
            if source.inexact and self.directory is not None:
                self._watchers.warn(f"a resume of this run may not be exact: {source.inexact}")
        if self.progress.batch == 0:
            self._training.reset_metrics()
        events = [*self._watchers.events(), *([look] if look else [])]
        events += [self._validation.when] if self._validation else []

        def read_ahead(after: Progress, running: Callable[[], bool]) -> None:
            if self.steps_planned is None or after.step < self.steps_planned:
                size = self._window_size(after, events)
                self._feed.read_ahead(size, self._training.placed, running)

        while not self._over():
            before = self._looked  # time also passes in hooks and in the body of a user's `for`
            if self._passes_over():
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
            self._watchers.run_due(self, before)
            self._looked = self.progress
            yield
            self._watchers.save_if_due(self, before, self.progress)
        if self.progress.batch == source.length and not self._feed.take(1, self.progress):
            self._epoch_ended = True  # the call ends where the epoch does

    def _look(self) -> Logs:
        """Return the logs of the steps since the last look."""
        return Logs(self._training.look(), self.progress, self._training.metric_results)

    def _window_size(self, at: Progress, events: Sequence[When]) -> int:
        """Return how many steps may run before somebody looks, or a batch is passed over."""
        size = self._training.window_size(at, events, self.steps_planned)
        passed = [batch for epoch, batch, _ in self._passed if epoch == at.epoch]
        return min([size, *(batch - at.batch for batch in passed if batch > at.batch)])

    def _passes_over(self) -> bool:
        """Take the next batch away if the run went back because of it; say whether that was so."""
        at = self.progress
        why = self._passed.get((at.epoch, at.batch, at.step))
        if why is None or self._feed.take(1, at) is None:
            return False
        self.progress = replace(at, batch=at.batch + 1)
        self.log({"warning": f"passed over batch {at.batch + 1} of epoch {at.epoch + 1}: {why}"})
        return True

    def _train(self, window: Window, meanwhile: Callable[..., None] | None = None) -> None:
        """Run one window, account for it, and log every step of it."""
        self._watchers.tell("before", self)  # first: what it changes may need another program
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
            if self._before is not None:  # the plan is known now
                self._watchers.warn(lost_guarantee(self._before, self.plan))
                self._before = None
        except BaseException:  # a later call reads these batches again
            self._feed.close()
            raise
        self.progress = self._call.timed(logs.progress)
        self.history.add_steps(logs)
        self._weights.ran(logs)
        with noting("train_step", self.progress):
            self._training.check_promises()
        self._watchers.tell("steps", self, logs)

    def _open(self, source: Source) -> None:
        """Open a source where the run stands."""
        if source.closed and self._resuming.waits:  # it asks what was trained, not a fresh model
            self._resuming.assign_what_exists(self.state)
        position = self._resuming.found.source if self._resuming.found else None
        self._feed.open(source, self.progress, self, position)

    def _begin(self, window: Window) -> None:
        """Build the step, take over what an earlier process left, and start hooks."""
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
            restoring.refuse_lost()  # an object that was replaced has other variables
            raise
        if not self._watched:
            self._averages.begin(self.state)
        if found is not None:
            self._training.restore(found.loop["means"])
            if not later:  # the checkpoint is of this training
                self._averages.restore(found.loop.get("averages", {}))
            self._before = found.about
            if self._run_record is not None:
                self._watchers.warn(self._run_record.changed)
        if not self._watched:
            self._watched = True
            if found is not None and found.loop["call"] == self._resuming.call:
                self._weights.restore(found.loop.get("weights"))
            else:
                self._weights.start(self.state)
            restoring.before_start()
            self._watchers.tell("start", self)
            self._watchers.warn(
                restoring.after_start(self._training, lambda: self._prepare(window))
            )
            if self.directory is not None:
                self._watchers.warn(deaf())

    def _look_at(self, source: Source) -> None:
        """Build what an earlier process has trained, as far as a batch is needed for that."""
        with shortened():
            window = self._feed.sample(source, Progress(), self)
            if window is not None:
                self._restoring.build(self._training, lambda: self._prepare(window))
            self._resuming.assign_what_exists(self.state)

    def _come_to_end(self, source: Source) -> None:
        """Where an earlier process did all steps of this call, but not its end: be there too."""
        if self._resuming.found is not None and not self.unfinished:
            self._begin_with_sample(source, Progress())

    def _begin_with_sample(self, source: Source, progress: Progress) -> None:
        """Begin with the first batch of an epoch, which is not trained on; put the source back."""
        found = self._resuming.found
        first = self._feed.sample(source, progress, self)
        if first is not None:
            self._begin(first)
        if found is not None and found.source is not None:  # the sample has moved what lasts
            self._feed.open(source, self.progress, self, found.source)

    def _prepare(self, window: Window) -> None:
        """Build the step; where the run is resumed, for all forms of batch that it has met."""
        forms, shown = self._resuming.forms, self._watchers.activity("building the step")
        with shown, self._constants.building():
            with noting("train_step", self.progress, running=1), explaining(window):
                self._training.prepare(window, forms.get("train_step", ()))
            with noting("eval_step", self.progress), explaining():
                self._evaluation.prepare(forms.get("eval_step", ()))

    def _end_epoch(self) -> None:
        """Validate, run hooks that are due, and record the epoch."""
        before, values = self.progress, self.metrics()
        if self._validation:
            due = self._validation.due(before, before, epoch_ended=True)
            values |= self._validate() if due else self._validation.results_of(before.step)
        self._feed.close()
        self._watchers.run_due(self, before, epoch_ended=True)
        self._record("epoch", values)
        self.progress = self.progress.at_epoch(before.epoch + 1)
        self._training.reset_metrics()
        self._watchers.save_if_due(self, before, before, epoch_ended=True)

    def _validate(self) -> dict[str, float]:
        """Evaluate the validation sets, unless that was just done."""
        if self._validation is None:
            return {}
        results = self._validation.results_of(self.progress.step)
        if not results:
            self._watchers.tell("validation", self, None)
            results = self._validation.run(super().evaluate, self.progress)
            self._watchers.tell("validation", self, results)
        return results

    def _refuse(self, method: str) -> None:
        """Refuse to train by a method that a hook calls, or that cannot be taken back.

        Raises:
            ConfigurationError: It is so.
        """
        self._watchers.refuse_training(method)
        if self._depth == 0 and self._watchers.rolls_back:
            raise ConfigurationError(
                f"NonFinite(action='rollback') needs loop.fit, and this is loop.{method}: what "
                "your own code does between the steps cannot be taken back. Use action='skip'"
            )

    def _over(self) -> bool:
        """Say whether this call has come to its end."""
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
        """Start a call that trains; calls inside one another count once.

        Hooks end with an error, after `fit`, or with the `with` block around it.
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
            with noted() as call.asked:
                yield
                call.heed_signals()  # those that came during a last validation
                if call.unfinished and self._watched:
                    self._watchers.save(self)
            if call.asked.signal is not None:
                raise call.asked.error()
        except GeneratorExit:  # the user's own `for` was left; why, the `with` block will say
            raise
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._depth = 0
            if whole or error or not self._entered:
                self._end_hooks(error, final=whole or self._in_epochs)

    def _end_hooks(self, error: BaseException | None, final: bool) -> None:
        """Save where the run stands, and let hooks end.

        Where training ends for good, averaged weights (`use_ema=True`) become the averages. The
        checkpoint comes first: it holds the raw weights, from which a longer run goes on exactly.
        """
        if not self._watched:
            found = self._resuming.found
            if final and error is None and self._nothing_left and found is not None:
                self._resuming.end_with(averaged(found.state, found.loop.get("averages", {})))
                self._resuming.assign_what_exists(self.state)
            return
        try:
            if error is None:
                self._warn_unchanged()
                self._watchers.save(self)
                if final and not self.unfinished:
                    self._swapped = self._watchers.swapped_optimizers
                    for warning in self._averages.finish(self.state, self._swapped):
                        self.log({"warning": warning})
        finally:
            self._watched = False
            try:
                self._watchers.end(self, error)
            finally:
                self._swapped = None

    def _warn_unchanged(self) -> None:
        """Warn where the call that ends has changed no weight."""
        prepared = self._training.prepared
        text = self._weights.warning(prepared) if prepared and not self.unfinished else ""
        if text:
            self.log({"warning": text})
            if not self._watchers.has_console:
                warnings.warn(text, TreadleWarning, stacklevel=2)

    def _was_done(self, asked: Mapping[str, Any]) -> bool:
        """Say whether an earlier process did the next call that trains; it is then passed over."""
        record = self._run_record
        number = self._resuming.call + 1
        if record is None:
            return False
        done = record.call(number, asked)
        if record.finished and not done and not self._resuming.is_later(number):
            self._stand(record, at_end=False)  # this call goes on, with other arguments, as it may
        if not done and not self._resuming.over:
            return False
        self._resuming.begin(self.progress)
        lost = self._restoring.begin_call(self._resuming.found)
        self._resuming.assign_what_exists(self.state)
        if done:
            if lost:
                self._watchers.warn(f"not everything is as the run left it: {lost} during the run")
            self._call.reason = "it was finished before"
            self._watchers.say(f"{record.path} holds this run already, finished; nothing was done")
            self._watchers.warn(record.changed)
        return True

    def _went_back(self, train: Callable[..., None], *arguments: Any) -> bool:
        """Train; say whether the run went back to a checkpoint instead of coming to its end."""
        record = self._run_record
        try:
            train(*arguments)
        except RolledBack as back:
            assert record is not None  # `Watchers` sees to that
            if back.passed is not None:
                record.pass_over(back.passed, str(back))
                self._passed = record.passed_over()
            self._feed.close()
            self._restoring.rolled_back = True
            self._resuming = Resuming(self._watchers.newest_checkpoint(), self._resuming.call - 1)
            seconds = self.progress.seconds  # what was lost took time all the same
            self._stand(record, at_end=False)
            self.progress = self.progress.after_seconds(seconds)
            return True
        return False
