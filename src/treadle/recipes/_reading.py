"""Find the tasks in a file by parsing its source, without running it or importing a framework."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, did_you_mean
from ._settings import Parameter, read_given, read_settings
from ._signature import parameters_in

BASES = ("Task", "Supervised")
MAKERS = ("task", *BASES)


@dataclass(frozen=True)
class Recipe:
    """A task in a file.

    Attributes:
        name: Name on the command line and in directory names.
        description: The first line of the docstring.
        path: The file.
        target: Name of the class, function or object in the file.
        parameters: The settings; None if they cannot be read from the file.
        backend: The only backend that the task supports, or None for any.
        offered: Whether the source shows that this is a task. Other classes and functions can only
            be chosen by name.
        is_class: Whether it is a class, not a function or an object.
        module: Dotted module name if the recipe comes with Treadle, else None.
    """

    name: str
    description: str
    path: Path
    target: str
    parameters: tuple[Parameter, ...] | None
    backend: str | None
    offered: bool = True
    is_class: bool = False
    module: str | None = None

    @property
    def source(self) -> str:
        """The argument for `treadle run`: the recipe's name, or `file.py:Task` with full path."""
        return self.name if self.module else f"{self.path}:{self.target}"

    def settings(self, given: Sequence[str]) -> dict[str, Any]:
        """Return all settings of the task: those given as `name=value`, and the known defaults.

        Raises:
            ConfigurationError: If a given setting is unknown or has the wrong type, or a required
                setting is missing.
        """
        return read_settings(given, self.parameters, self.name)

    def given(self, texts: Sequence[str]) -> dict[str, Any]:
        """Return only the settings given as `name=value`.

        Raises:
            ConfigurationError: If a setting is unknown or has the wrong type.
        """
        return read_given(texts, self.parameters, self.name)


def choose(recipes: Mapping[str, Recipe], path: Path, target: str | None) -> Recipe:
    """Return the task with the given name; without a name, the only task of the file.

    Raises:
        ConfigurationError: If there is no such task, or there are several and none is named.
    """
    offered = [name for name, recipe in recipes.items() if recipe.offered]
    if target is not None:
        if target not in recipes:
            raise ConfigurationError(
                f"{path} has no class, function or object {target!r}."
                f"{did_you_mean(target, offered)}"
            )
        return recipes[target]
    classes = [name for name, recipe in recipes.items() if recipe.is_class]
    if not offered and classes:
        raise ConfigurationError(
            f"{path} has no class that visibly inherits from treadle.Task: its classes are "
            f"{', '.join(classes)}. If one inherits from a task in another file, name it, as "
            f"{path.name}:{classes[-1]}"
        )
    if not offered:
        raise ConfigurationError(
            f"{path} holds no task: write a class that inherits from treadle.Task, or name a "
            f"function or object that makes one, as {path.name}:NAME"
        )
    if len(offered) > 1:
        raise ConfigurationError(
            f"{path} holds several tasks: name one, as {path.name}:{offered[0]} "
            f"(there are {', '.join(offered)})"
        )
    return recipes[offered[0]]


def read_file(path: Path) -> dict[str, Recipe]:
    """Return the classes, functions and objects of a file that may be tasks, by name.

    Raises:
        ConfigurationError: If the file is missing, unreadable or not valid Python.
    """
    tree = _parsed(path)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    module = _Module(path, tree, classes)
    recipes: dict[str, Recipe] = {}
    for i, node in enumerate(tree.body):
        if isinstance(node, ast.ClassDef):
            recipes[node.name] = Recipe(
                name=node.name,
                description=_first_line(node) or _first_line(tree),
                path=path,
                target=node.name,
                parameters=module.parameters(node),
                backend=_text(node.body, "backend") or _text(tree.body, "backend"),
                offered=module.is_task(node) and not node.name.startswith("_"),
                is_class=True,
            )
        elif isinstance(node, ast.FunctionDef):
            recipes[node.name] = Recipe(
                name=node.name,
                description=_first_line(node) or _first_line(tree),
                path=path,
                target=node.name,
                parameters=parameters_in(node, method=False),
                backend=_text(tree.body, "backend"),
                offered=False,
            )
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            following = tree.body[i + 1] if i + 1 < len(tree.body) else None
            recipes[name] = Recipe(
                name=name,
                description=_string(following).partition("\n")[0] or _first_line(tree),
                path=path,
                target=name,
                parameters=(),
                backend=_text(tree.body, "backend"),
                offered=isinstance(node.value, ast.Call) and _last(node.value.func) in MAKERS,
            )
    return recipes


@dataclass(frozen=True)
class _Module:
    """A parsed file and its classes, to resolve base classes."""

    path: Path
    tree: ast.Module
    classes: Mapping[str, ast.ClassDef]

    def is_task(self, node: ast.ClassDef) -> bool:
        """Return whether a class defines `train_step` or has a task among its known bases."""
        methods = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
        if "train_step" in methods:
            return True
        for base in map(_last, node.bases):
            inner = self.classes.get(base)
            if base in BASES or (inner is not None and inner is not node and self.is_task(inner)):
                return True
            elsewhere = self._imported(base) if inner is None else None
            if elsewhere is not None and elsewhere.offered:
                return True
        return False

    def parameters(self, node: ast.ClassDef) -> tuple[Parameter, ...] | None:
        """Return the parameters of `__init__`, own or inherited; None if it cannot be found."""
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                return parameters_in(part, method=True)
        for base in map(_last, node.bases):
            if base == "Task":
                return ()
            if base in self.classes and self.classes[base] is not node:
                return self.parameters(self.classes[base])
            elsewhere = self._imported(base)
            if elsewhere is not None:
                return elsewhere.parameters
        return None

    def _imported(self, name: str) -> Recipe | None:
        """Find an imported base class in another recipe, or in a file in the same folder."""
        for node in self.tree.body:
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    path = self._file(node.module)
                    return read_file(path).get(alias.name) if path else None
        return None

    def _file(self, module: str) -> Path | None:
        if module.startswith("treadle.recipes."):
            spec = find_spec(module)
            return Path(spec.origin) if spec and spec.origin else None
        neighbor = self.path.parent.joinpath(*module.split(".")).with_suffix(".py")
        return neighbor if neighbor.is_file() else None


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except FileNotFoundError as error:
        raise ConfigurationError(f"there is no file {path}") from error
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror or error}") from error
    except SyntaxError as error:
        where = f"line {error.lineno}: " if error.lineno else ""
        raise ConfigurationError(f"{path} is not valid Python: {where}{error.msg}") from error
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid Python: {error}") from error


def _first_line(node: ast.ClassDef | ast.FunctionDef | ast.Module) -> str:
    return (ast.get_docstring(node) or "").partition("\n")[0]


def _text(body: Sequence[ast.stmt], name: str) -> str | None:
    """Return the string that is assigned to `name`, or None."""
    for node in body:
        targets: list[Any] = []
        if isinstance(node, ast.Assign):
            targets = list(node.targets)
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = node.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                return value.value
    return None


def _string(node: ast.stmt | None) -> str:
    """Return the string of a bare string statement, as the docstring of an attribute; else ""."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return node.value.value if isinstance(node.value.value, str) else ""
    return ""


def _last(node: ast.expr) -> str:
    """Return the last name of a dotted expression: `Task` of `treadle.Task`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
