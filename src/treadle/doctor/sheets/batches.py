"""Facts about the arrays of the batch."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final

import numpy as np

from ...core.identity import source_facts
from ..numbers import Array, as_floats, is_float, shape_of
from ..trials import Leaf, Trials, leaves_of, paired, rows_of
from .influences import Influences, changed_at, effects, offsets, reached
from .layers import sums_to_one
from .lines import NUMBER, SETTING, WIRING, Line, Lines, names_of, range_of, short

FEW: Final = 20
"""How many different values an array of labels has at most."""

MOST_COMPARED: Final = 64
"""How many columns are compared with other arrays."""

MOST_ROWS: Final = 20_000
"""How many rows are compared with those of the validation data."""

SCALE: Final = 10
"""The ratio of mean sizes from which two arrays have another scale."""

MOST_LIKE: Final = "rows most like those of {}:"

EXACT: Final = 0.9999
"""The correlation from which a column is a multiple of another plus a constant."""


def batch_facts(trials: Trials, influences: Influences) -> list[Line]:
    """Return facts about the source and each array of the batch."""
    lines = Lines("batch")
    _source(lines, trials)
    leaves = leaves_of(trials.last.batch)
    rows = influences.rows.items()
    inputs = {name for name, x in rows if effects(trials.usual, x)["predictions"]}
    for leaf in leaves:
        _values(lines, leaf, trials)
        _influence(lines, leaf, influences, inputs)
        _evaluated(lines, leaf, trials, influences)
        for text in _related(leaf, leaves):
            lines.add(leaf.name, "column", text, "ahead", WIRING, "it has what is to be predicted")
    _validation(lines, trials)
    return lines.found


def _source(lines: Lines, trials: Trials) -> None:
    """Add whether the source shuffles, the shapes of its batches, and its second pass."""
    described = source_facts(trials.train)
    if "shuffle" in described:
        lines.add("data", "shuffled", bool(described["shuffle"]), "object")
    forms = {tuple(leaf.array.shape for leaf in leaves_of(batch)) for batch in trials.ahead}
    if trials.rows is not None:  # the last batch of an epoch may be smaller
        forms = {form for form in forms if form and form[0]} or forms
    text = "one" if len(forms) == 1 else f"{len(forms)} in {len(trials.ahead)} batches"
    mark = "each shape that comes often is compiled" if len(forms) > FEW // 4 else ""
    lines.add("data", "shapes", text, "ahead", WIRING, mark, len(forms) > 1)
    if trials.train.closed_loop:
        return
    try:
        again = trials.read_again()
    except Exception as error:
        name = type(error).__name__
        lines.add("data", "second pass", f"ends: {name}", "again", WIRING, "epochs differ")
        return
    first = trials.ahead[: len(again)]
    equal = bool(again) and all(_same(a, b) for a, b in zip(first, again, strict=True))
    text = "the same batches" if equal else "other batches" if again else "no batches"
    mark = "" if equal else "epochs differ"
    lines.add("data", "second pass", text, "again", WIRING, mark, not equal)


def _same(a: Any, b: Any) -> bool:
    pairs = zip(leaves_of(a), leaves_of(b), strict=False)
    return all(np.array_equal(x.array, y.array, equal_nan=is_float(x.array)) for x, y in pairs)


def _values(lines: Lines, leaf: Leaf, trials: Trials) -> None:
    name, every = leaf.name, _ahead(leaf.name, trials)
    lines.add(name, "array", f"{shape_of(leaf.array)} {leaf.array.dtype}", "read")
    if every.dtype.kind == "b":
        lines.add(name, "true", _share(float(every.mean())), "ahead", NUMBER)
        return
    lines.add(name, "from", range_of(every), "ahead", NUMBER)
    bad = int((~np.isfinite(as_floats(every))).sum())
    if bad:
        lines.add(name, "not finite", bad, "ahead", WIRING, "NaN or infinite")
    kind, mark = _kind(every)
    lines.add(name, "kind", kind, "ahead", SETTING, mark)
    values, counts = np.unique(every, return_counts=True)
    if 1 < len(values) <= FEW and every.size == len(every):
        share = float(counts.max() / counts.sum())
        text = f"{short(float(values[counts.argmax()]))} in {_share(share)}"
        lines.add(name, "most frequent", text, "ahead", NUMBER)
        in_batch = len(np.unique(leaf.array))
        text = f"{in_batch} in a batch, {len(values)} in all"
        lines.add(name, "different values", text, "ahead", SETTING, "", in_batch < len(values))


def _share(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def _ahead(name: str, trials: Trials) -> Array:
    """Return an array of all batches that were read, one after another."""
    found = _named(name, trials.ahead)
    alike = [x for x in found if x.shape[1:] == found[0].shape[1:]]
    return np.concatenate(alike) if found[0].ndim else np.stack(alike)


def _named(name: str, batches: Sequence[Any]) -> list[Array]:
    """Return the arrays of batches that have this name."""
    return [leaf.array for batch in batches for leaf in leaves_of(batch) if leaf.name == name]


def _kind(array: Array) -> tuple[str, str]:
    """Return the kind of an array's values, and a mark."""
    x = as_floats(array)
    x = x[np.isfinite(x).reshape(len(x), -1).all(axis=1)] if x.ndim else x
    if not x.size:
        return "no finite rows", "NaN or infinite"
    if x.ndim and len(x) > 1 and (x == x[:1]).all():
        return "the same in all rows", "all rows are equal"
    whole = bool((x == np.round(x)).all())
    if whole and set(np.unique(x)) <= {0.0, 1.0}:
        if x.ndim < 2 or x.shape[-1] == 1:
            return "0 and 1", ""
        ones = x.sum(axis=-1)
        low, high = int(ones.min()), int(ones.max())
        return ("one-hot", "") if low == high == 1 else (f"{low} to {high} ones in a row", "")
    if whole:
        return f"{len(np.unique(x))} different integers", ""
    return ("rows sum to 1" if sums_to_one(x) else "numbers"), ""


