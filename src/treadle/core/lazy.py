"""Public names of a package that are imported when they are first used (PEP 562)."""

import ast
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import resolve_name
from typing import Any

from .habits import no_attribute


def lazy(
    package: str, habits: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package that imports names at first use.

    The names are those that its source imports under `if TYPE_CHECKING`, where type checkers read
    them: no other list of them is needed.

    Args:
        package: The name of the package, which calls this while it is imported.
        habits: What to write for names of other libraries.

    Example:
        >>> import treadle.testing
        >>> found, _, names = lazy("treadle.testing")
        >>> "agree" in names, found("agree").__module__
        (True, 'treadle.testing.trace')
    """
    modules = _imported(package)

    def get(name: str) -> Any:
        if name not in modules:
            raise no_attribute(f"module {package!r}", name, habits or {})
        return getattr(import_module(modules[name]), name)

    return get, lambda: sorted([*vars(sys.modules[package]), *modules]), sorted(modules)


def _imported(package: str) -> dict[str, str]:
    """Return the modules that a package imports names from for type checkers, by these names."""
    loader: Any = sys.modules[package].__loader__
    return {
        alias.name: resolve_name("." * node.level + (node.module or ""), package)
        for block in ast.parse(loader.get_source(package)).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
