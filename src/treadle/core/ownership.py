"""Which code is the user's own, decided by what belongs to the task, wherever libraries lie.

A task's own code is what lies in the project folders of its class, of the bases of its class, and
of the functions that it was made with. Python's own modules, installed distributions, and what
Treadle itself is built on never are, also where they lie inside a project folder. Modules are
known here by their namespaces (their `__dict__`): attributes of a lazy module are never asked for,
since that would import something.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final

LIBRARIES: Final = ("treadle", "keras", "tensorflow", "jax", "jaxlib", "torch", "numpy")
"""What Treadle is built on, by name: a copy of Keras may lie in the project folder."""

MARKERS: Final = (".git", "pyproject.toml")
"""The nearest folder above a task's code that holds one of these is its project folder."""

STANDARD_LIBRARY: Final = Path(os.__file__).parent
INSTALLED_INTO: Final = frozenset(("site-packages", "dist-packages"))
"""Python's own names of folders for distributions."""


class Project:
    """The code that belongs to a task.

    Args:
        roots: What the task is made of: its class, and the functions that it was made with.

    Attributes:
        folders: The project folders.
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
    """Return a module's `__dict__` without importing what a lazy module stands for."""
    return object.__getattribute__(module, "__dict__")


def namespace_of_class(kind: type) -> Mapping[str, Any]:
    """Return the namespace of the module that defines a class; empty where it is not known."""
    module = sys.modules.get(kind.__module__)
    if module is not None:
        return namespace_of(module)
    functions = (part for part in vars(kind).values() if isinstance(part, FunctionType))
    return next((function.__globals__ for function in functions), {})


def is_library(namespace: Mapping[str, Any]) -> bool:
    """Return whether a module is Python's own, of an installed distribution, or built in."""
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
        # A notebook has no file. Its own modules lie in the folder that it runs in.
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
    """Return the names of the files and folders that installers put into a folder.

    `pip install --target` makes such folders anywhere, also out of a project folder.
    """
    records = folder.glob("*.dist-info/RECORD")
    lines = (line for record in records for line in record.read_text("utf-8").splitlines())
    return frozenset(line.partition(",")[0].partition("/")[0] for line in lines)


@cache
def _project_folder(root: Path) -> Path:
    """Return the project that a folder of imports is part of, or the folder itself."""
    for folder in (root, *root.parents):
        if any((folder / marker).exists() for marker in MARKERS):
            return folder
    return root


def _namespaces_of(root: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the namespaces of the modules in which a class and its bases, or a function, stand."""
    if isinstance(root, type):
        yield from map(namespace_of_class, root.__mro__)
    elif isinstance(root, FunctionType):
        yield root.__globals__