def _influence(lines: Lines, leaf: Leaf, influences: Influences, inputs: set[str]) -> None:
    """Add what an array influences, and which rows and positions."""
    usual, name = influences.trials.usual, leaf.name
    trial = influences.rows.get(name)
    if trial is None:
        return
    found = effects(usual, influences.every.get(name, trial))
    what = ["predictions"] if found["predictions"] else []
    what += found["losses"]
    what += [kind for kind in ("gradients", "returned values") if found[kind]]
    if not what:  # of other arrays it is chance: one row may be counted as before
        what = [f"metric {name}" for name in influences.trials.metrics_of(found["variables"])]
    lines.add(name, "influences", what, "row", WIRING, "" if what else "without influence")
    rows = rows_of(usual.batch)
    if rows is None:
        return
    predictions, counted = (
        names_of([reached(found, len(x), rows) for x, y in pairs if (found := changed_at(x, y))])
        for pairs in (paired(usual.outputs, trial.outputs), paired(usual.slopes, trial.slopes))
    )
    if name in inputs:
        lines.add(name, "a row changes predictions of", predictions, "row", WIRING)
    if counted:
        lines.add(name, "a row counts in the loss of", counted, "row", WIRING)
        both, seen, beyond = _pairing(name, influences, inputs - {name})
        if seen and name not in inputs:
            text = f"{both} of the {seen} rows that its inputs reach"
            text += f" and {beyond} others" if beyond else ""
            lines.add(name, "it counts for", text, "row", WIRING, "", both < seen)
    _positions(lines, name, influences)


def _pairing(name: str, influences: Influences, inputs: set[str]) -> tuple[int, int, int]:
    """Compare the rows in which a label counts with those that the inputs of its row reach.

    Returns:
        How many are in both, those that the inputs reach, and those in which it counts alone.
    """
    usual, label = influences.trials.usual, influences.rows[name]
    for key, slope in usual.slopes.items():
        counted = set(changed_at(slope, label.slopes[key]) if key in label.slopes else ())
        seen: set[int] = set()
        for trial in (influences.rows[one] for one in inputs):
            if key[1:] in usual.outputs and key[1:] in trial.outputs:
                seen |= set(changed_at(usual.outputs[key[1:]], trial.outputs[key[1:]]))
        if counted and seen:
            return len(seen & counted), len(seen), len(counted - seen)
    return 0, 0, 0


def _positions(lines: Lines, name: str, influences: Influences) -> None:
    position = influences.positions.get(name)
    if position is None:
        return
    usual, trial, axis = influences.trials.usual, position.trial, position.axis
    length = _named(name, [usual.batch])[0].shape[axis]
    for fact, pairs in (
        ("a position changes predictions at", paired(usual.outputs, trial.outputs)),
        ("a position counts in the loss at", paired(usual.slopes, trial.slopes)),
    ):
        found = [
            offsets(changed, position.place, x.shape[axis])
            for x, y in pairs
            if x.ndim > axis and abs(x.shape[axis] - length) <= 1
            if (changed := changed_at(x, y, axis))
        ]
        if found:
            lines.add(name, fact, names_of(found), "position", WIRING)


