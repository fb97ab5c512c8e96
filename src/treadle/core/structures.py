"""Structures of arrays: nested dicts, lists, tuples, named tuples and dataclass instances.

All that crosses a boundary (batches, results, outputs) is flattened and packed by these functions,
which keep the order of keys and the classes of containers. Frameworks get flat lists of leaves: the
trees of JAX, TensorFlow and Keras sort the keys of dicts. None is a part of the structure, and no
leaf.
"""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from operator import methodcaller
from typing import Any, NamedTuple

Path = tuple[Any, ...]
OPAQUE: set[type] = set()
"""Dataclasses that are leaves."""


class _Kind(NamedTuple):
    """How containers of a class are taken apart and made again."""

    keys: Callable[[Any], Iterable[Any]]
    parts: Callable[[Any], Iterable[Any]]
    made: Callable[[Any, list[Any]], Any]
    is_dict: bool = False


def flatten(structure: Any) -> list[Any]:
    """Return the leaves of a structure, in the order of its keys.

    Example:
        >>> flatten({"z": 1, "b": (2, None)})
        [1, 2]
    """
    kind = _kind(type(structure))
    if kind is None:
        return [] if structure is None else [structure]
    leaves: list[Any] = []
    _extend(leaves, kind.parts(structure))
    return leaves


def _extend(leaves: list[Any], parts: Iterable[Any]) -> None:
    for part in parts:
        kind = _kind(type(part))
        if kind is not None:
            _extend(leaves, kind.parts(part))
        elif part is not None:
            leaves.append(part)


def pack(structure: Any, leaves: Iterable[Any]) -> Any:
    """Return a structure like this one with other leaves, in the order of `flatten`.

    Example:
        >>> pack({"z": 1, "b": (2, None)}, "xy")
        {'z': 'x', 'b': ('y', None)}
    """
    following = iter(leaves)
    kind = _kind(type(structure))
    if kind is None:
        return None if structure is None else next(following)
    return _packed(structure, kind, following)


def _packed(structure: Any, kind: _Kind, following: Iterator[Any]) -> Any:
    parts = [
        _packed(part, inner, following)
        if (inner := _kind(type(part))) is not None
        else (None if part is None else next(following))
        for part in kind.parts(structure)
    ]
    return kind.made(structure, parts)


def mapped(function: Callable[..., Any], structure: Any, *others: Any) -> Any:
    """Return a structure like the first one, with the results of a function of its leaves.

    Args:
        function: A function of a leaf of each structure.
        structure: The first structure.
        *others: Structures like the first one.
    """
    if not others:
        return pack(structure, [function(x) for x in flatten(structure)])
    columns = [flatten(structure), *(aligned(other, structure) for other in others)]
    return pack(structure, [function(*leaves) for leaves in zip(*columns, strict=True)])


def outline(structure: Any) -> Any:
    """Return a structure like this one, to `pack` other leaves, that keeps no leaf in memory."""
    return mapped(lambda _: 0, structure)


def with_paths(structure: Any) -> list[tuple[Path, Any]]:
    """Return `(path, leaf)` of every leaf, in the order of `flatten`.

    Example:
        >>> with_paths({"z": 1, "b": (2, None)})
        [(('z',), 1), (('b', 0), 2)]
    """
    kind = _kind(type(structure))
    if kind is None:
        return [] if structure is None else [((), structure)]
    pairs = zip(kind.keys(structure), kind.parts(structure), strict=True)
    return [((key, *path), leaf) for key, part in pairs for path, leaf in with_paths(part)]


def parts(structure: Any) -> list[tuple[Any, Any]] | None:
    """Return `(key, part)` of the parts of a container, or None for a leaf.

    Example:
        >>> parts({"z": 1, "b": (2, None)}), parts(1)
        ([('z', 1), ('b', (2, None))], None)
    """
    kind = _kind(type(structure))
    if kind is None:
        return None
    return list(zip(kind.keys(structure), kind.parts(structure), strict=True))


def rebuilt(cls: type, pairs: Sequence[tuple[Any, Any]]) -> Any:
    """Return a container of a class with these parts by key; its `__init__` is not called.

    Raises:
        ValueError: Instances of the class have other keys, or are no containers.
    """
    kind, keys, values = _kind(cls), [key for key, _ in pairs], [part for _, part in pairs]
    if kind is None or issubclass(cls, UserDict):
        raise ValueError(f"a {cls.__name__} cannot hold {', '.join(map(repr, keys))}")
    if issubclass(cls, tuple):
        new: Any = tuple.__new__(cls, values)
    else:
        base: Any = cls if issubclass(cls, (dict, list)) else object
        new = base.__new__(cls)
    if kind.is_dict:
        new.update(pairs)
    elif kind.keys is _positions:
        new = kind.made(new, values)
    elif list(kind.keys(new)) != keys:
        raise ValueError(f"a {cls.__name__} has the fields {', '.join(kind.keys(new))}")
    elif not issubclass(cls, tuple):
        for key, part in pairs:
            object.__setattr__(new, key, part)
    return new


