"""Search spaces of hyperparameters: `Range` and `Choice`.

They are annotations of a task's parameters, such as
`units: Annotated[int, treadle.Range(64, 512, log=True)] = 64`. `treadle tune` tries values from
these spaces; `treadle run` accepts any other value too.
"""

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from ..errors import ConfigurationError

Plain = bool | int | float | str | None
PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Range:
    """A range of numbers, including both bounds.

    It contains only whole numbers if both bounds are whole, unless the parameter is a `float`.

    Args:
        low: The lower bound.
        high: The upper bound.
        log: Sample on a logarithmic scale: 0.001 to 0.01 is as likely as 0.01 to 0.1.
        step: Only `low`, `low + step`, `low + 2 * step`, …; None for any number.

    Raises:
        ConfigurationError: The bounds are not finite numbers or not in increasing order; `log` is
            combined with a lower bound of 0 or less, or with a step; the step is not positive.

    Example:
        >>> str(Range(64, 512, log=True))
        '64..512 log'
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        for number in (self.low, self.high, 1 if self.step is None else self.step):
            if type(number) not in (int, float) or not math.isfinite(number):
                raise ConfigurationError(f"{self!r}: {number!r} is not a finite number")
        if self.low >= self.high:
            raise ConfigurationError(
                f"{self!r}: the first bound must be less than the second, and {self.low!r} is not "
                f"less than {self.high!r}"
            )
        if self.log and self.low <= 0:
            raise ConfigurationError(
                f"{self!r}: a range with log=True must begin above 0, not at {self.low!r}"
            )
        if self.step is not None and (self.log or self.step <= 0):
            reason = "has either log=True or a step, not both" if self.log else "needs a step > 0"
            raise ConfigurationError(f"{self!r}: a range {reason}")

    @property
    def whole(self) -> bool:
        """Whether the range contains only whole numbers."""
        return all(isinstance(number, int) for number in (self.low, self.high, self.step or 1))

    @property
    def last(self) -> float:
        """The greatest number in the range: with a step, the last multiple up to `high`.

        Example:
            >>> Range(0.0, 1.0, step=0.3).last
            0.9
        """
        if self.step is None:
            return self.high
        last = Decimal(str(self.high)) - _above_step(self.high, self.low, self.step)
        return int(last) if self.whole else float(last)

    def __contains__(self, value: object) -> bool:
        """Return whether a value is in the range."""
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return False
        on_grid = self.step is None or not _above_step(value, self.low, self.step)
        return self.low <= value <= self.high and on_grid

    def __str__(self) -> str:
        """Return the range in the command line's notation."""
        more = " log" if self.log else "" if self.step is None else f" step {self.step!r}"
        return f"{self.low!r}..{self.high!r}{more}"


@dataclass(frozen=True, init=False)
class Choice:
    """A choice between several values without an order.

    Args:
        *values: Numbers, strings, True, False or None; at least two.

    Raises:
        ConfigurationError: There are fewer than two values, some are equal (as 1, 1.0 and True
            are), or of another type.

    Example:
        >>> str(Choice("relu", "gelu"))
        'relu,gelu'
    """

    values: tuple[Plain, ...]

    def __init__(self, *values: Plain) -> None:
        object.__setattr__(self, "values", values)
        for value in values:
            if type(value) not in PLAIN:
                raise ConfigurationError(
                    f"{self!r}: {value!r} is neither a number nor a text, nor True, False or None"
                )
        if len(values) < 2 or len(set(values)) < len(values):  # Optuna compares them by `==`
            raise ConfigurationError(f"{self!r}: a choice is between two or more different values")

    def __repr__(self) -> str:
        """Return the choice as Python code."""
        return f"Choice({', '.join(map(repr, self.values))})"

    def __contains__(self, value: object) -> bool:
        """Return whether a value is one of the values, with the same type."""
        return any(type(value) is type(known) and value == known for known in self.values)

    def __str__(self) -> str:
        """Return the choice in the command line's notation."""
        return ",".join(map(str, self.values))


Space = Range | Choice


def _above_step(value: float, low: float, step: float) -> Decimal:
    """Return the distance of a value from the step below it, in exact decimal arithmetic."""
    return (Decimal(str(value)) - Decimal(str(low))) % Decimal(str(step))


def fitted(name: str, space: Space, accepts: tuple[object, ...], kind: str) -> Space:
    """Adapt a search space to the type of a parameter: for a float, return a range of floats.

    Args:
        name: The parameter's name, for messages.
        space: The search space.
        accepts: The types that the parameter accepts; empty if unknown.
        kind: The types as written in the annotation, for messages.

    Raises:
        ConfigurationError: The parameter does not accept values of the space.

    Example:
        >>> fitted("rate", Range(1, 2), (float,), "float")
        Range(low=1.0, high=2.0, log=False, step=None)
    """
    if not accepts:
        return space
    if isinstance(space, Choice):
        for value in space.values:
            if not _fits(value, accepts):
                raise ConfigurationError(f"{name} is of type {kind}, which {value!r} is not")
        return space
    if float in accepts:
        step = None if space.step is None else float(space.step)
        return Range(float(space.low), float(space.high), space.log, step)
    if int not in accepts:
        raise ConfigurationError(
            f"{name} is of type {kind}, which has no range: give it values to choose from, as "
            "Choice(…)"
        )
    if not space.whole:
        raise ConfigurationError(f"{name} is of type {kind}: its range {space} needs whole numbers")
    return space


def _fits(value: Plain, accepts: tuple[object, ...]) -> bool:
    kinds = (type(value), float) if type(value) is int else (type(value),)
    literal = any(type(value) is type(known) and value == known for known in accepts)
    return literal or any(kind in accepts for kind in kinds)


def evaluate(
    node: ast.expr, names: Mapping[str, Any], calls: Mapping[str, Callable[..., Any]]
) -> Any:
    """Return the value of a parsed expression that consists of literals, lists and known names.

    Only the last part of a dotted name counts: `typing.Literal` means `Literal`.

    Args:
        node: The expression.
        names: What may be named, subscripted, and joined by `|`.
        calls: What may be called.

    Raises:
        NameError: If the expression calls anything else; its attribute `name` is the name.
        ValueError: If the expression contains anything else.
        Exception: Whatever a known name raises when it is called or subscripted.

    Example:
        >>> evaluate(ast.parse("range(2, -3)", mode="eval").body, {}, {"range": range})
        range(2, -3)
    """

    def value_of(part: ast.expr) -> Any:
        return evaluate(part, names, calls)

    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=ast.Constant()):
            return ast.literal_eval(node)
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in names:
            return names[name]
        case ast.List(elts=parts):
            return [value_of(part) for part in parts]
        case ast.Tuple(elts=parts):
            return tuple(value_of(part) for part in parts)
        case ast.Subscript(value=value, slice=index):
            return value_of(value)[value_of(index)]
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return value_of(left) | value_of(right)
        case ast.Call(
            func=ast.Name(id=name) | ast.Attribute(attr=name), args=args, keywords=words
        ) if all(word.arg for word in words):
            if name not in calls:
                raise NameError(f"{name} is not known", name=name)
            named = {str(word.arg): value_of(word.value) for word in words}
            return calls[name](*map(value_of, args), **named)
        case _:
            raise ValueError(f"{ast.unparse(node)} is neither a literal nor a known name")
