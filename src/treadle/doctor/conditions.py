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
_NUMBER: Final = r"([-+]?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|inf))"
_NAME: Final = r"([^\s()<>=!]+)"
_VALUE: Final = rf"\s*(?:{_NUMBER}|norm\s*\(\s*{_NAME}\s*\)|{_NAME})\s*"
_COMPARISON: Final = re.compile(f"{_VALUE}({'|'.join(COMPARISONS)}){_VALUE}")
_TEST: Final = re.compile(rf"\s*(not\s+)?({'|'.join(TESTS)})\s*\(\s*{_NAME}\s*\)\s*")


@dataclass(frozen=True, slots=True)
class Condition:
    """A parsed condition.

    Attributes:
        text: The condition's text.
        names: The names in it.
        holds: A function that evaluates the condition for values by name. It raises
            `ConfigurationError` for an array that is compared with a number.

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
    if match := _TEST.fullmatch(text):
        negated, function, name = match.groups()
        test, expected = TESTS[function], negated is None
        return Condition(text, (name,), lambda values: test(as_floats(values[name])) is expected)
    if match := _COMPARISON.fullmatch(text):
        number, normed, name, sign, *right = match.groups()
        compare, left = COMPARISONS[sign], (number, normed, name)
        names = dict.fromkeys(x for x in (*left[1:], *right[1:]) if x)
        if names:
            return Condition(
                text, (*names,), lambda values: compare(_of(values, *left), _of(values, *right))
            )
    raise ConfigurationError(
        f"cannot read the condition {text!r}: compare a value with a number, or test it, as in "
        "'loss > 5', 'isnan(loss)', 'not isfinite(model/layers/0/kernel)' or "
        "'norm(model/layers/0/kernel) > 10'"
    )


def _of(values: Mapping[str, Any], number: str, normed: str, name: str) -> float:
    """Return a number, the norm of a named value, or a named value; two of the three are None."""
    if number or normed:
        return float(number) if number else norm_of(as_floats(values[normed]))
    array = as_floats(values[name])
    if array.size != 1:
        raise ConfigurationError(
            f"{name} is an array of shape {array.shape}, so it cannot be compared with a number: "
            f"write norm({name})"
        )
    return float(array.reshape(()))
