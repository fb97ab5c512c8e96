"""What a compiled step takes as constant: how each Python value is told from what it was."""

import dataclasses
import zlib
from collections.abc import Callable
from types import NoneType
from typing import Any, NamedTuple

import keras
import numpy as np

LARGE = 65_536  # bytes of a NumPy attribute above which only its identity is compared
SHOWN = 5  # keys of a dict that a message lists


class Constant(NamedTuple):
    """Where a Python value of a task is.

    Attributes:
        read: Returns the value as it is now; None where it is gone.
        write: Sets it. Raises what Python or the owner's class raises where that is not possible.
    """

    read: Callable[[], Any]
    write: Callable[[Any], None]


class This:
    """An object as a constant: equal to itself alone.

    Attributes:
        thing: The object.
    """

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, This) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)

    def __repr__(self) -> str:
        return f"one {type(self.thing).__name__}"


class Items:
    """A list, tuple or dict as a constant: as many items, under the same keys.

    The items are constants of their own.

    Attributes:
        last: The item at the end, or None.
    """

    def __init__(self, container: Any) -> None:
        self._kind: type = next(k for k in (dict, list, tuple) if isinstance(container, k))
        named = isinstance(container, dict)
        self._keys: Any = tuple(container) if named else len(container)
        self.last = next(reversed(container.values() if named else container), None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Items) and (self._kind, self._keys) == (other._kind, other._keys)

    def __hash__(self) -> int:
        return hash((self._kind, self._keys))

    def __repr__(self) -> str:
        if isinstance(self._keys, int):
            return f"a {self._kind.__name__} of {self._keys}"
        more = ", …" if len(self._keys) > SHOWN else ""
        return f"a dict of {len(self._keys)} ({', '.join(map(str, self._keys[:SHOWN]))}{more})"


def mark(value: Any) -> Any:
    """Return what changes when a value does; large arrays are known by identity alone."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if value == value else "nan"  # which is not equal to itself
    if isinstance(value, (bool, int, str, NoneType)):
        return value
    if isinstance(value, (list, tuple, dict)):
        return Items(value)
    if not isinstance(value, np.ndarray) or value.nbytes > LARGE:
        return This(value)
    return value.shape, str(value.dtype), zlib.crc32(np.ascontiguousarray(value).tobytes())


def part_of(whole: Callable[[], Any], key: Any) -> Callable[[], Any]:
    """Return what reads one part of a container again, or None where it is gone."""

    def read() -> Any:
        try:
            return whole()[key]
        except (LookupError, TypeError):
            return None

    return read


def set_part(whole: Constant, key: Any, value: Any) -> None:
    """Set one item of a list or dict; a tuple is replaced by another one."""
    container = whole.read()
    if isinstance(container, tuple):
        parts: list[Any] = list(container)  # type: ignore[reportUnknownArgumentType]
        parts[key] = value
        whole.write(tuple_like(container, parts))  # type: ignore[reportUnknownArgumentType]
    else:
        container[key] = value


def tuple_like(like: tuple[Any, ...], parts: list[Any]) -> tuple[Any, ...]:
    """Return a tuple of the same class, which may be a named one."""
    make: Callable[[list[Any]], Any] = getattr(like, "_make", type(like))
    return make(parts)


def set_attribute(holder: Any, name: str, owner: Constant | None, value: Any) -> None:
    """Set an attribute; a frozen dataclass is replaced in its owner by another one."""
    parameters: Any = getattr(holder, "__dataclass_params__", None)
    if owner is not None and parameters is not None and parameters.frozen:
        owner.write(dataclasses.replace(owner.read(), **{name: value}))
    else:
        setattr(holder, name, value)


def told(path: str, old: Any, new: Any) -> str:
    """Say how a constant changed from one mark to another.

    Example:
        >>> told("losses", mark([]), mark([0.5]))
        'losses changed from a list of 0 to a list of 1'
    """
    same = isinstance(old, This) and isinstance(new, This) and repr(old) == repr(new)
    return f"{path} changed from {old!r} to {repr(new).replace('one', 'another', int(same))}"


def tensor_kept(new: Any) -> bool:
    """Say whether a constant's mark is that of a tensor, or of a container that ends with one."""
    thing = new.thing if isinstance(new, This) else new.last if isinstance(new, Items) else None
    return bool(keras.ops.is_tensor(thing))
