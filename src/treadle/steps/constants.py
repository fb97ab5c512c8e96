"""Python values that are constants of a compiled step: fingerprints that detect their changes."""

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Any, NamedTuple

import keras
import numpy as np

from ..backends.base import active
from ..errors import StepError

LARGE = 65_536  # bytes of a NumPy attribute above which only its identity is compared
_ARRAYS: dict[type, bool] = {}  # `keras.ops.is_tensor` takes ten times as long
SHOWN = 5  # keys of a dict that a message lists


class Constant(NamedTuple):
    """Read and write access to a Python value of a task.

    Attributes:
        read: Returns the current value, or None if it no longer exists.
        write: Sets the value. Raises the error of Python or of the owner's class if it cannot.
        holder: The object whose attribute it is; None for an item of a container.
        name: The name of the attribute.
        used_by_name: Whether only functions reach it, by a name. What a step changes itself in such
            a container is left out, for example in a cache.
    """

    read: Callable[[], Any]
    write: Callable[[Any], None]
    holder: Any = None
    name: str = ""
    used_by_name: bool = False

    def reached(self, by_name: bool) -> "Constant":
        """Return the same access, to a value that is used by name or not."""
        return Constant(*self[:4], by_name)


class This:
    """Fingerprint of an object, compared by identity."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, This) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)

    def __repr__(self) -> str:
        return f"one {type(self.thing).__name__}"


class Items:
    """Fingerprint of a list, tuple or dict: its type, and its length or keys.

    The items have fingerprints of their own.
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


def fingerprint(value: Any) -> Any:
    """Return the fingerprint of a value; large arrays are compared by identity only."""
    if isinstance(value, np.generic):
        item: Any = value.item()  # for other than plain values, such as dates, a new object
        value = item if isinstance(item, (bool, int, float, complex, str)) else np.asarray(value)
    if isinstance(value, (float, complex)):
        return value if value == value else "nan"  # NaN is not equal to itself
    if isinstance(value, (bool, int, str, NoneType)):
        return value
    if isinstance(value, (list, tuple, dict)):
        return Items(value)
    if not isinstance(value, np.ndarray) or value.nbytes > LARGE:
        return This(value)
    return value.shape, str(value.dtype), zlib.crc32(np.ascontiguousarray(value).tobytes())


def fingerprints(constants: Mapping[str, Constant]) -> dict[str, Any]:
    """Return the fingerprints of Python values, by path."""
    return {path: fingerprint(constant.read()) for path, constant in constants.items()}


def is_array(value: Any) -> bool:
    """Return whether a value is a NumPy array or a tensor, and no variable."""
    kind: type = type(value)
    if kind not in _ARRAYS:
        symbolic = issubclass(kind, (keras.Variable, keras.KerasTensor))
        array = issubclass(kind, np.ndarray) or (not symbolic and keras.ops.is_tensor(value))
        _ARRAYS[kind] = bool(array) and not active().is_native_variable(value)
    return _ARRAYS[kind]


def part_of(whole: Callable[[], Any], key: Any) -> Callable[[], Any]:
    """Return a function that reads one item of a container, or None if it no longer exists."""

    def read() -> Any:
        container = whole()
        try:
            # `get` inserts nothing into a `defaultdict`, and calls no `__missing__`.
            return container.get(key) if isinstance(container, dict) else container[key]
        except (LookupError, TypeError):
            return None

    return read


def set_part(whole: Constant, key: Any, value: Any) -> None:
    """Set one item of a list or dict; a tuple is replaced by a new one."""
    container = whole.read()
    if isinstance(container, tuple):
        parts: list[Any] = list(container)  # type: ignore[reportUnknownArgumentType]
        parts[key] = value
        whole.write(tuple_like(container, parts))  # type: ignore[reportUnknownArgumentType]
    else:
        container[key] = value


def tuple_like(like: tuple[Any, ...], parts: list[Any]) -> tuple[Any, ...]:
    """Return a tuple of the same class, which may be a named tuple."""
    make: Callable[[list[Any]], Any] = getattr(like, "_make", type(like))
    return make(parts)


def set_attribute(holder: Any, name: str, owner: Constant | None, value: Any) -> None:
    """Set an attribute; a frozen dataclass is replaced in its owner by a new one."""
    parameters: Any = getattr(holder, "__dataclass_params__", None)
    if owner is not None and parameters is not None and parameters.frozen:
        owner.write(dataclasses.replace(owner.read(), **{name: value}))
    else:
        setattr(holder, name, value)


def attribute(holder: Any, name: str, owner: Constant | None) -> Constant:
    """Return access to an attribute of an object, to which `owner` gives access, if anything."""
    reads = partial(getattr, holder, name, None)
    return Constant(reads, partial(set_attribute, holder, name, owner), holder, name)


def item(whole: Constant, key: Any) -> Constant:
    """Return access to an item of a container."""
    return Constant(part_of(whole.read, key), partial(set_part, whole, key))


Changed = Mapping[str, Sequence[str]]
"""How Python values changed: by path, what they were and what they are, for people."""


def change_texts(changed: Mapping[str, tuple[Any, Any]]) -> dict[str, list[str]]:
    """Describe changes of constants, given by path with their old and new fingerprints.

    Example:
        >>> change_texts({"losses": (fingerprint([]), fingerprint([0.5]))})
        {'losses': ['a list of 0', 'a list of 1']}
    """
    found: dict[str, list[str]] = {}
    for path, (old, new) in changed.items():
        same = isinstance(old, This) and isinstance(new, This) and repr(old) == repr(new)
        found[path] = [repr(old), repr(new).replace("one", "another", int(same))]
    return found


def changes_text(changes: Changed) -> str:
    """Return changes as one text.

    Example:
        >>> changes_text({"scale": ["1.0", "2.0"]})
        'scale changed from 1.0 to 2.0'
    """
    return "; ".join(f"{path} changed from {old} to {new}" for path, (old, new) in changes.items())


def too_large_text(paths: Sequence[str]) -> str:
    """Return a warning that not all values of some objects are compared; empty for none.

    Example:
        >>> too_large_text(["settings/words"])[:49]
        'settings/words holds too many values to compare: '
    """
    if not paths:
        return ""
    return (
        f"{', '.join(paths[:SHOWN])} holds too many values to compare: a compiled step does not "
        "see if they change. Keep changing values in a keras.Variable"
    )


def tensor_kept(new: Any) -> bool:
    """Return whether a fingerprint is of a tensor, or of a container whose last item is one."""
    thing = new.thing if isinstance(new, This) else new.last if isinstance(new, Items) else None
    return bool(keras.ops.is_tensor(thing))


def refuse_moving(changed: Mapping[str, tuple[Any, Any]], name: str) -> None:
    """Reject a step that changes Python values itself.

    Args:
        changed: The old and the new fingerprints of the values that it changed, by path.
        name: The step's name, for messages.

    Raises:
        StepError: It changes some: a compiled step would do so only while it is traced.
    """
    for path, (_, new) in changed.items():
        if tensor_kept(new):
            raise StepError(
                f"a tensor of {name} was stored in {path}, but it has no value outside of a "
                "compiled step: return it from the step, which logs it, or assign it to a "
                "keras.Variable that is an attribute of the task"
            )
    if changed:
        changes = changes_text(change_texts(changed))
        raise StepError(
            f"{name} changes Python values ({changes}), which a compiled step does only while it "
            "is traced: store changing values in a keras.Variable"
        )