def _evaluated(lines: Lines, leaf: Leaf, trials: Trials, influences: Influences) -> None:
    """Add the range of an array in the evaluation, and what its order counts for."""
    evaluation = trials.validated
    if evaluation is None:
        return
    for other in _named(leaf.name, [evaluation.batch]):
        sizes = [_size(x) for x in (leaf.array, other)]
        is_other = min(sizes) and max(sizes) / min(sizes) > SCALE and len(leaf.array) > 4
        mark = "another scale than in training" if is_other else ""
        text = range_of(other)
        lines.add(leaf.name, "in evaluation from", text, "evaluated", NUMBER, mark, False)
    trial = influences.evaluated.get(leaf.name)
    if trial is not None:
        found = effects(evaluation, trial)
        what = ["predictions"] if found["predictions"] else []
        what += found["returned values"] + trials.metrics_of(found["variables"])
        fact = "its order in evaluation changes"
        lines.add(leaf.name, fact, names_of(what), "values", WIRING, "", False)


def _size(array: Array) -> float:
    x = as_floats(array)
    x = x[np.isfinite(x)]
    return float(np.abs(x).mean()) if x.size else 0.0


def _related(leaf: Leaf, leaves: list[Leaf]) -> Iterator[str]:
    """Yield columns of an array that another array has, too."""
    x = as_floats(leaf.array)
    if x.ndim != 2 or len(x) < 8 or leaf is leaves[-1] or not np.isfinite(x).all():
        return
    for other in leaves:
        y = as_floats(other.array)
        if other is leaf or y.size != len(x) or len(np.unique(y)) < 2:
            continue
        y = y.reshape(-1)
        for column in range(min(x.shape[1], MOST_COMPARED)):
            z = x[:, column]
            if np.array_equal(y, z):
                yield f"column {column} equals {other.name}"
            elif z.std() and abs(float(np.corrcoef(y, z)[0, 1])) > EXACT:
                yield f"column {column} is a multiple of {other.name} plus a constant"


def _alike(a: Array, b: Array) -> int | None:
    """Return how many rows of an array resemble the row of another at the same place most."""
    x, y = (as_floats(z).reshape(len(z), -1) for z in (a, b))
    if len(x) < 4 or x.shape[1] < 2:
        return None
    x, y = (z - z.mean(axis=0) for z in (x, y))
    norms = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(y, axis=1)[None]
    if not norms.all():
        return None
    return int((np.argmax(x @ y.T / norms, axis=1) == np.arange(len(x))).sum())


def _validation(lines: Lines, trials: Trials) -> None:
    """Add rows that are also in the validation batch or repeat, and arrays that resemble others."""
    leaves = leaves_of(trials.last.batch)
    for i, leaf in enumerate(leaves):
        for other in leaves[i + 1 :]:
            if leaf.array.shape == other.array.shape and leaf.array.dtype.kind == "f":
                count = _alike(leaf.array, other.array) if leaf.array.ndim else None
                if count is not None:
                    text, fact = f"{count} of {len(leaf.array)} at the same place", MOST_LIKE
                    lines.add(other.name, fact, text, "read", about=[leaf.name])
    if not leaves or leaves[0].array.ndim < 2:
        return
    name = leaves[0].name
    rows = _all_rows(trials.train, trials.ahead, name)
    if len(rows) != len(set(rows)):
        text = f"{len(rows) - len(set(rows))} of {len(rows)}"
        lines.add(name, "rows that repeat:", text, "ahead", WIRING, "", False)
    if trials.validation is None:
        return
    evaluation = [] if trials.evaluation is None else [trials.evaluation.batch]
    held_out = set(_all_rows(trials.validation, evaluation, name))
    if held_out:
        both = sum(row in held_out for row in rows)
        mark = "rows in both" if both else ""
        lines.add(name, "rows also in validation:", both, "ahead", WIRING, mark, bool(both))


def _all_rows(source: Any, batches: Sequence[Any], name: str) -> list[bytes]:
    """Return the rows of an array: of a source of arrays, else of the batches that were read."""
    arrays = getattr(source, "arrays", None)
    batches = batches if arrays is None else [arrays]
    rows = islice((row for array in _named(name, batches) for row in array), MOST_ROWS)
    return [np.ascontiguousarray(row).tobytes() for row in rows]
