"""Values that the user's functions use by name: globals, default arguments and closures.

A compiled step takes them as constants, like the attributes of the task: if one has changed, the
step is compiled again. Names that a function itself assigns (`global`, `nonlocal`) are left out.
"""

import dis
import enum
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from types import (
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
    NoneType,
    SimpleNamespace,
)
from typing import Any, NamedTuple

import numpy as np

from ..core.user_code import (
    Project,
    code_in,
    function_of,
    functions_of,
    is_library,
    namespace_of,
    namespace_of_class,
)
from .constants import Constant

PLAIN = (bool, int, float, complex, str, NoneType, enum.Enum, np.generic)
STEPS = frozenset({"train_step", "eval_step", "predict_step"})
NOT_IN_STEPS = frozenset({"hooks", "datasets", "__init__", "__new__", "__post_init__"})
# With these, code reads attributes whose names it does not contain.
_READS_ANY = frozenset({"vars", "getattr", "attrgetter", "__dict__", "asdict", "astuple", "fields"})
_NO_OBJECTS = (type, ModuleType, FunctionType, MethodType)


@cache
def is_own(kind: type) -> bool:
    """Return whether a class is the user's, and not one of a library, or a plain namespace."""
    return kind in (SimpleNamespace, Namespace) or not is_library(namespace_of_class(kind))


def holds_settings(value: Any) -> bool:
    """Return whether a value is a container or an object of a user's class."""
    kind = type(value)
    return issubclass(kind, (list, tuple, dict)) or (
        not issubclass(kind, _NO_OBJECTS) and is_own(kind)
    )


@dataclass(frozen=True)
class Read:
    """What steps may read by name.

    Attributes:
        attributes: The names of attributes; None for all.
        holders: Containers, and objects of the user's classes, by path.
    """

    attributes: frozenset[str] | None
    holders: dict[str, Constant]


@dataclass(frozen=True)
class Searched:
    """What a search has found. In a copy of the task it is None, since globals are not copied.

    Attributes:
        functions: The functions that were searched.
        kinds: The classes whose methods were searched.
        found: The plain values.
        read: What steps may read, by the classes of the objects that they use.
    """

    functions: tuple[Any, ...]
    kinds: frozenset[type]
    found: dict[str, Constant]
    read: dict[frozenset[type], Read] = field(default_factory=lambda: {})

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
    return _searched(functions, kinds).found


def read_by_steps(functions: Iterable[Any], kinds: Iterable[type], named: Iterable[type]) -> Read:
    """Return what the functions that steps run may read by name.

    Args:
        functions: Functions that steps may call.
        kinds: Classes of which steps may call all methods, such as layers.
        named: Classes of which steps may call methods whose names their code contains. Of tasks,
            also those that override a method of a library, which calls it.

    Example:
        >>> class Settings:
        ...     def __init__(self): self.rate, self.seen = 0.1, 0
        ...     def scaled(self, x): return self.rate * x
        ...     def count(self): self.seen += 1
        >>> settings = Settings()
        >>> read = read_by_steps([lambda x: settings.scaled(x)], [], [Settings])
        >>> sorted(read.attributes), list(read.holders)
        (['rate', 'scaled'], ['<lambda>.settings'])
    """
    named = list(named)
    search = _searched(functions, kinds, named)
    members = [pair for kind in named for pair in _members(kind)]
    known = -1
    while len(search.names) != known:
        known = len(search.names)
        for name, member, is_called in members:
            if is_called or name in search.names:
                search.take(member)
    any_name = not _READS_ANY.isdisjoint(search.names)
    return Read(None if any_name else frozenset(search.names), search.holders)


def _searched(
    functions: Iterable[Any], kinds: Iterable[type], named: Iterable[type] = ()
) -> "_Search":
    functions, kinds = list(functions), list(kinds)
    search = _Search(Project([*map(function_of, functions), *kinds, *named]))
    for kind in kinds:
        search.take_class(kind)
    for function in functions:
        search.take(function)
    return search


