"""Checks of padding: losses and means that count it."""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from keras import ops

from ..numbers import Array, as_floats
from .guarding import guarded
from .intervening import changed_outputs, floats_of, losses_of, noise_like, outer_calls
from .recording import LAYER, LOSS, METRIC, OBJECTIVE, Event
from .report import Finding
from .trials import Leaf, Trial, Trials, distance, leaves_of, rows_of

CODE: Final = "L-padding"
SHORTEST: Final = 4
"""The least number of positions of a sequence."""


def check(trials: Trials) -> Iterator[Finding]:
    """Change outputs at positions of padding, and add padding: losses must stay the same."""
    batch = trials.last.batch
    for length, padded in _padding(batch).items():
        found = guarded(trials, _counted, trials, length, padded) or guarded(
            trials, _pooled, trials.last, length, padded
        )
        yield from found or guarded(trials, _wrong_count, trials, length, padded)


def _padding(batch: Any) -> dict[int, Array]:
    """Return which positions of each row are padding, by the length of the sequences.

    Padding ends rows of different lengths. It is one value of an array of integers that occurs
    nowhere else, where a mask is zero, or what follows the positions that an array of lengths
    counts.
    """
    rows, leaves = rows_of(batch), leaves_of(batch)
    if rows is None or rows < 4:
        return {}
    found: dict[int, Array] = {}
    for leaf in leaves:
        x = leaf.array[..., 0] if leaf.array.ndim == 3 and leaf.array.shape[2] == 1 else leaf.array
        if x.ndim != 2 or x.shape[1] < SHORTEST:
            continue
        padded = _of_mask(x, leaf, leaves) if np.isin(x, (0, 1)).all() else _of_ids(x)
        if padded is not None:
            length = x.shape[1]
            found[length] = padded & found[length] if length in found else padded
    if not found:
        found = _of_lengths(leaves)
    return {length: padded for length, padded in found.items() if padded.any()}


def _of_ids(x: Array) -> Array | None:
    """Return the positions of the value that ends rows of integers, if it is padding."""
    if x.dtype.kind not in "iu" or len(np.unique(x)) < 4:
        return None
    last = x[:, -1]
    values, counts = np.unique(last, return_counts=True)
    value = values[counts.argmax()]
    ends = _ends(x == value)
    runs = ends.sum(1)
    elsewhere = float(((x == value) & ~ends).mean())
    if (runs >= 2).mean() < 0.25 or len(np.unique(runs)) < 2 or elsewhere > 0.01:
        return None
    return ends


def _of_mask(x: Array, leaf: Leaf, leaves: list[Leaf]) -> Array | None:
    """Return where rows of a mask end with zeros; or ones, if another array is constant there."""
    zeros = x == 0
    for padded in (zeros, ~zeros):
        ends = _ends(padded)
        if (ends != padded).any() or len(np.unique(ends.sum(1))) < 2 or ends.all():
            continue
        alone = all(_constant_at(other, ends) is None for other in leaves if other is not leaf)
        if padded is zeros or not alone:
            return ends
    return None


def _of_lengths(leaves: list[Leaf]) -> dict[int, Array]:
    """Return the padding that an array of lengths tells, if another array is constant there."""
    for lengths in leaves:
        x = lengths.array
        if x.dtype.kind not in "iu" or x.size != len(x) or len(np.unique(x)) < 2 or x.min() < 1:
            continue
        for leaf in leaves:
            if leaf.array.ndim < 2 or leaf.array.shape[1] < max(SHORTEST, x.max()):
                continue
            padded = np.arange(leaf.array.shape[1])[None] >= x.reshape(-1, 1)
            if _constant_at(leaf, padded) is not None:
                return {leaf.array.shape[1]: padded}
    return {}


def _ends(matches: Array) -> Array:
    """Return the matches after the last position of each row that does not match."""
    return np.flip(np.cumprod(np.flip(matches, 1), 1), 1).astype(bool)


