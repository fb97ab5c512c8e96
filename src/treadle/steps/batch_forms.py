"""Forms of batches (structure, shapes and dtypes) as values that a checkpoint can store."""

from typing import Any

import numpy as np

from ..checkpoint.dtypes import dtype_named, name_of


def described(batch: Any) -> Any:
    """Return the form of a batch as nested lists of strings and numbers.

    Returns None if the batch has parts other than dicts, lists, tuples, arrays and None.

    Example:
        >>> described({"x": np.zeros((8, 3), "float32"), "mask": None})
        ['dict', [['x', ['array', '<f4', [8, 3]]], ['mask', ['none']]]]
        >>> zeros(described((np.ones(2, "int32"),)))
        (array([0, 0], dtype=int32),)
    """
    if batch is None:
        return ["none"]
    kind: Any = type(batch)
    if kind is dict:
        items = [[key, described(part)] for key, part in batch.items()]
        known = all(isinstance(key, (str, int)) and part is not None for key, part in items)
        return ["dict", items] if known else None
    if kind in (list, tuple):
        parts = [described(part) for part in batch]
        return None if None in parts else [kind.__name__, parts]
    if not hasattr(batch, "dtype") or name_of(batch.dtype) is None:
        return None
    return ["array", name_of(batch.dtype), list(batch.shape)]


def zeros(description: Any) -> Any:
    """Return a batch of zeros of the form that `described` returned.

    Raises:
        ValueError: `description` is not a description of a form.
    """
    match description:
        case ["none"]:
            return None
        case ["array", str(name), list(shape)]:
            return np.zeros(shape, dtype_named(name))
        case ["dict", list(items)]:
            return {key: zeros(part) for key, part in items}
        case ["list", list(parts)]:
            return [zeros(part) for part in parts]
        case ["tuple", list(parts)]:
            return tuple(zeros(part) for part in parts)
        case _:
            raise ValueError(f"{description!r:.60} describes no form of a batch")
