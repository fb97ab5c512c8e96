"""Triggers: `every("200 steps", …)`, `at("3 epochs", …)`, `after("10 min", …)`.

Units are required, because "every 100" could mean steps or epochs. A step is one call of
`train_step`, even if several steps run as one compiled call.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from ..errors import ConfigurationError, did_you_mean
from .progress import Progress
from .user_code import unfit_parameters

SECONDS = {"s": 1, "sec": 1, "second": 1, "min": 60, "minute": 60, "h": 3600, "hour": 3600}
COUNTS = {"step": "step", "epoch": "epoch", "example": "examples"}
UNITS = ("steps", "epochs", "examples", "s", "min", "h")


@dataclass(frozen=True, slots=True)
class Span:
    """An amount with a unit: `"step"`, `"epoch"`, `"examples"` or `"seconds"`.

    Example:
        >>> Span.parse("30 min")
        Span(amount=1800.0, of='seconds')
    """

    amount: float
    of: str

    @classmethod
    def parse(cls, text: "str | Span") -> "Span":
        """Parse `"200 steps"`, `"1 epoch"`, `"50_000 examples"`, `"30 s"`, `"10 min"`, `"2 h"`.

        Raises:
            ConfigurationError: The text has no number or no unit, or either of them is invalid.
        """
        if isinstance(text, Span):
            return text
        if callable(text):
            raise ConfigurationError(
                "a trigger begins with its time or count, as treadle.every('200 steps', function)"
            )
        match = re.fullmatch(r"\s*(\d[\d_]*(?:\.\d*)?|\.\d+)\s*([a-zA-Z]+)\s*", str(text))
        if match is None:
            number = str(text) if str(text).isdecimal() else "200"
            raise ConfigurationError(
                f"cannot read {text!r} as a time or a count: write a number and a unit in quotes, "
                f"for example '{number} steps'; units are {', '.join(UNITS)}"
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
        if singular in ("batche", "batch", "iteration", "it"):
            advice = f" A step trains on one batch: write '{match[1]} steps'"
        else:
            advice = did_you_mean(unit, UNITS)
        raise ConfigurationError(f"unknown unit {unit!r} in {text!r}.{advice}")


@dataclass(frozen=True, slots=True)
class When:
    """A trigger: when an event is due.

    An event counted in steps is due exactly at its step. An event counted in examples or seconds is
    due at the first window boundary at or after this amount.

    Attributes:
        span: The amount and its unit.
        repeat: Whether the event is due at each multiple of the span (`every`) or only once (`at`,
            `after`).
    """

    span: Span
    repeat: bool = True

    def steps_until(self, progress: Progress, examples_per_batch: int) -> int | None:
        """Return the number of steps until the event is due, or None if steps do not determine it.

        That is the case for epochs and seconds, and after an event that does not repeat.
        """
        of = self.span.of
        if of not in ("step", "examples"):
            return None
        now, amount = int(getattr(progress, of)), int(self.span.amount)
        target = (now // amount + 1) * amount if self.repeat else amount
        if target <= now:
            return None
        if of == "step":
            return target - now
        return max(1, ceil((target - now) / max(1, examples_per_batch)))

    def due(self, before: Progress, after: Progress, epoch_ended: bool = False) -> bool:
        """Return whether the event became due between two points of a run."""
        of = self.span.of
        old, new = getattr(before, of), getattr(after, of)
        if of == "epoch":  # an epoch counts once it has ended
            if not epoch_ended:
                return False
            old, new = after.epoch, after.epoch + 1
        if self.repeat:
            return old // self.span.amount < new // self.span.amount
        return old < self.span.amount <= new

    def facts(self) -> dict[str, Any]:
        """Return what identifies the trigger, in JSON's types; `from_facts` is the inverse."""
        return asdict(self.span)

    @staticmethod
    def from_facts(facts: Mapping[str, Any]) -> "When":
        """Return the repeated trigger with these facts."""
        span, epochs = Span(facts["amount"], facts["of"]), facts.get("epochs")
        if "first" not in facts:
            return When(span)
        numbers = None if epochs is None else tuple(epochs)
        return AtEpochs(span, epochs=numbers, first=facts["first"])


@dataclass(frozen=True, slots=True)
class AtEpochs(When):
    """A trigger that is due at the end of some epochs, as `validation_freq` of Keras.

    Attributes:
        epochs: Their numbers, from 1; None for each multiple of the span.
        first: The number of epochs before the first one of the run.
    """

    epochs: tuple[int, ...] | None = None
    first: int = 0

    def facts(self) -> dict[str, Any]:
        """Return what identifies the trigger, in JSON's types."""
        epochs = None if self.epochs is None else list(self.epochs)
        return {**asdict(self.span), "epochs": epochs, "first": self.first}

    def due(self, before: Progress, after: Progress, epoch_ended: bool = False) -> bool:
        """Return whether the epoch that has just ended is one of them."""
        if not epoch_ended:
            return False
        number = after.epoch + 1 + self.first
        return number % self.span.amount == 0 if self.epochs is None else number in self.epochs


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A hook function with its trigger; made by `every`, `at` and `after`."""

    when: When
    function: Callable[[Any], Any]

    def __post_init__(self) -> None:
        """Check that the function can be called with the loop.

        Raises:
            ConfigurationError: It cannot.
        """
        name = getattr(self.function, "__name__", type(self.function).__name__)
        if not callable(self.function):
            raise ConfigurationError(
                f"a trigger needs a function, not {self.function!r:.60}: write "
                "treadle.every('200 steps', function), without calling the function"
            )
        if (taken := unfit_parameters(self.function, 1)) is not None:
            raise ConfigurationError(
                f"{name} takes {taken}, but a hook is called with the loop: write `def "
                f"{name if name.isidentifier() else 'show'}(loop):`"
            )


def every(span: str, function: Callable[[Any], Any]) -> Scheduled:
    """Run `function(loop)` repeatedly, once per span: `every("200 steps", show)`.

    Args:
        span: A number with a unit: steps, epochs, examples, s, min or h.
        function: Called with the loop; if it returns a dict, the dict is logged.

    Raises:
        ConfigurationError: The span is invalid.

    Example:
        >>> every("2 epochs", print).when.span.amount
        2
    """
    return Scheduled(When(Span.parse(span)), function)


def at(span: str, function: Callable[[Any], Any]) -> Scheduled:
    """Run `function(loop)` once, exactly at a step or at the end of an epoch.

    Args:
        span: A number with a unit: steps, epochs or examples.
        function: Called with the loop; if it returns a dict, the dict is logged.

    Raises:
        ConfigurationError: The span is invalid, or is a time, which does not determine a step.

    Example:
        >>> at("1000 steps", print).when.repeat
        False
    """
    parsed = Span.parse(span)
    if parsed.of == "seconds":
        raise ConfigurationError(
            f"at({span!r}) is a time, not an exact step: use after({span!r}, …)"
        )
    return Scheduled(When(parsed, repeat=False), function)


def after(span: str, function: Callable[[Any], Any]) -> Scheduled:
    """Run `function(loop)` once, at the first window boundary after a span.

    Args:
        span: A number with a unit: steps, epochs, examples, s, min or h.
        function: Called with the loop; if it returns a dict, the dict is logged.

    Raises:
        ConfigurationError: The span is invalid.

    Example:
        >>> after("30 min", print).when.span.of
        'seconds'
    """
    return Scheduled(When(Span.parse(span), repeat=False), function)