def _constant_at(leaf: Leaf, padded: Array) -> Any:
    """Return the one value that an array has at positions and seldom elsewhere, or None."""
    x = leaf.array
    if x.ndim < 2 or x.shape[:2] != padded.shape or not padded.any() or padded.all():
        return None
    value = x[padded].flat[0]
    if (x[padded] != value).any() or (x[~padded] == value).mean() > 0.5:
        return None
    return value


def _counted(trials: Trials, length: int, padded: Array) -> Iterator[Finding]:
    """Change the last sequence of outputs where both it and its inputs are padding."""
    last = trials.last
    sequences = {
        number: event
        for number, event in outer_calls(last).items()
        if any(_positions(x, length, padded) is not None for x in floats_of(event).values())
    }
    if not sequences:
        return
    number, event = max(sequences.items())
    if _goes_on(last, number, event) or _is_carried(event, length, padded):
        return
    with changed_outputs({number: lambda name, tensor: _noisy(tensor, length, padded)}):
        trial = trials.attempt(CODE, last.batch)
    before, after = losses_of(last), [] if trial is None else losses_of(trial)
    if not np.allclose(before, after, rtol=1e-6, atol=0) and len(before) == len(after):
        found = list(_ignored(trials, number, event, length, padded))
        yield from found
        if found:
            return
    for which, (a, b) in enumerate(zip(before, after, strict=False)):
        if abs(a - b) > 1e-4 * max(abs(a), 1e-3):
            lines = [e.info.line for e in last.of(OBJECTIVE)]
            yield Finding(
                CODE,
                "warning",
                event.info.path,
                f"with other outputs at the {padded.mean():.0%} of positions that are padding, the "
                f"loss is {b:.4g} instead of {a:.4g}",
                "the model learns to predict padding, and long rows count less than short ones",
                "multiply by a mask before the sum, and divide by the sum of the mask",
                lines[which] if which < len(lines) else "",
            )
            return
    if trial is None or not np.allclose(before, after, rtol=1e-6, atol=0):
        return
    for name, metric in trials.state.metrics.items():
        paths = [trials.state.path_of(variable) for variable in metric.variables]
        if any(distance(trial.after[p], last.after[p]) > 1e-6 for p in paths if p in last.after):
            yield Finding(
                CODE,
                "warning",
                name,
                f"with other outputs at the {padded.mean():.0%} of positions that are padding, "
                "the metric changes, and the loss does not",
                "it counts padding, which the loss leaves out",
                "pass the mask as sample_weight to update_state",
                next((e.info.line for e in last.of(METRIC) if e.info.path == name), ""),
            )
            return


def _ignored(
    trials: Trials, number: int, event: Event, length: int, padded: Array
) -> Iterator[Finding]:
    """Find a mask the wrong way around: of rows with padding, nothing else counts."""
    with_padding = padded.any(1, keepdims=True) & ~padded.all(1, keepdims=True)
    others = ~padded & with_padding
    if not others.any() or padded.mean() > 0.9:
        return
    changes = {number: lambda name, tensor: _noisy(tensor, length, others, False)}
    with changed_outputs(changes):
        trial = trials.attempt(CODE, trials.last.batch)
    if trial is not None and np.allclose(
        losses_of(trial), losses_of(trials.last), rtol=1e-7, atol=0
    ):
        yield Finding(
            CODE,
            "warning",
            event.info.path,
            "in rows with padding, other outputs at positions of padding change the loss, and at "
            "all other positions they do not",
            "the model reads padding alone",
            "read the last position before the padding, or exchange both sides of the mask",
            event.info.line,
        )


def _is_carried(event: Event, length: int, padded: Array) -> bool:
    """Return whether padding has the last output before it, as of a recurrent layer with a mask."""
    y = event.get("outputs")
    if y is None or y.ndim != 3 or y.shape[:2] != padded.shape or padded.all(1).any():
        return False
    ends = np.where(padded.any(1), padded.argmax(1), length) - 1
    carried = as_floats(y)[np.arange(len(y)), ends][:, None]
    return bool(np.allclose(np.where(padded[..., None], as_floats(y) - carried, 0), 0, atol=1e-6))


