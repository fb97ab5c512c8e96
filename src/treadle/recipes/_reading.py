"""Find the tasks in a file by parsing its source, without running it or importing a framework."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..core.options import backend_name, precision_name, run_seed
from ..errors import ConfigurationError, did_you_mean
from ._settings import Parameter, parameters_in

BASES = ("Task", "Supervised")
MAKERS = ("task", *BASES)
LENGTHS = ("epochs", "steps", "until")  # options of the command that are easily taken for settings


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A task in a file.

    Attributes:
        name: Name on the command line and in directory names.
        description: The first line of the docstring, its own or that of the file.
        path: The file.
        target: Name of the class, function or object in the file.
        parameters: The settings; None if they cannot be read from the file.
        backend: The only backend that the task supports, or None for any.
        is_task: Whether the source shows that this is a task. Other classes and functions can
            only be chosen by name.
        is_class: Whether it is a class, not a function or an object.
        module: Dotted module name if the recipe comes with Treadle, else None.
    """

    name: str
    description: str
    path: Path
    target: str
    parameters: tuple[Parameter, ...] | None
    backend: str | None
    is_task: bool = False
    is_class: bool = False
    module: str | None = None

    @property
    def source(self) -> str:
        """The argument for `treadle run`: the recipe's name, or `file.py:Task` with full path."""
        return self.name if self.module else f"{self.path}:{self.target}"

    def known_parameters(self) -> tuple[Parameter, ...]:
        """Return the parameters.

        Raises:
            ConfigurationError: If they cannot be read from the task's file.
        """
        if self.parameters is None:
            raise ConfigurationError(
                f"the settings of {self.name} cannot be read from its file, since it inherits its "
                "__init__ from elsewhere: define an __init__ with typed parameters in the class"
            )
        return self.parameters

    def given(self, texts: Sequence[str]) -> dict[str, Any]:
        """Return only the settings given as `name=value`. If a name is repeated, the last counts.

        Raises:
            ConfigurationError: If a text has no `=`, a name is unknown, or a value does not fit its
                type.
        """
        values: dict[str, str] = {}
        for text in texts:
            name, equals, value = text.partition("=")
            if not equals or not name.strip():
                raise ConfigurationError(
                    f"cannot read the setting {text!r}: write it as name=value"
                )
            values[name.strip()] = value.strip()
        known = {p.name: p for p in (self.known_parameters() if values else ())}
        for name in values:
            if name not in known:
                option = f" `treadle run` has an option --{name}." if name in LENGTHS else ""
                raise ConfigurationError(
                    f"{self.name} has no setting {name!r}.{option}{did_you_mean(name, known)}"
                )
        return {name: known[name].read(values[name]) for name in known if name in values}

    def settings(self, texts: Sequence[str]) -> dict[str, Any]:
        """Return all settings of the task: those given as `name=value`, and the known defaults.

        Raises:
            ConfigurationError: As for `given`, or if a required setting is missing.
        """
        found = self.given(texts)
        for parameter in self.parameters or ():
            if parameter.required and parameter.name not in found:
                raise ConfigurationError(
                    f"{self.name} needs a value for {parameter.name!r}, of type "
                    f"{parameter.kind or 'unknown'}: add --set {parameter.name}=…"
                )
        return {
            parameter.name: found.get(parameter.name, parameter.default)
            for parameter in self.parameters or ()
            if parameter.name in found or parameter.has_default
        }

    def configuration(
        self, settings: Mapping[str, Any], execution: str, data_dir: str | None
    ) -> dict[str, Any]:
        """Return what identifies a run of the task, by which commands make the task again.

        Seed, backend and precision are those in effect, set by options or by the task's file.
        """
        return {
            "recipe": self.source,
            "settings": dict(settings),
            "seed": run_seed(),
            "backend": backend_name(),
            "precision": precision_name(),
            "execution": execution,
            "data_dir": data_dir,
        }


def choose(recipes: Mapping[str, Recipe], path: Path, target: str | None) -> Recipe:
    """Return the task with the given name; without a name, the only task of the file.

    Raises:
        ConfigurationError: If there is no such task, or there are several and none is named.
    """
    offered = [name for name, recipe in recipes.items() if recipe.is_task and name[0] != "_"]
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
    found: dict[str, Recipe] = {}
    imported = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }

    def class_of(name: str) -> Recipe | None:
        """Return a class above in the file, or imported from a recipe or a file next to it."""
        recipe = found.get(name)
        if recipe is None and name in imported:
            module, original = imported[name]
            file = _file(module, path.parent)
            recipe = read_file(file).get(original) if file else None
        return recipe if recipe is not None and recipe.is_class else None

    for node in tree.body:
        facts: dict[str, Any] = {"backend": _text(tree.body, "backend")}
        match node:
            case ast.ClassDef(name=name):
                facts |= _class_facts(
                    node, {base: class_of(base) for base in map(_last, node.bases)}
                )
                facts["backend"] = _text(node.body, "backend") or facts["backend"]
            case ast.FunctionDef(name=name):
                facts["parameters"] = parameters_in(node, method=False)
            case ast.Assign(targets=[ast.Name(id=name), *_], value=value):
                made = isinstance(value, ast.Call) and _last(value.func) in MAKERS
                facts |= {"parameters": (), "is_task": made}
            case _:
                continue
        text = "" if isinstance(node, ast.Assign) else _first_line(node)
        facts["description"] = text or _first_line(tree)
        found[name] = Recipe(name=name, target=name, path=path, **facts)
    return found


def _class_facts(node: ast.ClassDef, bases: Mapping[str, Recipe | None]) -> dict[str, Any]:
    """Return whether a class is a task, and the parameters of its own or inherited `__init__`.

    Args:
        node: The class.
        bases: Its base classes by name; None for one that is in no readable file.
    """
    methods = {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}
    inherited = [
        base.parameters if base else () for n, base in bases.items() if base or n == "Task"
    ]
    init = methods.get("__init__")
    return {
        "is_class": True,
        "is_task": "train_step" in methods
        or any(name in BASES or (base and base.is_task) for name, base in bases.items()),
        "parameters": parameters_in(init, method=True) if init else next(iter(inherited), None),
    }


def _file(module: str, folder: Path) -> Path | None:
    if module.startswith("treadle.recipes."):
        spec = find_spec(module)
        return Path(spec.origin) if spec and spec.origin else None
    neighbor = folder.joinpath(*module.split(".")).with_suffix(".py")
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
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Constant(value=str() as text)):
                pass
            case ast.AnnAssign(target=ast.Name(id=target), value=ast.Constant(value=str() as text)):
                pass
            case _:
                continue
        if target == name:
            return text
    return None


def _last(node: ast.expr) -> str:
    """Return the last name of a dotted expression: `Task` of `treadle.Task`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
