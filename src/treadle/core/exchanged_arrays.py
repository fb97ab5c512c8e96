"""Exchanging arrays between the processes of a run, on the host."""

import base64
from collections.abc import Sequence
from math import prod
from typing import Any, Final

import numpy as np

from .processes import process_group

Array = np.ndarray[Any, np.dtype[Any]]

MOST_TOGETHER: Final = 40 << 20
"""The most bytes that all processes exchange in one message. Larger arrays take several ones."""


def exchange_arrays(arrays: Sequence[Array], at: str) -> list[list[Array]]:
    """Return the arrays of all processes by rank; all must call this at the same point.

    Process 0 receives and sends all of them, as text. So this is for what a run exchanges now and
    then; what a step sums goes through the framework.

    Args:
        arrays: Arrays of numbers; each process may have others.
        at: What this process is doing, for messages; the same in all processes.

    Example:
        >>> exchange_arrays([np.arange(2)], "an example")[0][0].tolist()
        [0, 1]
    """
    group = process_group()
    if group.size == 1:
        return [list(arrays)]
    native = [np.ascontiguousarray(x, x.dtype.newbyteorder("=")) for x in arrays]
    data = b"".join(x.tobytes() for x in native)
    forms = [[x.dtype.name, list(x.shape)] for x in arrays]
    found = group.exchange([forms, len(data)], at)
    each = max(1 << 10, MOST_TOGETHER // group.size)
    received: list[list[bytes]] = [[] for _ in found]
    for start in range(0, max(size for _, size in found), each):
        part = base64.b64encode(data[start : start + each]).decode()
        for parts, text in zip(received, group.exchange(part, at), strict=True):
            parts.append(base64.b64decode(text))
    return [
        _arrays(forms, b"".join(parts)) for (forms, _), parts in zip(found, received, strict=True)
    ]


def _arrays(forms: Sequence[Any], data: bytes) -> list[Array]:
    """Return arrays of dtypes and shapes whose values follow each other."""
    found: list[Array] = []
    start = 0
    for name, shape in forms:
        dtype = np.dtype(name)
        count = prod(shape)
        found.append(np.frombuffer(data, dtype, count, start).reshape(shape))
        start += count * dtype.itemsize
    return found
