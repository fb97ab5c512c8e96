"""Forms of batches (structure, shapes and dtypes) as values that a checkpoint can store."""

import json
import sys
from collections import UserDict
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from ..core import structures
from ..core.schema import MOST, shown
from ..errors import DataError
from .arrays import dtype_named, name_of

READING_ERRORS = (LookupError, TypeError, AttributeError, ValueError, DataError)
"""What a step usually raises when it reads a batch of another structure than it expects."""


class MissingClassError(LookupError):
    """The process has no class of the name that a form has for a container."""


_classes: WeakValueDictionary[tuple[str, str], type] = WeakValueDictionary()
"""Classes of containers that this process has described, also those made in functions."""


def described(batch: Any) -> Any:
    """Return the form of a batch as nested lists of strings and numbers.

    Returns None if the batch has parts other than arrays, None, and the containers of
    `core.structures` with strings or integers as keys.

    Example:
        >>> described({"x": np.zeros((8, 3), "float32"), "mask": None})
        ['dict', [['x', ['array', '<f4', [8, 3]]], ['mask', ['none']]]]
        >>> zeros(described((np.ones(2, "int32"),)))
        (array([0, 0], dtype=int32),)
    """
    if batch is None:
        return ["none"]
    kind: Any = type(batch)
    pairs = structures.parts(batch)
    if pairs is None:
        if not hasattr(batch, "dtype") or name_of(batch.dtype) is None:
            return None
        return ["array", name_of(batch.dtype), list(batch.shape)]
    items = [[key, described(part)] for key, part in pairs]
    if not all(isinstance(key, (str, int)) and part is not None for key, part in items):
        return None
    if kind is dict:
        return ["dict", items]
    if kind in (list, tuple):
        return [kind.__name__, [part for _, part in items]]
    if issubclass(kind, UserDict):
        return None
    _classes[kind.__module__, kind.__qualname__] = kind
    return ["object", kind.__module__, kind.__qualname__, items]


def text_of(description: Any) -> str:
    """Return the description of a form as a text, empty if there is none."""
    return "" if description is None else json.dumps(description, separators=(",", ":"))


def zeros(description: Any) -> Any:
    """Return a batch of zeros of the form that `described` returned.

    Containers get the classes that the process has under the recorded names. Nothing is imported,
    and no `__init__` is called.

    Raises:
        ValueError: `description` is not a description of a form.
        MissingClassError: The process lacks a class, or its instances have other fields.
    """
    match description:
        case ["none"]:
            return None
        case ["array", str(name), list(shape)] if all(
            type(size) is int and 0 <= size <= MOST for size in shape
        ):
            try:
                return np.zeros(shape, dtype_named(name))
            except MemoryError:
                raise ValueError(f"an array of shape {shape} is too large") from None
        case ["dict", list(items)]:
            return {key: zeros(part) for key, part in items}
        case ["list", list(parts)]:
            return [zeros(part) for part in parts]
        case ["tuple", list(parts)]:
            return tuple(zeros(part) for part in parts)
        case ["object", str(module), str(name), list(items)]:
            pairs = [(key, zeros(part)) for key, part in items]
            try:
                return structures.rebuilt(_loaded(module, name), pairs)
            except ValueError as error:
                raise MissingClassError(f"{module}.{name} has changed: {error}") from error
        case _:
            raise ValueError(f"{shown(description)} is not the form of a batch")


def example(description: Any, batch: Any) -> Any:
    """Return a batch of a recorded form: of zeros, or the given one if the form is unknown."""
    if description in (None, described(batch)):
        return batch
    try:
        return zeros(description)
    except MissingClassError:
        return batch


def _loaded(module: str, name: str) -> type:
    found: Any = _classes.get((module, name)) or sys.modules.get(module)
    if not isinstance(found, type):
        for part in name.split("."):
            found = getattr(found, part, None)
    if not isinstance(found, type):
        raise MissingClassError(f"there is no class {module}.{name}")
    return found


def structure(description: Any) -> str:
    """Return the structure of a form as text, without shapes and dtypes.

    Example:
        >>> structure(described({"x": np.zeros((8, 3)), "both": (np.ones(2), None)}))
        "{'both': (array, None), 'x': array}"
    """
    match description:
        case ["none"]:
            return "None"
        case ["dict", list(items)]:
            parts = sorted((repr(key), structure(part)) for key, part in items)
            return "{" + ", ".join(f"{key}: {part}" for key, part in parts) + "}"
        case ["list", list(parts)]:
            return "[" + ", ".join(map(structure, parts)) + "]"
        case ["tuple", list(parts)]:
            return "(" + ", ".join(map(structure, parts)) + ("," if len(parts) == 1 else "") + ")"
        case ["object", _, str(name), list(items)]:
            parts = [f"{key}: {structure(part)}" for key, part in items]
            return f"{name.rpartition('.')[2]}({', '.join(parts)})"
        case _:
            return "array"


def refuse_other_structure(recorded: Sequence[Any], now: Any, error: Exception) -> None:
    """Explain an error of `train_step` on the recorded forms by data of another structure.

    Does nothing if a recorded form has the structure of the current batch, or if one of them is
    unknown: the error then has another cause.

    Args:
        recorded: Descriptions of the forms in the checkpoint.
        now: The description of the current batch.
        error: What the step raised for one of the recorded forms.

    Raises:
        DataError: If no recorded form has the structure of the current batch.
    """
    if now is None or None in recorded:
        return
    before = list(dict.fromkeys(map(structure, recorded)))
    if structure(now) not in before:
        raise DataError(
            f"this run cannot resume: it was trained on batches {' and '.join(before)}, for which "
            f"train_step now raises {type(error).__name__}: {error}, and the source gives "
            f"{structure(now)}. Use the earlier structure in the data and in train_step again, or "
            "start a new run with the weights of this one (treadle.warm_start)"
        ) from error
