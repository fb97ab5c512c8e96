"""Comparing the entries of a register of private names with the installed versions."""

import ast
import inspect
from pathlib import Path
from typing import Any

import treadle
from treadle.core.internals import Attribute, Internal

SOURCES = Path(treadle.__file__).parent
REGISTERS = ("keras_internals.py", "patches.py")
LINKS = tuple(
    f"https://github.com/{name}/"
    for name in ("keras-team/keras", "tensorflow/tensorflow", "pytorch/pytorch", "jax-ml/jax")
)


def difference(internal: Internal) -> str:
    """Return how a private part of a library differs from its entry, or an empty string."""
    found = internal.resolve()
    if missing := [name for name in internal.members if not hasattr(found, name)]:
        return f"{internal.place} has no {', '.join(missing)}: see its uses in Treadle"
    signature = _parameters(found) if internal.signature else ""
    if signature != internal.signature:
        return (
            f"{internal.place} takes {signature}, and Treadle was written for "
            f"{internal.signature}: see its uses in Treadle"
        )
    return ""


def _parameters(function: Any) -> str:
    """Return a function's parameters with their defaults, without annotations."""
    empty = inspect.Signature.empty
    found = inspect.signature(function)
    parameters = [x.replace(annotation=empty) for x in found.parameters.values()]
    return str(found.replace(parameters=parameters, return_annotation=empty))


def missing(name: str, attribute: Attribute, examples: list[Any]) -> str:
    """Return which of some objects do not have a private attribute, or an empty string."""
    without = [type(example).__name__ for example in examples if not hasattr(example, name)]
    if not examples or without:
        return (
            f"{' and '.join(without) or attribute.owner} has no {name}, which Treadle uses "
            f"({attribute.reason}): see {attribute.upstream}"
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
