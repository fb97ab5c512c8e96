"""Checks of rows: outputs that depend on other rows, and views of one example."""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from ..numbers import Array, as_floats
from .checks_losses import same
from .checks_pairs import without_self_pairs
from .guarding import guarded
from .intervening import changed_outputs, constant, losses_of, outer_calls
from .recording import LAYER, Event
from .report import Finding
from .spying import without_updates
from .trials import Trial, Trials, leaves_of, rows_of

FEWEST: Final = 6
"""The least number of rows that can show a mistake."""


def check(trials: Trials) -> Iterator[Finding]:
    """Change one row of a batch, and look at the rows of outputs that change."""
    yield from guarded(trials, _mixed, trials)
    yield from guarded(trials, _views, trials)


def with_other_row(trials: Trials, code: str, row: int) -> Trial | None:
    """Repeat the last step with another example in the place of one."""
    batch = trials.last.batch
    for number in range(len(leaves_of(batch))):
        leaf = leaves_of(batch)[number]
        changed = leaf.array.copy()
        changed[row] = leaf.array[(row + 1) % len(changed)]
        batch = leaf.with_(changed)
    return trials.attempt(code, batch)


def _changed_rows(a: Array, b: Array) -> Array:
    """Return the numbers of the rows that differ by more than what statistics of a batch carry.

    Inputs may be standardized with the statistics of their batch on purpose, which changes every
    row a little. Where some rows stay the same, any change of others counts.
    """
    x, y = (as_floats(z).reshape(len(z), -1) for z in (a, b))
    sizes = np.linalg.norm(x, axis=1)
    sizes = np.maximum(sizes, sizes.mean()) + 1e-12  # outputs of one column may be near zero
    changes = np.linalg.norm(x - y, axis=1) / sizes
    some_stay = float((changes < 1e-6).mean()) > 0.1
    return np.flatnonzero(changes > (1e-3 if some_stay else max(0.2, 4 / len(x))))


