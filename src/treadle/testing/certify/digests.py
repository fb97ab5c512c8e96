"""Digests of arrays, with which batches and states are compared between processes."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np


def digests(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of each array's dtype, shape and bytes."""
    found: dict[str, str] = {}
    for name, array in arrays.items():
        array = np.ascontiguousarray(array)
        head = f"{array.dtype} {array.shape} ".encode()
        found[name] = hashlib.sha256(head + array.tobytes()).hexdigest()[:16]
    return found


def leaves_of(structure: Any, path: str = "random") -> dict[str, Any]:
    """Return the arrays and numbers of nested dicts and lists by path.

    Example:
        >>> leaves_of({"python": {"gauss": 0.5, "version": 3}})
        {'random/python/gauss': 0.5, 'random/python/version': 3}
    """
    if isinstance(structure, Mapping):
        pairs: Any = structure.items()
    elif isinstance(structure, list | tuple):
        pairs = enumerate(structure)
    else:
        return {} if structure is None else {path: structure}
    found: dict[str, Any] = {}
    for key, part in pairs:
        found |= leaves_of(part, f"{path}/{key}")
    return found
