"""The training loop: the public methods with their documentation.

All training goes through `run.engine`, where the order of a step's events is written down. The
state and the parts of a run are in `run.run`; what a checkpoint holds is `run.state`.

Calls of `fit`, `epochs` and `steps` are numbered. When the same script runs again, calls that an
earlier process completed do nothing, and the interrupted call resumes from the checkpoint (see
`run.resume`). A rollback by `fit` restores a checkpoint within one process in the same way (see
`hooks.nonfinite`).

Hooks see a loop as `core.hook.LoopView`.
"""

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .core.habits import explains, no_attribute
from .core.history import History
from .core.hook import Hook, LoopView, RolledBack
from .core.identity import source_facts
from .core.locked_arrays import release
from .core.logs import Logs
from .core.options import Options
from .core.progress import Costs, Progress
from .core.tracebacks import shortened
from .core.triggers import Scheduled, Span, When
from .data import as_source
from .distribute import check_joined
from .errors import ConfigurationError, whole_number_or_none
from .run.arguments import checked_hooks, checked_options, checked_task, narrow_parts
from .run.calls import Calls, closed_at_exit
from .run.engine import Engine
from .run.habits import OF_FIT, OF_LOOP, OF_LOOPS, never_called
from .run.run import Run
from .run.services import Services, open_services
from .run.training import stacked
from .run.validation import Validation
from .steps.planning import check_end
from .steps.state import State
from .steps.task import check_eval_step


