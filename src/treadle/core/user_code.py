"""The user's code: which modules belong to the user, what functions refer to, and hashes of it.

A task's own code is in the project folders of its class, of its base classes, and of the functions
among its constructor arguments. Modules of Python itself, of installed distributions and of the
libraries that Treadle is built on are never the user's own, even inside a project folder. Modules
are represented by their namespaces (their `__dict__`), because accessing an attribute of a lazy
module would import it.
"""

import ast
import hashlib
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

from ..errors import listed

PLAIN: Final = (bool, int, float, str, type(None))
"""The types of values that are compared as they are."""

_NAMED = 5  # functions and classes listed in a message

LIBRARIES: Final = ("treadle", "keras", "tensorflow", "jax", "jaxlib", "torch", "numpy")
"""Treadle and its libraries, by name, since a copy of Keras may be in the project folder."""

MARKERS: Final = (".git", "pyproject.toml")
"""The project folder is the nearest folder above a task's code that contains one of these."""

STANDARD_LIBRARY: Final = Path(os.__file__).parent
INSTALLED_INTO: Final = frozenset(("site-packages", "dist-packages"))
"""Names of the folders into which Python installs distributions."""

WRAPPERS: Final = ("__wrapped__", "__func__", "python_function")
"""Attributes that hold the wrapped function; the last one is that of `tf.function`."""

importing: list[Path] = []
"""Files that a command executes to get their task, which must not train meanwhile."""

DEEPEST: Final = 10
"""At most this many wrappers are unwrapped, since a wrapper may refer to itself."""


def unfit_parameters(function: Any, count: int) -> str | None:
    """Return the parameters of a function that cannot be called with `count` arguments, else None.

    Example:
        >>> unfit_parameters(lambda loop, step: None, 1)
        'loop, step'
    """
    try:
        signature = inspect.signature(function, follow_wrapped=False)  # of what is called
    except (TypeError, ValueError):  # of a callable without one
        return None
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return ", ".join(signature.parameters) or "no arguments"
    return None


def code_of(task: Any) -> dict[str, str]:
    """Return short hashes of the user's code that a task consists of.

    Included are the methods of its class and base classes, the functions among its constructor
    arguments, and the functions, classes and plain values that these refer to by name, if they are
    in the task's own project (see `Project`). Comments and whitespace are ignored. Code without
    an available source, for example from an interactive shell, is left out.

    Returns:
        Hashes by qualified name: `{"Digits.train_step": "1b4f0e9851971998"}`.
    """
    made = getattr(task, "_made_with", None)  # a `MadeWith`
    functions = () if made is None else made.functions
    code = _Code(Project([type(task), *map(function_of, functions)]))
    code.take_class(type(task))
    for function in functions:
        code.take(function)
    return {name: "+".join(sorted(hashes)) for name, hashes in sorted(code.found.items())}


def changed_code(before: Mapping[str, str], now: Mapping[str, str], since: str = "this run") -> str:
    """Return a sentence on the changes between two results of `code_of`, or an empty string.

    Args:
        before: The earlier result.
        now: The later result.
        since: The time of the earlier result, for the sentence.

    Example:
        >>> changed_code({"M.train_step": "1b4f"}, {"M.train_step": "77c2"})[:51]
        'the code of M.train_step changed since this run, so'
    """
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if not before or not now or not names:
        return ""
    return (
        f"the code of {listed(names, _NAMED)} changed since {since}, so its results are those of "
        "other code: fresh=True (--fresh) trains from scratch"
    )


class Project:
    """The code that belongs to a task.

    Args:
        roots: The task's class, and the functions among its constructor arguments.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        places = [import_root(space) for root in roots for space in _namespaces_of(root)]
        self.folders = tuple(
            dict.fromkeys(_project_folder(place) for place in places if place is not None)
        )

    def owns(self, namespace: Mapping[str, Any]) -> bool:
        """Return whether the module with this namespace is the user's own."""
        if namespace.get("__name__") == "__main__":
            return True  # a script, or a notebook, whose cells have no file
        place = import_root(namespace)
        return place is not None and any(place.is_relative_to(folder) for folder in self.folders)


def namespace_of(module: ModuleType) -> dict[str, Any]:
    """Return a module's `__dict__` without triggering the import of a lazy module."""
    return object.__getattribute__(module, "__dict__")