def _mixed(trials: Trials) -> Iterator[Finding]:
    """Find layers whose outputs for a row depend on many other rows."""
    code, rows = "B-rows-mixed", rows_of(trials.last.batch)
    if rows is None or rows < FEWEST or _is_a_graph(trials, rows):
        return
    if any(hasattr(event.info.of, "moving_mean") for event in trials.last.of(LAYER)):
        return  # BatchNormalization mixes rows on purpose
    with without_updates(trials.state.optimizers):  # those of one row change all later outputs
        usual = trials.attempt(code, trials.last.batch)
        others = {row: with_other_row(trials, code, row) for row in (1, rows // 2)}
    if usual is None or None in others.values():
        return
    calls = outer_calls(usual)
    for number, event in calls.items():
        x, y = event.get("inputs[0]"), event.get("outputs")
        if x is None or y is None or y.ndim < 2 or len(x) != rows or len(y) != rows:
            continue
        changed = {
            row: changed_by(trial, number, event)
            for row, trial in others.items()
            if trial is not None
        }
        if all(same(found, row + np.arange(len(found))) for row, found in changed.items()):
            continue  # rows are points in time, and change those that follow
        counts = [len(found) for found in changed.values()]
        if min(counts) > 2 and is_fed(trials, event):
            yield Finding(
                code,
                "warning",
                event.info.path,
                f"with another example in one row of the batch, {min(counts)} of {rows} rows of "
                "what it gets and returns change",
                "each prediction depends on the other examples of its batch",
                "look for a reshape where a transpose is meant, or a mean or a softmax over the "
                "wrong axis",
                event.info.line,
            )
            return


def _is_a_graph(trials: Trials, rows: int) -> bool:
    """Return whether rows may be nodes.

    There is a matrix of them, or lists of the numbers of rows, or each batch is all data.
    """
    ahead = [leaves_of(batch)[0].array for batch in trials.ahead[:2]]
    arrays = [x.array for x in leaves_of(trials.last.batch)]
    matrix = any(x.shape[:2] == (rows, rows) for x in arrays)
    neighbors = any(_lists_rows(x, rows) for x in arrays)
    return matrix or neighbors or len(ahead) < 2 or same(*ahead)


def _lists_rows(x: Array, rows: int) -> bool:
    """Return whether an array may hold the numbers of several rows for each of its own."""
    if x.dtype.kind not in "iu" or x.ndim != 2 or x.shape[1] < 2 or not x.size:
        return False
    return bool(x.min() >= 0 and x.max() < rows)


def changed_by(trial: Trial, number: int, event: Event) -> Array:
    """Return the rows of the inputs or outputs of a call that differ, whichever are more."""
    other = outer_calls(trial).get(number)
    if other is None or other.info.path != event.info.path:
        return np.zeros(0, int)
    pairs = [(event.get(name), other.get(name)) for name in ("inputs[0]", "outputs")]
    both = [(x, y) for x, y in pairs if x is not None and y is not None]
    return max(
        (_changed_rows(x, y) for x, y in both if x.shape == y.shape),
        key=len,
        default=np.zeros(0, int),
    )


def is_fed(trials: Trials, event: Event) -> bool:
    """Return whether gradients flow to the layer, which computes predictions and not targets."""
    paths = [trials.state.path_of(variable) for variable in event.info.of.trainable_variables]
    return any(path in trials.last.gradients for path in paths)


# Views


def _views(trials: Trials) -> Iterator[Finding]:
    """Find views of examples that are equal, or that a contrastive loss does not pair.

    Which rows of the inputs are views of one example is known from a change of that example. A
    loss is contrastive if it is least where the outputs of views of one example are equal.
    """
    code = "L-views"
    last, rows = trials.last, rows_of(trials.last.batch)
    if rows is None or rows < FEWEST or len(leaves_of(last.batch)) != 1:
        return
    for number, event in list(outer_calls(last).items())[-1:]:
        x, y = event.get("inputs[0]"), event.get("outputs")
        if x is None or y is None or len(x) != 2 * rows or len(y) != 2 * rows:
            continue
        of = _examples(trials, code, event, rows)
        if of is None:
            continue
        first = [int(np.flatnonzero(of == row)[0]) for row in range(rows)]
        second = [int(np.flatnonzero(of == row)[1]) for row in range(rows)]
        if y.ndim != 2 or y.shape[1] < 2:
            continue
        if same(x[first], x[second]) and same(y[first], y[second]):
            yield Finding(
                code,
                "warning",
                event.info.path,
                f"the two views of each of {rows} examples are equal",
                "the loss is least already: nothing is learned from comparing them",
                "augment twice: concatenate([augment(x), augment(x)])",
                event.info.line,
            )
            return
        paired, apart = _pairing(trials, code, number, y, of, rows)
        contrastive = bool(without_self_pairs(trials, rows)[1])
        if (
            contrastive
            and paired is not None
            and apart is not None
            and not paired < apart - 0.05 * abs(apart)
        ):
            yield Finding(
                code,
                "warning",
                event.info.path,
                f"the loss is {paired:.4g} if both views of each example have equal outputs, and "
                f"{apart:.4g} if views of different examples have",
                "other examples are taken for the positives",
                "positives of concatenated views are n rows apart: roll(arange(2 * n), n)",
                event.info.line,
            )
            return


def _examples(trials: Trials, code: str, event: Event, rows: int) -> Array | None:
    """Return which example each row of the inputs is a view of, if each has two views.

    Two examples tell whether views are in halves or in turns.
    """
    halves, turns = np.arange(2 * rows) % rows, np.arange(2 * rows) // 2
    found: list[list[int]] = []
    for row in (1, rows - 2):
        trial = with_other_row(trials, code, row)
        other = None if trial is None else outer_calls(trial).get(event.info.more["outer"])
        y = None if other is None else other.get("inputs[0]")
        if y is None or y.shape != event["inputs[0]"].shape:
            return None
        found.append([int(i) for i in np.flatnonzero(~_equal_rows(event["inputs[0]"], y))])
    for of in (halves, turns):
        expected = [[int(i) for i in np.flatnonzero(of == row)] for row in (1, rows - 2)]
        if found == expected:
            return of
    return None


def _equal_rows(a: Array, b: Array) -> Array:
    return (a.reshape(len(a), -1) == b.reshape(len(b), -1)).all(1)


def _pairing(
    trials: Trials, code: str, number: int, y: Array, of: Array, rows: int
) -> tuple[float | None, float | None]:
    """Return the loss for equal outputs of the views of one example, and of different examples."""
    rng = np.random.default_rng(6)
    directions = rng.normal(size=(rows, y.shape[1]))
    size = float(np.sqrt(np.mean(as_floats(y) ** 2))) or 1.0
    paired = size * directions[of]
    apart = paired.copy()
    for row in range(rows):
        apart[np.flatnonzero(of == row)[1]] = size * directions[(row + 1) % rows]
    values: list[float | None] = []
    for outputs in (paired, apart):
        with changed_outputs({number: _constant(outputs.astype("float32"))}):
            trial = trials.attempt(code, trials.last.batch)
        losses = [] if trial is None else losses_of(trial)
        values.append(losses[0] if len(losses) == 1 else None)
    return values[0], values[1]


def _constant(value: Array) -> Any:
    return lambda name, tensor: constant(value, tensor) if name == "outputs" else tensor
