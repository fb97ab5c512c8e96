"""Checks of signs: losses that fall as outputs leave their targets."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

from ..numbers import Array, as_floats
from .changed_losses import CODE, Losses, line_of
from .checks_entropy import entropy
from .checks_losses import enters_a_layer, same
from .checks_terms import (
    columns_without_bound,
    outputs_without_bound,
    proportional_weights,
    weights_without_bound,
)
from .guarding import guarded
from .intervening import MOST_CALLS, Change, constant, floats_of, outer_calls
from .recording import GRADIENTS, Event
from .report import Finding
from .trials import Leaf, Trial, Trials, leaves_of

WHY: Final = "training drives the outputs away from where they should be"
FIX: Final = "change the sign of this part of the loss"

MOST_ROWS: Final = 8
"""How many rows are tried alone."""


def check(trials: Trials) -> Iterator[Finding]:
    """Look at how the losses answer to better labels, and to outputs and weights far too large."""
    if not trials.last.gradients or _is_ascent(trials.last):  # which O-ascent finds
        return
    for part in (
        *(_labels, _inputs_as_targets),
        *(outputs_without_bound, columns_without_bound, weights_without_bound),
        *(proportional_weights, entropy),
    ):
        found = guarded(trials, part, trials)
        yield from found
        if found:  # one wrong sign has several effects
            return


def _is_ascent(trial: Trial) -> bool:
    """Return whether the gradients of a loss are applied with the opposite sign."""
    applied = trial.applied
    products = [
        sum(
            float(np.vdot(as_floats(g), as_floats(applied[path])))
            for path, g in event.arrays.items()
            if path in applied and applied[path].shape == g.shape
        )
        for event in trial.of(GRADIENTS)
    ]
    return min(products, default=0.0) < 0


# Labels


def _labels(trials: Trials) -> Iterator[Finding]:
    """Give the rows the labels that the outputs name, and others: the first must have less loss.

    Both for each half of the rows: a loss that is a mean of terms, one for each row, adds up.
    """
    last, losses = trials.last, Losses(trials)
    calls = list(outer_calls(last).values())[-MOST_CALLS:]
    for leaf in leaves_of(last.batch):
        if leaf.array.ndim == 0 or enters_a_layer(last, leaf):
            continue
        batch = _others_positive(last.batch, leaf)
        found: list[tuple[Array, Event, Array, tuple[Array, ...]]] = []
        for event in calls:
            for outputs in floats_of(event).values():
                labels = _better_and_worse(leaf, outputs)
                if labels is not None:
                    gaps = losses.of(batch(labels[0])) - losses.of(batch(labels[1]))
                    found.append((np.nan_to_num(gaps), event, outputs, labels))
        if any(
            gaps.any() for gaps, *_ in found
        ):  # labels need not fit to the outputs of each layer
            trials.failed.pop(CODE, None)
        for number in range(losses.count if found else 0):
            # Labels from the outputs that they are compared with make the largest difference.
            gaps, event, outputs, labels = max(found, key=lambda entry: abs(entry[0][number]))
            values = None
            if gaps[number] > 0:
                certain = _is_compared(losses, leaf, event, outputs, number)
                values = _reversed(losses, leaf, batch, number, certain, *labels)
            if values is None or _are_inputs(trials, batch(labels[0]), batch(labels[1])):
                continue
            if _rows_agree(losses, batch, number, outputs, labels):
                yield Finding(
                    CODE,
                    "warning",
                    leaf.name,
                    f"the loss is {values[0]:.4g} if it names what {event.info.path} returns, and "
                    f"{values[1]:.4g} if it names something else",
                    WHY,
                    FIX,
                    line_of(last, number),
                )
                return


def _reversed(
    losses: Losses,
    leaf: Leaf,
    batch: Callable[[Array], Any],
    number: int,
    certain: bool,
    better: Array,
    worse: Array,
    mirrored: Array | None = None,
) -> tuple[float, float] | None:
    """Return a loss with better and with worse labels if the first is larger, as a sum over rows.

    Floats may be weights or rewards: unless they are certainly labels, the loss must also be
    negative, as the negative of a distance is, and fall on both sides, as a product does not.
    """
    half = len(leaf.array) // 2
    mixed = [np.concatenate([a[:half], b[half:]]) for a, b in ((better, worse), (worse, better))]
    good, bad, first, second = (
        float(losses.of(batch(labels))[number]) for labels in (better, worse, *mixed)
    )
    uncertain = leaf.array.dtype.kind == "f" and not certain
    if not good > bad + 1e-4 * abs(bad) or (uncertain and not bad < 0):
        return None
    if mirrored is not None and not losses.of(batch(mirrored))[number] < min(good, 0):
        return None
    adds_up = abs(first + second - good - bad) < 0.1 * (good - bad)
    return (good, bad) if adds_up and bad < min(first, second) < good else None


def _is_compared(losses: Losses, leaf: Leaf, event: Event, outputs: Array, number: int) -> bool:
    """Return whether floats of 0 and 1 are labels of outputs, though with the sign reversed.

    Larger outputs where the label is 1 must raise the loss, and those where it is 0 lower it: where
    a weight is 0, outputs do not count. The loss must train the layer: an adversary's does not.
    """
    last, y = losses.trials.last, leaf.array
    names = [name for name, x in floats_of(event).items() if x is outputs]
    if y.dtype.kind != "f" or y.size != outputs.size or not names or not np.isin(y, (0, 1)).all():
        return False
    trained = {p for e in last.of(GRADIENTS)[number : number + 1] for p in e.info.more["paths"]}
    own = {losses.trials.state.path_of(v) for v in event.info.of.trainable_variables}
    if not own & trained:
        return False
    x, ones = as_floats(outputs), y.reshape(outputs.shape) == 1
    step = 0.2 * float(x.std()) or 0.1
    base, at_ones, at_zeros = (
        float(
            losses.of(changes={event.info.more["outer"]: _at(names[0], x + step * where)})[number]
        )
        for where in (np.zeros(x.shape), ones, ~ones)
    )
    least = 1e-5 * abs(base)
    return at_ones > base + least and at_zeros < base - least


def _at(name: str, value: Array) -> Change:
    value = value.astype("float32")
    return lambda key, tensor: constant(value, tensor) if key == name else tensor


def _are_inputs(trials: Trials, one: Any, other: Any) -> bool:
    """Return whether layers return something else for other labels, as those of a condition."""
    found = [trials.attempt(CODE, batch) for batch in (one, other)]
    if found[0] is None or found[1] is None:
        return True
    first, second = (outer_calls(trial) for trial in found if trial is not None)
    return first.keys() != second.keys() or any(
        not same(x, second[number].arrays.get(name, np.zeros(0)))
        for number, event in first.items()
        for name, x in floats_of(event).items()
    )


def _rows_agree(
    losses: Losses,
    batch: Callable[[Array], Any],
    number: int,
    outputs: Array,
    labels: tuple[Array, ...],
) -> bool:
    """Return whether better labels of single rows do not lower a loss either.

    A policy gradient has factors that the step computes: normalized returns, of which half are
    negative. Rows are chosen whose outputs are clear. Those of padding are often all alike.
    """
    better, worse = labels[:2]
    y = as_floats(outputs)
    clear = np.abs(y - np.median(y)).reshape(len(y), -1).mean(1)
    rows = np.flatnonzero(clear > np.median(clear))
    chosen = (
        np.unique(rows[np.linspace(0, len(rows) - 1, MOST_ROWS).astype(int)]) if rows.size else rows
    )
    bad = float(losses.of(batch(worse))[number])
    for row in chosen:
        mixed = worse.copy()
        mixed[row] = better[row]
        if losses.of(batch(mixed))[number] < bad - 1e-6 * abs(bad):
            return False
    return True


def _better_and_worse(leaf: Leaf, outputs: Array) -> tuple[Array, ...] | None:
    """Return labels that fit to outputs, and others that do not; None if these are no labels."""
    x, y = leaf.array, as_floats(outputs)
    if not np.isfinite(y).all() or y.ndim < 2 or len(x) != len(y):
        return None
    flat = x.shape[:-1] if x.ndim > 1 and x.shape[-1] == 1 else x.shape
    classes = y.shape[-1]
    if x.dtype.kind in "iu" and flat == y.shape[:-1] and classes > 1:
        if x.min() < 0 or x.max() >= classes:
            return None
        found = (y.argmax(-1), y.argmin(-1))
        return tuple(labels.reshape(x.shape).astype(x.dtype) for labels in found)
    if x.dtype.kind not in "fiub" or x.size != y.size:
        return None
    binary = bool(np.isin(x, (0, 1)).all())
    if binary and x.shape == y.shape and classes > 1 and (x.sum(-1) == 1).all():
        rows = np.eye(classes, dtype=x.dtype)
        return rows[y.argmax(-1)], rows[y.argmin(-1)]
    y = y.reshape(x.shape)
    if binary:
        above = y > np.median(y)
        return above.astype(x.dtype), (~above).astype(x.dtype)
    if x.dtype.kind != "f":
        return None
    far = 2 * (float(np.sqrt(np.mean((as_floats(x) - y) ** 2))) or 1.0)
    far = far * np.where(np.random.default_rng(5).random(x.shape) < 0.5, -1.0, 1.0)
    return tuple(found.astype(x.dtype) for found in (y, y + far, y - far))


def _others_positive(batch: Any, leaf: Leaf) -> Callable[[Array], Any]:
    """Return a function that puts labels into a batch whose rewards or weights are positive.

    A reward for an action is a loss with the opposite sign where it is negative.
    """
    place = [other.name for other in leaves_of(batch)].index(leaf.name)
    for number in range(len(leaves_of(batch))):
        other = leaves_of(batch)[number]
        x = other.array
        one_each = x.ndim > 0 and x.size == len(x) and x.dtype.kind == "f"
        if number != place and one_each and not np.isin(x, (0, 1)).all():
            large = 10 * max(1.0, float(np.abs(x).max()))
            batch = other.with_(np.full_like(x, large) if x.min() < 0 else x)

    def put(labels: Array) -> Any:
        return leaves_of(batch)[place].with_(labels)

    return put


# Inputs that are targets too


def _inputs_as_targets(trials: Trials) -> Iterator[Finding]:
    """Move the outputs to an array of the batch and beyond: a distance is smallest at the array."""
    last, losses = trials.last, Losses(trials)
    for number, event in list(outer_calls(last).items())[-MOST_CALLS:]:
        for leaf in leaves_of(last.batch):
            output = event.get("outputs")
            if output is None or output.shape != leaf.array.shape or output.ndim < 2:
                continue
            there, at, beyond = (
                losses.of(changes={number: _placed(as_floats(leaf.array), output, share)})
                for share in (1.0, 0.0, -1.0)
            )
            bend = (there + beyond) / 2 - at
            even = np.abs(there - beyond) < 0.05 * np.abs(bend)
            large = np.abs(bend) > 1e-3 * np.abs(at)
            for which in np.flatnonzero((bend < 0) & even & large):
                yield Finding(
                    CODE,
                    "warning",
                    event.info.path,
                    f"the loss is {there[which]:.4g}, and {at[which]:.4g} if its outputs equal "
                    f"{leaf.name}",
                    WHY,
                    FIX,
                    line_of(last, int(which)),
                )
                return


def _placed(target: Array, output: Array, share: float) -> Change:
    value = (target + share * (as_floats(output) - target)).astype("float32")
    return lambda name, tensor: constant(value, tensor) if name == "outputs" else tensor
