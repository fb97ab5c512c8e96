"""A snapshot of a task's Python values, which finds quickly that none has changed.

Python values are constants of compiled steps, and the body of a user's loop or a hook may change
them after any step. Computing all fingerprints (see `constants`) takes about 1 µs for each value,
every time; comparing objects by identity takes about 0.03 µs.
"""

from collections.abc import Callable, Mapping
from operator import is_, itemgetter
from typing import Any

import numpy as np

from .constants import LARGE, Constant, fingerprint

_Container = list[Any] | tuple[Any, ...] | dict[Any, Any]


class Snapshot:
    """The objects that are the Python values of a task at one time.

    Args:
        constants: The values by path; for each item of a container, its container too.
    """

    def __init__(self, constants: Mapping[str, Constant]) -> None:
        # Per object: its attributes, a function that reads the constant ones, and what it returned.
        self._attributes: list[tuple[Any, Callable[[Any], Any], tuple[Any, ...]]] = []
        self._containers: list[tuple[_Container, tuple[Any, ...]]] = []
        # Values that properties return: containers, then others, and arrays that may change.
        self._read: list[tuple[Callable[[], Any], Any]] = []
        self._others: list[tuple[Callable[[], Any], Any]] = []
        names: dict[int, tuple[Any, list[str]]] = {}
        for constant in constants.values():
            value = constant.read()
            if isinstance(value, (list, tuple, dict)):
                self._containers.append((value, _items(value)))
            if isinstance(value, np.ndarray) and value.nbytes <= LARGE:
                self._others.append((constant.read, fingerprint(value)))
            elif constant.holder is None:
                continue  # an item: compared with its container
            elif _is_plain_attribute(constant.holder, constant.name):
                names.setdefault(id(constant.holder), (constant.holder, []))[1].append(
                    constant.name
                )
            elif isinstance(value, (list, tuple, dict)):
                self._read.append((constant.read, value))
            else:
                self._others.append((constant.read, fingerprint(value)))
        for holder, listed in names.values():
            read = itemgetter(*listed, listed[0])  # two or more names: it returns a tuple
            self._attributes.append((holder, read, read(vars(holder))))

    def is_current(self) -> bool:
        """Return True only if no value has changed; False if one may have."""
        try:
            for holder, read, before in self._attributes:
                if not all(map(is_, read(vars(holder)), before)):
                    return False
        except KeyError:  # an attribute was deleted
            return False
        for container, before in self._containers:
            now = _items(container)
            if len(now) != len(before) or not all(map(is_, now, before)):
                return False
        if any(read() is not before for read, before in self._read):
            return False
        return all(fingerprint(read()) == before for read, before in self._others)


def _items(container: _Container) -> tuple[Any, ...]:
    """Return the items of a container, and the keys of a dict."""
    if isinstance(container, dict):
        return (*container, *container.values())
    return tuple(container)


def _is_plain_attribute(holder: Any, name: str) -> bool:
    """Return whether an attribute is read from the object's dict, and not by a property."""
    return name in vars(holder) and not hasattr(getattr(type(holder), name, None), "__set__")
