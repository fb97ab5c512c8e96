"""When something happens: `every("200 steps", …)`, `at("3 epochs", …)`, `after("10 min", …)`.

Units are always spelled out, because "every 100" means steps to one reader and epochs to the next.
"steps" are calls of `train_step`, whatever runs inside one compiled call.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

from ..errors import ConfigurationError, did_you_mean
from .progress import Progress

SECONDS = {"s": 1, "sec": 1, "second": 1, "min": 60, "minute": 60, "h": 3600, "hour": 3600}
COUNTS = {"step": "step", "epoch": "epoch", "example": "examples"}
UNITS = ("steps", "epochs", "examples", "s", "min", "h")


@dataclass(frozen=True, slots=True)
class Span:
    """An amount and what it counts: `"step"`, `"epoch"`, `"examples"` or `"seconds"`.

    Example:
        >>> Span.parse("30 min")
        Span(amount=1800.0, of='seconds')
    """

    amount: float
    of: str

    @classmethod
    def parse(cls, text: "str | Span") -> "Span":
        """Read `"200 steps"`, `"1 epoch"`, `"50_000 examples"`, `"30 s"`, `"10 min"`, `"2 h"`.

        Raises:
            ConfigurationError: The text has no number, no unit, or one that is not known.
        """
        if isinstance(text, Span):
            return text
        match = re.fullmatch(r"\s*(\d[\d_]*(?:\.\d*)?|\.\d+)\s*([a-zA-Z]+)\s*", str(text))
        if match is None:
            raise ConfigurationError(
                f"cannot read {text!r} as a time or a count: write a number and a unit, for "
                f"example '200 steps'; units are {', '.join(UNITS)}"
            )
        amount, unit = float(match[1].replace("_", "")), match[2].lower()
        singular = unit if unit in SECONDS or unit in COUNTS else unit.removesuffix("s")
        if amount <= 0:
            raise ConfigurationError(f"{text!r} must be more than zero")
        if singular in SECONDS:
            return cls(amount * SECONDS[singular], "seconds")
        if singular in COUNTS:
            if amount != int(amount):
                raise ConfigurationError(f"{text!r} must be a whole number of {unit}")
            return cls(int(amount), COUNTS[singular])
        raise ConfigurationError(f"unknown unit {unit!r} in {text!r}.{did_you_mean(unit, UNITS)}")

    def of_progress(self, progress: Progress) -> float:
        """Return what this span counts, as it stands at a batch (epochs: the finished ones)."""
        return float(getattr(progress, self.of))


@dataclass(frozen=True, slots=True)
class When:
    """A rule for the moments at which something is due.

    Attributes:
        span: What it counts, and how much.
        repeat: Due at each multiple (`every`), or only once (`at`, `after`).

    An event counted in steps is due exactly at its step; one counted in examples or seconds at the
    first window boundary at or after it.
    """

    span: Span
    repeat: bool = True

    def steps_until(self, progress: Progress, examples_per_batch: int) -> int | None:
        """Return after how many steps it is due next; None where steps cannot tell."""
        if self.span.of not in ("step", "examples"):
            return None
        now, amount = int(self.span.of_progress(progress)), int(self.span.amount)
        target = (now // amount + 1) * amount if self.repeat else amount
        if target <= now:
            return None
        if self.span.of == "step":
            return target - now
        return max(1, ceil((target - now) / max(1, examples_per_batch)))

    def due(self, before: Progress, after: Progress, epoch_ended: bool = False) -> bool:
        """Say whether it became due between two moments of a run."""
        old, new = self.span.of_progress(before), self.span.of_progress(after)
        if self.span.of == "epoch":  # an epoch counts once it has ended
            if not epoch_ended:
                return False
            old, new = after.epoch, after.epoch + 1
        if self.repeat:
            return old // self.span.amount < new // self.span.amount
        return old < self.span.amount <= new


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A hook function and when it runs; made by `every`, `at` and `after`."""

    when: When
    function: Callable[[Any], Any]


def every(span: str, function: Callable[[Any], Any]) -> Scheduled:
    """Run `function(loop)` every so often: `every("200 steps", show)`.

    Args:
        span: A count with its unit: steps, epochs, examples, s, min or h.
        function: Called with the loop; a dict that it returns is logged.

    Raises:
        ConfigurationError: The span cannot be read.

    Example:
        >>> every("2 epochs", print).when.span.amount
        2
    """
    return Scheduled(When(Span.parse(span)), function)


def at(span: str, function: Callable[[Any], Any]) -> Scheduled:
    """Run `function(loop)` once, at exactly this step or the end of this epoch.

    Args:
        span: A count with its unit: steps, epochs or examples.
        function: Called with the loop; a dict that it returns is logged.

    Raises:
        ConfigurationError: The span cannot be read, or counts time, which has no exact moment.

    Example:
        >>> at("1000 steps", print).when.repeat
        False
    """
    parsed = Span.parse(span)
    if parsed.of == "seconds":
        raise ConfigurationError(f"at({span!r}) names no exact moment: use after({span!r}, …)")
    return Scheduled(When(parsed, repeat=False), function)


def after(span: str, function: Callable[[Any], Any]) -> Scheduled:
    """Run `function(loop)` once, at the first window boundary after this much.

    Args:
        span: A count or a time with its unit.
        function: Called with the loop; a dict that it returns is logged.

    Raises:
        ConfigurationError: The span cannot be read.

    Example:
        >>> after("30 min", print).when.span.of
        'seconds'
    """
    return Scheduled(When(Span.parse(span), repeat=False), function)
