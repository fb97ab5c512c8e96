"""The settings of a task: the parameters of its class or function, and their values as texts.

Commands reject a wrong setting, and print `--help`, before they import a framework. So they read
the signature in the source of the task's file (`parameters_in`). A class or function that exists in
this process is inspected instead (`parameters_of`).
"""

import ast
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..core.ranges import Choice, Range, Space, evaluate, fitted
from ..errors import ConfigurationError, did_you_mean

PLAIN: Final = (int, float, bool, str)
NAMES: Final[dict[str, Any]] = {
    **{kind.__name__: kind for kind in PLAIN},
    "Literal": typing.Literal,
    "Optional": typing.Optional,
    "Union": typing.Union,
}
SPACES: Final = {"Range": Range, "Choice": Choice}
BOOLS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
NONE: Final = ("none", "null")
EMPTY: Final = inspect.Parameter.empty
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

    Raises:
        ConfigurationError: If a name in an annotation cannot be resolved at run time.

    Example:
        >>> def line(slope: typing.Annotated[int, Range(1, 3)] = 2): ...
        >>> [(parameter.name, str(parameter.space)) for parameter in parameters_of(line)]
        [('slope', '1..3')]
    """
    try:
        signature = inspect.signature(make, eval_str=True)
    except NameError as error:
        name = getattr(make, "__qualname__", type(make).__qualname__)
        raise ConfigurationError(
            f"cannot read the annotations of {name}: {error}. Import it outside of `if "
            "TYPE_CHECKING`, or give the task's name, as 'my_task.py:MyTask', whose file is only "
            "read"
        ) from error
    found: list[Parameter] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            hint, metadata = parameter.annotation, ()
            if typing.get_origin(hint) is typing.Annotated:
                hint, *metadata = typing.get_args(hint)
            found.append(_parameter(name, hint, metadata, parameter.default))
    return tuple(found)


def parameters_in(function: ast.FunctionDef, method: bool) -> tuple[Parameter, ...]:
    """Return the parameters of a function definition that can be passed by name.

    Raises:
        ConfigurationError: If a search space has computed or invalid arguments.
    """
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    missing: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    pairs = list(zip(positional, [*missing, *arguments.defaults], strict=True))[int(method) :]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return tuple(
        _parameter(argument.arg, *_annotation_in(argument.arg, argument.annotation), _literal(node))
        for argument, node in pairs
    )


def _literal(default: ast.expr | None) -> Any:
    try:
        return EMPTY if default is None else ast.literal_eval(default)
    except (TypeError, ValueError):  # TypeError: a list as the key of a dict
        return UNKNOWN


def _annotation_in(name: str, node: ast.expr | None) -> tuple[Any, Sequence[Any]]:
    """Return a type and the search spaces of a parameter; the text of a type that is not known.

    Raises:
        ConfigurationError: If a search space has computed or invalid arguments.
    """
    match node:
        case None:
            return EMPTY, ()
        case ast.Constant(value=str(text)):
            try:
                return _annotation_in(name, ast.parse(text, mode="eval").body)
            except SyntaxError:  # Python does not read it either
                return text, ()
        case ast.Subscript(
            value=ast.Name(id="Annotated") | ast.Attribute(attr="Annotated"),
            slice=ast.Tuple(elts=[first, *metadata]),
        ):
            spaces = (_space_in(name, part) for part in metadata)
            return _annotation_in(name, first)[0], [part for part in spaces if part is not None]
        case _:
            pass
    try:
        return evaluate(node, NAMES, {}), ()
    except (LookupError, NameError, TypeError, ValueError):  # no type that a text is read as
        return ast.unparse(node), ()


def _space_in(name: str, node: ast.expr) -> Space | None:
    """Return the search space of a `Range(…)` or `Choice(…)` expression, None for another one.

    Raises:
        ConfigurationError: If its arguments are computed or invalid.
    """
    match node:
        case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called)) if called in SPACES:
            pass
        case _:
            return None
    try:
        return evaluate(node, {}, SPACES)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from error
    except (LookupError, NameError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{name}: cannot read {ast.unparse(node)}, since its file is read without running it: "
            "use literal values, as Range(64, 512, log=True) or Choice('relu', 'gelu')"
        ) from error


def _parameter(name: str, hint: Any, metadata: Sequence[Any], default: Any) -> Parameter:
    """Return a parameter.

    Args:
        name: Its name.
        hint: Its type, the text of an unknown type, or `EMPTY` without an annotation.
        metadata: Further parts of its annotation, such as search spaces.
        default: Its default, or `EMPTY`.
    """
    if hint is EMPTY and type(default) in PLAIN:
        hint = type(default)
    kind = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
    kind, accepts = "" if hint is EMPTY else kind, _accepts(hint)
    space = next((part for part in metadata if isinstance(part, (Range, Choice))), None)
    if space is not None:
        space = fitted(name, space, accepts, kind)
    return Parameter(
        name, kind, accepts, None if default is EMPTY else default, default is EMPTY, space
    )


def _accepts(hint: Any) -> tuple[Any, ...]:
    """Return the types and values that an annotation allows; empty for other annotations."""
    if hint in PLAIN:
        return (hint,)
    if hint in (None, type(None)):
        return (None,)
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        parts = [_accepts(part) for part in typing.get_args(hint)]
        return tuple(value for part in parts for value in part) if all(parts) else ()
    return ()
