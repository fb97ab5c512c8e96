"""Comparing the entries of a register of private names with the installed versions."""

import ast
from pathlib import Path
from typing import Any

import treadle
from treadle.core.internals import Attributes

SOURCES = Path(treadle.__file__).parent
REGISTERS = ("keras_internals.py", "patches.py")


def missing(entry: Attributes, examples: list[Any]) -> str:
    """Return which of some objects do not have private attributes, or an empty string."""
    for name in entry.names:
        without = [type(example).__name__ for example in examples if not hasattr(example, name)]
        if not examples or without:
            return (
                f"{' and '.join(without) or 'nothing'} has no {name}, which Treadle uses "
                f"({entry.reason}): see {entry.module}"
            )
    return ""


def private_names_used() -> dict[str, str]:
    """Return each private attribute that Treadle reads of other objects, and where it does."""
    trees = {path: ast.parse(path.read_text()) for path in SOURCES.rglob("*.py")}
    own = {name for tree in trees.values() for node in ast.walk(tree) for name in _defined(node)}
    found: dict[str, str] = {}
    for path, tree in trees.items():
        for node in ast.walk(tree) if path.name not in REGISTERS else ():
            name = _read(node)
            if name.startswith("_") and not name.startswith("__") and name not in own:
                found[name] = f"{path.relative_to(SOURCES)}:{node.lineno}"  # type: ignore[attr-defined]
    return found


def _read(node: ast.AST) -> str:
    """Return the name of an attribute that a node reads or sets, or an empty string."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        accesses = node.func.id in ("getattr", "hasattr", "setattr") and len(node.args) > 1
        if accesses and isinstance(node.args[1], ast.Constant):
            return str(node.args[1].value)
    return ""


def _defined(node: ast.AST) -> list[str]:
    """Return the names that a node of Treadle's own defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        on_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        return [node.attr] if on_self else []
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    return []
