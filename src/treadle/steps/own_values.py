"""Plain values that the user's functions use by name: globals, and variables that they close over.

A compiled step takes them as constants, like the attributes of the task: if one has changed, the
step is compiled again. Names that a function itself assigns (`global`, `nonlocal`) are left out.
"""

import dis
import enum
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from types import CellType, CodeType, FunctionType, ModuleType, NoneType
from typing import Any, NamedTuple

import numpy as np

from ..core.user_code import Project, code_in, function_of, namespace_of, namespace_of_class
from .constants import Constant

PLAIN = (bool, int, float, str, NoneType, enum.Enum, np.generic)


@dataclass(frozen=True)
class Searched:
    """What a search has found. In a copy of the task it is None, since globals are not copied.

    Attributes:
        functions: The functions that were searched.
        kinds: The classes whose methods were searched.
        found: The plain values.
    """

    functions: tuple[Any, ...]
    kinds: frozenset[type]
    found: dict[str, Constant]

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Replace this object with None in copies and pickles."""
        return NoneType, ()


def own_values(functions: Iterable[Any], kinds: Iterable[type]) -> dict[str, Constant]:
    """Return the plain values that functions and methods of the user's project use by name.

    Args:
        functions: Functions, perhaps decorated or bound. What they call by name is included.
        kinds: Classes whose methods are included.

    Returns:
        `module.NAME` to a global, `function.NAME` to a variable that the function closes over.

    Example:
        >>> rate = 0.5
        >>> def outer(scale): return lambda x: scale * x
        >>> [constant.read() for constant in own_values([outer(2)], []).values()]
        [2]
    """
    functions, kinds = list(functions), list(kinds)
    search = _Search(Project([*map(function_of, functions), *kinds]))
    for kind in kinds:
        search.take_class(kind)
    for function in functions:
        search.take(function)
    return search.found


class _Space:
    """Gives access to a namespace as the attributes of an object."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.__dict__ = namespace


class _Search:
    """Follows the names in functions to plain values and to other functions."""

    def __init__(self, project: Project) -> None:
        self.found: dict[str, Constant] = {}
        self._project = project
        self._owned: dict[int, bool] = {}
        self._seen: set[int] = set()
        self._spaces: dict[int, _Space] = {}

    def take_class(self, kind: type) -> None:
        """Follow the methods and properties of a class and of its base classes."""
        for base in kind.__mro__:
            if self._owns(namespace_of_class(base)) and self._is_first(base):
                for member in list(vars(base).values()):
                    self.take(member)

    def take(self, thing: Any) -> None:
        """Follow the names in a function, which may be decorated."""
        function = function_of(thing)
        if function is None or not self._is_first(function):
            return
        if self._owns(function.__globals__):
            names = _names_in(function.__code__)
            for name in names.globals:
                self._take_global(function.__globals__, name, names.attributes)
            self._take_closure(function, names.closed)

    def _take_global(self, space: dict[str, Any], name: str, attributes: frozenset[str]) -> None:
        if name not in space:  # of Python, such as `len`
            return
        value: Any = space[name]
        if issubclass(type(value), PLAIN):
            holder = self._spaces.setdefault(id(space), _Space(space))
            path = f"{space.get('__name__')}.{name}"
            write = partial(setattr, holder, name)
            self._add(path, Constant(partial(getattr, holder, name, None), write, holder, name))
        elif issubclass(type(value), ModuleType):
            inner = namespace_of(value)
            if self._owns(inner):
                for attribute in attributes & set(inner):
                    self._take_global(inner, attribute, frozenset())
        elif issubclass(type(value), type):
            self.take_class(value)
        else:
            self.take(value)

    def _take_closure(self, function: FunctionType, names: frozenset[str]) -> None:
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            value = _content(cell, self)
            if value is self:
                continue
            if issubclass(type(value), PLAIN) and name in names:
                path = f"{function.__qualname__}.{name}"
                write = partial(setattr, cell, "cell_contents")
                self._add(path, Constant(partial(_content, cell), write, cell, "cell_contents"))
            elif issubclass(type(value), type):
                self.take_class(value)
            else:
                self.take(value)

    def _add(self, path: str, constant: Constant) -> None:
        """Add a value; a function that was made several times closes over several of one name."""
        unique, number = path, 1
        while (known := self.found.get(unique)) and known.holder is not constant.holder:
            number += 1
            unique = f"{path} ({number})"
        self.found[unique] = constant

    def _owns(self, namespace: Any) -> bool:
        if id(namespace) not in self._owned:
            self._owned[id(namespace)] = self._project.owns(namespace)
        return self._owned[id(namespace)]

    def _is_first(self, thing: Any) -> bool:
        new = id(thing) not in self._seen
        self._seen.add(id(thing))
        return new


class _Names(NamedTuple):
    """The names that a function reads and does not assign.

    Attributes:
        globals: The names of globals.
        attributes: The names of attributes of anything.
        closed: The names of variables that it closes over.
    """

    globals: frozenset[str]
    attributes: frozenset[str]
    closed: frozenset[str]


@lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> _Names:
    read: dict[str, set[str]] = {"GLOBAL": set(), "NAME": set(), "ATTR": set(), "METHOD": set()}
    stored: set[str] = set()
    for part in code_in(code):
        for instruction in dis.get_instructions(part):
            action, _, kind = instruction.opname.partition("_")
            if action == "LOAD" and kind in read:
                read[kind].add(instruction.argval)
            elif action == "STORE" and kind in ("GLOBAL", "DEREF"):
                stored.add(instruction.argval)
    attributes = frozenset(read["ATTR"] | read["METHOD"])
    used = frozenset((read["GLOBAL"] | read["NAME"]) - stored)
    return _Names(used, attributes, frozenset(code.co_freevars) - stored)


def _content(cell: CellType, default: Any = None) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return default
