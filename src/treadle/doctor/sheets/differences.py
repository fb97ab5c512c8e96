"""What two sheets show differently, the most telling first."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from .lines import EFFECT, GROUPS, Line, text_of

MOST: Final = 8
"""The most lines of a difference."""

SHOWN: Final = 3
"""How many facts of a subject a line shows."""

ROUNDING: Final = 1e-3
"""The relative difference up to which numbers are equal."""

ABSENT: Final = "absent"

ORDER: Final = sorted(GROUPS, key=lambda group: group == "variables")
"""The groups, causes first: what an optimizer updates comes before the variables."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A subject that two sheets show differently.

    Attributes:
        group: Its group.
        subject: The subject; of effects that are shown together, `further effects`.
        text: The facts, as `fact before → after`.

    Example:
        >>> print(Difference("optimizers", "optimizer", "rate 0.01 → 1"))
        optimizers  optimizer: rate 0.01 → 1
    """

    group: str
    subject: str
    text: str

    def __str__(self) -> str:
        """Return the difference as a line."""
        return f"{self.group}  {self.subject}: {self.text}"


@dataclass(frozen=True, slots=True)
class _Change:
    text: str
    weight: int
    marked: bool


def differences(lines: Sequence[Line], others: Sequence[Line]) -> list[Difference]:
    """Return what differs, one subject a line, at most eight.

    Subjects whose connections changed come first, then changed settings, then numbers at their
    origin; of these first those that are unusual in one of the two. Numbers that follow from
    others, such as norms of gradients, are counted in one line.
    """
    found: dict[tuple[str, str], list[_Change]] = {}
    first, second = _by_key(lines), _by_key(others)
    for key in dict.fromkeys((*first, *second)):
        pair = first.get(key), second.get(key)
        before, after = (ABSENT if x is None else x.value for x in pair)
        if not _equal(before, after):
            line, *_ = present = [x for x in pair if x is not None]
            text = f"{line.name} {text_of(before)} → {text_of(after)}".strip()
            marked = len({"" if x is None else x.mark for x in pair}) > 1
            change = _Change(text, min(x.weight for x in present), marked)
            found.setdefault((line.group, line.subject), []).append(change)
    places = {key[:2]: i for i, key in reversed([*enumerate((*first, *second))])}
    ranked = sorted(found.items(), key=lambda item: (*_rank(item), places[item[0]]))
    telling = [item for item in ranked if min(x.weight for x in item[1]) < EFFECT]
    left = [item for item in ranked if item not in telling]
    room = MOST - bool(left or len(telling) > MOST)
    left = [*telling[room:], *left]
    result = [Difference(*key, _text(changes)) for key, changes in telling[:room]]
    if len(left) == 1:
        (key, changes), *_ = left
        return [*result, Difference(*key, _text(changes))]
    if left:
        names = ", ".join(subject for (_, subject), _ in left[:SHOWN])
        text = f"{sum(len(changes) for _, changes in left)} facts of {len(left)} subjects: {names}"
        more = ", …" if len(left) > SHOWN else ""
        result.append(Difference("", "further effects", text + more))
    return result


def _by_key(lines: Sequence[Line]) -> dict[tuple[str, str, str, int], Line]:
    """Return facts by group, subject, name, and number among equal names."""
    counts: Counter[tuple[str, str, str]] = Counter()
    found: dict[tuple[str, str, str, int], Line] = {}
    for line in lines:
        key = line.group, line.subject, line.fact.format(*line.about)
        found[*key, counts[key]] = line
        counts[key] += 1
    return found


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return a == b or abs(a - b) <= ROUNDING * max(abs(a), abs(b))
    return a == b


def _rank(item: tuple[tuple[str, str], list[_Change]]) -> tuple[int, bool, int]:
    (group, _), changes = item
    first = _ordered(changes)[0]
    return first.weight, not first.marked, ORDER.index(group)


def _ordered(changes: Sequence[_Change]) -> list[_Change]:
    return sorted(changes, key=lambda change: (change.weight, not change.marked))


def _text(changes: Sequence[_Change]) -> str:
    more = f"; {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
    return "; ".join(change.text for change in _ordered(changes)[:SHOWN]) + more
