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

The parts of a run, and how it begins, resumes and ends, are in `run.session`. Hooks see a loop as
`core.hook.LoopView`. Half of this file is the public methods with their documentation.
"""

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from .backends.window import Following, Window
from .checkpoint import Checkpoint
from .core.error_notes import add_note, noting
from .core.history import History
from .core.hook import Hook
from .core.identity import source_facts
from .core.logs import Logs, loggable
from .core.options import Options
from .core.processes import process_group
from .core.progress import Costs, Progress
from .core.rollback import RolledBack
from .core.tracebacks import shortened
from .core.triggers import Scheduled, Span, When
from .data import as_source
from .data.source import Source
from .errors import ConfigurationError
from .run.arguments import checked_count, checked_hooks, checked_options, checked_task, narrow_parts
from .run.explanations import explain, explaining
from .run.next_windows import NextWindows
from .run.services import Services, open_services
from .run.session import Session
from .run.training import stacked
from .run.validation import Validation
from .steps.layer_statistics import StepStatistics
from .steps.planning import check_end
from .steps.results import merged
from .steps.state import State

# Who returns the values of a record, for messages.
MERGED = ("train_step", "a validation")


class Loop:
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
        directory: The run directory, or None.
        steps_per_epoch: The number of batches in an epoch of `fit`, or None if unknown.

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

    def __init__(
        self,
        task: Any,
        directory: str | Path | None = None,
        hooks: Sequence[Hook | Scheduled] = (),
        options: Options | None = None,
        configuration: Mapping[str, Any] | None = None,
        fresh: bool = False,
        override: bool | Collection[str] = False,
        console: bool = True,
    ) -> None:
        task, options, hooks = checked_task(task), checked_options(options), checked_hooks(hooks)
        place = Path(directory).absolute() if directory is not None else None
        services = open_services(task, place, hooks, configuration or {}, fresh, override, console)
        self._begin(task, options, services)

    @classmethod
    def with_services(cls, task: Any, options: Options, services: Services) -> "Loop":
        """Return a loop with other services than those of a run directory, as for a replay.

        Args:
            task: The task.
            options: Execution options.
            services: The services.
        """
        loop = cls.__new__(cls)
        loop._begin(task, options, services)
        return loop

    def _begin(self, task: Any, options: Options, services: Services) -> None:
        self.task, self.options, self.directory = task, options, services.directory
        self.steps_per_epoch: int | None = None
        self._hooks = services.hooks
        self._session = Session(self, task, options, services)
        services.reporter.warn(narrow_parts(task))

    def __enter__(self) -> "Loop":
        """Return the loop."""
        self._session.in_context = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the hooks and close the source."""
        self._session.in_context = False
        self._session.feed.close()
        try:
            if isinstance(error, Exception):  # perhaps of the body; `sys.exit` is no failure
                self._session.tell_others(error)
        finally:
            self._session.end(error, final=True)

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

        If an earlier call left an epoch unfinished, the same source continues in it. Another source
        ends it, with a record of the kind `"partial"`, and begins at its first batch.

        At the end, weights that an optimizer averages (`use_ema=True`) are replaced by their
        averages, as in Keras's `fit`. Checkpoints hold the raw weights.

        Args:
            train: A source of batches: `treadle.data`, tf.data, DataLoader, PyDataset, Grain, …
            validation: A source, or a dict of named sources. The results are logged as `val_…` or
                `val_<name>_…`.
            epochs: The number of epochs to train in this call.
            steps: The number of steps to train in this call.
            until: The time limit of this call, such as `"30 min"`: the training time, also if it
                is resumed in between. With `epochs` or `steps`, it is that of each process: the run
                is saved at the time limit, and resumes when the same script runs again.
            validate_every: How often to validate, in epochs, steps, examples or time.

        Returns:
            The history of the run.

        Raises:
            ConfigurationError: If none of `epochs`, `steps` and `until` is given, if one of them is
                not positive, or if called from a hook or in the body of a loop over `epochs` or
                `steps`.
        """
        session = self._session
        with session.checking_arguments():
            self._check_outermost("fit")
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
        if session.skip_completed_call(arguments, source):
            session.build_and_assign(source)
            return self.history
        self.steps_per_epoch = source.length
        # A call that its time limit ends for good keeps it when it is resumed.
        ends = epochs is not None or steps is not None
        begun = self.progress if ends else session.resuming.next_begun(self.progress)
        deadline = begun.seconds + Span.parse(until).amount if until else None
        with shortened():
            while True:
                try:
                    with session.calling("fit", epochs, steps, deadline, validating):
                        self._fit(source)
                    return self.history
                except RolledBack as error:
                    session.roll_back(error)

    def _fit(self, source: Source) -> None:
        """Train from the current progress to the end of the call."""
        for _ in self._epochs():
            for _ in self.steps(source, every="auto"):
                pass
        session = self._session
        session.restore_completed_call(source)
        more_to_do = session.call.unfinished or not self.progress.batch
        if not more_to_do and self.progress.step != session.last_recorded_step:
            session.record("validation", self._validated(self.metrics()))

    def epochs(self, count: int | None = None) -> Iterator[int]:
        """Yield the number of each epoch, and record the epoch after the loop body.

        The body may train on several sources: each is read from its first batch, or continues if
        the body left it unfinished before. The epoch's record has the means over all of them. An
        unfinished epoch of an earlier call continues if the body begins with its source, and else
        ends first.

        Args:
            count: The number of epochs in this call. If None, epochs continue until a hook, a
                signal or a `break` ends the call.

        Example:
            for epoch in loop.epochs(10):
                for logs in loop.steps(train, every="200 steps"):
                    print(logs.step, logs["loss"])
        """
        session = self._session
        with session.checking_arguments():
            self._check_outermost("epochs")
            self._check_no_rollback("epochs")
            count = checked_count("epochs", count)
        if session.skip_completed_call({"epochs": count}):
            return
        with shortened(), session.calling("epochs", count) as call:
            yield from self._epochs()
            session.resuming.assign_what_exists(self.state)
            call.was_complete = session.resuming.found is not None

    def _epochs(self) -> Iterator[int]:
        """Yield the number of each epoch of the running call, and end the epoch after the body."""
        call, is_over = self._session.call, self._session.is_over
        while (call.epochs is None or self.progress.epoch < call.epochs) and not is_over():
            call.epoch_ended, call.has_opened = True, False
            yield self.progress.epoch
            if call.epoch_ended or not is_over():  # or the body ended with `break`
                self._end_epoch()

    def steps(self, source: Any, every: str = "1 step") -> Iterator[Logs]:
        """Train for one epoch of a source and yield logs at regular intervals.

        The epoch continues after the last batch if an earlier call left it unfinished, by a `break`
        for example, and had the same source. Another source begins at its first batch; see `fit`.

        While the loop body runs, the state is exactly that after `logs.step`. Yielding after every
        step requires one compiled call per step, so `every="200 steps"` is faster. On JAX, steps
        share calls if the body reads no variable.

        Args:
            source: A source of batches.
            every: The interval between yields, such as `"200 steps"`. `"auto"` yields after each
                window.

        Yields:
            The means of the steps since the previous yield.
        """
        session = self._session
        with session.checking_arguments():
            self._hooks.refuse_training("steps")
            if not session.call.running:
                self._check_no_rollback("steps")
            trigger = None if every == "auto" else When(Span.parse(every))
            train = as_source(source)
        if not session.call.running:
            arguments = {"every": every, "train": source_facts(train)}
            if session.skip_completed_call(arguments, train):
                return
        with shortened(), session.calling("steps") as call:
            if call.sources_to_skip:  # an earlier process has finished this one, in this epoch
                session.epoch_source.skip(train, call.sources_to_skip)
                call.sources_to_skip -= 1
                return
            before = self.progress
            if not call.has_epochs and before.epoch > session.resuming.begun.epoch:
                session.restore_completed_call(train)
                return
            call.epoch_ended = False
            windows = _Returning(self._windows(train, trigger))
            for _ in windows:
                if trigger is None or trigger.due(before, self.progress):
                    before = self.progress
                    yield self._logs_since_last()
            call.epoch_ended = session.epoch_source.ended = ended = windows.value
            # A time trigger may become due in the body: without a new step, nothing is yielded.
            new = self.progress.step > before.step or (trigger and trigger.span.of == "epoch")
            if trigger is not None and new and trigger.due(before, self.progress, ended):
                yield self._logs_since_last()
            if ended and not call.has_epochs:
                self._end_epoch()

    def step(self, batch: Any) -> Logs:
        """Train on one batch and return the values that `train_step` returned."""
        session = self._session
        with session.checking_arguments():
            self._hooks.refuse_training("step")
            if not session.call.running:
                self._check_no_rollback("step")
        with shortened(), session.calling("step"):
            window, batches = stacked(batch), self.progress.batch
            session.begin(window)
            self._train(window)
            # The batch is not one of an epoch.
            session.progress = replace(self.progress, batch=batches)
        return self._logs_since_last()

    # The loop

    def _windows(self, source: Source, trigger: When | None) -> Generator[None, None, bool]:
        """Train to the end of the epoch, and yield after each window; see the module docstring.

        Args:
            source: The source of batches.
            trigger: Windows end where it is due, in addition to the triggers of hooks.

        Returns:
            Whether the epoch ended, and not only the call.
        """
        session = self._session
        if session.is_over():
            return False
        session.open(source)
        if session.leave_finished_epoch():
            self._end_epoch()
            session.open(source)
        if session.progress.batch == 0:
            session.training.reset_metrics()
        windows = NextWindows(session, trigger)
        while not session.is_over():
            before = session.trigger_check  # time triggers count hooks and the `for` body
            if session.skip_excluded_batch():
                continue
            window = session.feed.take(windows.size(session.progress), session.progress)
            if window is None:
                return True
            self._train(window, windows.prefetch, partial(windows.following, window))
            self._validate_if_due(before, source)
            self._hooks.run_due(self, before)
            session.trigger_check = session.progress
            yield
            session.services.save_if_due(self, before, session.progress)
        # The call may end where the epoch does.
        read = session.progress.batch - session.epoch_source.began
        return read == source.length and not session.feed.take(1, session.progress)

    def _train(
        self,
        window: Window,
        meanwhile: Callable[..., None] | None = None,
        following: Following | None = None,
    ) -> None:
        """Run one window, account for it, and log every step of it."""
        session, training = self._session, self._session.training
        self._hooks.notify("before", self)  # first: a hook's change may require recompiling
        session.recompile_if_changed(window)
        try:
            background = window.count > 1 or session.feed.slow
            logs = training.run(window, session.progress, meanwhile, background, following)
            session.feed.ran(until=training.ended)
            session.warn_of_lost_guarantee()
        except BaseException as error:
            if isinstance(error, Exception):  # not by `with`, which takes six calls of Python
                explain(error, window)
                lost = training.steps_lost_on_error(window)
                add_note(error, "train_step", session.progress, window.count, lost)
            session.feed.close()  # these batches are read again by a later call
            raise
        session.count(logs)
        if training.has_violations:
            with noting("train_step", session.progress):
                training.check_promises()
        self._hooks.notify("steps", self, logs)

    def _validate_if_due(self, before: Progress, source: Source) -> None:
        """Validate within an epoch if due, and record the results."""
        session, validation = self._session, self._session.call.validation
        if validation is not None and validation.due(before, session.progress):
            session.record("validation", self._validated(self.metrics()))
            if source.endless:
                session.training.reset_metrics()

    def _validated(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return training means and metrics, and the results of a validation of this step."""
        return merged(values, self._validate(), *MERGED)

    def _validate(self) -> dict[str, float]:
        """Evaluate the validation sets, or return the results of this step if they exist."""
        validation = self._session.call.validation
        if validation is None:
            return {}
        results = validation.results_of(self.progress.step)
        if not results:
            self._hooks.notify("validation", self, None)
            with self._session.evaluation.timed():
                results = validation.run(self._evaluate, self.progress)
            self._session.warn_of_effects(self._session.evaluation.effects)
            self._hooks.notify("validation", self, results)
        return results

    def _end_epoch(self) -> None:
        """Validate, run the hooks that are due, record the epoch and save a checkpoint."""
        session, before, values = self._session, self.progress, self.metrics()
        if validation := session.call.validation:
            if validation.due(before, before, epoch_ended=True):
                self._validate()
            values = merged(values, validation.results_of(before.step), *MERGED)
        session.feed.close()
        self._hooks.run_due(self, before, epoch_ended=True)
        session.record("epoch", values)
        session.progress = session.progress.at_epoch(before.epoch + 1)
        session.epoch_source.begin_epoch()
        session.training.reset_metrics()
        session.services.save_if_due(self, before, before, epoch_ended=True)

    def _logs_since_last(self) -> Logs:
        """Return the logs since this was last called."""
        session = self._session
        means, metrics = session.training.means_since_last(), session.training.metric_results
        return Logs(means, session.progress, metrics)

    def _check_outermost(self, method: str) -> None:
        """Check that a method that makes calls of its own may train now.

        Raises:
            ConfigurationError: If called from a hook or in the body of another loop.
        """
        self._hooks.refuse_training(method)
        call = self._session.call
        if call.running:
            raise ConfigurationError(
                f"loop.{method} was called while loop.{call.kind} trains: in the body of a `for` "
                "loop, train with loop.steps(source) or loop.step(batch). To train on other data "
                f"before or after, call loop.{method} outside of that body"
            )

    def _check_no_rollback(self, method: str) -> None:
        """Check that steps outside of `fit` need no rollback.

        Raises:
            ConfigurationError: If a hook rolls back.
        """
        if self._session.services.rolls_back:
            raise ConfigurationError(
                f"NonFinite(action='rollback') needs loop.fit, but loop.{method} was called: code "
                "of your own between the steps cannot be rolled back. Use loop.fit, or "
                "action='skip'"
            )

    # Using the task

    def prepare(self, source: Any) -> None:
        """Build and check `train_step` with the first batch of a source, without training."""
        session = self._session
        with shortened():
            session.open_source(as_source(source))
            window = session.feed.first(self.progress)
            if window is not None:
                session.prepare(window)
            session.resuming.assign_what_exists(self.state)

    def evaluate(self, source: Any) -> dict[str, float]:
        """Evaluate a source with `eval_step` and return the means and metrics.

        The state is unchanged afterwards. Between the first step and the end of training, Keras
        callbacks are notified, so a callback that swaps weights for validation also does so here.
        """
        with shortened():
            if self._session.started:
                self._hooks.notify("evaluation", self, None)
            results = self._evaluate(source)
            if self._session.started:
                self._hooks.notify("evaluation", self, results)
            return results

    def _evaluate(self, source: Any) -> dict[str, float]:
        """Evaluate a source without notifying hooks."""
        self._session.restore_without_training()
        process_group().exchange(None, "an evaluation")
        with shortened(), noting("evaluation", self.progress), explaining():
            return self._session.evaluation.evaluate(source, self)

    def predict(self, source: Any) -> Any:
        """Run `predict_step` over a source and return NumPy arrays joined on the first axis."""
        self._session.restore_without_training()
        process_group().exchange(None, "a prediction")
        with shortened(), explaining():
            return self._session.evaluation.predict(source, self)

    def call(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Run a function of the task compiled and return NumPy arrays; state changes are discarded.

        Inside the function, arrays and floats are tensors, while integers, booleans and strings are
        constants. Each call draws from a new random stream. Compiled programs are kept for the 16
        most recently called combinations of function and constants.
        """
        # A source may call this for its first batch, before the build.
        self._session.restore_without_training()
        process_group().exchange(None, "a call of a function")
        with shortened(), explaining():
            return self._session.evaluation.call(function, *inputs)

    def find_learning_rate(self, train: Any, **how: Any) -> Any:
        """Run a learning-rate range test; the state is unchanged afterwards. See `treadle.doctor`.

        Args:
            train: A source of batches.
            how: Keyword arguments of `treadle.doctor.find_learning_rate`: `optimizer`, `monitor`,
                `begin`, `end`, `steps`.

        Returns:
            A `treadle.doctor.RangeTest`, with `suggestion` and `draw("rates.png")`.
        """
        self._hooks.refuse_training("find_learning_rate")
        # Imported late: the doctor trains with a loop of its own.
        from .doctor.find_lr import find_learning_rate

        how.setdefault("options", self.options)
        return find_learning_rate(self.task, train, **how)

    # The state of the run

    @property
    def progress(self) -> Progress:
        """The current step, epoch, batch, examples and seconds."""
        return self._session.progress

    @property
    def history(self) -> History:
        """All logged values."""
        return self._session.history

    @property
    def state(self) -> State:
        """All variables of the task by path."""
        return self._session.state

    @property
    def known_state(self) -> State:
        """The variables that the task had when its step was built: `state` without a search."""
        return self._session.known_state

    @property
    def plan(self) -> str:
        """How steps are executed, in one line; empty before the first step."""
        return self._session.plan

    @property
    def reads_shares(self) -> bool:
        """Whether each of several processes reads its own share of the data that is trained on."""
        return (self._session.feed.shards or 1) > 1

    @property
    def reason(self) -> str | None:
        """The reason given for stopping the call, or None."""
        return self._session.call.reason

    @property
    def unfinished(self) -> bool:
        """Whether the call was interrupted before its planned end, and is meant to be resumed."""
        return self._session.call.unfinished

    @property
    def epochs_planned(self) -> int | None:
        """The number of epochs of the run at the end of this call, or None if unknown."""
        return self._session.call.epochs

    @property
    def steps_planned(self) -> int | None:
        """The step at which this call ends, or None if unknown."""
        return self._session.call.steps

    @property
    def optimizers(self) -> dict[str, Any]:
        """The optimizers that `train_step` applies, by path; empty before the first step."""
        prepared = self._session.training.prepared
        if prepared is None:
            return {}
        found = prepared.state.all_optimizers.items()
        return {path: optimizer for path, optimizer in found if id(optimizer) in prepared.applied}

    @property
    def compiling(self) -> bool:
        """Whether a window is being compiled now."""
        return self._session.training.compiling

    @property
    def evaluated(self) -> tuple[int, int | None] | None:
        """Batches done by the running evaluation, and their total number if known."""
        return self._session.evaluation.position

    @property
    def costs(self) -> Costs:
        """The number of compiled programs, and the time spent compiling and waiting for data."""
        session = self._session
        costs, saver = session.training.costs(), session.services.checkpointer
        return replace(
            costs,
            compiling=costs.compiling + session.evaluation.compile_seconds,
            waiting=session.feed.waited,
            validating=session.evaluation.seconds,
            saving=saver.waited if saver is not None else 0.0,
        )

    def metrics(self) -> dict[str, float]:
        """Return training means and metric results since they were last reset."""
        return self._session.training.metrics()

    def log(self, values: Mapping[str, Any]) -> None:
        """Log values at the current step: scalars of any library, strings or images.

        Raises:
            ConfigurationError: If a value is none of these. Nothing is logged then.
        """
        self._session.record("log", loggable(values, "loop.log"))

    def save(self) -> None:
        """Save a checkpoint now, and wait until it is on disk.

        Raises:
            ConfigurationError: If the loop has no directory.
            CheckpointError: If the checkpoint cannot be written.
        """
        services = self._session.services
        services.require_checkpoints()
        services.save(self)

    def capture(self, buffers: Mapping[str, Any], score: float | None = None) -> Checkpoint:
        """Return the complete state of the run at this window boundary, as a checkpoint.

        Args:
            buffers: The `state` of an earlier checkpoint that is no longer needed; it is
                overwritten.
            score: The value of the monitored metric, if the best checkpoints are kept.
        """
        return self._session.capture(buffers, score)

    def stop(self, why: str) -> None:
        """Stop training at this window boundary; the reason `why` is printed and recorded."""
        self._session.call.stop(why)

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of every variable's value, for `restore`."""
        return self.state.keep()

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Set every variable to the value it had when `snapshot` was taken."""
        session = self._session
        self.state.put_back(snapshot)
        if session.swapped_optimizers is not None:  # training has ended: use averaged weights
            session.averages.finish(self.state, session.swapped_optimizers)

    @property
    def measured(self) -> StepStatistics | None:
        """The statistics of the layers in the first step of the last window, if measured."""
        return self._session.training.measured

    @property
    def unmeasured(self) -> str:
        """Why the layers were not measured although that was requested; else empty."""
        return self._session.training.unmeasured

    def measure_next_step(self) -> None:
        """Measure the layers in the first step of the next window; for hooks."""
        self._session.training.measure_next = True

    def batch_at(self, step: int) -> Any:
        """Return the batch of a step (from 1) of the window that ran last, as NumPy arrays."""
        return self._session.training.batch_at(step)


class _Returning:
    """Iterates over a generator, and keeps the value that it returns."""

    def __init__(self, generator: Generator[None, None, bool]) -> None:
        self._generator, self.value = generator, False

    def __iter__(self) -> Iterator[None]:
        self.value = yield from self._generator
