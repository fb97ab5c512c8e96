"""Parse a task's settings from command-line texts, by the types in its signature."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.ranges import Choice, Space
from ..errors import ConfigurationError, did_you_mean

PLAIN = {"int": int, "float": float, "bool": bool, "str": str}
BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
NONE = ("none", "null")
LENGTHS = ("epochs", "steps", "until")  # options of the command that are easily taken for settings
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
            option = f" `treadle run` has an option --{name}." if name in LENGTHS else ""
            raise ConfigurationError(
                f"{owner} has no setting {name!r}.{option}{did_you_mean(name, known)}"
            )
    return {name: known[name].read(texts[name]) for name in known if name in texts}
