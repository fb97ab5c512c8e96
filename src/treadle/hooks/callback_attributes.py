"""Attributes of Keras callbacks: set before training, and saved in checkpoints."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import ConfigurationError
from .monitor import direction_of

# Attributes that are not saved, since Keras sets them, or derives them from settings at the first
# epoch (it changes the sign of `min_delta` there).
SET_UP = frozenset({"params", "model", "_model", "mode", "monitor_op", "min_delta"})
LONGEST = 1000  # longer lists are not saved in checkpoints


def set_direction(callback: Any, metrics: Mapping[str, Any]) -> None:
    """Set the mode of a callback from the metric it monitors, as `compile` would."""
    monitor = getattr(callback, "monitor", None)
    if not isinstance(monitor, str) or getattr(callback, "mode", None) != "auto":
        return
    metric = metrics.get(monitor.removeprefix("val_"))
    direction = getattr(metric, "_direction", None)
    if direction is not None:
        callback.mode = "max" if direction == "up" else "min"
        return
    try:
        callback.mode = direction_of(monitor, None)
    except ConfigurationError:
        return  # Keras reports the missing mode at the first epoch


def append_to_file(callback: Any) -> None:
    """Make `CSVLogger` append to its file instead of overwriting it."""
    import keras

    if isinstance(callback, keras.callbacks.CSVLogger):
        callback.append = True


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
