"""Checks of losses: arguments, reduction, pairs of rows, what is trained and logged."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import keras
import numpy as np

from ..numbers import Array, as_floats
from .recording import ACTIVATION, BRANCH, LAYER, LOSS, METRIC, OBJECTIVE, Event
from .report import Finding
from .trials import Leaf, Trial, Trials, distance, leaves_of, rows_of, window_of

ASYMMETRIC: Final = ("crossentropy", "divergence", "hinge", "poisson", "dice", "tversky")


def check(trials: Trials) -> Iterator[Finding]:
    """Check the calls of losses in a training and an evaluation step."""
    for trial in (trials.last, trials.evaluation):
        if trial is not None:
            for event in (*trial.of(LOSS), *trial.of(METRIC)):
                yield from _swapped(event, trial)
    yield from _reduction(trials)
    yield from _constant_divisor(trials.last)
    yield from _unpaired(trials)
    yield from _logged(trials.last)


def _swapped(event: Event, trial: Trial) -> Iterator[Finding]:
    """Find losses and metrics that get the outputs as labels, and labels as outputs."""
    true, pred = event.get("true"), event.get("pred")
    if true is None or pred is None or "float" not in str(true.dtype):
        return
    name = f"{event.info.kind} {event.info.path}".lower()
    if event.what == LOSS and not any(kind in name for kind in ASYMMETRIC):
        return
    from_model = any(
        same(true, x)
        for layer in (*trial.of(LAYER), *trial.of(ACTIVATION))
        for part, x in layer.arrays.items()
        if part.startswith("out")
    )
    if from_model and any(same(pred, leaf.array) for leaf in leaves_of(trial.batch)):
        yield Finding(
            "L-swapped",
            "error",
            event.info.path,
            "y_true is the output of a layer, and y_pred is an array of the batch",
            "the arguments are swapped: it computes something else",
            "call it as loss(y_true, y_pred), metric.update_state(y_true, y_pred)",
            event.info.line,
        )


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
    return keras.tree.map_structure(lambda x: None if x is None else function(x), stacked)


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
    for number, leaf in enumerate(leaves[1:], start=1):
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


def _logged(trial: Trial) -> Iterator[Finding]:
    """Compare the value that is logged as `loss` with the loss that is differentiated."""
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
