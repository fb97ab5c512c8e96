"""Checks of data sources: order, forms of batches, rows in both sets."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from ...backends.window import form_of
from ...data.arrays import ArraySource
from ...data.foreign.sources import IteratorSource
from ...errors import DataError
from ..numbers import Array
from .checks_losses import same
from .guarding import guarded
from .recording import ENTROPY, LOSS, METRIC
from .report import Finding
from .trials import STEPS, Trial, Trials, leaves_of

MOST_ROWS: Final = 20_000
"""How many rows are searched for copies in both sets."""

SLOW: Final = 1.0
"""The seconds of reading from which the first batches are not read again."""

FREQUENT: Final = 20
"""The number of copies of a row from which it may be one without content, as a black image."""

MANY_FORMS: Final = 6
"""The least number of forms among the first batches that may be too many."""


def check(trials: Trials, train: Any, validation: Any) -> Iterator[Finding]:
    """Check the first batches of any source and, of arrays in memory, the data sets."""
    yield from guarded(trials, _forms, trials)
    yield from guarded(trials, _passes, trials, train)
    if isinstance(train, ArraySource):
        yield from guarded(trials, _sorted, train)
        if isinstance(validation, ArraySource):
            yield from guarded(trials, _overlap, train, validation)
    else:
        yield from guarded(trials, _sorted_batches, trials)


def _forms(trials: Trials) -> Iterator[Finding]:
    """Find batches of ever new shapes, for each of which a step is compiled again."""
    forms = list(dict.fromkeys(form_of(batch) for batch in trials.ahead))
    if len(forms) < max(MANY_FORMS, len(trials.ahead) / 2):
        return
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for batch in trials.ahead:
        for leaf in leaves_of(batch):
            seen = shapes.setdefault(leaf.name, [])
            if leaf.array.shape not in seen:
                seen.append(leaf.array.shape)
    name, most = max(shapes.items(), key=lambda item: len(item[1]))
    yield Finding(
        "S-recompiles",
        "warning",
        name,
        f"{len(forms)} of the first {len(trials.ahead)} batches have a form that no earlier one "
        f"had: its shape changes from {most[0]} to {', '.join(map(str, most[1:4]))} …",
        "the step is compiled again for each form, which takes longer than the step itself",
        "pad to a few lengths (buckets), and drop a short last batch",
    )


def _passes(trials: Trials, source: Any) -> Iterator[Finding]:
    """Read the first batches again: they must be the same, since the order depends on the epoch."""
    if isinstance(source, (ArraySource, IteratorSource)) or source.closed_loop:
        return
    seconds, first = trials.seconds_of_reading, trials.ahead[:STEPS]
    if seconds > SLOW:
        trials.failed["D-hidden-state"] = f"reading the first batches takes {seconds:.1f} s"
        return
    reader = source.read(0, seed=0)
    try:
        windows = [reader.take(1) for _ in first]
        keeps = reader.position() is not None
    except Exception as error:  # the user's code may raise any in a second pass
        kind = "" if isinstance(error, DataError) else f"{type(error).__name__}: "
        windows, keeps, seen = [], False, f"ends: {kind}{error}"
    else:
        again = [None if w is None else w.streamed().batch(0) for w in windows]
        number = next((i for i, x in enumerate(again) if not _equal(first[i], x)), None)
        if number is None or keeps:
            return
        seen = f"gives another batch {number + 1}" if again[number] is not None else "ends earlier"
    finally:
        reader.close()
    exact = source.inexact is None
    yield Finding(
        "D-hidden-state",
        "warning" if exact or not windows else "note",
        "the training data",
        f"read again from its start, with equal seeds, it {seen}",
        "the data object has a state of its own: a resumed run and treadle replay get other "
        "batches, and a later epoch may have fewer",
        "make a new iterator for each epoch, and draw from NumPy's global functions, which Treadle "
        "seeds for each batch, or from the generator that treadle.data.from_function passes",
    )


def _equal(a: Any, b: Any) -> bool:
    ours, theirs = leaves_of(a), [] if b is None else leaves_of(b)
    return len(ours) == len(theirs) and all(
        # NaN may stand for a missing value. Other arrays, such as texts, have none.
        np.array_equal(x.array, y.array, equal_nan=x.array.dtype.kind in "fc")
        for x, y in zip(ours, theirs, strict=True)
    )


def _sorted_batches(trials: Trials) -> Iterator[Finding]:
    """Compare the classes in each of the first batches with those of random batches."""
    number = _number_of_labels(trials.last)
    if number is None:
        return
    labels = [
        leaves[number].array.ravel()
        for batch in trials.ahead
        if len(leaves := leaves_of(batch)) > number
    ]
    if len(labels) < 4 or min(map(len, labels)) < 8:
        return
    every = np.concatenate(labels)
    classes = np.unique(every)
    kinds = float(np.median([len(np.unique(x)) for x in labels]))
    if len(classes) == 1:
        if classes[0] < (outputs := _classes_of_outputs(trials.last)) and outputs > 2:
            yield _sorted_finding(
                f"the first {len(labels)} batches, {every.size} rows, are all of class "
                f"{classes[0]}, and the model has {outputs}",
                "shuffle the rows before batches are made",
            )
    elif len(classes) <= 1000:
        rng = np.random.default_rng(3)
        expected = np.mean([len(np.unique(rng.choice(every, len(x)))) for x in labels])
        if kinds < 0.6 * expected:
            yield _sorted_finding(
                f"batches hold {kinds:.0f} classes (shuffled: {expected:.1f})",
                "shuffle the rows before batches are made",
            )


def _classes_of_outputs(trial: Trial) -> int:
    """Return the number of classes of the model's outputs, or 0."""
    shapes = [pred.shape for e in trial.of(ENTROPY) if (pred := e.get("pred")) is not None]
    return max((shape[-1] for shape in shapes if len(shape) == 2), default=0)


