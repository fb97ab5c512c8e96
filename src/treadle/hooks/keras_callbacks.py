"""The `KerasCallbacks` hook, which runs Keras callbacks in a Treadle loop."""

import math
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..core.hook import DetailedHook, Hook, LoopView
from ..core.logs import Record, StepLogs
from ..core.triggers import Scheduled, Span, When
from ..errors import ConfigurationError
from .callback_model import (
    append_to_file,
    changed_attributes,
    close_file,
    compiled_attributes,
    copied,
    only_model,
    optimizer_of,
    set_direction,
    size_of_file,
    unsaved_attributes,
)
from .nonfinite import NonFinite
from .stopping import RESTORED

BATCH_METHODS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
TEST_BATCH_METHODS = ("on_test_batch_begin", "on_test_batch_end")
NEVER_CALLED = (
    "on_predict_begin",
    "on_predict_end",
    "on_predict_batch_begin",
    "on_predict_batch_end",
)


class KerasCallbacks(DetailedHook):
    """Runs Keras callbacks as `fit` does: at the same points of training and with the same logs.

    Callbacks have a working `model`, `params` and `logs`. Setting `model.stop_training = True` ends
    the run, and `model.optimizer` is the optimizer that updates the model; the model has both
    attributes only while callbacks run. Training continues with the weights and learning rates that
    callbacks assign. The order of `callbacks` has the same effect as under `fit`.

    - `on_train_begin` and `on_train_end` are called once per `fit` call. `on_train_end` is not
      called if an error ended training.
    - `on_epoch_begin` is called before the first step of an epoch. `on_epoch_end` is called after
      the epoch's validation, with means, metrics and `val_…` values. It is not called for an
      unfinished epoch, unless a callback stopped training. Epochs are counted from 0, over all
      calls of a run.
    - `on_train_batch_begin` and `on_train_batch_end` are called at every step. If a callback
      overrides one of them, each step is a separate compiled call, which is slower; otherwise
      window lengths do not change. `ModelCheckpoint(save_freq="epoch")` and
      `TensorBoard(update_freq="epoch")` override these methods without using them, and do not slow
      down training.
    - Models saved by `ModelCheckpoint` load as compiled models: with the optimizer and its state,
      and for `treadle.Supervised` with the loss and the metrics.
    - `on_test_begin` and `on_test_end` are called before and after each validation, and each
      `loop.evaluate` between the first step and the end of training. If a callback overrides
      `on_test_batch_begin` or `on_test_batch_end`, they are called for each batch, which is then a
      compiled call of its own. Methods for predictions are not called; if a callback overrides
      one, a warning is logged.

    `TerminateOnNaN` replaces the default hook `NonFinite`, which would raise first. A `NonFinite`
    hook that you pass to the loop is not replaced.

    A resumed run calls `on_train_begin` again, and then restores the numbers, strings and arrays
    that each callback changed after its construction: for `EarlyStopping` the best weights and the
    epochs waited, for `ReduceLROnPlateau` the best value and the cooldown, for `ModelCheckpoint`
    the best value. Other objects are not saved: open files, functions, lists of more than 100,000
    items. `CSVLogger` appends to the same file, without the rows of epochs after the checkpoint.

    Args:
        callbacks: The callbacks, in the order in which they are called: a list of
            `keras.callbacks.Callback`, which may contain lists; one callback; or a
            `keras.callbacks.CallbackList`.
        model: The `model` of the callbacks; by default the only model of the task.
        optimizer: The `model.optimizer` of the callbacks; by default the optimizer with which
            `train_step` updates the model. The optimizer passed to `model.compile` is used only if
            `train_step` applies it.
        first_epoch: The number of the first epoch, as `initial_epoch` of `fit`.
        verbose: The `verbose` of the callbacks' `params`.

    Attributes:
        replaces: Classes of default hooks that are not added to a run with these callbacks.

    Raises:
        ConfigurationError: If an object is not a callback, or is `BackupAndRestore`. At the start:
            if `model` is not given and the task has no model or several. When a callback uses
            `model.optimizer`: if several optimizers update the model and `optimizer` is not given.

    Example:
        >>> import keras, treadle
        >>> stopping = keras.callbacks.EarlyStopping("val_loss", restore_best_weights=True)
        >>> hook = treadle.hooks.KerasCallbacks([stopping])
        >>> hook.when is None  # no callback needs every step
        True
    """

    def __init__(
        self,
        callbacks: Iterable[Any] | Any,
        model: Any = None,
        optimizer: Any = None,
        first_epoch: int = 0,
        verbose: Any = 1,
    ) -> None:
        import keras  # late: it fixes the backend, which may not be chosen yet at import

        self._callbacks = [_checked(callback) for callback in _flattened(callbacks)]
        self.identity = ", ".join(
            f"{type(x).__name__} {x.monitor}" for x in self._callbacks if hasattr(x, "monitor")
        )
        kinds = keras.callbacks
        if not any(isinstance(callback, kinds.History) for callback in self._callbacks):
            self._callbacks.append(kinds.History())  # as `fit` does: it is `model.history`
        terminating = any(isinstance(c, kinds.TerminateOnNaN) for c in self._callbacks)
        self.replaces: tuple[type[Hook], ...] = (NonFinite,) if terminating else ()
        self._given = model, optimizer
        self._first_epoch, self._verbose = first_epoch, verbose
        every_step = any(_uses_batch_methods(callback) for callback in self._callbacks)
        self.when = When(Span(1, "step")) if every_step else None
        self._made = [copied(vars(callback)) for callback in self._callbacks]
        self._kept: Mapping[str, Any] | None = None
        self._model: Any = None
        self._lent: dict[str, Any] = {}
        self._begin()

    def start(self, loop: LoopView) -> None:
        """Give the callbacks their model, and call `on_train_begin`."""
        model, optimizer = self._given
        self._model = model if model is not None else only_model(loop.task)
        kept, self._kept = self._kept, None
        epoch = self._epoch if loop.progress.batch else -1  # begun by the call before
        self._begin()
        self._epoch = epoch
        # Keras' TensorBoard callback reads the graph from `train_function`.
        self._lent = {"stop_training": False, "train_function": None}
        self._lent["history"] = self.history
        if optimizer is None:
            optimizer = optimizer_of(loop, self._model)
        if optimizer is not None:
            self._lent["optimizer"] = optimizer
            self._lent |= compiled_attributes(loop.task, self._model, optimizer)
        _warn_of_methods_never_called(loop, self._callbacks)
        epochs = _epochs(loop) + self._first_epoch
        params = {"verbose": self._verbose, "epochs": epochs, "steps": loop.steps_per_epoch}
        metrics = loop.state.metrics
        with self._as_in_fit():
            for name, callback in self._named():
                set_direction(callback, metrics)
                if loop.progress.step:
                    append_to_file(callback, (kept or {}).get("files", {}).get(name))
                callback.set_model(self._model)
                callback.set_params(dict(params))
            for callback in self._callbacks:
                callback.on_train_begin({})
        self._warn_of_unsaved_attributes(loop)
        if kept is not None:
            self._epoch = kept["epoch"]
            self._restore_attributes(kept)

    def before(self, loop: LoopView) -> None:
        """Call `on_epoch_begin` at the start of an epoch, and `on_train_batch_begin` if needed."""
        at = loop.progress
        if self._epoch != at.epoch:
            self._epoch = at.epoch
            self._call(loop, "on_epoch_begin", at.epoch + self._first_epoch, {})
        if self.when is not None:
            self._call(loop, "on_train_batch_begin", at.batch, logs={})

    def steps(self, loop: LoopView, logs: StepLogs) -> None:
        """Call `on_train_batch_end` if a callback overrides it."""
        if self.when is not None:
            means = dict(loop.metrics())
            self._call(loop, "on_train_batch_end", loop.progress.batch - 1, logs=means)

    def validation(self, loop: LoopView, results: Mapping[str, float] | None) -> None:
        """Call `on_test_begin` or `on_test_end` for a validation."""
        if results is not None:
            results = {name.removeprefix("val_"): value for name, value in results.items()}
        self.evaluation(loop, results)

    def evaluation(self, loop: LoopView, results: Mapping[str, float] | None) -> None:
        """Call `on_test_begin` (without results) or `on_test_end` for `loop.evaluate`."""
        if results is None:
            self._call(loop, "on_test_begin", {})
        else:
            self._call(loop, "on_test_end", dict(results))

    @property
    def sees_test_batches(self) -> bool:
        """Whether a callback defines a method for the batches of validations."""
        return self._model is not None and any(
            _defines(callback, method)
            for callback in self._callbacks
            for method in TEST_BATCH_METHODS
        )

    def test_batch(self, loop: LoopView, batch: int, results: Mapping[str, float] | None) -> None:
        """Call `on_test_batch_begin` (without results) or `on_test_batch_end`."""
        if results is None:
            self._call(loop, "on_test_batch_begin", batch, {})
        else:
            self._call(loop, "on_test_batch_end", batch, dict(results))

    def record(self, loop: LoopView, record: Record) -> None:
        """Call `on_epoch_end` after an epoch, also if a callback stopped the run during it."""
        stopped = bool(self._stopped_by) and record.kind == "validation"
        if record.kind == "epoch" or stopped:
            self._logs = ordered(record.values)
            epoch = record.progress.epoch + self._first_epoch
            self._call(loop, "on_epoch_end", epoch, dict(self._logs))
            if stopped:  # a further call continues the epoch, which begins again for callbacks
                self._epoch = -1
            self._warn_of_unsaved_attributes(loop)

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Call `on_train_end`, unless training failed."""
        if self._model is not None and error is None:
            self._call(loop, "on_train_end", self._logs)
            if not loop.unfinished:
                self._note_restored(loop)
        for callback in self._callbacks:
            close_file(callback)
        self._model, self._lent = None, {}

    def _note_restored(self, loop: LoopView) -> None:
        """Log the step whose weights Keras' `EarlyStopping` has restored, as our own hook does."""
        import keras

        steps = {x.progress.epoch: x.progress.step for x in loop.history.records}  # the last wins
        for callback in self._callbacks:
            if not isinstance(callback, keras.callbacks.EarlyStopping):
                continue
            step = steps.get(callback.best_epoch - self._first_epoch)
            restored = callback.restore_best_weights and callback.best_weights is not None
            if restored and step and math.isfinite(callback.best):
                best = f"the best {callback.monitor}: {callback.best:.6g}"
                loop.log({"note": f"{RESTORED}{step}, {best}"})

    @property
    def history(self) -> Any:
        """The `keras.callbacks.History` of the callbacks."""
        import keras

        return next(c for c in self._callbacks if isinstance(c, keras.callbacks.History))

    @property
    def stopped(self) -> bool:
        """Whether a callback has set `model.stop_training`."""
        return bool(self._stopped_by)

    @property
    def swapped_optimizers(self) -> list[Any]:
        """The optimizer whose averages `SwapEMAWeights` has swapped into the weights, if any."""
        swapped = any(getattr(c, "_ema_weights_in_model", False) for c in self._callbacks)
        return [self._lent["optimizer"]] if swapped and "optimizer" in self._lent else []

    def state(self) -> dict[str, Any]:
        """Return the numbers, strings and arrays that each callback changed."""
        found = {
            name: changed_attributes(callback, made)
            for (name, callback), made in zip(self._named(), self._made, strict=True)
        }
        sizes = {name: size_of_file(callback) for name, callback in self._named()}
        files = {name: size for name, size in sizes.items() if size is not None}
        stopped = self._stopped_by
        return {"epoch": self._epoch, "callbacks": found, "files": files, "stopped": stopped}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Keep the state returned by `state`, to be restored when training starts."""
        self._kept = state

    def restore_end(self, state: Mapping[str, Any]) -> None:
        """Restore what a finished run has left, from its last state: it is not trained again."""
        self._restore_attributes(state)
        self._stopped_by = state.get("stopped", "")

    def _restore_attributes(self, state: Mapping[str, Any]) -> None:
        for name, callback in self._named():
            for attribute, value in state["callbacks"].get(name, {}).items():
                setattr(callback, attribute, value)

    def _warn_of_unsaved_attributes(self, loop: LoopView) -> None:
        """Warn of attributes that a checkpoint cannot hold: each once, also if one is set later."""
        for callback in self._callbacks if loop.directory is not None else ():
            found = unsaved_attributes(callback)
            told = self._told.setdefault(id(callback), set())
            new = {name: kind for name, kind in found.items() if name not in told}
            told.update(new)
            if new:
                parts = ", ".join(f"{name} ({kind})" for name, kind in new.items())
                loop.log(
                    {
                        "warning": f"{type(callback).__name__} has attributes that a checkpoint "
                        f"cannot hold: {parts}. After a resume, they begin as in a new run: use "
                        "numbers, strings, arrays, or lists and dicts of these with strings as keys"
                    }
                )

    def _begin(self) -> None:
        self._told: dict[int, set[str]] = {}
        self._epoch = -1
        self._logs: dict[str, Any] = {}  # of the last epoch
        self._stopped_by = ""

    def _call(self, loop: LoopView, method: str, *arguments: Any, **named: Any) -> None:
        """Call a method of each callback with the same logs, to which callbacks may add values."""
        if self._model is None:  # a validation before the first step
            return
        with self._as_in_fit():
            for callback in self._callbacks:
                getattr(callback, method)(*arguments, **named)
                if self._model.stop_training and not self._stopped_by:
                    self._stopped_by = type(callback).__name__
                    loop.stop(f"{self._stopped_by} set model.stop_training")

    @contextmanager
    def _as_in_fit(self) -> Generator[None]:
        """Give the model the attributes that `compile` and `fit` set, within a `with` block.

        They are removed afterwards: otherwise they would become part of the task's state and change
        the paths of variables.
        """
        attributes = vars(self._model)
        own = {name: attributes[name] for name in self._lent if name in attributes}
        attributes.update(self._lent)
        try:
            yield
        finally:
            self._lent["stop_training"] = attributes.get("stop_training", False)
            for name in self._lent:
                attributes.pop(name, None)
            attributes.update(own)

    def _named(self) -> Iterator[tuple[str, Any]]:
        counts: Counter[str] = Counter()
        for callback in self._callbacks:
            name = type(callback).__name__
            counts[name] += 1
            yield f"{name}-{counts[name]}", callback


def _flattened(callbacks: Any) -> Iterator[Any]:
    """Yield the callbacks of a list, of lists in it, and of a `CallbackList`."""
    import keras

    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    if isinstance(callbacks, Iterable) and not isinstance(callbacks, (str, bytes)):
        for part in callbacks:
            yield from _flattened(part)
    elif callbacks is not None:
        yield callbacks


def ordered(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of an epoch in the order in which `fit` logs them.

    Keras sorts them before it replaces inner dicts by what they hold, so that the names of a step
    with inner dicts keep the order in which it returns them.
    """
    names = [name for name in values if not name.startswith("val_")]
    others = sorted(name for name in values if name.startswith("val_"))
    every = sorted(values) if names == sorted(names) else [*names, *others]
    return {name: values[name] for name in every}


