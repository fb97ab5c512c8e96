"""`fit`, `evaluate` and `predict`: the loop for existing Keras programs, with Keras' arguments."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import keras

from .checkpoint import Checkpoints
from .core.directory import CHECKPOINTS
from .core.habits import explains
from .core.hook import Hook, LoopView
from .core.options import Options, global_random_seed, run_seed
from .core.triggers import AtEpochs, Scheduled, Span, When
from .data.fit_arguments import FitData, writeable_again
from .data.order import hashed
from .errors import ConfigurationError, whole_number, whole_number_or_none
from .hooks.keras_callbacks import KerasCallbacks, ordered
from .loop import Loop
from .run.habits import OF_KERAS_FIT
from .steps.keras_task import KerasTask

# By model: the epochs trained by earlier calls of `fit`. The next call shuffles in new orders.
_epochs_of: Final[WeakKeyDictionary[Any, int]] = WeakKeyDictionary()
_SEEDS: Final = 2**31  # as many as NumPy and Keras accept everywhere


@explains("treadle.fit", OF_KERAS_FIT)
def fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: Any = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool = True,
    class_weight: Mapping[int, float] | None = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | Sequence[int] = 1,
    *,
    directory: str | Path | None = None,
    hooks: Sequence[Hook | Scheduled] = (),
    options: Options | None = None,
    fresh: bool = False,
    override: bool | Collection[str] = False,
) -> Any:
    """Train a compiled Keras model in a loop: `model.fit(…)` becomes `treadle.fit(model, …)`.

    The model's own `train_step`, `test_step`, `compute_loss`, metrics and callbacks are used, and
    the history has the names and values that `model.fit` reports. With `shuffle`, Treadle
    determines the order, by the seed and the number of the epoch only; without a directory, a
    second call uses new orders. Afterwards the model holds the trained weights and the state of its
    optimizer.

    Args:
        model: A compiled `keras.Model`.
        x: Arrays, a structure of arrays, or an object that gives batches: tf.data, `PyDataset`,
            DataLoader, Grain, a generator.
        y: Labels, if `x` is arrays.
        batch_size: The number of examples in a batch, if `x` is arrays; 32 by default, or with
            `steps_per_epoch`, as many as these steps need.
        epochs: The epoch to stop at: `epochs - initial_epoch` are trained.
        verbose: 0 shows nothing; other values show Treadle's progress line.
        callbacks: Keras callbacks.
        validation_split: The fraction of the examples to validate on, taken from the end.
        validation_data: `(x, y)`, `(x, y, sample_weight)` or an object that gives batches.
        shuffle: Whether to shuffle arrays, or the batches of a `PyDataset`, in each epoch.
        class_weight: The weight of each class, by its number.
        sample_weight: The weight of each example.
        initial_epoch: The number of the first epoch, from 0.
        steps_per_epoch: The number of batches in an epoch. The next epoch continues after them.
        validation_steps: The number of batches to validate on.
        validation_batch_size: The number of examples in a batch of validation; as `batch_size` by
            default.
        validation_freq: Validate every so many epochs, or after the epochs of a list, from 1.
        directory: The run directory, for checkpoints and logs. If the program is started again, the
            run resumes where it was interrupted.
        hooks: Hooks of Treadle.
        options: Execution options.
        fresh: Start from scratch in a directory that already holds a run.
        override: Resume the run although its configuration differs; see `treadle.Loop`.

    Returns:
        The `keras.callbacks.History` of the run, with the loop as its attribute `loop`.

    Raises:
        ConfigurationError: The model is not compiled, or it overrides what a loop cannot use.
        DataError: The data arguments do not fit together.

    Example:
        >>> import keras, numpy as np, treadle
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
        >>> x, y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")
        >>> history = treadle.fit(model, x, y, batch_size=4, epochs=2, verbose=0)
        >>> list(history.history), history.epoch
        (['loss', 'mae'], [0, 1])
    """
    task = KerasTask(model)
    epochs = _limited(whole_number("epochs", epochs, ConfigurationError, least=0), "max_epochs")
    steps_per_epoch = _limited(steps_per_epoch, "max_steps_per_epoch")
    initial_epoch = whole_number("initial_epoch", initial_epoch, ConfigurationError, least=0)
    whole_number_or_none("steps_per_epoch", steps_per_epoch, ConfigurationError)
    whole_number_or_none("validation_steps", validation_steps, ConfigurationError)
    training, validating = FitData(x, y, sample_weight), None
    if validation_data is not None:
        validating = FitData.of(validation_data)
    elif validation_split:
        training, validating = training.split(validation_split)
    with writeable_again(x, y, sample_weight, validation_data):
        # A run with a directory has the orders of its own seed, however often it is started.
        before = _epochs_of.get(model, 0) if directory is None else 0
        seed = hashed(run_seed(), before) % _SEEDS if before else None
        train = training.source(
            batch_size, shuffle, seed, class_weight, steps_per_epoch, continues=True
        )
        validation = None
        if validating is not None:
            size = validation_batch_size or batch_size
            validation = validating.source(size, steps=validation_steps)
        given = KerasCallbacks(
            callbacks,
            model,
            model.optimizer,
            first_epoch=initial_epoch,
            verbose=_verbosity(verbose),
        )
        if directory is None:
            _epochs_of[model] = before + max(0, epochs - initial_epoch)
        loop = Loop(
            task,
            directory,
            [Notes(model, shuffle and training.can_shuffle), given, *hooks],
            options,
            fresh=fresh,
            override=override,
            console=bool(_verbosity(verbose)),
        )
        history = given.history
        with loop:
            if epochs > initial_epoch:
                loop.fit(
                    train,
                    validation,
                    epochs=epochs - initial_epoch,
                    validate_every=_when(validation_freq, initial_epoch),
                )
        if not hasattr(history, "epoch"):  # the run was finished before
            _restore_finished(given, loop, initial_epoch)
        history.set_model(model)
        history.loop = loop
        model.history, model.stop_training = history, given.stopped
    return history


def evaluate(
    model: Any,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    verbose: Any = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Any = None,
    return_dict: bool = False,
    *,
    options: Options | None = None,
) -> Any:
    """Evaluate a compiled Keras model with its own `test_step`, as `model.evaluate` does.

    Args:
        model: A compiled `keras.Model`.
        x: Arrays, a structure of arrays, or an object that gives batches.
        y: Labels, if `x` is arrays.
        batch_size: The number of examples in a batch, if `x` is arrays; 32 by default.
        verbose: Accepted, as by Keras; nothing is shown.
        sample_weight: The weight of each example.
        steps: The number of batches.
        callbacks: Keras callbacks, of which `on_test_begin` and `on_test_end` are called.
        return_dict: Return a dict of the results, not a list.
        options: Execution options.

    Returns:
        The loss alone, or a list of the loss and the metrics, or a dict.

    Example:
        >>> import keras, numpy as np, treadle
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
        >>> x, y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")
        >>> list(treadle.evaluate(model, x, y, return_dict=True))
        ['loss', 'mae']
    """
    task = KerasTask(model)
    whole_number_or_none("steps", steps, ConfigurationError)
    notified = keras.callbacks.CallbackList(callbacks, model=model, verbose=0, epochs=1)
    with writeable_again(x, y, sample_weight):
        source = FitData(x, y, sample_weight).source(batch_size, steps=steps)
        notified.on_test_begin()
        results = Loop(task, options=options, console=False).evaluate(source)
        notified.on_test_end(dict(sorted(results.items())))
    if return_dict:
        return dict(sorted(results.items()))
    names = [name for metric in model.metrics for name in _names(metric)]
    listed = [results[name] for name in names if name in results]
    listed += [results[name] for name in sorted(results) if name not in names]
    return listed[0] if len(listed) == 1 else listed


def predict(
    model: Any,
    x: Any,
    batch_size: int | None = None,
    verbose: Any = "auto",
    steps: int | None = None,
    callbacks: Any = None,
    *,
    options: Options | None = None,
) -> Any:
    """Return the outputs of a Keras model by its own `predict_step`, as NumPy arrays.

    Args:
        model: A `keras.Model`, which need not be compiled.
        x: Arrays, a structure of arrays, or an object that gives batches.
        batch_size: The number of examples in a batch, if `x` is arrays; 32 by default.
        verbose: Accepted, as by Keras; nothing is shown.
        steps: The number of batches.
        callbacks: Keras callbacks, of which `on_predict_begin` and `on_predict_end` are called.
        options: Execution options.

    Example:
        >>> import keras, numpy as np, treadle
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> treadle.predict(model, np.ones((8, 2), "float32")).shape
        (8, 1)
    """
    task = Predicting(model)
    whole_number_or_none("steps", steps, ConfigurationError)
    notified = keras.callbacks.CallbackList(callbacks, model=model, verbose=0, epochs=1)
    with writeable_again(x):
        source = FitData(x).source(batch_size, steps=steps)
        notified.on_predict_begin()
        outputs = Loop(task, options=options, console=False).predict(source)
        notified.on_predict_end()
    return outputs


class Predicting(KerasTask):
    """A model that only predicts, which needs no optimizer and no loss.

    Args:
        model: A `keras.Model`, which need not be compiled.
    """

    needs_compile = False


def _limited(count: Any, name: str) -> Any:
    """Return a number, or the limit that `keras.config.set_<name>` has set, if it is less.

    Keras 3.12 and older have no such limits.
    """
    limit = getattr(keras.config, name, lambda: None)()
    return limit if limit is not None and (count is None or limit < count) else count


class Notes(Hook):
    """Prints what is different from `model.fit` when training starts.

    Args:
        model: The model.
        shuffles: Whether rows or batches are shuffled.
    """

    chief_only = True

    def __init__(self, model: Any, shuffles: bool) -> None:
        self._steps, self._shuffles = model.steps_per_execution, shuffles

    def start(self, loop: LoopView) -> None:
        """Print the sentences."""
        if loop.progress.step and global_random_seed() is None:
            loop.print(
                "the weights of the run replace those with which this program initialized the "
                "model: it sets no seed, so they are different in each process"
            )
        if self._shuffles:
            loop.print("shuffled data has Treadle's order: it depends on the seed and the epoch")
        if self._steps != 1:
            loop.print(
                f"steps_per_execution={self._steps} is ignored: the plan decides how many steps "
                "run in one call"
            )


def _verbosity(verbose: Any) -> int:
    return 1 if verbose == "auto" else int(verbose)


def _when(frequency: Any, first: int) -> When:
    """Return when `validation_freq` is due.

    Raises:
        ConfigurationError: It is neither a positive number nor a list of numbers.
    """
    if isinstance(frequency, (list, tuple)):
        numbers = [whole_number("validation_freq", part, ConfigurationError) for part in frequency]
        return AtEpochs(Span(1, "epoch"), epochs=tuple(numbers), first=first)
    every = Span(whole_number("validation_freq", frequency, ConfigurationError), "epoch")
    return AtEpochs(every, first=first) if first else When(every)


def _names(metric: Any) -> list[str]:
    """Return the names of a metric, or of those that it consists of."""
    parts = getattr(metric, "metrics", None)
    return [part.name for part in parts] if isinstance(parts, list) else [metric.name]


def _restore_finished(given: KerasCallbacks, loop: Loop, first: int) -> None:
    """Give the callbacks of a finished run, the history among them, the state at its end.

    The last checkpoint has it. If it was deleted, the log has the values of epochs, but for those
    that callbacks added.
    """
    saved = None if loop.directory is None else Checkpoints(loop.directory / CHECKPOINTS).latest()
    for state in saved.hooks.values() if saved is not None else ():
        if "callbacks" in state:
            given.restore_end(state)
    history = given.history
    if len(getattr(history, "epoch", ())) == loop.progress.epoch:
        return
    history.epoch, history.history = [], {}
    for number, values in enumerate(loop.history.epochs):
        history.epoch.append(first + number)
        for name, value in ordered(values).items():
            if isinstance(value, (int, float)):
                history.history.setdefault(name, []).append(value)