def namespace_of_class(kind: type) -> Mapping[str, Any]:
    """Return the namespace of the module that defines a class, or an empty one if unknown."""
    module = sys.modules.get(kind.__module__)
    if module is not None:
        return namespace_of(module)
    functions = (part for part in vars(kind).values() if isinstance(part, FunctionType))
    return next((function.__globals__ for function in functions), {})


def is_library(namespace: Mapping[str, Any]) -> bool:
    """Return whether a module belongs to Python itself or to an installed distribution."""
    return namespace.get("__name__") != "__main__" and import_root(namespace) is None


def import_root(namespace: Mapping[str, Any]) -> Path | None:
    """Return the folder from which a module was imported; None for a library.

    Example:
        >>> import keras
        >>> import_root(vars(keras)) is None
        True
    """
    spec = namespace.get("__spec__")
    name: str = getattr(spec, "name", None) or namespace.get("__name__") or ""
    if name.partition(".")[0] in LIBRARIES:
        return None
    file = namespace.get("__file__") or getattr(spec, "origin", None)
    if not isinstance(file, str) or not file.endswith((".py", ".pyc")):
        # A notebook has no file. The modules next to it are in the folder in which it runs.
        return Path.cwd() if name == "__main__" and file is None else None
    code = Path(file).absolute()
    path = code.parent if code.stem == "__init__" else code.with_suffix("")
    if name == "__main__" or name.rpartition(".")[2] != path.name:
        path = path.parent  # of a script, or of a file that was imported under another name
    else:
        for part in reversed(name.split(".")):
            if path.name != part:
                break
            path = path.parent
    installed = (
        path == STANDARD_LIBRARY
        or not INSTALLED_INTO.isdisjoint(path.parts)
        or code.relative_to(path).parts[0] in _installed_into(path)
    )
    return None if installed else path


@cache
def _installed_into(folder: Path) -> frozenset[str]:
    """Return the names of the files and folders in a folder that were installed by pip.

    `pip install --target` can install into any folder, including a project folder.
    """
    records = folder.glob("*.dist-info/RECORD")
    lines = (line for record in records for line in record.read_text("utf-8").splitlines())
    return frozenset(line.partition(",")[0].partition("/")[0] for line in lines)


@cache
def _project_folder(root: Path) -> Path:
    """Return the project folder that contains an import root, or the root itself."""
    for folder in (root, *root.parents):
        if any((folder / marker).exists() for marker in MARKERS):
            return folder
    return root


