"""Checks of the data: influence of each array, labels, scales, order, overlap."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from keras.metrics import MeanMetricWrapper

from ..numbers import Array, as_floats
from .checks_losses import enters_a_layer, same
from .guarding import guarded
from .intervening import floats_of, outer_calls
from .recording import BRANCH, LAYER, LOSS, METRIC
from .report import Finding
from .spying import other_branches
from .trials import Leaf, Trial, Trials, leaves_of, rows_of

MOST_COLUMNS: Final = 4096
"""The largest number of columns that are searched for labels."""

KERNELS: Final = ("Dense", "Conv1D", "Conv2D", "Conv3D", "LSTM", "GRU", "SeparableConv2D")
ACCURACIES: Final = {
    "Accuracy",
    "BinaryAccuracy",
    "CategoricalAccuracy",
    "SparseCategoricalAccuracy",
}
FEWEST: Final = 32
"""The least number of entries of an array whose scale is judged."""

FREQUENT: Final = 0.9
"""The share of the most frequent label from which accuracy alone says little."""


def check(trials: Trials) -> Iterator[Finding]:
    """Check the batches of the first steps."""
    yield from guarded(trials, _without_influence, trials)
    yield from guarded(trials, _label_among_inputs, trials)
    yield from guarded(trials, _constant_inputs, trials)
    yield from guarded(trials, _large_inputs, trials.last)
    yield from guarded(trials, _other_scale, trials)
    yield from guarded(trials, _imbalance, trials)


def _without_influence(trials: Trials) -> Iterator[Finding]:
    """Give each array other values: values, gradients or metrics must change."""
    last = trials.last
    for leaf in leaves_of(last.batch):
        batch = leaf.with_(_other_values(leaf))
        if _computes_the_same(trials, batch):
            yield Finding(
                "B-no-influence",
                "warning",
                leaf.name,
                "with other values of it, the step returns and computes exactly the same",
                "it is not used",
                "use it (sample weights: pass sample_weight to the loss and the metrics), or "
                "leave it out of the batches",
            )


def _computes_the_same(trials: Trials, batch: Any) -> bool:
    """Return whether another batch changes nothing, whichever branches of `cond` are taken."""
    trial = trials.attempt("B-no-influence", batch)
    if trial is None or not trial.equals(trials.last, rounding=1e-7):
        return False
    if not trials.last.of(BRANCH):
        return True
    with other_branches():
        first = trials.attempt("B-no-influence", trials.last.batch)
        second = trials.attempt("B-no-influence", batch)
    return first is not None and second is not None and second.equals(first, rounding=1e-7)


def _other_values(leaf: Leaf) -> Array:
    """Return valid but other values: drawn from the entries, or for constants a changed half."""
    x, rng = leaf.array, np.random.default_rng(2)
    if x.size > 1 and (x != x.flat[0]).any():
        drawn = rng.choice(x.ravel(), x.shape)  # not a permutation, which keeps sums over rows
        return np.roll(x.ravel(), 1).reshape(x.shape) if (drawn == x).all() else drawn
    if x.dtype == bool:
        return np.logical_xor(x, rng.random(x.shape) < 0.5) if x.size > 1 else ~x
    if x.dtype.kind == "f":
        return (x * (0.5 + rng.random(x.shape)) + 0.1 * rng.random(x.shape)).astype(x.dtype)
    other = np.where(x > 0, x - 1, x + 1)  # stays a valid index, if there are two
    half = rng.random(x.shape) < 0.5 if x.size > 1 else True
    return np.where(half, other, x).astype(x.dtype)


def _label_among_inputs(trials: Trials) -> Iterator[Finding]:
    trial = trials.last
    leaves, rows = leaves_of(trial.batch), rows_of(trial.batch)
    if rows is None or rows < 8:
        return
    entering = [leaf for leaf in leaves if enters_a_layer(trial, leaf)]
    for label in leaves:
        y = label.array.reshape(rows, -1)
        if y.shape[1] != 1 or label in entering or y.dtype.kind not in "fiub":
            continue
        few = len(np.unique(y)) < 3
        for leaf in entering:
            x = as_floats(leaf.array).reshape(rows, -1)
            if x.shape[1] > MOST_COLUMNS or leaf.array.ndim < 2:
                continue
            equal = np.flatnonzero((x == as_floats(y)).all(0))
            if few or not equal.size:
                yield from _function_of_the_label(trials, leaves.index(leaf), leaves.index(label))
            else:
                yield Finding(
                    "D-label-in-inputs",
                    "error" if label is leaves[-1] or _is_true(trial, label) else "note",
                    leaf.name,
                    f"column {equal[0]} equals {label.name} in all {rows} rows",
                    "the model reads the answer, and fails on data without it",
                    "remove the column",
                )


def _function_of_the_label(trials: Trials, place: int, of: int) -> Iterator[Finding]:
    """Find a column that is a multiple of the label plus a constant, in all batches that were read.

    An input of one column that the label is a multiple of is the task itself.
    """
    batches = [leaves_of(batch) for batch in trials.ahead]
    columns = [[leaf.array.shape[1:] for leaf in leaves] for leaves in batches]
    batches = [b for b, found in zip(batches, columns, strict=True) if found == columns[0]]
    x, y = (np.concatenate([as_floats(b[i].array) for b in batches]) for i in (place, of))
    x, y = x.reshape(len(x), -1), y.reshape(len(y), 1)
    label = batches[0][of]
    known = _is_true(trials.last, leaves_of(trials.last.batch)[of])
    if x.shape[1] < 2 or len(x) < FEWEST or len(x) != len(y):
        return
    x, y = x - x.mean(0), y - y.mean(0)
    sizes = np.linalg.norm(x, axis=0) * np.linalg.norm(y)
    usable = sizes > 0
    found = np.flatnonzero(usable & (np.abs((x * y).sum(0)) > (1 - 1e-6) * sizes))
    if found.size and (known or of == len(batches[0]) - 1):
        yield Finding(
            "D-label-in-inputs",
            "warning",
            batches[0][place].name,
            f"column {found[0]} is a multiple of {label.name} plus a constant in all {len(x)} rows",
            "the model reads the answer, and fails on data without it",
            "remove the column",
        )


def _is_true(trial: Trial, leaf: Leaf) -> bool:
    """Return whether a loss or a metric gets an array as `y_true`."""
    given = [event.get("true") for event in (*trial.of(LOSS), *trial.of(METRIC))]
    return any(true is not None and same(true, leaf.array) for true in given)


def _constant_inputs(trials: Trials) -> Iterator[Finding]:
    """Find inputs that are the same in all rows, though other arrays of the batch are not."""
    leaves = leaves_of(trials.last.batch)
    batches = [x for batch in trials.ahead if len(x := leaves_of(batch)) == len(leaves)]
    varies: list[bool] = []
    for number, leaf in enumerate(leaves):
        arrays = [batch[number].array for batch in batches]
        if leaf.array.ndim == 0 or sum(map(len, arrays)) < FEWEST:
            return
        varies.append(
            any(x.shape[1:] != leaf.array.shape[1:] or (x != leaf.array[0]).any() for x in arrays)
        )
    entering = [i for i, leaf in enumerate(leaves) if enters_a_layer(trials.last, leaf)]
    if not entering or any(varies[i] for i in entering) or not any(varies):
        return
    if any(
        _reaches_a_layer(trials, leaf) for leaf, other in zip(leaves, varies, strict=True) if other
    ):
        return  # the step prepares it
    leaf = leaves[entering[0]]
    yield Finding(
        "D-constant",
        "warning",
        leaf.name,
        f"all rows of the first {len(batches)} batches are the same: from {leaf.array.min():.4g} "
        f"to {leaf.array.max():.4g}",
        "the model gets the same inputs for every label",
        "look at how they are prepared: integers // 255 are 0, and so are casts of 0.7 to integers",
    )


def _reaches_a_layer(trials: Trials, leaf: Leaf) -> bool:
    """Return whether other rows of an array change what layers return."""
    trial = trials.attempt("D-constant", leaf.with_(np.roll(leaf.array, 1, axis=0)))
    if trial is None:
        return True
    before, after = outer_calls(trials.last), outer_calls(trial)
    return before.keys() != after.keys() or any(
        not same(x, after[number].arrays.get(name, np.zeros(0)))
        for number, event in before.items()
        for name, x in floats_of(event).items()
    )


def _large_inputs(trial: Trial) -> Iterator[Finding]:
    """Find unscaled inputs of the first layer with weights."""
    leaves = [leaf for leaf in leaves_of(trial.batch) if leaf.array.ndim > 1]
    for event in trial.of(LAYER):
        inputs = event.get("inputs[0]")
        if event.info.kind not in KERNELS or inputs is None:
            continue
        x = as_floats(inputs)
        size = float(np.abs(x).mean()) if x.size else 0.0
        from_batch = any(
            leaf.array.size == x.size and np.array_equal(as_floats(leaf.array).ravel(), x.ravel())
            for leaf in leaves
        )
        if from_batch and size > 10:
            yield Finding(
                "D-unscaled",
                "warning",
                event.info.path,
                f"it gets the batch as it is: from {x.min():.4g} to {x.max():.4g}, {size:.3g} on "
                "average",
                "layers are initialized for inputs of about 1: training starts slowly or diverges",
                "divide images by 255, or put keras.layers.Rescaling or Normalization first",
                event.info.line,
            )


def _other_scale(trials: Trials) -> Iterator[Finding]:
    """Compare the scale of each array in training and in evaluation."""
    if trials.evaluation is None:
        return
    ours, theirs = leaves_of(trials.last.batch), leaves_of(trials.evaluation.batch)
    if len(ours) != len(theirs):
        return
    every = [leaves_of(trial.batch) for trial in trials.base]
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        few = min(a.array.size, b.array.size) < FEWEST
        if a.array.dtype.kind not in "fiu" or a.array.ndim < 2 or few:
            continue
        others = [_size(leaves[i]) for leaves in every if len(leaves) > i]
        x, y = float(np.mean(others)), _size(b)
        if min(x, y) > 0 and not 0.1 * min(others) < y < 10 * max(others):
            yield Finding(
                "E-scale",
                "error",
                a.name,
                f"its mean size is {x:.3g} in training and {y:.3g} in evaluation",
                "the model is evaluated on data that it has not learned",
                "prepare both sets by the same function",
            )


def _size(leaf: Leaf) -> float:
    return float(np.abs(as_floats(leaf.array)).mean())


def _imbalance(trials: Trials) -> Iterator[Finding]:
    """Find accuracy as the only metric where nearly all labels are equal."""
    events = trials.last.of(METRIC)
    kinds = {_kind_of(metric) for metric in trials.state.metrics.values()}
    weighted = any(event.get("weight") is not None for event in events)
    if not events or weighted or not kinds <= ACCURACIES:
        return
    labels = [
        event["true"].ravel()
        for trial in trials.base
        for event in trial.of(METRIC)
        if event.get("true") is not None and event.info.path == events[0].info.path
    ]
    if not labels:
        return
    every = np.concatenate(labels)
    (most, count) = Counter(every.tolist()).most_common(1)[0]
    if every.size >= 64 and FREQUENT < count / every.size < 1:
        yield Finding(
            "D-imbalance",
            "note",
            events[0].info.path,
            f"{count / every.size:.0%} of the labels are {most:g}, and accuracy is the only metric",
            "always answering that gives this accuracy",
            "add a metric that shows the rare classes, such as AUC, Precision or Recall",
        )


def _kind_of(metric: Any) -> str:
    function = getattr(metric, "_fn", None)
    accuracy = type(metric) is MeanMetricWrapper and "accuracy" in getattr(function, "__name__", "")
    return "Accuracy" if accuracy else type(metric).__name__
