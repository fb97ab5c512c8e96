"""The settings of a task: the parameters of its class or function, and their values as texts.

Commands reject a wrong setting, and print `--help`, before they import a framework. So they read
the signature in the source of the task's file (`parameters_in`). A class or function that exists in
this process is inspected instead (`parameters_of`).
"""

import ast
import inspect
import types
import typing
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..core.expressions import evaluate
from ..core.ranges import Choice, Range, Space, fitted
from ..errors import ConfigurationError, did_you_mean

PLAIN = {"int": int, "float": float, "bool": bool, "str": str}
FORMS: dict[str, Any] = {
    "Literal": typing.Literal,
    "Optional": typing.Optional,
    "Union": typing.Union,
}
SPACES = {"Range": Range, "Choice": Choice}
BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
NONE = ("none", "null")
UNKNOWN: Any = object()
"""Marks a default that is computed, and so is not known without running the file."""


@dataclass(frozen=True)
class Parameter:
    """A parameter (setting) of a task.

    Attributes:
        name: Name of the parameter.
        kind: The annotation as written in the source; without one, the type of the default.
        accepts: Accepted types and values (of a `Literal`, or None); empty if the parameter cannot
            be given as text.
        default: The default value; `UNKNOWN` if it is computed.
        required: Whether there is no default.
        annotated: The `Range` or `Choice` in the annotation, or None.
    """

    name: str
    kind: str
    accepts: tuple[Any, ...]
    default: Any = UNKNOWN
    required: bool = False
    annotated: Space | None = None

    @property
    def has_default(self) -> bool:
        """Whether there is a default and its value is known."""
        return not self.required and self.default is not UNKNOWN

    @property
    def space(self) -> Space | None:
        """The search space for tuning, or None.

        It is the annotated `Range` or `Choice`, or the values of a `Literal`. A plain `bool` has
        none, since many switches do not affect the result, as one that trades memory for time.

        Example:
            >>> print(Parameter("kind", "Literal['a', 'b']", ("a", "b"), "a").space)
            a,b
        """
        if self.annotated is not None:
            return self.annotated
        values = tuple(dict.fromkeys(self.accepts))
        plain = len(values) > 1 and not any(isinstance(value, type) for value in values)
        return Choice(*values) if plain else None

    def __str__(self) -> str:
        """Return the setting as on the command line: `units=64`."""
        return f"{self.name}=" + ("…" if self.default is UNKNOWN else f"{self.default}")

    def read(self, text: str) -> Any:
        """Parse a value from text.

        Raises:
            ConfigurationError: If the text does not fit the annotation.

        Example:
            >>> Parameter("rate", "float | None", (float, None)).read("1e-3")
            0.001
        """
        if not self.accepts:
            raise ConfigurationError(
                f"{self.name} is of type {self.kind or 'unknown'}, which the command line cannot "
                "set: annotate it with int, float, bool, str, a Literal, or one of these | None"
            )
        if None in self.accepts and text.lower() in NONE:
            return None
        literals = [value for value in self.accepts if not isinstance(value, type)]
        for value in literals:
            if value is not None and str(value) == text:
                return value
        if bool in self.accepts and text.lower() in BOOLS:
            return BOOLS[text.lower()]
        for kind in (int, float, str):
            if kind in self.accepts:
                try:
                    return kind(text)
                except ValueError:
                    continue
        known = [str(value) for value in literals]
        raise ConfigurationError(
            f"{self.name}={text}: expected {self.kind}, found {text!r}."
            f"{did_you_mean(text, known) if known else ''}"
        )


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
    name, annotation, metadata = argument.arg, argument.annotation, ()
    try:
        value = UNKNOWN if default is None else ast.literal_eval(default)
    except (TypeError, ValueError):  # TypeError: a list as the key of a dict
        value = UNKNOWN
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        with suppress(SyntaxError):  # Python does not read it either
            annotation = ast.parse(annotation.value, mode="eval").body
    match annotation:
        case ast.Subscript(
            value=ast.Name(id="Annotated") | ast.Attribute(attr="Annotated"),
            slice=ast.Tuple(elts=[annotation, *metadata]),
        ):
            pass
        case _:
            pass
    if annotation is None:
        hint = type(value) if type(value) in PLAIN.values() else Any
        kind = "" if hint is Any else hint.__name__
    else:
        kind = ast.unparse(annotation)
        try:
            hint = evaluate(annotation, PLAIN | FORMS)
        except (LookupError, TypeError, ValueError):  # no type that a text is read as
            hint = Any
    spaces = (_space_in(name, part) for part in metadata if _called(part) in SPACES)
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


def _called(node: ast.expr) -> str:
    """Return the name of the function that an expression calls; empty for other expressions."""
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name
        case _:
            return ""


def _space_in(name: str, node: ast.expr) -> Space:
    """Return the search space of a `Range(…)` or `Choice(…)` expression.

    Raises:
        ConfigurationError: If its arguments are computed or invalid.
    """
    try:
        return evaluate(node, SPACES)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from error
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{name}: cannot read {ast.unparse(node)}, since its file is read without running it: "
            "use literal values, as Range(64, 512, log=True) or Choice('relu', 'gelu')"
        ) from error