def _members(kind: type) -> list[tuple[str, Any, bool]]:
    """Return the names and members of a class, and whether steps call them by other names."""
    bases = kind.__mro__
    task = hasattr(kind, "train_step")
    of_library = {name for base in bases if task and not is_own(base) for name in vars(base)}
    of_library |= STEPS
    return [
        (name, member, name not in NOT_IN_STEPS and (name[:2] == "__" or name in of_library))
        for base in bases
        if is_own(base)
        for name, member in list(vars(base).items())
    ]


class _Space:
    """Gives access to a namespace as the attributes of an object."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.__dict__ = namespace


class _Search:
    """Follows the names in functions to plain values and to other functions."""

    def __init__(self, project: Project) -> None:
        self.found: dict[str, Constant] = {}
        self.holders: dict[str, Constant] = {}
        self.names: set[str] = set()
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
        """Follow the names in a function and in its decorators."""
        for function in functions_of(thing):
            if not self._is_first(function) or not self._owns(function.__globals__):
                continue
            names = _names_in(function.__code__)
            self.names |= names.attributes | names.globals | names.parameters
            for name in names.globals:
                self._take_global(function.__globals__, name, names.attributes)
            self._take_closure(function, names.closed)
            for name in ("__defaults__", "__kwdefaults__"):
                if value := getattr(function, name):
                    self._add(f"{function.__qualname__}.{name}", _named(function, name), value)

    def _take_global(self, space: dict[str, Any], name: str, attributes: frozenset[str]) -> None:
        if name not in space:  # of Python, such as `len`
            return
        value: Any = space[name]
        if issubclass(type(value), ModuleType):
            inner = namespace_of(value)
            if self._owns(inner):
                for attribute in attributes & set(inner):
                    self._take_global(inner, attribute, frozenset())
        elif issubclass(type(value), type):
            self.take_class(value)
        else:
            holder = self._spaces.setdefault(id(space), _Space(space))
            self._add(f"{space.get('__name__')}.{name}", _named(holder, name), value)
            self.take(value)

    def _take_closure(self, function: FunctionType, names: frozenset[str]) -> None:
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            value = _content(cell, self)
            if value is self:
                continue
            if issubclass(type(value), type):
                self.take_class(value)
                continue
            if name in names:
                write = partial(setattr, cell, "cell_contents")
                constant = Constant(partial(_content, cell), write, cell, "cell_contents")
                self._add(f"{function.__qualname__}.{name}", constant, value)
            self.take(value)

    def _add(self, path: str, constant: Constant, value: Any) -> None:
        """Add a value; a function that was made several times closes over several of one name."""
        if issubclass(type(value), PLAIN):
            found = self.found
        elif holds_settings(value):
            found, constant = self.holders, constant.reached(True)
        else:
            return
        unique, number = path, 1
        while (known := found.get(unique)) and known.holder is not constant.holder:
            number += 1
            unique = f"{path} ({number})"
        found[unique] = constant

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
        parameters: The names of its parameters, by which a task may pass what it holds.
    """

    globals: frozenset[str]
    attributes: frozenset[str]
    closed: frozenset[str]
    parameters: frozenset[str]


@lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> _Names:
    kinds = ("GLOBAL", "NAME", "ATTR", "METHOD", "SUPER_ATTR")
    read: dict[str, set[str]] = {kind: set() for kind in kinds}
    stored: set[str] = set()
    for part in code_in(code):
        for instruction in dis.get_instructions(part):
            action, _, kind = instruction.opname.partition("_")
            if action == "LOAD" and kind in read:
                read[kind].add(instruction.argval)
            elif action == "STORE" and kind in ("GLOBAL", "DEREF"):
                stored.add(instruction.argval)
    attributes = frozenset(read["ATTR"] | read["METHOD"] | read["SUPER_ATTR"])
    used = frozenset((read["GLOBAL"] | read["NAME"]) - stored)
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    closed = frozenset(code.co_freevars) - stored
    return _Names(used, attributes, closed, frozenset(parameters))


def _named(holder: Any, name: str) -> Constant:
    """Return a value that functions reach by a name."""
    read, write = partial(getattr, holder, name, None), partial(setattr, holder, name)
    return Constant(read, write, holder, name)


def _content(cell: CellType, default: Any = None) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return default
