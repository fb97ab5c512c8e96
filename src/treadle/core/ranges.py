"""What a setting may be when the best one is searched for: `Range` and `Choice`.

They stand in a task's signature, as `units: Annotated[int, treadle.Range(64, 512, log=True)] = 64`.
They say what `treadle tune` tries; `treadle run` takes any other value too.
"""

import math
from dataclasses import dataclass
from decimal import Decimal

from ..errors import ConfigurationError

Plain = bool | int | float | str | None
PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Range:
    """Numbers from one to another, both included.

    Whole ones where both bounds are whole; for a parameter that is a `float`, any.

    Args:
        low: The least.
        high: The greatest.
        log: Look for the order of magnitude: 0.001 to 0.01 counts as much as 0.01 to 0.1.
        step: Only `low`, `low + step`, and so on; None means any.

    Raises:
        ConfigurationError: Bounds that are no finite numbers or not in order; a `log` from 0 or
            less, or with a step; a step that is not positive.

    Example:
        >>> str(Range(64, 512, log=True))
        '64..512 log'
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for number in (self.low, self.high, 1 if self.step is None else self.step):
            if type(number) not in (int, float) or not math.isfinite(number):
                raise ConfigurationError(f"{self!r}: {number!r} is no finite number")
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
        """Whether only whole numbers are meant."""
        return all(isinstance(number, int) for number in (self.low, self.high, self.step or 1))

    @property
    def last(self) -> float:
        """The greatest that is meant: with a step, the last that it comes to.

        Example:
            >>> Range(0.0, 1.0, step=0.3).last
            0.9
        """
        if self.step is None:
            return self.high
        last = Decimal(str(self.high)) - _over(self.high, self.low, self.step)
        return int(last) if self.whole else float(last)

    def __contains__(self, value: object) -> bool:
        """Say whether a value is one of those that are meant."""
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return False
        on_grid = self.step is None or not _over(value, self.low, self.step)
        return self.low <= value <= self.high and on_grid

    def __str__(self) -> str:
        """Say it as on the command line."""
        more = " log" if self.log else "" if self.step is None else f" step {self.step!r}"
        return f"{self.low!r}..{self.high!r}{more}"


@dataclass(frozen=True, init=False)
class Choice:
    """One of several values, in no order.

    Args:
        *values: Numbers, texts, True, False or None; at least two.

    Raises:
        ConfigurationError: Fewer than two, equal ones (as 1, 1.0 and True are), or something else
            among them.

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
        if len(values) < 2 or len(set(values)) < len(values):  # Optuna tells them by `==`
            raise ConfigurationError(f"{self!r}: a choice is between two or more different values")

    def __repr__(self) -> str:
        """Show it as it is written."""
        return f"Choice({', '.join(map(repr, self.values))})"

    def __contains__(self, value: object) -> bool:
        """Say whether this is one of the values."""
        return any(type(value) is type(known) and value == known for known in self.values)

    def __str__(self) -> str:
        """Say it as on the command line."""
        return ",".join(map(str, self.values))


Space = Range | Choice


def _over(value: float, low: float, step: float) -> Decimal:
    """Return by how much a value lies above the last step; as it is written, not in binary."""
    return (Decimal(str(value)) - Decimal(str(low))) % Decimal(str(step))


def fitted(name: str, space: Space, accepts: tuple[object, ...], kind: str) -> Space:
    """Return a space as it is for a parameter of these types: of a float, a range of floats.

    Args:
        name: The parameter's name, for messages.
        space: What it may be.
        accepts: The types that the parameter takes; nothing where that is not known.
        kind: They as they are written.

    Raises:
        ConfigurationError: The parameter does not take what is in the space.

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
