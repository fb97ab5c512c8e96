"""The settings of a task, from the signature of its class or function.

Commands reject a wrong setting, and print `--help`, before they import a framework. So they read
the signature in the source of the task's file (`parameters_in`). A class or function that exists in
this process is inspected instead (`parameters_of`).
"""

import ast
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from ..core.ranges import Choice, Range, Space, fitted
from ..errors import ConfigurationError
from ._settings import PLAIN, UNKNOWN, Parameter

SPACES: dict[str, Any] = {"Range": Range, "Choice": Choice}


def parameters_of(make: Callable[..., Any]) -> tuple[Parameter, ...]:
    """Return the parameters of a class or function, with the search spaces in its annotations.

    For a `functools.partial`, the annotations of the wrapped function are used.

    Raises:
        ConfigurationError: If a name in an annotation cannot be resolved at run time.

    Example:
        >>> def line(slope: typing.Annotated[int, Range(1, 3)] = 2): ...
        >>> [(parameter.name, str(parameter.space)) for parameter in parameters_of(line)]
        [('slope', '1..3')]
    """
    hints = _hints(make)
    found: list[Parameter] = []
    for name, parameter in inspect.signature(make).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        required = parameter.default is inspect.Parameter.empty
        default = None if required else parameter.default
        hint, metadata = hints.get(name), ()
        if typing.get_origin(hint) is typing.Annotated:
            hint, *metadata = typing.get_args(hint)
        if hint is None and not required:
            hint = type(default)
        kind = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
        spaces = (part for part in metadata if isinstance(part, (Range, Choice)))
        found.append(_parameter(name, kind, hint, default, required, spaces))
    return tuple(found)


def parameters_in(function: ast.FunctionDef, method: bool) -> tuple[Parameter, ...]:
    """Return the parameters of a function definition that can be passed by name.

    Raises:
        ConfigurationError: If a search space has computed or invalid arguments.
    """
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    blanks: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    pairs = list(zip(positional, [*blanks, *arguments.defaults], strict=True))
    pairs = pairs[1:] if method else pairs
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return tuple(_parameter_in(argument, default) for argument, default in pairs)


def _parameter_in(argument: ast.arg, default: ast.expr | None) -> Parameter:
    name, value = argument.arg, UNKNOWN
    if default is not None:
        try:
            value = ast.literal_eval(default)
        except ValueError:
            value = UNKNOWN
    annotation, metadata = argument.annotation, ()
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    match annotation:
        case ast.Subscript(
            value=ast.Name(id="Annotated") | ast.Attribute(attr="Annotated"),
            slice=ast.Tuple(elts=[annotation, *metadata]),
        ):
            pass
        case _:
            pass
    if annotation is not None:
        kind, hint = ast.unparse(annotation), _hint_in(annotation)
    else:
        hint = type(value) if type(value) in PLAIN.values() else Any
        kind = "" if hint is Any else hint.__name__
    spaces = (space for part in metadata if (space := _space_in(name, part)))
    return _parameter(name, kind, hint, value, default is None, spaces)


def _parameter(
    name: str, kind: str, hint: Any, default: Any, required: bool, spaces: Iterable[Space]
) -> Parameter:
    accepts, space = _accepts(hint), next(iter(spaces), None)
    if space is not None:
        space = fitted(name, space, accepts, kind)
    return Parameter(name, kind, accepts, default, required, space)


def _accepts(hint: Any) -> tuple[Any, ...]:
    """Return the types and values that an annotation allows; empty for other annotations."""
    if hint in (int, float, bool, str):
        return (hint,)
    if hint in (None, type(None)):
        return (None,)
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        parts = [_accepts(part) for part in typing.get_args(hint)]
        return tuple(value for part in parts for value in part) if all(parts) else ()
    return ()


def _hints(make: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a class's or function's parameters, by name.

    Raises:
        ConfigurationError: If a name in an annotation cannot be resolved at run time.
    """
    while isinstance(make, partial):
        make = make.func
    if isinstance(make, type):
        annotated: Any = make.__init__
    else:
        annotated = make if hasattr(make, "__annotations__") else type(make).__call__
    try:
        return typing.get_type_hints(annotated, include_extras=True)
    except NameError as error:
        name = getattr(make, "__qualname__", type(make).__qualname__)
        raise ConfigurationError(
            f"cannot read the annotations of {name}: {error}. Import it outside of `if "
            "TYPE_CHECKING`, or give the task's name, as 'my_task.py:MyTask', whose file is only "
            "read"
        ) from error
    except TypeError:  # built-in functions have no annotations
        return {}


def _hint_in(annotation: ast.expr) -> Any:
    """Return the type that an annotation in source code stands for; `Any` if it is another one."""
    match annotation:
        case ast.Constant(value=None):
            return None
        case ast.Name(id=name) if name in PLAIN:
            return PLAIN[name]
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _union([left, right])
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), slice=inner):
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            if name in ("Optional", "Union"):
                return _union([*parts, ast.Constant(None)] if name == "Optional" else parts)
            values = tuple(part.value for part in parts if isinstance(part, ast.Constant))
            return typing.Literal[values] if name == "Literal" and values else Any
        case _:
            return Any


def _union(parts: Sequence[ast.expr]) -> Any:
    return typing.Union[tuple(_hint_in(part) for part in parts)]  # noqa: UP007


def _space_in(name: str, node: ast.expr) -> Space | None:
    """Return the search space of a `Range(…)` or `Choice(…)` expression; None for others.

    Raises:
        ConfigurationError: If its arguments are computed or invalid.
    """
    match node:
        case ast.Call(func=ast.Name(id=kind) | ast.Attribute(attr=kind)) if kind in SPACES:
            try:
                arguments = [ast.literal_eval(argument) for argument in node.args]
                named = {word.arg or "": ast.literal_eval(word.value) for word in node.keywords}
                return SPACES[kind](*arguments, **named)
            except ConfigurationError as error:
                raise ConfigurationError(f"{name}: {error}") from error
            except (TypeError, ValueError) as error:
                raise ConfigurationError(
                    f"{name}: cannot read {ast.unparse(node)}, since its file is read without "
                    "running it: use literal values, as Range(64, 512, log=True) or "
                    "Choice('relu', 'gelu')"
                ) from error
        case _:
            return None
