"""A snapshot of a task's Python values, which finds quickly that none has changed.

Python values are constants of compiled steps, and the body of a user's loop or a hook may change
them after any step. Computing all fingerprints (see `constants`) takes about 1 µs for each value,
every time; comparing objects by identity takes about 0.03 µs.
"""

from collections.abc import Callable, Mapping
from itertools import chain
from operator import is_, itemgetter
from typing import Any, Final

import keras
import numpy as np

from .constants import LARGE, Constant, fingerprint

_Changing: Final = object()
_Container = list[Any] | tuple[Any, ...] | dict[Any, Any]


class Snapshot:
    """The objects that are the Python values of a task at one time.

    Args:
        constants: The values by path; for each item of a container, its container too.
    """

    def __init__(self, constants: Mapping[str, Constant]) -> None:
        # Per object, a function that reads the constant ones of its attributes; and all values.
        self._attributes: list[tuple[Any, Callable[[Any], tuple[Any, ...]]]] = []
        self._values: list[Any] = []
        self._containers: list[tuple[_Container, tuple[Any, ...]]] = []
        # Values that properties return: containers, then others with their fingerprints. Arrays
        # that may change are always compared by fingerprint.
        self._read: list[tuple[Callable[[], Any], Any]] = []
        self._others: list[tuple[Callable[[], Any], Any, Any]] = []
        names: dict[int, tuple[Any, list[str]]] = {}
        for constant in constants.values():
            value = constant.read()
            if isinstance(value, (list, tuple, dict)):
                self._containers.append((value, _items(value)))
            if isinstance(value, np.ndarray) and value.nbytes <= LARGE:
                self._others.append((constant.read, _Changing, fingerprint(value)))
            elif constant.holder is None:
                continue  # an item: compared with its container
            elif stored := _stored_name(constant.holder, constant.name):
                names.setdefault(id(constant.holder), (constant.holder, []))[1].append(stored)
            elif isinstance(value, (list, tuple, dict)):
                self._read.append((constant.read, value))
            else:
                self._others.append((constant.read, value, fingerprint(value)))
        for holder, listed in names.values():
            read = itemgetter(*listed, listed[0])  # two or more names: it returns a tuple
            self._attributes.append((holder, read))
            self._values += read(vars(holder))

    def is_current(self) -> bool:
        """Return True only if no value has changed; False if one may have."""
        try:
            values = [read(vars(holder)) for holder, read in self._attributes]
            if not all(map(is_, chain.from_iterable(values), self._values)):
                return False
        except KeyError:  # an attribute was deleted
            return False
        for container, before in self._containers:
            now = _items(container)
            if len(now) != len(before) or not all(map(is_, now, before)):
                return False
        if any(read() is not before for read, before in self._read):
            return False
        for read, value, before in self._others:
            now = read()
            if now is not value and fingerprint(now) != before:
                return False
        return True


def _items(container: _Container) -> tuple[Any, ...]:
    """Return the items of a container, and the keys of a dict."""
    if isinstance(container, dict):
        return (*container, *container.values())
    return tuple(container)


def _stored_name(holder: Any, name: str) -> str | None:
    """Return the key in an object's dict of an attribute, or None if code computes its value.

    `trainable` of a layer is a property that only returns another attribute. To read it from the
    dict saves a call for each layer in each step.
    """
    if not hasattr(holder, "__dict__"):
        return None
    found = getattr(type(holder), name, None)
    if found is keras.Layer.trainable:
        name, found = "_trainable", None
    return name if name in vars(holder) and not hasattr(found, "__set__") else None
