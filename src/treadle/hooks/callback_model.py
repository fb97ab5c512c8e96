"""What Keras callbacks see and change: the model of a task, and their own attributes."""

import os
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.hook import LoopView
from ..core.user_code import attributes_of, is_library, namespace_of_class
from ..errors import ConfigurationError
from .monitor import direction_of


def only_model(task: Any) -> Any:
    """Return the task's only model.

    Raises:
        ConfigurationError: The task has no model, or several.
    """
    import keras

    if isinstance(task, keras.Model):
        return task
    found = {
        name: value for name, value in attributes_of(task).items() if isinstance(value, keras.Model)
    }
    if len(found) != 1:
        names = ", ".join(found) or "none as an attribute"
        example = next(iter(found), "model")
        raise ConfigurationError(
            f"KerasCallbacks needs exactly one model, but {type(task).__name__} has {names}: pass "
            f"it, as KerasCallbacks([...], model=task.{example})"
        )
    return next(iter(found.values()))


def optimizer_of(loop: LoopView, model: Any) -> Any:
    """Return the optimizer with which `train_step` updates a model, or None if there is none.

    Optimizers that update weights of the model take precedence. An optimizer passed to
    `model.compile` that `train_step` does not apply is ignored, since it has no effect.
    """
    weights = {id(variable) for variable in model.variables}
    all_of_task = loop.state.optimizers
    applied = {path: o for path, o in loop.optimizers.items() if path in all_of_task} or {
        path: o for path, o in all_of_task.items() if o is not getattr(model, "optimizer", None)
    }
    owning = {
        path: optimizer
        for path, optimizer in applied.items()
        if any(id(v) in weights for v in optimizer._trainable_variables)
    }
    found = owning or applied or all_of_task
    if len(found) < 2:
        return next(iter(found.values()), None)
    return _Ambiguous(list(found), type(loop.task).__name__)


def compiled_attributes(task: Any, model: Any, optimizer: Any) -> dict[str, Any]:
    """Return the attributes with which Keras saves the model as a compiled model.

    The file then contains the optimizer and, for `treadle.Supervised`, the loss and the metrics.
    The result is empty if the model was compiled with the optimizer. It is also empty, and the file
    contains the model only, if the optimizer also updates weights of other models, or the model
    overrides `compile`.
    """
    import keras

    from ..steps.supervised import Supervised

    compiled = getattr(model, "compiled", False) and getattr(model, "optimizer", None) is optimizer
    if compiled or isinstance(optimizer, _Ambiguous):
        return {}
    own = [id(v) for v in model.trainable_variables]
    updated = [id(v) for v in optimizer._trainable_variables]
    if not own or own != updated or type(model).compile is not keras.Model.compile:
        return {}
    before = getattr(model, "_compile_config", None)  # set if the model was compiled
    kept = ("run_eagerly", "steps_per_execution", "jit_compile")
    config = {} if before is None else {name: before.config[name] for name in kept}
    config["optimizer"] = optimizer
    if isinstance(task, Supervised) and task.model is model:
        config |= task.compiled.arguments
    return {"compiled": True, "_compile_config": _Config(config)}