class Loop:
    """Trains a task.

    Args:
        task: A `treadle.Task`, or a compiled `keras.Model`, of which a `treadle.KerasTask` is made.
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
        progress: The current step, epoch, batch, examples and seconds.
        history: All logged values.
        directory: The run directory, or None.

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

    @explains("Loop", OF_LOOP)
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
        task, hooks = checked_task(task), checked_hooks(hooks)
        options = checked_options(options, task)
        place = Path(directory).absolute() if directory is not None else None
        check_joined()
        services = open_services(task, place, hooks, configuration or {}, fresh, override, console)
        self._begin(task, options, services)
        services.reporter.warn(never_called([task, *hooks]))

    def _begin(self, task: Any, options: Options, services: Services) -> None:
        self._run = run = Run(task, options, services)
        self._engine, self._calls = Engine(run), Calls(run)
        self.task, self.directory = task, services.directory
        services.reporter.warn(narrow_parts(task))

    if not TYPE_CHECKING:  # type checkers would accept every attribute

        def __getattr__(self, name: str) -> Any:
            if name in OF_LOOPS and not hasattr(type(self), name):
                raise no_attribute("'Loop' object", name, OF_LOOPS)
            return object.__getattribute__(self, name)  # raises the error of a property

    def __enter__(self) -> "Loop":
        """Return the loop."""
        self._calls.in_context = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the source, save a checkpoint and end the hooks."""
        self._calls.in_context = False
        self._run.feed.close()
        try:
            # The body may have raised it; `sys.exit` is no failure.
            if isinstance(error, Exception):
                self._calls.report_failure(error)
        finally:
            try:
                self._calls.end(error, final=True)
            finally:
                release(self._run)

    @explains("Loop.fit", OF_FIT)
    def fit(
        self,
        train: Any,
        validation: Any = None,
        epochs: int | None = None,
        steps: int | None = None,
        until: str | None = None,
        validate_every: str | When = "1 epoch",
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
            validate_every: How often to validate, in epochs, steps, examples or time, such as
                `"500 steps"`.

        Returns:
            The history of the run.

        Raises:
            ConfigurationError: If none of `epochs`, `steps` and `until` is given, if one of them is
                not positive, if there is a validation set but no `eval_step`, or if called from a
                hook or in the body of a loop over `epochs` or `steps`.
        """
        run, calls = self._run, self._calls
        with calls.checking_arguments():
            self._check_outermost("fit")
            epochs = whole_number_or_none("epochs", epochs, ConfigurationError)
            steps = whole_number_or_none("steps", steps, ConfigurationError)
            check_end(epochs=epochs, steps=steps, until=until)
            source, validating = as_source(train), Validation.of(validation, validate_every)
            if validating:
                check_eval_step(self.task)
            facts = source_facts(source)
            arguments = {"epochs": epochs, "steps": steps, "until": until, "train": facts}
            arguments |= validating.facts() if validating else {}
            if source.endless and epochs is not None:
                raise ConfigurationError(
                    "the source never ends, so it has no epochs: use steps=… or until=…, or cut it "
                    "into epochs with treadle.data.limited(source, batches)"
                )
        if calls.skip_completed_call(arguments, source):
            calls.build_and_assign(source)
            return self.history
        # A call that its time limit ends for good keeps it when it is resumed.
        ends = epochs is not None or steps is not None
        begun = self.progress if ends else run.resume.next_begun(self.progress)
        deadline = begun.seconds + Span.parse(until).amount if until else None
        while True:
            try:
                with calls.calling("fit", epochs, steps, deadline, validating) as call:
                    call.steps_per_epoch = source.length
                    for _ in self._engine.epochs():
                        for _ in self._engine.windows(source):
                            run.training.begin_logs()
                    self._engine.finish(source)
                return self.history
            except RolledBack as error:
                calls.roll_back(error)

    @closed_at_exit
    def epochs(self, count: int | None = None) -> Generator[int]:
        """Yield the number of each epoch, from 0, and record the epoch after the loop body.

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
        run, calls = self._run, self._calls
        with calls.checking_arguments():
            self._check_outermost("epochs")
            self._check_no_rollback("epochs")
            count = whole_number_or_none("epochs", count, ConfigurationError)
        if calls.skip_completed_call({"epochs": count}):
            return
        with shortened(), calls.calling("epochs", count) as call:
            yield from self._engine.epochs()
            run.resume.assign_what_exists()
            call.was_complete = run.resume.state is not None

    @closed_at_exit
    def steps(self, source: Any, every: str = "1 step") -> Generator[Logs]:
        """Train for one epoch of a source and yield logs at regular intervals.

        The epoch continues after the last batch trained on if an earlier call left it unfinished,
        by a `break` for example, and had the same source. Another source begins at its first batch;
        see `fit`.

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
        run, calls, engine = self._run, self._calls, self._engine
        with calls.checking_arguments():
            run.services.hooks.refuse_training("steps")
            if not run.current.running:
                self._check_no_rollback("steps")
            trigger = None if every == "auto" else When(Span.parse(every))
            train = as_source(source)
        if not run.current.running:
            arguments = {"every": every, "train": source_facts(train)}
            if calls.skip_completed_call(arguments, train):
                return
        with shortened(), calls.calling("steps") as call:
            if call.sources_to_skip:  # an earlier process has finished this one, in this epoch
                run.epoch_source.skip(train, call.sources_to_skip)
                call.sources_to_skip -= 1
                return
            before = self.progress
            if not call.has_epochs and before.epoch > run.resume.begun.epoch:
                engine.restore_completed_call(train)
                return
            for _ in engine.windows(train, trigger):
                if trigger is None or trigger.due(before, self.progress):
                    before = self.progress
                    yield engine.logs_since_last()
            # A time trigger may become due in the body: without a new step, nothing is yielded.
            new = self.progress.step > before.step or (trigger and trigger.span.of == "epoch")
            if trigger is not None and new and trigger.due(before, self.progress, call.epoch_ended):
                yield engine.logs_since_last()
            if call.epoch_ended and not call.has_epochs:
                engine.end_epoch()

    def step(self, batch: Any) -> Logs:
        """Train on one batch and return the values that `train_step` returned."""
        run, calls = self._run, self._calls
        with calls.checking_arguments():
            run.services.hooks.refuse_training("step")
            if not run.current.running:
                self._check_no_rollback("step")
        with shortened(), calls.calling("step"):
            window, batches = stacked(batch), self.progress.batch
            self._engine.build_and_start(window)
            self._engine.train(window)
            # The batch is not one of an epoch.
            run.progress = replace(self.progress, batch=batches)
        return self._engine.logs_since_last()

    def _check_outermost(self, method: str) -> None:
        """Check that a method that makes calls of its own may train now.

        Raises:
            ConfigurationError: If called from a hook or in the body of another loop.
        """
        self._run.services.hooks.refuse_training(method)
        call = self._run.current
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
        if self._run.services.rolls_back:
            raise ConfigurationError(
                f"NonFinite(action='rollback') needs loop.fit, but loop.{method} was called: code "
                "of your own between the steps cannot be rolled back. Use loop.fit, or "
                "action='skip'"
            )

    # Using the task

    def prepare(self, source: Any) -> None:
        """Build and check `train_step` with the first batch of a source, without training."""
        run = self._run
        with shortened():
            run.open_source(as_source(source))
            window = run.feed.first(self.progress)
            if window is not None:
                run.prepare(window)
            run.resume.assign_what_exists()

    def evaluate(self, source: Any) -> dict[str, float]:
        """Evaluate a source with `eval_step` and return the means and metrics.

        The state is unchanged afterwards. Between the first step and the end of training, Keras
        callbacks are notified, so a callback that swaps weights for validation also does so here.
        """
        with shortened():
            return self._run.evaluate(source)

    def predict(self, source: Any) -> Any:
        """Run `predict_step` over a source and return NumPy arrays joined on the first axis."""
        with shortened():
            return self._run.predict(source)

    def call(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Run a function of the task compiled and return NumPy arrays; state changes are discarded.

        Inside the function, arrays and floats are tensors, while integers, booleans and strings are
        constants. Each call draws from a new random stream. Compiled programs are kept for the 16
        most recently called combinations of function and constants.
        """
        with shortened():
            return self._run.call(function, *inputs)

    def find_learning_rate(self, train: Any, **how: Any) -> Any:
        """Run a learning-rate range test; the state is unchanged afterwards. See `treadle.doctor`.

        Args:
            train: A source of batches.
            how: Keyword arguments of `treadle.doctor.find_learning_rate`: `optimizer`, `monitor`,
                `begin`, `end`, `steps`.

        Returns:
            A `treadle.doctor.RangeTest`, with `suggestion` and `draw("rates.png")`.
        """
        self._run.services.hooks.refuse_training("find_learning_rate")
        # Imported late: the doctor trains with a loop of its own.
        from .doctor.find_lr import find_learning_rate

        how.setdefault("options", self._run.options)
        return find_learning_rate(self.task, train, **how)

    # The state of the run

    @property
    def view(self) -> LoopView:
        """The loop as hooks see it: it has more properties, and no methods that train."""
        return self._run

    @property
    def progress(self) -> Progress:
        """The current step, epoch, batch, examples and seconds."""
        return self._run.progress

    @property
    def history(self) -> History:
        """All logged values."""
        return self._run.history

    @property
    def state(self) -> State:
        """All variables of the task by path."""
        return self._run.state

    @property
    def plan(self) -> str:
        """How steps are executed, in one line; empty before the first step."""
        return self._run.plan

    @property
    def reason(self) -> str | None:
        """The reason given for stopping the call, or None."""
        return self._run.reason

    @property
    def costs(self) -> Costs:
        """The number of compiled programs, and the time spent compiling and waiting for data."""
        return self._run.costs

    def metrics(self) -> dict[str, float]:
        """Return training means and metric results since they were last reset."""
        return self._run.metrics()

    def log(self, values: Mapping[str, Any]) -> None:
        """Log values at the current step: scalars of any library, strings or images.

        Raises:
            ConfigurationError: If a value is none of these. Nothing is logged then.
        """
        self._run.log(values)

    def save(self) -> None:
        """Save a checkpoint now, and wait until it is on disk.

        Raises:
            ConfigurationError: If the loop has no directory.
            CheckpointError: If the checkpoint cannot be written.
        """
        self._run.save()

    def stop(self, why: str) -> None:
        """Stop training at this window boundary; the reason `why` is printed and recorded."""
        self._run.stop(why)


def loop_with(task: Any, options: Options, services: Services) -> Loop:
    """Return a loop with other services than those of a run directory, as for a replay."""
    loop = Loop.__new__(Loop)
    loop._begin(task, options, services)  # pyright: ignore[reportPrivateUsage]
    return loop
