"""Facts of a sheet, and how they were measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..numbers import Array, as_floats

GROUPS: Final = (
    *("batch", "losses", "layers", "variables", "optimizers", "randomness", "evaluation"),
    "metrics",
)

WIRING, SETTING, NUMBER, EFFECT = range(4)
"""How much a change of a fact tells: what is connected to what, what is configured, a number at its
origin, a number that follows from others."""

HOW: Final = {
    "read": "read from the batch",
    "ahead": "read from the first batches of the source",
    "again": "read the first batches of the source again",
    "row": "one row got the values of another row, in a step from equal state and random numbers",
    "position": "one position of all rows got the values of other rows",
    "values": "all rows got the values of others",
    "recorded": "recorded in the second training step",
    "both": "recorded in the first and the second training step",
    "repeated": "the second step ran again from equal state, batch and random numbers",
    "slopes": "the loss was differentiated with respect to outputs of layers",
    "weights": "the weights that the loss trains moved a little along their gradient, and back",
    "twice": "every row was held twice",
    "terms": "regularization and added losses were doubled",
    "changed call": "the call returned other numbers: each entry scaled, or with the other sign",
    "dry run": "the step ran with every branch",
    "object": "read from the object",
    "evaluated": "recorded in the evaluation of one batch",
    "seeds": "the evaluation ran again with other random numbers",
    "train batch": "the evaluation ran with the training batch",
    "replaced": "these variables got other values, in the training and in the evaluation step",
}
"""The ways of measuring, by their names in `--json`."""


UNNAMED: Final = ("array", "kind", "column", "class", "size", "shape", "evaluation")
"""Facts whose value says what it is: the text shows it without the name."""


@dataclass(frozen=True, slots=True)
class Line:
    """A fact about one subject.

    Attributes:
        group: One of `batch`, `losses`, `layers`, `variables`, `optimizers`, `randomness`,
            `evaluation`, `metrics`.
        subject: The array, loss, layer, variable or optimizer, by path.
        fact: The name of the fact, which is the same for all tasks; each `{}` in it stands for an
            entry of `about`.
        value: The fact: a string, number, boolean, or list of strings.
        how: How it was measured.
        mark: Why it is unusual; empty if it is not. A mark is no accusation.
        weight: How much a change of it tells: 0 for what is connected to what, 1 for settings, 2
            for numbers, 3 for numbers that follow from others.
        shown: Whether the text of a sheet shows it; what is usual is left out.
        about: What else the fact is about, such as the paths of other layers or arrays.

    Example:
        >>> Line("losses", "loss", "at the start", 2.302585, "recorded").text
        'at the start 2.3'
    """

    group: str
    subject: str
    fact: str
    value: Any
    how: str
    mark: str = ""
    weight: int = SETTING
    shown: bool = True
    about: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The name of the fact as the text shows it: with what it is about, or empty."""
        return "" if self.fact in UNNAMED else self.fact.format(*self.about)

    @property
    def text(self) -> str:
        """The fact in words."""
        return f"{self.name} {text_of(self.value)}".strip()


class Lines:
    """Collects the facts of one group."""

    def __init__(self, group: str) -> None:
        self._group, self.found = group, list[Line]()

    def add(
        self,
        subject: str,
        fact: str,
        value: Any,
        how: str,
        weight: int = SETTING,
        mark: str = "",
        shown: bool = True,
        about: Sequence[str] = (),
    ) -> None:
        """Add a fact; `how` is a key of `HOW`."""
        parts = (subject, fact, value, HOW[how], mark, weight, shown, about)
        self.found.append(Line(self._group, *parts))


def text_of(value: Any) -> str:
    """Format a value of a fact."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return short(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(text_of, value)) or "nothing"
    return str(value)


def short(value: float) -> str:
    """Format a number with three digits.

    Example:
        >>> short(0.123456), short(1234567.0), short(2.0)
        ('0.123', '1.23e+06', '2')
    """
    return f"{value:.3g}"


def range_of(array: Array) -> str:
    """Return the range of the finite entries, as `-1.2 to 3`."""
    x = as_floats(array)
    x = x[np.isfinite(x)]
    if not x.size:
        return "no finite numbers"
    low, high = float(x.min()), float(x.max())
    return short(low) if low == high else f"{short(low)} to {short(high)}"


def names_of(names: Sequence[str], most: int = 4) -> list[str]:
    """Return names, the first ones if there are many."""
    unique = list(dict.fromkeys(names))
    more = [f"{len(unique) - most} more"] if len(unique) > most else []
    return [*unique[:most], *more]