class _Config:
    """The configuration of `compile`, as Keras reads it when it saves a model."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def serialize(self) -> Any:
        """Return it without objects."""
        import keras

        return keras.saving.serialize_keras_object(self.config)


class _Ambiguous:
    """A placeholder for the optimizer of a model updated by several; raises when it is used."""

    def __init__(self, paths: Sequence[str], task: str) -> None:
        self._paths, self._task = paths, task

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        example = re.sub(r"/(\d+)", r"[\1]", f"task.{self._paths[0]}").replace("/", ".")
        raise ConfigurationError(
            f"a callback uses model.optimizer, and {self._task} updates the model with "
            f"{', '.join(self._paths)}: choose one, as KerasCallbacks([...], optimizer={example})"
        )


# Attributes that are not saved, since Keras sets them, or derives them from settings at the first
# epoch (it changes the sign of `min_delta` there).
SET_UP = frozenset({"params", "model", "_model", "mode", "monitor_op", "min_delta"})
LONGEST = 100_000  # longer lists are not saved in checkpoints


def set_direction(callback: Any, metrics: Mapping[str, Any]) -> None:
    """Set the mode of a callback from the metric it monitors, as `compile` would."""
    monitor = getattr(callback, "monitor", None)
    if not isinstance(monitor, str) or getattr(callback, "mode", None) != "auto":
        return
    metric = metrics.get(monitor.removeprefix("val_"))
    direction = metric and getattr(metric, "_direction", None)
    if direction is not None:
        callback.mode = "max" if direction == "up" else "min"
        return
    try:
        callback.mode = direction_of(monitor, None)
    except ConfigurationError:
        return  # Keras reports the missing mode at the first epoch


def append_to_file(callback: Any, size: int | None) -> None:
    """Make `CSVLogger` append to its file, without the rows that were written after a checkpoint.

    Args:
        callback: The callback.
        size: The size of the file at the checkpoint; None if it is unknown.
    """
    import keras

    if not isinstance(callback, keras.callbacks.CSVLogger):
        return
    callback.append = True
    if size is not None and size < (size_of_file(callback) or 0):
        os.truncate(callback.filename, size)


def size_of_file(callback: Any) -> int | None:
    """Return the size of the file of `CSVLogger`; None for other callbacks, or without a file."""
    import keras

    if isinstance(callback, keras.callbacks.CSVLogger) and os.path.isfile(callback.filename):
        return os.path.getsize(callback.filename)
    return None


def close_file(callback: Any) -> None:
    """Close the file of `CSVLogger` if an error prevented `on_train_end` from closing it."""
    import keras

    if isinstance(callback, keras.callbacks.CSVLogger) and callback.csv_file is not None:
        callback.csv_file.close()


def changed_attributes(callback: Any, made: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain attributes of a callback that changed since it was constructed."""
    return {
        name: value
        for name, value in vars(callback).items()
        if name not in SET_UP and _is_plain(value) and not _is_same(value, made.get(name, ...))
    }


def unsaved_attributes(callback: Any) -> dict[str, str]:
    """Return the attributes of a user's callback that may change and no checkpoint can hold.

    Returns:
        The type of each, by name.
    """
    if is_library(namespace_of_class(type(callback))):
        return {}
    return {
        name: type(value).__name__
        for name, value in vars(callback).items()
        if name not in SET_UP and not _is_plain(value) and _may_change(value)
    }


def _may_change(value: Any) -> bool:
    """Return whether a value is a container or an object of a user's class with attributes."""
    if isinstance(value, (list, dict, set, bytearray, deque, np.ndarray)):
        return True
    own = hasattr(value, "__dict__") and not is_library(namespace_of_class(type(value)))
    return own and not callable(value)


def copied(value: Any) -> Any:
    """Copy lists and dicts recursively; other values are not copied."""
    if type(value) is dict:
        return {key: copied(part) for key, part in value.items()}
    return [copied(part) for part in value] if type(value) is list else value


def _is_same(value: Any, before: Any) -> bool:
    if type(value) is not type(before):
        return False
    if isinstance(value, (list, tuple)):
        return len(value) == len(before) and all(map(_is_same, value, before))
    if isinstance(value, dict):
        return value.keys() == before.keys() and all(_is_same(value[k], before[k]) for k in value)
    return value is before if isinstance(value, np.ndarray) else bool(value == before)


def _is_plain(value: Any) -> bool:
    """Return whether a checkpoint can contain the value."""
    if isinstance(value, (list, tuple)):
        return len(value) <= LONGEST and all(_is_plain(part) for part in value)
    if isinstance(value, dict):
        named = all(isinstance(key, str) for key in value)
        return named and len(value) <= LONGEST and all(map(_is_plain, value.values()))
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf"
    return value is None or isinstance(value, (bool, int, float, str, np.number, np.bool_))
