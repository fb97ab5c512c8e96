"""What one array of the batch influences: steps with other values in a row, or at a position."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ...steps.probes import INPUT_GRADIENTS
from ..numbers import Array, as_floats, is_float
from ..recording import Change, Event
from ..trials import ROUNDING, Leaf, Trials, TriedStep, differs, leaves_of

FEWEST_POSITIONS: Final = 3
"""The length of an axis from which it has positions."""


@dataclass(frozen=True, eq=False)
class ChangedPosition:
    """A step in which one position of all rows has other values."""

    axis: int
    place: int
    trial: TriedStep


@dataclass(eq=False)
class Influences:
    """Steps with changed arrays.

    Attributes:
        trials: The trials.
        rows: For each array the step in which its first row has the values of another row.
        every: For each array the step in which all rows have those of others, where one row of it
            changes nothing.
        positions: For each array with positions the step in which one of them is changed.
        evaluated: For each array of the evaluation the one with its rows in another order.
    """

    trials: Trials
    rows: dict[str, TriedStep] = field(default_factory=lambda: {})
    every: dict[str, TriedStep] = field(default_factory=lambda: {})
    positions: dict[str, ChangedPosition] = field(default_factory=lambda: {})
    evaluated: dict[str, TriedStep] = field(default_factory=lambda: {})

    def measure(self) -> None:
        """Run the steps."""
        trials = self.trials
        for leaf in leaves_of(trials.last.batch):
            self._rows(leaf)
            self._positions(leaf)
        if trials.evaluation is None:
            return
        for leaf in leaves_of(trials.evaluation.batch):
            turned = rolled(leaf.array)
            if turned is not None:
                what = f"{leaf.name} in evaluation"
                trial = trials.evaluated_again(what, batch=leaf.with_(turned))
                if trial is not None:
                    self.evaluated[leaf.name] = trial

    def _rows(self, leaf: Leaf) -> None:
        new = other_row(leaf.array)
        if new is None:
            self.trials.failed[f"influence of {leaf.name}"] = "its values are all equal"
            return
        trial = self.trials.attempt(f"influence of {leaf.name}", batch=leaf.with_(new))
        if trial is None:
            return
        self.rows[leaf.name] = trial
        turned = rolled(leaf.array)
        if turned is not None and not any(effects(self.trials.usual, trial).values()):
            trial = self.trials.attempt(f"influence of {leaf.name}", batch=leaf.with_(turned))
            if trial is not None:
                self.every[leaf.name] = trial

    def _positions(self, leaf: Leaf) -> None:
        axis = positions_of(leaf.array)
        turned = rolled(leaf.array)
        if axis is None or turned is None:
            return
        place = leaf.array.shape[axis] // 2
        new, index = leaf.array.copy(), (*[slice(None)] * axis, place)
        new[index] = turned[index]
        trial = self.trials.attempt(f"positions of {leaf.name}", batch=leaf.with_(new))
        if trial is not None:
            self.positions[leaf.name] = ChangedPosition(axis, place, trial)


def positions_of(array: Array) -> int | None:
    """Return the axis of positions: of texts and series the second one, of images the third."""
    axis = 2 if array.ndim > 3 else 1
    if array.ndim > 2 or (array.ndim == 2 and array.dtype.kind in "iu"):
        return axis if array.shape[axis] >= FEWEST_POSITIONS else None
    return None


def rolled(array: Array) -> Array | None:
    """Return an array whose rows are those of others; None if they are all equal."""
    turned = np.roll(array, 1, axis=0) if array.ndim else array
    return None if np.array_equal(turned, array, equal_nan=True) else turned


def other_row(array: Array) -> Array | None:
    """Return an array with the values of another row in the first one; None if there are none."""
    new = array.copy()
    first = new[:1] if new.ndim else new
    rows = new[1:] if new.ndim else ()
    others = [row for row in rows if not np.array_equal(row, new[0], equal_nan=True)]
    if others:
        first[...] = others[0]
    elif array.dtype.kind == "f":
        first[...] = 1.5 * first + 0.5
    elif array.dtype.kind == "b":
        first[...] = ~first
    else:
        return None
    return new


def effects(usual: TriedStep, other: TriedStep) -> dict[str, list[str]]:
    """Return what differs between two steps, by kind.

    The kinds are `predictions` (outermost calls of layers), `losses`, `gradients`, `updates` (the
    gradients that optimizers get), `returned values` and `variables`.
    """
    predictions = [
        event.call.path
        for key, event in usual.outer.items()
        if key in other.outer and _differing(event.floats(), other.outer[key].floats())
    ]
    losses = [dict(enumerate(map(np.array, trial.losses))) for trial in (usual, other)]
    before, after = (trial.gradients or trial.applied for trial in (usual, other))
    return {
        "predictions": predictions,
        "losses": [name_of_loss(i, len(usual.losses)) for i in _differing(*losses)],
        "gradients": _differing(before, after),
        "updates": _differing(usual.applied, other.applied),
        "returned values": _differing(usual.values, other.values),
        "variables": _differing(
            {path: x for path, x in usual.after.items() if is_float(x)}, other.after
        ),
    }


def _differing(these: Mapping[Any, Array], others: Mapping[Any, Array]) -> list[Any]:
    """Return the names of the arrays that are in both, and differ."""
    return [key for key, x in these.items() if key in others and differs(x, others[key])]


def is_used(trials: Trials, what: str, event: Event, change: Change) -> bool | None:
    """Return whether updates, returned values or variables depend on what a call returns.

    Returns:
        None if the step fails with the other outputs.
    """
    trial = trials.attempt(what, changes={(event.call.kind, event.call.key): change})
    if trial is None:
        return None
    found = effects(trials.usual, trial)
    used = bool(found["updates"] or found["returned values"] or found["variables"])
    # Of gradients with respect to inputs also the loss of them.
    return used or (event.call.kind == INPUT_GRADIENTS and bool(found["losses"]))


def name_of_loss(number: int, count: int) -> str:
    """Return the name of a loss that is differentiated."""
    return "loss" if count == 1 else f"loss {number + 1}"


def changed_at(a: Array, b: Array, axis: int = 0) -> list[int]:
    """Return the rows, or positions along an axis, where arrays differ by more than rounding."""
    if a.shape != b.shape or a.ndim <= axis or np.array_equal(a, b):
        return []
    x, y = (z if z.dtype == np.float32 else as_floats(z) for z in (a, b))
    size = np.max(np.abs(x), initial=0.0, where=np.isfinite(x))
    with np.errstate(invalid="ignore"):
        different = np.moveaxis(np.abs(x - y) > ROUNDING * size, axis, 0)
    return np.flatnonzero(different.reshape(a.shape[axis], -1).any(axis=1)).tolist()


def reached(changed: list[int], length: int, rows: int) -> str:
    """Describe which rows of an output a change of the first row reaches."""
    if not changed:
        return "none"
    whole = length // rows if length % rows == 0 else 0
    if not whole:
        return f"{len(changed)} of {length}"
    if all(row < whole for row in changed) or all(row % rows == 0 for row in changed):
        return "its own row"
    if len(changed) == length:
        return "all rows"
    return "its own and other rows" if 0 in changed else "other rows"


def offsets(changed: list[int], place: int, length: int) -> str:
    """Describe which positions of an output a change of one position reaches."""
    if not changed:
        return "none"
    low, high = min(changed), max(changed)
    earlier = "" if low >= place else "all earlier" if low == 0 else f"{place - low} earlier"
    later = "" if high <= place else "all later" if high == length - 1 else f"{high - place} later"
    own = "its own" if place in changed else ""
    return ", ".join(part for part in (own, earlier, later) if part)