def part_at(structure: Any, path: Path) -> Any:
    """Return the part of a structure at a path."""
    for key in path:
        kind = _kind(type(structure))
        assert kind is not None
        pairs = zip(kind.keys(structure), kind.parts(structure), strict=True)
        structure = dict(pairs)[key]
    return structure


def form(structure: Any, of_leaf: Callable[[Any], Any]) -> Any:
    """Return a key that is equal for structures of equal keys and classes, and equal leaves.

    Args:
        structure: The structure.
        of_leaf: Returns the key of a leaf.
    """
    kind = _kind(type(structure))
    if kind is None:
        return None if structure is None else of_leaf(structure)
    # Leaves without a call of this function: each step calls it.
    parts = [
        form(part, of_leaf) if part is None or _kind(type(part)) is not None else of_leaf(part)
        for part in kind.parts(structure)
    ]
    return type(structure), *zip(kind.keys(structure), parts, strict=True)


def aligned(structure: Any, like: Any) -> list[Any]:
    """Return the leaves of a structure in the order of the keys of another one.

    Raises:
        ValueError: The structures differ in more than the order of keys. The message is a clause.

    Example:
        >>> aligned({"z": 1, "b": 2}, like={"b": 0, "z": 0})
        [2, 1]
        >>> aligned({"z": (1, 2)}, like={"z": 0})
        Traceback (most recent call last):
        ValueError: ['z'] is an array in one, and a tuple of 2 in the other
    """
    leaves: list[Any] = []
    _align(leaves, structure, like, ())
    return leaves


def _align(leaves: list[Any], structure: Any, like: Any, path: Path) -> None:
    kind, expected = _kind(type(structure)), _kind(type(like))
    if kind is None and expected is None and (structure is None) == (like is None):
        if structure is not None:
            leaves.append(structure)
        return
    if kind is not None and expected is not None:
        keys, wanted = list(kind.keys(structure)), list(expected.keys(like))
        same = (kind.is_dict and expected.is_dict) or type(structure) is type(like)
        if same and len(keys) == len(wanted) and set(keys) == set(wanted):
            parts = dict(zip(keys, kind.parts(structure), strict=True))
            for key, part in zip(wanted, expected.parts(like), strict=True):
                _align(leaves, parts[key], part, (*path, key))
            return
    raise ValueError(
        f"{text_of(path) or 'it'} is {_described(like)} in one, and {_described(structure)} in the "
        "other"
    )


def text_of(path: Path) -> str:
    """Return a path as in Python code.

    Example:
        >>> text_of(("labels", 0))
        "['labels'][0]"
    """
    return "".join(f"[{key!r}]" for key in path)


def _described(structure: Any) -> str:
    kind = _kind(type(structure))
    if kind is None:
        return "None" if structure is None else "an array"
    keys, name = list(kind.keys(structure)), type(structure).__name__
    if isinstance(structure, (list, tuple)):
        return f"a {name} of {len(keys)}"
    return f"a {name} with {', '.join(map(repr, keys)) or 'no keys'}"


@lru_cache(maxsize=4096)
def _kind(cls: type) -> _Kind | None:
    """Return how containers of a class are taken apart, or None for the class of a leaf."""
    if issubclass(cls, (dict, UserDict)):
        return _Kind(list, methodcaller("values"), _dict if cls is dict else _mapping, True)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return _Kind(_fields, iter, lambda old, parts: tuple.__new__(type(old), parts))
    if issubclass(cls, list) and cls is not list:
        return _Kind(_positions, iter, _list)
    if issubclass(cls, (list, tuple)):
        return _Kind(_positions, iter, lambda old, parts: type(old)(parts))
    is_array = hasattr(cls, "__array__") or hasattr(cls, "dtype")
    if dataclasses.is_dataclass(cls) and not is_array and cls not in OPAQUE:
        names = [field.name for field in dataclasses.fields(cls)]
        return _Kind(lambda _: names, lambda old: [getattr(old, name) for name in names], _instance)
    return None


def _positions(structure: Sequence[Any]) -> Iterable[int]:
    return range(len(structure))


def _fields(structure: Any) -> Iterable[str]:
    return structure._fields


def _dict(old: Any, parts: list[Any]) -> Any:
    return dict(zip(old, parts, strict=True))


def _mapping(old: Any, parts: list[Any]) -> Any:
    new = copy.copy(old)  # keeps what else it holds, such as the factory of a defaultdict
    for key, part in zip(old, parts, strict=True):
        new[key] = part
    return new


def _list(old: Any, parts: list[Any]) -> Any:
    new = copy.copy(old)
    new[:] = parts
    return new


def _instance(old: Any, parts: list[Any]) -> Any:
    new = copy.copy(old)
    for field, part in zip(dataclasses.fields(old), parts, strict=True):
        object.__setattr__(new, field.name, part)  # it may be frozen
    return new
