"""Checks of examples that a step mixes or shuffles: their labels must follow them."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from ..numbers import Array, as_floats
from .checks_losses import same
from .guarding import guarded
from .intervening import Change, changed_outputs, constant, losses_of, noise_like, outer_calls
from .recording import Event
from .report import Finding
from .trials import Leaf, Trials, leaves_of, rows_of

CODE: Final = "L-unpaired"
FEWEST: Final = 6
"""The least number of rows that can show a mixture."""

MOST: Final = 8
"""How many examples are changed."""


def check(trials: Trials) -> Iterator[Finding]:
    """Change single examples, and look at the rows that the first layer gets."""
    yield from guarded(trials, _labels_left_behind, trials)


def _labels_left_behind(trials: Trials) -> Iterator[Finding]:
    """Find rows of inputs that are mostly another example, whose label they are not compared with.

    Background of other examples, which is a small or a separate part of the inputs, keeps labels.
    """
    last, rows = trials.last, rows_of(trials.last.batch)
    calls, leaves = outer_calls(last), leaves_of(last.batch)
    if rows is None or rows < FEWEST or not calls or len(leaves) < 2:
        return
    first, number = calls[min(calls)], max(calls)
    entering, outputs = first.get("inputs[0]"), calls[number].get("outputs")
    if entering is None or outputs is None or len(entering) != rows or len(outputs) != rows:
        return
    if any(same(entering, leaf.array) for leaf in leaves):
        return
    for examples in leaves:
        if examples.array.ndim < 2 or examples.array[0].size < 2:
            continue
        for row, source in _mostly_others(trials, examples, first):
            for labels in leaves:
                if labels is not examples and _is_of_the_row_alone(
                    trials, labels, number, outputs, row, source
                ):
                    yield Finding(
                        CODE,
                        "warning",
                        labels.name,
                        f"row {row} of the inputs is mostly or only example {source} of "
                        f"{examples.name}, and its outputs are compared with the label of "
                        f"example {row} alone",
                        "inputs are learned with labels of other examples",
                        "mix or shuffle inputs and labels by the same permutation and weights",
                        first.info.line,
                    )
                    return


def _mostly_others(trials: Trials, examples: Leaf, first: Event) -> Iterator[tuple[int, int]]:
    """Yield rows of the inputs of a layer, each with another example that it mostly consists of."""
    rows = len(examples.array)
    known: dict[int, Array | None] = {}

    def changes(row: int) -> Array | None:
        if row not in known:
            known[row] = _changes(trials, examples, first, row)
        return known[row]

    for source in np.linspace(0, rows - 1, MOST).astype(int).tolist():
        found = changes(source)
        if found is None:
            return
        sizes = np.linalg.norm(found, axis=1)
        moved = np.flatnonzero(sizes > 0.05 * sizes.max())
        if not moved.size or len(moved) > 3:
            return  # statistics of the batch, or another array
        for row in moved.tolist():
            own = None if row == source else changes(row)
            if own is None or not _are_parallel(found[row], found[source]):
                continue
            if sizes[row] > 1.5 * float(np.linalg.norm(own[row])):
                yield row, source


def _changes(trials: Trials, examples: Leaf, first: Event, row: int) -> Array | None:
    """Return how the inputs of a layer change with one example, relative to its change."""
    other = examples.array.copy()
    other[row] = examples.array[(row + 1) % len(other)]
    size = float(np.linalg.norm(as_floats(other[row]) - as_floats(examples.array[row])))
    trial = trials.attempt(CODE, examples.with_(other)) if size else None
    event = None if trial is None else outer_calls(trial).get(first.info.more["outer"])
    after = None if event is None else event.get("inputs[0]")
    before = first["inputs[0]"]
    if after is None or after.shape != before.shape:
        return None
    return (as_floats(after) - as_floats(before)).reshape(len(before), -1) / size


def _are_parallel(a: Array, b: Array) -> bool:
    sizes = float(np.linalg.norm(a) * np.linalg.norm(b))
    return not sizes or float(a @ b) > 0.99 * sizes


def _is_of_the_row_alone(
    trials: Trials, labels: Leaf, number: int, outputs: Array, row: int, source: int
) -> bool:
    """Return whether a row of outputs is compared with its own label, and not with that of another.

    An output and a label that are compared change the loss by more than each of them alone.
    """
    if (labels.array[row] == labels.array[source]).all():
        return False
    values = as_floats(outputs).copy()
    moved = values.copy()
    moved[row] += 2 * noise_like(outputs)[row]

    def losses(y: Array, x: Array) -> Array:
        value = x.astype("float32")
        change: Change = lambda name, tensor: (  # noqa: E731
            constant(value, tensor) if name == "outputs" else tensor
        )
        with changed_outputs({number: change}):
            trial = trials.attempt(CODE, labels.with_(y))
        return np.array([np.nan] if trial is None else losses_of(trial))

    def compared(with_row: int, by: int) -> Array:
        other = labels.array.copy()
        other[with_row] = labels.array[by]
        y = labels.array
        cross = losses(other, moved) - losses(other, values) - losses(y, moved) + losses(y, values)
        return np.abs(cross)

    own = compared(row, source)
    if not (own > 1e-5 * np.abs(losses(labels.array, values))).any():
        return False
    return bool((compared(source, row) < 1e-2 * own.max()).all())