def _number_of_labels(trial: Trial) -> int | None:
    """Return which array of the batch holds the class numbers that a loss or a metric gets."""
    given = [event.get("true") for what in (ENTROPY, LOSS, METRIC) for event in trial.of(what)]
    for number, leaf in enumerate(leaves_of(trial.batch)):
        one_each = leaf.array.ndim > 0 and leaf.array.size == len(leaf.array)
        if not one_each or leaf.array.dtype.kind not in "iub":
            continue
        if any(true is not None and same(true, leaf.array) for true in given):
            return number
    return None


def _sorted_finding(seen: str, fix: str) -> Finding:
    return Finding(
        "D-sorted",
        "error",
        "the labels",
        seen,
        "each batch teaches one class, and the next one forgets it",
        fix,
    )


def _labels_of(source: ArraySource) -> Array | None:
    leaves = leaves_of(source.arrays)
    for leaf in leaves if isinstance(source.arrays, dict) else leaves[1:]:
        x = leaf.array
        if x.dtype.kind in "iub" and x.size == len(x) and len(np.unique(x[:MOST_ROWS])) > 1:
            return x.reshape(len(x))
    return None


def _sorted(source: ArraySource) -> Iterator[Finding]:
    """Find classification data that are sorted by class and not shuffled."""
    labels = _labels_of(source)
    if source.shuffle or labels is None or source.length < 4:
        return
    classes = np.unique(labels[:MOST_ROWS])
    if not 2 <= len(classes) <= 1000:
        return
    size = source.batch_size
    kinds = [
        len(np.unique(labels[i : i + size])) for i in range(0, min(len(labels), MOST_ROWS), size)
    ]
    rng = np.random.default_rng(3)
    expected = np.mean([len(np.unique(rng.choice(labels, size))) for _ in range(8)])
    if np.median(kinds) < 0.6 * expected:
        yield _sorted_finding(
            f"batches hold {np.median(kinds):.0f} classes (shuffled: {expected:.1f}), and the "
            "source does not shuffle",
            "pass shuffle=True to from_arrays",
        )


def _overlap(train: ArraySource, validation: ArraySource) -> Iterator[Finding]:
    """Find rows of the validation data among the training data, by their bytes."""
    ours, theirs = leaves_of(train.arrays), leaves_of(validation.arrays)
    if not ours or not theirs or train.on_disk or validation.on_disk:
        return
    widest = max(range(len(ours)), key=lambda i: ours[i].array[:1].nbytes)
    if len(theirs) <= widest:
        return
    x, y = ours[widest].array, theirs[widest].array
    if x.shape[1:] != y.shape[1:] or x.dtype != y.dtype or x[:1].nbytes < 8:
        return
    if x[0].size < 3 and x.dtype.kind != "f":
        return
    known = Counter(row.tobytes() for row in x[:MOST_ROWS])
    checked = y[:MOST_ROWS]
    repeats = len(known) < 0.9 * len(x[:MOST_ROWS])
    if repeats and not _are_copies(x[:MOST_ROWS]):
        return  # rows repeat by chance
    shared = sum(0 < known[row.tobytes()] <= FREQUENT for row in checked)
    if shared > max(1, 0.01 * len(checked)):
        yield Finding(
            "D-overlap",
            "error" if shared > 0.2 * len(checked) and not repeats else "warning",
            theirs[widest].name,
            f"{shared} of {len(checked)} rows of the validation data are also training data"
            + (", in which rows repeat as well" if repeats else ""),
            "the validation shows what was learned by heart",
            "split the data before copies or augmentations are made",
        )


def _are_copies(x: Array) -> bool:
    """Return whether rows are too long to repeat by chance, if their entries are independent.

    Of tokens, each may depend on the one before.
    """
    columns = x.reshape(len(x), -1)
    if x.dtype.kind in "iub" and len(np.unique(columns)) <= len(x) ** 0.5:
        return _chance_of_texts(columns) < 0.01
    columns = columns[
        :, np.linspace(0, columns.shape[1] - 1, min(64, columns.shape[1])).astype(int)
    ]
    chance = float(len(x)) ** 2
    for column in columns.T:
        shares = np.unique(column, return_counts=True)[1] / len(column)
        chance *= float((shares * shares).sum())
    return chance < 0.01


def _chance_of_texts(x: Array) -> float:
    """Return how many pairs of rows of few symbols are expected to be equal.

    Each entry depends on the one before it, as in texts and in the padding after them.
    """
    symbols = np.unique(x, return_inverse=True)[1].reshape(x.shape)
    count = int(symbols.max()) + 1
    shares = np.bincount(symbols[:, 0], minlength=count) / len(x)
    equal = shares**2
    for before, after in zip(symbols.T[:-1], symbols.T[1:], strict=True):
        pairs = np.bincount(before * count + after, minlength=count * count).reshape(count, count)
        equal = equal @ (pairs / np.maximum(pairs.sum(1, keepdims=True), 1)) ** 2
    return float(equal.sum()) * len(x) ** 2
