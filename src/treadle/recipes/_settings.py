"""Parse a task's settings from command-line texts, by the types in its signature."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.ranges import Choice, Range, Space, fitted
from ..errors import ConfigurationError, did_you_mean

PLAIN = {"int": int, "float": float, "bool": bool, "str": str}
BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
NONE = ("none", "null")
SPACES: dict[str, Any] = {"Range": Range, "Choice": Choice}
UNKNOWN = object()
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


def read_settings(
    given: Sequence[str], parameters: Sequence[Parameter] | None, owner: str
) -> dict[str, Any]:
    """Return all settings of a task: those given as `name=value`, and the known defaults.

    Args:
        given: Texts of the form `name=value`. If a name is repeated, the last one counts.
        parameters: The task's parameters; None if they cannot be read from its file.
        owner: The task's name, for messages.

    Raises:
        ConfigurationError: If a text has no `=`, a name is unknown, a value does not fit its type,
            or a required parameter is missing.

    Example:
        >>> read_settings(["units=8"], [Parameter("units", "int", (int,), 64)], "Digits")
        {'units': 8}
    """
    found = read_given(given, parameters, owner)
    values: dict[str, Any] = {}
    for parameter in parameters or ():
        name = parameter.name
        if name in found:
            values[name] = found[name]
        elif parameter.required:
            raise ConfigurationError(
                f"{owner} needs a value for {name!r}, of type {parameter.kind or 'unknown'}: add "
                f"--set {name}=…"
            )
        elif parameter.has_default:
            values[name] = parameter.default
    return values


def known_parameters(parameters: Sequence[Parameter] | None, owner: str) -> Sequence[Parameter]:
    """Return the task's parameters, which must be known.

    Raises:
        ConfigurationError: If `parameters` is None: they cannot be read from the task's file.
    """
    if parameters is None:
        raise ConfigurationError(
            f"the settings of {owner} cannot be read from its file, since it inherits its __init__ "
            "from elsewhere: define an __init__ with typed parameters in the class"
        )
    return parameters


def read_given(
    given: Sequence[str], parameters: Sequence[Parameter] | None, owner: str
) -> dict[str, Any]:
    """Return only the settings given as `name=value`.

    Raises:
        ConfigurationError: As for `read_settings`, except that parameters may be missing.
    """
    texts: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ConfigurationError(f"cannot read the setting {text!r}: write it as name=value")
        texts[name.strip()] = value.strip()
    known = {p.name: p for p in (known_parameters(parameters, owner) if texts else ())}
    for name in texts:
        if name not in known:
            raise ConfigurationError(f"{owner} has no setting {name!r}.{did_you_mean(name, known)}")
    return {name: known[name].read(texts[name]) for name in known if name in texts}


def parameters_of(function: ast.FunctionDef, method: bool) -> tuple[Parameter, ...]:
    """Return the parameters of a function definition that can be passed by name."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    blanks: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    pairs = list(zip(positional, [*blanks, *arguments.defaults], strict=True))
    pairs = pairs[1:] if method else pairs
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return tuple(_parameter(argument, default) for argument, default in pairs)


def _parameter(argument: ast.arg, default: ast.expr | None) -> Parameter:
    value: Any = UNKNOWN
    if default is not None:
        try:
            value = ast.literal_eval(default)
        except ValueError:
            value = UNKNOWN
    annotation = argument.annotation
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    annotation, metadata = _without_metadata(annotation)
    if annotation is None:
        kind = type(value).__name__ if type(value) in PLAIN.values() else ""
        accepts: tuple[Any, ...] | None = (PLAIN[kind],) if kind else ()
    else:
        kind, accepts = ast.unparse(annotation), _accepts(annotation)
    space = next((found for part in metadata if (found := _space(argument.arg, part))), None)
    if space is not None:
        space = fitted(argument.arg, space, accepts or (), kind)
    return Parameter(argument.arg, kind, accepts or (), value, default is None, space)


def _without_metadata(annotation: ast.expr | None) -> tuple[ast.expr | None, Sequence[ast.expr]]:
    """Split `Annotated[type, …]` into the type and the metadata."""
    match annotation:
        case ast.Subscript(
            value=ast.Name(id="Annotated") | ast.Attribute(attr="Annotated"),
            slice=ast.Tuple(elts=[inner, *metadata]),
        ):
            return inner, metadata
        case _:
            return annotation, ()


def _space(name: str, node: ast.expr) -> Space | None:
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


def _accepts(annotation: ast.expr) -> tuple[Any, ...] | None:
    """Return the types and values that an annotation accepts; None if a part is not supported."""
    match annotation:
        case ast.Constant(value=None):
            return (None,)
        case ast.Name(id=name) if name in PLAIN:
            return (PLAIN[name],)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _joined([left, right])
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), slice=inner):
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            if name == "Optional":
                return _joined([*parts, ast.Constant(None)])
            if name == "Union":
                return _joined(parts)
            if name == "Literal":
                return tuple(part.value for part in parts if isinstance(part, ast.Constant)) or None
            return None
        case _:
            return None


def _joined(parts: Sequence[ast.expr]) -> tuple[Any, ...] | None:
    accepted = [_accepts(part) for part in parts]
    if any(part is None for part in accepted):
        return None
    return tuple(value for part in accepted for value in part or ())