def _goes_on(trial: Trial, number: int, event: Event) -> bool:
    """Return whether a later layer gets the outputs, which may know the mask."""
    outputs = list(floats_of(event).values())
    later = [e for n, e in outer_calls(trial).items() if n > number]
    inputs = [x for e in later for name, x in e.arrays.items() if name.startswith("inputs")]
    return any(x.shape == y.shape and np.array_equal(x, y) for x in inputs for y in outputs)


def _positions(x: Any, length: int, padded: Array, shifted: bool = True) -> Array | None:
    """Return the positions of an output that are padding; of shifted ones, those in both."""
    shape = tuple(x.shape)
    if len(shape) < 2 or len(shape) > 3 or shape[0] != len(padded):
        return None
    if shape[1] not in (length, length - 1):
        return None
    both = padded.copy()
    if shifted:
        both[:, 1:] &= padded[:, :-1]  # the first one may be the token that ends a text
    chosen = both[:, : shape[1]]
    return chosen if chosen.any() else None


def _noisy(tensor: Any, length: int, padded: Array, shifted: bool = True) -> Any:
    chosen = _positions(tensor, length, padded, shifted)
    if chosen is None:
        return tensor
    shape = tuple(tensor.shape)
    noise = noise_like(np.zeros(shape)) * chosen.reshape(chosen.shape + (1,) * (len(shape) - 2))
    return tensor + ops.cast(ops.convert_to_tensor(noise.astype("float32")), tensor.dtype)


def _pooled(trial: Trial, length: int, padded: Array) -> Iterator[Finding]:
    """Find pooling layers that average over padding."""
    for event in trial.of(LAYER):
        x, y = event.get("inputs[0]"), event.get("outputs")
        if event.info.kind != "GlobalAveragePooling1D" or x is None or y is None or x.ndim != 3:
            continue
        if _positions(x[..., 0], length, padded) is None:
            continue
        plain = as_floats(x).mean(1).reshape(y.shape)
        if np.allclose(plain, as_floats(y), rtol=1e-3, atol=1e-5):
            yield Finding(
                CODE,
                "warning",
                event.info.path,
                f"it averages over all {x.shape[1]} positions, and {padded.mean():.0%} of them are "
                "padding",
                "the result depends on how much padding a row has",
                "give it a mask: Embedding(mask_zero=True) and layers that pass masks on, or "
                "call it with mask=",
                event.info.line,
            )
            return


def _wrong_count(trials: Trials, length: int, padded: Array) -> Iterator[Finding]:
    """Add as much padding again: a sum that is divided by all positions halves."""
    last = trials.last
    if min(padded.shape) < SHORTEST or not padded[:, -1].any():
        return
    batch = last.batch
    for number in range(len(leaves_of(batch))):
        leaf = leaves_of(batch)[number]
        x = leaf.array
        if x.ndim < 2 or x.shape[:2] != padded.shape:
            continue
        more = np.broadcast_to(x[np.nonzero(padded[:, -1])[0][:1], -1:], (len(x), *x.shape[1:]))
        batch = leaf.with_(np.concatenate([x, more], axis=1))
    trial = trials.attempt(f"{CODE} (the number of positions)", batch)
    before, after = losses_of(last), [] if trial is None else losses_of(trial)
    given = [event.get("weight") for event in last.of(LOSS)]
    by_keras = any(weight is not None and weight.ndim == 2 for weight in given)
    for which, (a, b) in enumerate(zip(before, after, strict=False)):
        if a and 0.4 < b / a < 0.62:
            lines = [e.info.line for e in last.of(OBJECTIVE)]
            yield Finding(
                CODE,
                "note" if by_keras else "warning",
                "the loss",
                f"with twice as many positions, the new ones padding, the loss is {b:.4g} instead "
                f"of {a:.4g}: its sum is divided by the number of all positions",
                "batches with more padding have smaller losses and gradients",
                "divide by the sum of the mask",
                lines[which] if which < len(lines) else "",
            )
            return