def _namespaces_of(root: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the namespaces of the modules that define a class and its bases, or a function."""
    if isinstance(root, type):
        yield from map(namespace_of_class, root.__mro__)
    elif isinstance(root, FunctionType):
        yield root.__globals__


def function_of(thing: Any) -> FunctionType | None:
    """Return the Python function inside a method, a decorated function, a property or a partial.

    Attributes are looked up statically, because accessing one would import a lazy object.

    Example:
        >>> def double(x): return 2 * x
        >>> function_of(partial(double, 3)).__name__
        'double'
    """
    functions = functions_of(thing)
    return functions[-1] if functions else None


def functions_of(thing: Any) -> list[FunctionType]:
    """Return the Python functions of a callable that others wrap, from the outermost inwards.

    Example:
        >>> import functools
        >>> def double(x): return 2 * x
        >>> @functools.wraps(double)
        ... def wrapper(x): return double(x)
        >>> [function.__code__.co_name for function in functions_of(wrapper)]
        ['wrapper', 'double']
    """
    found: list[FunctionType] = []
    for _ in range(DEEPEST):
        kind = type(thing)
        if issubclass(kind, type | ModuleType):
            break
        if issubclass(kind, partial):
            thing = thing.func
            continue
        if issubclass(kind, property):
            thing = thing.fget
            continue
        if issubclass(kind, FunctionType):
            found.append(thing)
        for name in WRAPPERS:
            if inspect.getattr_static(thing, name, None) is not None:
                thing = getattr(thing, name)
                break
        else:
            break
    return found


def closure_of(function: FunctionType) -> dict[str, Any]:
    """Return the variables that a function closes over, by name, without unassigned ones.

    Example:
        >>> def outer(scale): return lambda x: scale * x
        >>> closure_of(outer(2))
        {'scale': 2}
    """
    found: dict[str, Any] = {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    return found


def used_by(function: FunctionType) -> dict[str, Any]:
    """Return the globals and closed-over variables that a function uses, by name.

    Example:
        >>> def outer(scale): return lambda x: print(scale * x)
        >>> sorted(used_by(outer(2)))
        ['scale']
    """
    names = {name for code in code_in(function.__code__) for name in code.co_names}
    space = function.__globals__
    return {name: space[name] for name in names if name in space} | closure_of(function)


def name_in(functions: Iterable[Any], wanted: Callable[[Any], bool]) -> str:
    """Return the name by which functions use an object, or functions of the user that they use.

    Args:
        functions: The functions.
        wanted: Whether an object is the one.

    Returns:
        The name; empty if there is none.

    Example:
        >>> def outer(scale): return lambda x: scale * x
        >>> name_in([outer(2)], lambda thing: thing == 2)
        'scale'
    """
    waiting = [inner for function in functions for inner in functions_of(function)]
    seen = set(waiting)
    for function in waiting:
        used = used_by(function)
        for name, thing in used.items():
            if wanted(thing):
                return name
        inner = [f for thing in used.values() for f in functions_of(thing) if f not in seen]
        waiting += [f for f in inner if not is_library(f.__globals__)]
        seen.update(inner)
    return ""


def code_in(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of its inner functions.

    Example:
        >>> def outer(): return lambda x: x
        >>> [code.co_name for code in code_in(outer.__code__)]
        ['outer', '<lambda>']
    """
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_in(constant)


class _Code:
    """Collects hashes of a project's code, following the names that it refers to."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self.found: dict[str, set[str]] = {}  # a set, since two modules may use the same name
        self._seen: set[int] = set()

    def take_class(self, kind: type) -> None:
        """Add the methods and plain attributes of a class and of its base classes."""
        for base in kind.__mro__:
            if not self._project.owns(namespace_of_class(base)) or not self._first(base):
                continue
            for name, member in list(vars(base).items()):
                if issubclass(type(member), PLAIN) and not name.startswith("__"):
                    self._take_value(f"{base.__qualname__}.{name}", member)
                else:
                    self.take(member)

    def take(self, thing: Any) -> None:
        """Add a function, unwrapped if needed, and everything that it refers to by name."""
        for function in functions_of(thing):
            if self._first(function) and self._project.owns(function.__globals__):
                self._take_function(function)

    def _take_function(self, function: FunctionType) -> None:
        try:
            source = inspect.getsource(function.__code__)  # of a function, it is the wrapped one's
        except (OSError, TypeError):
            return
        self._found(function.__qualname__, _without_comments(source))
        names = {name for code in code_in(function.__code__) for name in code.co_names}
        for name, value in used_by(function).items():
            if issubclass(type(value), ModuleType):
                parts = namespace_of(value)
                if self._project.owns(parts):
                    for part in names & set(parts):
                        self._take_used(f"{name}.{part}", parts[part])
            else:
                self._take_used(name, value)

    def _take_used(self, name: str, value: Any) -> None:
        kind = type(value)  # isinstance would access `__class__` of a lazy object
        if issubclass(kind, type):
            self.take_class(value)
        elif issubclass(kind, PLAIN):
            self._take_value(name, value)
        else:
            self.take(value)

    def _take_value(self, name: str, value: Any) -> None:
        if not name.startswith("__"):  # such as __file__
            self._found(name, repr(value))

    def _found(self, name: str, text: str) -> None:
        self.found.setdefault(name, set()).add(hashlib.sha256(text.encode()).hexdigest()[:16])

    def _first(self, thing: Any) -> bool:
        new = id(thing) not in self._seen
        self._seen.add(id(thing))
        return new


def _without_comments(source: str) -> str:
    try:
        return ast.unparse(ast.parse(textwrap.dedent(source)))
    except SyntaxError:  # the source of a lambda is only a part of a statement
        return source


OF_TASKS = ("_made_with", "_own_values")
"""Slots of `Task`, which are no state."""


def attributes_of(holder: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, also those in `__slots__`.

    Example:
        >>> class Point:
        ...     __slots__ = ("x",)
        >>> point = Point()
        >>> point.x = 3
        >>> attributes_of(point)
        {'x': 3}
    """
    found = dict(getattr(holder, "__dict__", {}))
    for base in type(holder).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):  # mangled by Python
                name = f"_{base.__name__.lstrip('_')}{name}"
            if not name.startswith("__") and name not in OF_TASKS and hasattr(holder, name):
                found.setdefault(name, getattr(holder, name))
    return found
