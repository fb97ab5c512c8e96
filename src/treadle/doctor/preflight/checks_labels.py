"""Checks of labels: whether the label of a row counts for the outputs of that row."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np

from ..numbers import Array, as_floats
from .checks_rows import changed_by, is_fed, with_other_row
from .guarding import guarded
from .intervening import (
    Change,
    changed_outputs,
    constant,
    floats_of,
    held,
    losses_of,
    noise_like,
    outer_calls,
)
from .recording import Event
from .report import Finding
from .spying import without_updates
from .trials import Leaf, Trials, leaves_of, rows_of

CODE: Final = "L-unpaired"
FEWEST: Final = 8
"""The least number of rows that can show a mistake."""

NEAR: Final = 3
"""Rows may be points in time, where a label may count for a neighboring row."""


def check(trials: Trials) -> Iterator[Finding]:
    """Find labels that the loss compares with the outputs of other rows."""
    yield from guarded(trials, _of_other_rows, trials)


def _of_other_rows(trials: Trials) -> Iterator[Finding]:
    """Change a row, which tells the outputs that depend on it, and then one label of this row.

    The label counts for an output if the change of the loss with both is not the sum of its
    changes with each.
    """
    rows = rows_of(trials.last.batch)
    if rows is None or rows < FEWEST:
        return
    calls = outer_calls(trials.last)
    fitting = [
        (number, event)
        for number, event in calls.items()
        if all(len(x) == rows for x in floats_of(event).values() if x.ndim)
        and is_fed(trials, event)
    ]
    if not fitting:
        return
    number, event = fitting[-1]
    tested = sorted({rows // 4, rows // 3 + 1, rows // 2 + 1, rows - 2})
    with without_updates(trials.state.optimizers):
        others = {row: with_other_row(trials, CODE, row) for row in tested}
    of = {
        row: {int(i) for i in changed_by(trial, number, event)}
        for row, trial in others.items()
        if trial is not None
    }
    if len(of) < len(tested) or any(row not in of[row] for row in of):
        return
    if any(len(found) > rows / 3 for found in of.values()):
        return
    steps = _Held(trials, calls, number)
    elsewhere = set(range(rows)).difference(*of.values())
    for leaf in leaves_of(trials.last.batch):
        if not _Labels(steps, leaf, tested).count_for(elsewhere):
            continue
        found = [
            (row, seen)
            for row in tested
            if (seen := _misplaced(_Labels(steps, leaf, [row]), of[row]))
        ]
        if len(found) >= 2:  # a permutation may leave some rows where they are
            row, seen = found[0]
            yield Finding(
                CODE,
                "warning",
                leaf.name,
                f"its row {row} counts for the outputs of other rows, {seen}",
                "labels are compared with the outputs of other examples",
                "use the same order, permutation and axes for inputs, outputs and labels",
                event.info.line,
            )
            return


def _misplaced(label: "_Labels", own: set[int]) -> str:
    """Return how the label of one row is misplaced, or an empty string.

    Args:
        label: The label.
        own: The rows of the outputs that depend on this row of the inputs.
    """
    (row,), everything = label.rows, set(range(len(label.array)))
    if not label.count_for(everything - own):
        return ""
    if not label.count_for(own):
        near = {i for i in everything if abs(i - row) <= NEAR} - own
        return "" if label.count_for(near) else "and not for its own"
    mixed = sorted(own - {row})[:2]
    if mixed and not all(label.count_for({i}) for i in mixed):
        return f"and not for row {mixed[0]}, which the same row of the inputs was mixed into"
    return ""


class _Held:
    """Losses of steps in which all outputs are held, except for some rows of one call.

    Args:
        trials: The trials.
        calls: The outermost calls of layers.
        number: The call whose outputs are changed.
    """

    def __init__(self, trials: Trials, calls: dict[int, Event], number: int) -> None:
        self._trials, self._calls, self._number = trials, calls, number
        self._usual: dict[frozenset[int], Array] = {}

    def usual(self, rows: frozenset[int]) -> Array:
        """Return the losses with the same batch and other outputs in some rows."""
        if rows not in self._usual:
            self._usual[rows] = self.losses(rows, self._trials.last.batch)
        return self._usual[rows]

    def losses(self, rows: frozenset[int], batch: Any) -> Array:
        """Return the losses with another batch and other outputs in some rows."""
        changes: dict[int, Change] = {n: held(event) for n, event in self._calls.items()}
        changes[self._number] = _with_other_outputs(self._calls[self._number], sorted(rows))
        with without_updates(self._trials.state.optimizers), changed_outputs(changes):
            trial = self._trials.attempt(CODE, batch)
        return np.array([np.nan] if trial is None else losses_of(trial))


class _Labels:
    """One entry of an array in each of some rows, which are changed together.

    Args:
        steps: The steps with held outputs.
        leaf: The array.
        rows: The rows.

    Attributes:
        array: The array.
        rows: The rows.
    """

    def __init__(self, steps: _Held, leaf: Leaf, rows: Sequence[int]) -> None:
        self._steps, self._leaf, self.array, self.rows = steps, leaf, leaf.array, rows

    def count_for(self, rows: set[int]) -> bool:
        """Return whether the labels count for the outputs of some of these rows."""
        if not rows or self._other is None:
            return False
        which = frozenset(rows)
        plain, outputs = self._steps.usual(frozenset()), self._steps.usual(which)
        both = self._steps.losses(which, self._other)
        cross = np.abs(both - outputs - self._labels_alone + plain)
        size = 1 + np.abs(plain) + np.abs(outputs) + np.abs(self._labels_alone)
        return bool((cross > 2e-6 * size).any())

    @cached_property
    def _labels_alone(self) -> Array:
        return self._steps.losses(frozenset(), self._other)

    @cached_property
    def _other(self) -> Any:
        """The batch with entries of other rows, the most different ones; None if all agree."""
        flat = self.array.reshape(len(self.array), -1)
        place = min(1, flat.shape[1] - 1)
        column, other = as_floats(flat[:, place]), flat.copy()
        for row in self.rows:
            donor = int(np.abs(column - column[row]).argmax())
            other[row, place] = flat[donor, place]
        same = np.array_equal(flat, other)
        return None if same else self._leaf.with_(other.reshape(self.array.shape))


def _with_other_outputs(event: Event, rows: Sequence[int]) -> Change:
    """Return a change of some rows of outputs, which leaves probabilities within their range."""

    def change(name: str, tensor: Any) -> Any:
        if name not in event.arrays:
            return tensor
        values = as_floats(event[name]).copy()
        if values.ndim and len(rows):
            within = values.min() >= 0 and values.max() <= 1
            other = np.roll(values, 1, axis=0) if within else values + 3 * noise_like(values)
            values[list(rows)] = other[list(rows)]
        return constant(values.astype("float32"), tensor)

    return change
