"""Conditions on a run, as strings: `loss > 5`, `isnan(loss)`, `norm(model/layers/0/kernel) > 10`.

A small grammar defines them; they are never evaluated as Python code.

    condition  = value comparison value | test
    test       = ["not"] ("isnan" | "isinf" | "isfinite") "(" name ")"
    value      = number | name | "norm" "(" name ")"
    comparison = "<" | "<=" | ">" | ">=" | "==" | "!="

A name is the name of a value that steps return, or the path of a variable. `isnan` and `isinf` are
true if any entry is NaN or infinite, `isfinite` if all entries are finite. `norm` is the L2 norm.
"""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..errors import ConfigurationError
from .numbers import as_floats, norm_of

COMPARISONS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
TESTS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "isnan": lambda x: bool(np.isnan(x).any()),
    "isinf": lambda x: bool(np.isinf(x).any()),
    "isfinite": lambda x: bool(np.isfinite(x).all()),
}
NUMBER: Final = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?|[-+]?inf")
_NAME: Final = r"([^\s()<>=!]+)"
_TEST: Final = re.compile(rf"(not\s+)?(\w+)\s*\(\s*{_NAME}\s*\)")
_VALUE: Final = re.compile(rf"(?:(\w+)\s*\(\s*{_NAME}\s*\)|{_NAME})")
_EXAMPLES: Final = (
    "'loss > 5', 'isnan(loss)', 'not isfinite(model/layers/0/kernel)' or "
    "'norm(model/layers/0/kernel) > 10'"
)


@dataclass(frozen=True, slots=True)
class Operand:
    """One side of a comparison: a number, or a named value.

    Attributes:
        name: The name of a value or a variable; empty for a number.
        number: The number.
        norm: Whether to compare the norm of the named value.
    """

    name: str = ""
    number: float = 0.0
    norm: bool = False

    def of(self, values: Mapping[str, Any]) -> float:
        """Return the number, looked up in `values` if it is named.

        Raises:
            ConfigurationError: It names an array, which cannot be compared with a number.
        """
        if not self.name:
            return self.number
        array = as_floats(values[self.name])
        if self.norm:
            return norm_of(array)
        if array.size != 1:
            raise ConfigurationError(
                f"{self.name} is an array of shape {array.shape}, so it cannot be compared with a "
                f"number: write norm({self.name})"
            )
        return float(array.reshape(()))


@dataclass(frozen=True, slots=True)
class Condition:
    """A parsed condition.

    Attributes:
        text: The condition's text.
        names: The names in it.
        holds: A function that evaluates the condition for values by name.

    Example:
        >>> parse("loss > 5").holds({"loss": 6.0}), parse("isnan(loss)").holds({"loss": 6.0})
        (True, False)
    """

    text: str
    names: tuple[str, ...]
    holds: Callable[[Mapping[str, Any]], bool]


def parse(text: str) -> Condition:
    """Parse a condition.

    Raises:
        ConfigurationError: The text is not a valid condition.

    Example:
        >>> parse("norm(model/kernel) >= 1e3").names
        ('model/kernel',)
        >>> parse("not isfinite(loss)").holds({"loss": float("inf")})
        True
    """
    test = _TEST.fullmatch(text.strip())
    if test is not None:
        return _tested(text, bool(test[1]), test[2], test[3])
    parts = re.split("(<=|>=|==|!=|<|>)", text)
    if len(parts) != 3:
        raise _unreadable(text)
    left, right = _value(text, parts[0]), _value(text, parts[2])
    compare = COMPARISONS[parts[1]]
    names = tuple(dict.fromkeys(side.name for side in (left, right) if side.name))
    if not names:
        raise _unreadable(text)
    return Condition(text, names, lambda values: compare(left.of(values), right.of(values)))


def _tested(text: str, negated: bool, function: str, name: str) -> Condition:
    if function not in TESTS:
        raise _unreadable(text)
    test = TESTS[function]
    return Condition(text, (name,), lambda values: test(as_floats(values[name])) is not negated)


def _value(text: str, part: str) -> Operand:
    part = part.strip()
    if NUMBER.fullmatch(part):
        return Operand(number=float(part))
    match = _VALUE.fullmatch(part)
    if match is None or match[1] not in (None, "norm"):
        raise _unreadable(text)
    return Operand(name=match[2] or match[3], norm=match[1] is not None)


def _unreadable(text: str) -> ConfigurationError:
    return ConfigurationError(
        f"cannot read the condition {text!r}: compare a value with a number, or test it, as in "
        f"{_EXAMPLES}"
    )
