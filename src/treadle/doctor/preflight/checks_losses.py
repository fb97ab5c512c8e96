"""Checks of losses: arguments, reduction, pairs of rows, what is trained and logged."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from keras import ops

from ...core import structures
from ..numbers import Array, as_floats, norm_of
from .guarding import guarded
from .intervening import changed_outputs, held, outer_calls
from .recording import BRANCH, ENTROPY, LAYER, LOSS, METRIC, OBJECTIVE, Event
from .report import Finding
from .spying import without_updates
from .trials import Leaf, Trial, Trials, distance, leaves_of, rows_of, window_of


def check(trials: Trials) -> Iterator[Finding]:
    """Check the calls of losses in a training and an evaluation step."""
    yield from guarded(trials, _swapped, trials)
    yield from guarded(trials, _reduction, trials)
    yield from guarded(trials, _constant_divisor, trials.last)
    yield from guarded(trials, _unpaired, trials)
    yield from guarded(trials, _logged, trials)


def _swapped(trials: Trials) -> Iterator[Finding]:
    """Find losses and metrics that get the outputs as labels, and labels as outputs.

    With other weights, `y_true` changes and `y_pred` does not: it is an array of the batch, a
    constant or the output of a model that is not trained. Exchanged arguments of a symmetric
    distance change nothing.
    """
    for trial in (trials.last, trials.evaluation):
        if trial is None:
            continue
        calls = _compared(trial)
        if not calls or not trials.last.gradients:
            continue
        before = trial.before
        weights = {p: noisy(before[p], 0.05, 3) for p in trials.last.gradients if p in before}
        other = (
            trials.attempt("L-swapped", trial.batch, weights)
            if trial is trials.last
            else trials.evaluated_again(weights)
        )
        again = [] if other is None else _compared(other)
        if len(again) != len(calls):
            continue
        for event, moved in zip(calls, again, strict=True):
            true, pred = event["true"], event["pred"]
            still = same(pred, moved["pred"]) and not same(true, moved["true"])
            if still and not _is_symmetric(event):
                own = any(same(pred, x.array) for x in leaves_of(trial.batch)) or np.ptp(pred) == 0
                yield Finding(
                    "L-swapped",
                    "error" if own else "warning",
                    event.info.path,
                    "with other weights y_true changes, and y_pred does not",
                    "the arguments are swapped: it computes something else",
                    "call it as loss(y_true, y_pred), metric.update_state(y_true, y_pred)",
                    event.info.line,
                )


def _compared(trial: Trial) -> list[Event]:
    """Return the calls of losses and metrics with outputs and float labels."""
    found: list[Event] = []
    for event in (*trial.of(LOSS), *trial.of(METRIC), *trial.of(ENTROPY)):
        true, pred = event.get("true"), event.get("pred")
        if true is None or pred is None or "float" not in str(true.dtype):
            continue
        # The classes call the functions.
        known = [e for e in found if event.what == ENTROPY and e.what == LOSS]
        if not any(same(true, e["true"]) and same(pred, e["pred"]) for e in known):
            found.append(event)
    return found


def _is_symmetric(event: Event) -> bool:
    """Return whether a loss or a metric is the same if its arguments are exchanged."""
    compare = event.info.of if event.what == LOSS else getattr(event.info.of, "_fn", None)
    true, pred = event["true"], event["pred"]
    if compare is None or true.shape != pred.shape:
        return False
    try:
        values = [
            np.asarray(ops.convert_to_numpy(compare(*x))) for x in ((true, pred), (pred, true))
        ]
    except Exception:
        return False  # it does not take outputs as labels
    return distance(values[0], values[1]) < 1e-5


def _reduction(trials: Trials) -> Iterator[Finding]:
    """Hold every row twice: a loss that is a mean over rows stays the same."""
    last = trials.last
    rows = rows_of(last.batch)
    if rows is None or rows < 2 or not last.gradients:
        return
    doubled = _mapped(lambda x: np.concatenate([x, x]), last.batch)
    trial = trials.attempt("L-sum, L-divided", doubled)
    if trial is None:
        return
    ratios = [
        _size(trial.gradients[path]) / _size(g)
        for path, g in last.gradients.items()
        if _size(g) and path in trial.gradients
    ]
    ratio = float(np.median(ratios)) if ratios else 1.0
    if ratio < 1 and not _falls(last, trial):
        return  # as of outputs that are normalized over the batch
    for least, most, code, sentence, fix in (
        (1.8, 2.2, "L-sum", "twice as large", "use ops.mean, or a loss with its default reduction"),
        (0.45, 0.55, "L-divided", "half as large", "do not divide a mean by the number of rows"),
    ):
        if least < ratio < most:
            yield Finding(
                code,
                "warning",
                "the loss",
                f"with every row twice, the gradients are {sentence} ({ratio:.2f})",
                "the learning rate then depends on the batch size, and short last batches count "
                "otherwise",
                fix,
            )


def _falls(last: Trial, doubled: Trial) -> bool:
    """Return whether a loss is smaller with every row twice."""
    pairs = zip(last.of(OBJECTIVE), doubled.of(OBJECTIVE), strict=False)
    sizes = [[abs(float(as_floats(e["loss"]).sum())) for e in pair] for pair in pairs]
    return not sizes or any(b < a for a, b in sizes)


def _constant_divisor(trial: Trial) -> Iterator[Finding]:
    """Find a mean that is divided, or multiplied, by the number of rows as a Python number.

    Holding every row twice does not change such a number.
    """
    rows, trained, losses = rows_of(trial.batch), trial.of(OBJECTIVE), trial.of(LOSS)
    if rows is None or rows < 4 or len(trained) != 1 or len(losses) != 1:
        return
    mean = losses[0].get("result")
    if mean is None or mean.size != 1 or "mean" not in _reduction_of(losses[0].info.of):
        return
    found, result = float(as_floats(trained[0]["loss"])), float(as_floats(mean).ravel()[0])
    for code, factor, sentence, fix in (
        ("L-divided", 1 / rows, "divided", "do not divide a mean by the number of rows"),
        ("L-sum", float(rows), "multiplied", "do not multiply a mean by the number of rows"),
    ):
        if result and abs(found / (result * factor) - 1) < 1e-4:
            yield Finding(
                code,
                "warning",
                "the loss",
                f"{losses[0].info.path} returns the mean {result:.4g}, and the gradients are of "
                f"{found:.4g}: it is {sentence} by {rows}, the number of rows",
                "the learning rate then depends on the batch size",
                fix,
                losses[0].info.line,
            )


def _reduction_of(loss: Any) -> str:
    reduction = str(getattr(loss, "reduction", ""))
    return "mean" if reduction == "sum_over_batch_size" else reduction


def _size(array: Array) -> float:
    return float(np.linalg.norm(as_floats(array)))


def _mapped(function: Any, batch: Any) -> Any:
    stacked = window_of(batch).batch(0)
    return structures.mapped(function, stacked)


def _unpaired(trials: Trials) -> Iterator[Finding]:
    """Shuffle the rows of one array against the others: the gradients must change.

    They stay the same if a loss pairs every row with every label, as arrays of shapes (N,) and
    (N, 1) do. The array must matter at all: other values of it change the gradients. Biases are
    left out, since their gradients are sums over rows, and so is a loss of one array alone.
    """
    last = trials.last
    rows, leaves = rows_of(last.batch), leaves_of(last.batch)
    if rows is None or rows < 4 or len(leaves) < 2 or not last.gradients:
        return
    judged = [p for p, g in last.gradients.items() if g.ndim > 1 and g.size > g.shape[-1]]
    kernels = bool(judged)
    judged = [p for p in judged or last.gradients if as_floats(last.gradients[p]).any()]
    for number, leaf in enumerate(leaves):
        if number == 0 and (len(leaves) < 3 or enters_a_layer(last, leaf)):
            continue  # of two arrays, one is enough
        shuffled = np.random.default_rng(1).permutation(rows)
        other = _repeated(leaf)
        if other is None or (leaf.array[shuffled] == leaf.array).all() or not judged:
            continue
        moved = trials.attempt("L-unpaired", leaf.with_(leaf.array[shuffled]))
        if moved is None or not (still := _equal_gradients(moved, last, judged)):
            continue
        changed = trials.attempt("L-unpaired", leaf.with_(other))
        if changed is None:
            continue
        still -= _equal_gradients(changed, last, judged)
        flat = leaf.array.reshape(rows, -1).shape[1] == 1
        certain = flat and not enters_a_layer(last, leaf)
        if not still or (not (certain and kernels) and len(still) < len(judged)):
            continue
        alone = trials.attempt("L-unpaired", _others_repeated(last.batch, number))
        if alone is not None and still <= _equal_gradients(alone, last, judged):
            continue  # these gradients are of this array alone
        part = len(still) < len(judged)
        yield Finding(
            "L-unpaired",
            "error" if certain else "note",
            leaf.name,
            f"{'the gradients stay' if not part else f'the gradient of {min(still)} stays'} the "
            "same if its rows are shuffled against the other arrays, but not if its values change",
            "each row is compared with the labels of all rows"
            if certain
            else "rows of the arrays are not paired with each other",
            "give both arguments of the loss the same shape: (N,) and (N, 1) broadcast to (N, N)",
        )


def _others_repeated(batch: Any, number: int) -> Any:
    """Return a batch in which all arrays but one have their first row everywhere."""
    for i in range(len(leaves_of(batch))):
        leaf = leaves_of(batch)[i]
        if i != number and (repeated := _repeated(leaf)) is not None:
            batch = leaf.with_(repeated)
    return batch


def _repeated(leaf: Leaf) -> Array | None:
    """Return an array with its first row everywhere; None if that is what it is."""
    flat = leaf.array.reshape(len(leaf.array), -1)
    if (flat == flat[:1]).all():
        return None
    return np.broadcast_to(leaf.array[:1], leaf.array.shape)


def enters_a_layer(trial: Trial, leaf: Leaf) -> bool:
    """Return whether an array of the batch is the input of a layer, which labels seldom are."""
    return any(
        same(x, leaf.array)
        for event in trial.of(LAYER)
        for name, x in event.arrays.items()
        if name.startswith("inputs")
    )


def _logged(trials: Trials) -> Iterator[Finding]:
    """Compare the value that is logged as `loss` with the loss that is differentiated."""
    trial = trials.last
    trained = trial.of(OBJECTIVE)
    if len(trained) != 1 or "loss" not in trial.values or trial.of(BRANCH):
        return
    found, logged = float(as_floats(trained[0]["loss"])), float(as_floats(trial.values["loss"]))
    rows = rows_of(trial.batch) or 1
    scale = max(abs(found), 1e-6)
    if abs(logged + found) < 1e-4 * scale and abs(logged) > 1e-4:
        seen = "the negative of it"
    elif rows > 2 and abs(logged - found * rows) < 1e-3 * scale * rows:
        seen = f"{rows} times it, the number of rows"
    elif rows > 2 and abs(logged - found / rows) < 1e-3 * scale / rows:
        seen = f"1/{rows} of it, the number of rows"
    elif abs(logged - found) > 1e-4 * scale and _penalty_is_only_logged(trials):
        seen = "a part of it depends on the weights alone, and is not differentiated"
    elif abs(logged - found) > 1e-3 * scale and _is_another_function(trials):
        seen = "it is computed after the update, by another function"
    else:
        return
    yield Finding(
        "L-not-logged",
        "warning",
        "loss",
        f"the gradients are of a loss of {found:.4g}, and {logged:.4g} is logged: {seen}",
        "curves, early stopping and the best checkpoint follow another number than training",
        "return the loss that treadle.gradients or treadle.minimize returned",
        trained[0].info.line,
    )


def _penalty_is_only_logged(trials: Trials) -> bool:
    """Return whether other weights, with outputs of layers held, change the logged loss alone."""
    last = trials.last
    weights = {p: 1.5 * as_floats(last.before[p]) for p, g in last.gradients.items() if g.ndim > 1}
    with changed_outputs({n: held(event) for n, event in outer_calls(last).items()}):
        trial = trials.attempt("L-not-logged", last.batch, weights)
        usual = trials.attempt("L-not-logged", last.batch)
    if not weights or trial is None or usual is None or len(trial.of(OBJECTIVE)) != 1:
        return False
    trained = [as_floats(x.of(OBJECTIVE)[0]["loss"]) for x in (trial, usual)]
    logged = [as_floats(x.values["loss"]) for x in (trial, usual)]
    return distance(*trained) < 1e-5 and distance(*logged) > 1e-3


def _is_another_function(trials: Trials) -> bool:
    """Return whether the logged loss comes after the update, and differs even without an update."""
    with without_updates(trials.state.optimizers):
        trial = trials.attempt("L-not-logged", trials.last.batch)
    if trial is None or len(trial.of(OBJECTIVE)) != 1:
        return False
    logged, trained = trial.values["loss"], trial.of(OBJECTIVE)[0]["loss"]
    moves = distance(logged, trials.last.values["loss"]) > 1e-6
    return moves and distance(logged, trained) > 1e-3


def noisy(value: Array, amount: float, seed: int) -> Array:
    """Return an array with noise, relative to the size of its entries or to 1."""
    x = as_floats(value)
    scale = amount * max(norm_of(x.ravel()) / max(1, x.size) ** 0.5, 1.0)
    return (x + scale * np.random.default_rng(seed).normal(size=x.shape)).astype(value.dtype)


def _equal_gradients(a: Trial, b: Trial, paths: Sequence[str]) -> set[str]:
    """Return the paths, of those given, whose gradients agree in two steps."""
    return {
        path
        for path in paths
        if path in a.gradients and distance(a.gradients[path], b.gradients[path]) <= 1e-4
    }


def same(a: Array, b: Array) -> bool:
    """Return whether two arrays have equal entries in the same order, whatever their shapes."""
    return a.size == b.size and bool(np.array_equal(as_floats(a).ravel(), as_floats(b).ravel()))