def _epochs(loop: LoopView) -> float:
    """Return the total number of epochs of the run; infinity if it is unknown.

    Callbacks use this number; `SwapEMAWeights` uses it to detect the last epoch.
    """
    planned = math.inf if loop.epochs_planned is None else loop.epochs_planned
    if loop.steps_planned is None or not loop.steps_per_epoch:
        return planned
    at = loop.progress
    batches = at.batch + max(0, loop.steps_planned - at.step)
    return min(planned, at.epoch + math.ceil(batches / loop.steps_per_epoch))


def _checked(callback: Any) -> Any:
    import keras

    if not isinstance(callback, keras.callbacks.Callback):
        if isinstance(callback, Hook | Scheduled):
            raise ConfigurationError(
                f"{type(callback).__name__} is a hook, not a Keras callback: pass it as hooks=[…]"
            )
        raise ConfigurationError(
            f"KerasCallbacks takes a list of objects of keras.callbacks.Callback, and found "
            f"{callback!r}: make a function of the loop a hook with treadle.every"
        )
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        raise ConfigurationError(
            "KerasCallbacks cannot run BackupAndRestore, which would put its own weights over "
            "those of the run's checkpoints: give the loop a directory instead, to make it resume"
        )
    return callback


def _uses_batch_methods(callback: Any) -> bool:
    """Return whether a callback uses any of the methods called at every batch."""
    import keras

    kinds = keras.callbacks
    if type(callback) is kinds.ModelCheckpoint and callback.save_freq == "epoch":
        return False
    if type(callback) is kinds.TensorBoard:
        per_batch = callback.update_freq != "epoch" or callback.write_steps_per_second
        return bool(per_batch or callback._should_trace)
    return any(_overrides(callback, method) for method in BATCH_METHODS)


def _overrides(callback: Any, method: str) -> bool:
    """Return whether a callback overrides a method of `keras.callbacks.Callback`."""
    import keras

    own = getattr(callback, method)
    return getattr(own, "__func__", own) is not getattr(keras.callbacks.Callback, method)


def _defines(callback: Any, method: str) -> bool:
    """Return whether a callback of the user defines a method, or one of Keras was given it."""
    import keras

    kind = type(callback)
    of_keras = getattr(keras.callbacks, kind.__name__, None) is kind
    return _overrides(callback, method) and (not of_keras or method in vars(callback))


def _warn_of_methods_never_called(loop: LoopView, callbacks: Sequence[Any]) -> None:
    for callback in callbacks:
        missed = [method for method in NEVER_CALLED if _defines(callback, method)]
        if missed:
            loop.log(
                {
                    "warning": f"{type(callback).__name__}.{missed[0]} is never called: "
                    "predictions of a loop have no callbacks"
                }
            )
