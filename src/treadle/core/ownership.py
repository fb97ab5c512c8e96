"""Ownership of code: which modules belong to the user's project, and which to libraries.

A task's own code is in the project folders of its class, of its base classes, and of the functions
among its constructor arguments. Modules of Python itself, of installed distributions and of the
libraries that Treadle is built on are never the user's own, even inside a project folder. Modules
are represented by their namespaces (their `__dict__`), because accessing an attribute of a lazy
module would import it.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final

LIBRARIES: Final = ("treadle", "keras", "tensorflow", "jax", "jaxlib", "torch", "numpy")
"""Treadle and its libraries, by name, since a copy of Keras may be in the project folder."""

MARKERS: Final = (".git", "pyproject.toml")
"""The project folder is the nearest folder above a task's code that contains one of these."""

STANDARD_LIBRARY: Final = Path(os.__file__).parent
INSTALLED_INTO: Final = frozenset(("site-packages", "dist-packages"))
"""Names of the folders into which Python installs distributions."""


class Project:
    """The code that belongs to a task.

    Args:
        roots: The task's class, and the functions among its constructor arguments.

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
