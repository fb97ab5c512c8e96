"""Checks of signs: losses that fall as outputs leave their targets, and terms without a bound."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..numbers import Array, as_floats
from .checks_losses import enters_a_layer, same
from .intervening import (
    MOST_CALLS,
    Change,
    changed_outputs,
    constant,
    floats_of,
    held,
    losses_of,
    noise_like,
    outer_calls,
)
from .recording import GRADIENTS, OBJECTIVE, Event
from .report import Finding
from .trials import Leaf, Trial, Trials, leaves_of, rows_of

CODE: Final = "L-sign"
WHY: Final = "training drives the outputs away from where they should be"
FIX: Final = "change the sign of this part of the loss"

MOST_ROWS: Final = 8
"""How many rows are tried alone."""


def check(trials: Trials) -> Iterator[Finding]:
    """Look at how the losses answer to better labels, and to outputs and weights far too large."""
    if not trials.last.gradients or _is_ascent(trials.last):  # which O-ascent finds
        return
    found = list(_labels(trials)) or list(_inputs_as_targets(trials))
    found = found or list(_outputs_without_bound(trials)) or list(_weights_without_bound(trials))
    yield from found
    if not found:
        yield from _entropy(trials)


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


@dataclass(frozen=True)
class _Losses:
    """The losses of steps that differ from the last one in one thing.

    Attributes:
        trials: The trials.
    """

    trials: Trials

    @property
    def count(self) -> int:
        """The number of losses of a step."""
        last = self.trials.last
        return len(last.of(GRADIENTS)) or len(losses_of(last))

    def of(self, batch: Any = None, changes: Any = None, variables: Any = None) -> Array:
        """Return the losses of a changed step; NaN if it failed or has other losses."""
        batch = self.trials.last.batch if batch is None else batch
        with changed_outputs(changes or {}):
            trial = self.trials.attempt(CODE, batch, variables)
        found = [] if trial is None else losses_of(trial)
        return np.array(found) if len(found) == self.count else np.full(self.count, np.nan)


def _line(trial: Trial, number: int) -> str:
    events = trial.of(OBJECTIVE)
    return events[number].info.line if number < len(events) else ""


# Labels


def _labels(trials: Trials) -> Iterator[Finding]:
    """Give the rows the labels that the outputs name, and others: the first must have less loss.

    Both for each half of the rows: a loss that is a mean of terms, one for each row, adds up.
    """
    last, losses = trials.last, _Losses(trials)
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
        for number in range(losses.count if found else 0):
            # Labels from the outputs that they are compared with make the largest difference.
            gaps, event, outputs, labels = max(found, key=lambda entry: abs(entry[0][number]))
            values = _reversed(losses, leaf, batch, number, *labels) if gaps[number] > 0 else None
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
                    _line(last, number),
                )
                return


def _reversed(
    losses: _Losses,
    leaf: Leaf,
    batch: Callable[[Array], Any],
    number: int,
    better: Array,
    worse: Array,
    mirrored: Array | None = None,
) -> tuple[float, float] | None:
    """Return a loss with better and with worse labels if the first is larger, as a sum over rows.

    Floats may be weights or rewards: of them, the loss must also be negative, as the negative of a
    distance is, and it must fall on both sides, as a product does not.
    """
    half = len(leaf.array) // 2
    mixed = [np.concatenate([a[:half], b[half:]]) for a, b in ((better, worse), (worse, better))]
    good, bad, first, second = (
        float(losses.of(batch(labels))[number]) for labels in (better, worse, *mixed)
    )
    if not good > bad + 1e-4 * abs(bad) or (leaf.array.dtype.kind == "f" and not bad < 0):
        return None
    if mirrored is not None and not losses.of(batch(mirrored))[number] < min(good, 0):
        return None
    adds_up = abs(first + second - good - bad) < 0.1 * (good - bad)
    return (good, bad) if adds_up and bad < min(first, second) < good else None


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
    losses: _Losses,
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
    last, losses = trials.last, _Losses(trials)
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
                    _line(last, int(which)),
                )
                return


def _placed(target: Array, output: Array, share: float) -> Change:
    value = (target + share * (as_floats(output) - target)).astype("float32")
    return lambda name, tensor: constant(value, tensor) if name == "outputs" else tensor


# Terms without a bound


def _outputs_without_bound(trials: Trials) -> Iterator[Finding]:
    """Scale one output of a call, and hold other calls: the loss must not fall ever faster.

    Several outputs at once may be multiplied with each other, as likelihoods and values are.
    """
    last, losses = trials.last, _Losses(trials)
    calls = outer_calls(last)
    for number, event in list(calls.items())[-MOST_CALLS:]:
        others = {n: held(e) for n, e in calls.items() if n != number}
        for name in floats_of(event):
            which = _falling(
                lambda scale, n=number, e=event, o=others, name=name: losses.of(
                    changes={**o, n: _scaled(e, scale, name)}
                )
            )
            if which is not None:
                yield _without_bound(event.info.path, "its outputs", last, *which)
                return


def _scaled(event: Event, scale: float, name: str) -> Change:
    """Return a change to a multiple of an output, which noise keeps from being zero."""
    value = as_floats(event[name]) + 0.1 * noise_like(event[name])

    def change(key: str, tensor: Any) -> Any:
        return constant((scale * value).astype("float32"), tensor) if key == name else tensor

    return change


def _weights_without_bound(trials: Trials) -> Iterator[Finding]:
    """Scale the trained variables, and hold the outputs of layers: what is left are penalties."""
    last, losses = trials.last, _Losses(trials)
    # Calls in `input_gradients` are not held: a gradient penalty depends on weights through them.
    calls = {n: e for n, e in outer_calls(last).items() if not e.info.more["nested"]}
    changes = {number: held(event) for number, event in calls.items()}
    # Variables that the step uses by itself, or in calls that are not recorded, act on its outputs.
    paths = {
        trials.state.path_of(v) for e in outer_calls(last).values() for v in e.info.of.variables
    }
    before = {
        p: as_floats(last.before[p])
        for p in last.gradients
        if p in paths and last.before[p].size > 1
    }
    if not before:
        return

    def scaled(scale: float) -> Array:
        values = {p: (scale * x).astype(last.before[p].dtype) for p, x in before.items()}
        return losses.of(changes=changes, variables=values)

    if (which := _falling(scaled)) is not None:
        yield _without_bound(min(before), "the weights", last, *which)


def _falling(losses: Callable[[float], Array]) -> tuple[int, float, float] | None:
    """Return the number of a loss that falls ever faster, and two of its values.

    A loss with a lower bound may fall faster at first, as an error of products of small numbers;
    so may one in proportion, as the logarithm of a probability times a negative advantage.
    """
    one, four = losses(1.0), losses(4.0)
    if not (four < one - 1e-6 * np.abs(one)).any():
        return None
    sixteen = losses(16.0)
    falls = (four - one < -1e-6 * np.abs(one)) & (sixteen - one < 10 * (four - one))
    if not falls.any():
        return None
    with np.errstate(invalid="ignore"):  # twice as much as in proportion, as before
        falls &= (losses(256.0) - sixteen < 40 * (sixteen - four)) | np.isneginf(sixteen)
    for number in np.flatnonzero(falls):
        return int(number), float(one[number]), float(sixteen[number])
    return None


def _without_bound(
    path: str, what: str, trial: Trial, number: int, first: float, last: float
) -> Finding:
    return Finding(
        CODE,
        "warning",
        path,
        f"with 16 times {what}, and other layers as before, the loss is {last:.4g} instead of "
        f"{first:.4g}: a term of it falls without bound",
        "the loss is smallest where this part is largest, so a penalty works as a reward",
        "change the sign of the term: losses are minimized, so distances and penalties are added",
        _line(trial, number),
    )


# Entropy


def _entropy(trials: Trials) -> Iterator[Finding]:
    """Without advantages, sharper policies must not have less loss: a bonus rewards entropy.

    Only where an array with one number for each row counts in proportion, as advantages do.
    """
    last, losses = trials.last, _Losses(trials)
    rows, leaves = rows_of(last.batch), leaves_of(last.batch)
    calls = outer_calls(last)
    for number, event in list(calls.items())[-MOST_CALLS:]:
        for name, logits in floats_of(event).items():
            actions = [x for x in leaves if _names_columns(x, logits)]
            weights = [x for x in leaves if x.array.size == rows and x.array.dtype.kind == "f"]
            if not actions or rows is None or rows < 4:
                continue
            for leaf in weights:
                if np.isin(leaf.array, (0, 1)).all():
                    continue
                changes = _policy_alone(calls, number, name)
                which = _rewards_certainty(losses, leaf, changes)
                if which is not None:
                    yield Finding(
                        CODE,
                        "warning",
                        event.info.path,
                        f"with zeros in {leaf.name}, the loss falls if these logits are doubled "
                        f"(by {which[1]:.3g})",
                        "the entropy is subtracted as a bonus and not added: here the policy is "
                        "rewarded for certainty, and stops exploring",
                        "subtract the entropy from the loss: loss - 0.01 * entropy",
                        _line(last, which[0]),
                    )
                    return


def _names_columns(leaf: Leaf, outputs: Array) -> bool:
    x = leaf.array
    return (
        x.dtype.kind in "iu"
        and outputs.ndim == 2
        and outputs.shape[1] > 1
        and x.size == len(outputs)
        and x.min() >= 0
        and x.max() < outputs.shape[1]
    )


def _policy_alone(calls: dict[int, Event], number: int, name: str) -> Callable[[float], Any]:
    """Return changes to multiples of some logits, with zeros for values of a single column."""

    def changes(scale: float) -> dict[int, Change]:
        own = _scaled(calls[number], scale, name)
        found: dict[int, Change] = {}
        for n, event in calls.items():

            def change(key: str, tensor: Any, n: int = n, event: Event = event) -> Any:
                if n == number and key == name:
                    return own(key, tensor)
                if len(tensor.shape) > 1 and tensor.shape[-1] > 1:
                    return held(event)(key, tensor)
                return 0.0 * tensor

            found[n] = change
        return found

    return changes


def _rewards_certainty(
    losses: _Losses, leaf: Leaf, changes: Callable[[float], Any]
) -> tuple[int, float] | None:
    """Return the number of a loss that sharper logits reduce without advantages, and how much."""
    zero = leaf.with_(np.zeros_like(leaf.array))
    flat, usual, sharp = (losses.of(zero, changes(scale)) for scale in (0.25, 1.0, 2.0))
    falls = (sharp < usual - 1e-6) & (usual < flat - 1e-6)
    if not falls.any():
        return None
    gains: list[Array] = [sharp - flat]
    for times in (1.0, 2.0):
        batch = leaf.with_((times * leaf.array).astype(leaf.array.dtype))
        gains.append(losses.of(batch, changes(2.0)) - losses.of(batch, changes(0.25)))
    none, once, twice = gains
    for number in np.flatnonzero(falls):
        share = float(once[number] - none[number])  # an advantage counts in proportion
        both = float(twice[number] - none[number])
        if abs(share) > 1e-6 and abs(both - 2 * share) < 0.05 * abs(share):
            return int(number), float(usual[number] - sharp[number])
    return None
