"""Mistakes of losses, metrics and layers that are certain, without a threshold."""

from collections.abc import Iterator
from typing import Any, Final

import keras
import numpy as np

from ...steps.probes import CROSS_ENTROPY, GRADIENTS, LAYER, LOSS, METRIC
from ..numbers import Array, as_floats, norm_of_all
from ..recording import Event
from ..trials import ROUNDING, Trials, TriedStep, differs, leaves_of, paired
from .findings import Finding
from .influences import Influences, changed_at, effects, rolled
from .layers import squashing
from .terms import Terms

ROUNDED: Final = 1e-3
"""How far rounding may take a probability out of its range."""


def loss_mistakes(trials: Trials, influences: Influences, terms: Terms) -> Iterator[Finding]:
    """Yield the mistakes of losses."""
    usual = trials.usual
    yield from _entropies(usual)
    yield from _unpaired(trials, influences)
    yield from _swapped(trials)
    yield from _regularizers(trials, terms)


def layer_mistakes(trials: Trials) -> Iterator[Finding]:
    """Yield the mistakes of layers and metrics."""
    for trial in (trials.usual, trials.validated):
        if trial is not None:
            yield from _twice(trial)
            yield from _over_one(trial)
            yield from _metrics(trial)


def mistake_in(event: Event, code: str, seen: str, why: str, fix: str) -> Finding:
    """Return a mistake in one call, with its path and its line."""
    return Finding(code, event.call.path, seen, why, fix, event.call.line)


def _entropies(trial: TriedStep) -> Iterator[Finding]:
    """Yield cross-entropies of logits, and of probabilities as logits."""
    made = [(event.get("outputs"), squashing(event)[0]) for event in trial.events]
    for event in trial.of(CROSS_ENTROPY):
        outputs = event.get("y_pred")
        if outputs is None or not outputs.size:
            continue
        x, name = as_floats(outputs), event.call.path
        if event.call.facts["from_logits"]:
            kind = next((kind for array, kind in made if kind and _same(array, outputs)), "")
            if kind:
                yield mistake_in(
                    event,
                    "L-probabilities-as-logits",
                    f"with from_logits=True it gets what a {kind} returned",
                    "the probabilities are squashed a second time: gradients are small, and the "
                    "loss has a bound that training cannot pass",
                    "leave out from_logits=True, or the activation of the last layer",
                )
        elif (x < -ROUNDED).any() or (name.startswith("binary") and (x > 1 + ROUNDED).any()):
            yield mistake_in(
                event,
                "L-logits-not-told",
                f"with from_logits=False it gets values from {x.min():.3g} to {x.max():.3g}",
                "such values are no probabilities: they are clipped, and have no gradient there",
                "pass from_logits=True, or end the model with softmax or sigmoid",
            )


def _same(a: Array | None, b: Array | None) -> bool:
    return a is not None and b is not None and a.size > 1 and np.array_equal(a, b)


def _twice(trial: TriedStep) -> Iterator[Finding]:
    """Yield softmax of a softmax over the same axis."""
    earlier = list[tuple[Array, int]]()
    for event in trial.events:
        name, axis, alone = squashing(event)
        given, outputs = event.given, event.get("outputs")
        if "softmax" not in name or given is None or outputs is None or not outputs.ndim:
            continue
        axis = axis % outputs.ndim
        if alone and any(other == axis and _same(array, given) for array, other in earlier):
            yield mistake_in(
                event,
                "T-softmax-twice",
                f"this {name} gets what a softmax returned",
                "its outputs are nearly equal, whatever the model computes",
                "leave one of the two out",
            )
        if not name.startswith("log"):
            earlier.append((outputs, axis))


def _over_one(trial: TriedStep) -> Iterator[Finding]:
    """Yield dense layers whose softmax is over one unit."""
    for event in trial.of(LAYER):
        layer: Any = event.call.of
        is_single = isinstance(layer, keras.layers.Dense) and layer.units == 1
        if is_single and squashing(event)[0] == "softmax":
            yield mistake_in(
                event,
                "L-axis",
                "softmax over one entry: its outputs are all 1",
                "they depend neither on inputs nor on weights",
                "use sigmoid for one unit, or a unit for each class",
            )


def _metrics(trial: TriedStep) -> Iterator[Finding]:
    """Yield metrics that compare class numbers with one-hot labels, or labels with numbers."""
    for event in trial.of(METRIC):
        target, outputs = event.get("y_true"), event.get("y_pred")
        if target is None or outputs is None:
            continue
        kind, seen = type(event.call.of).__name__, ""
        if type(event.call.of) is not getattr(keras.metrics, kind, None):
            continue  # a metric of the user, which may have this name
        shapes = f"labels of shape {target.shape} and outputs of shape {outputs.shape}"
        wide = outputs.ndim > 1 and outputs.shape[-1] > 1
        numbers = target.ndim < outputs.ndim or (target.ndim > 0 and target.shape[-1] == 1)
        if kind in ("CategoricalAccuracy", "BinaryAccuracy") and wide and numbers:
            seen = f"it gets {shapes}"
        whole = [(x == np.round(x)).all() for x in (target, outputs)]
        if kind == "Accuracy" and whole == [True, False]:
            seen = f"it counts equal numbers, and gets outputs such as {outputs.reshape(-1)[0]:.3g}"
        if seen:
            yield mistake_in(
                event,
                "M-labels",
                f"{kind}: {seen}",
                "it does not compare predicted classes with labels",
                "use SparseCategoricalAccuracy for class numbers, CategoricalAccuracy for one-hot "
                "labels, and BinaryAccuracy for labels 0 and 1 with one output each",
            )


def _unpaired(trials: Trials, influences: Influences) -> Iterator[Finding]:
    """Yield labels whose order among the rows of the batch does not matter."""
    usual, rows = trials.usual, trials.rows
    if not usual.slopes or rows is None:
        return
    leaves = leaves_of(usual.batch)
    for leaf in leaves:
        trial, turned = influences.rows.get(leaf.name), rolled(leaf.array)
        if trial is None or turned is None or leaf.array.size != len(leaf.array):
            continue
        others = [*usual.outputs.values(), *(other.array for other in leaves)]
        if not any(x.size == rows and x.shape != leaf.array.shape for x in others):
            continue  # nothing to broadcast with: a loss of the whole batch, such as of its mean
        found = effects(usual, trial)
        counted = [
            len(changed_at(x, y)) for x, y in paired(usual.slopes, trial.slopes) if len(x) == rows
        ]
        if found["predictions"] or not found["losses"] or rows not in counted:
            continue
        rising = np.sort(leaf.array, axis=0)  # the first label differs in one of both orders
        orders = {"order of": turned, "sorted": rising, "reversed": rising[::-1].copy()}
        if any(
            other is None or _trains_otherwise(usual, other)
            for what, array in orders.items()
            for other in [trials.attempt(f"{what} {leaf.name}", batch=leaf.with_(array))]
        ):
            continue
        event = usual.of(GRADIENTS)[0]
        yield Finding(
            "L-unpaired",
            leaf.name,
            f"with its {rows} rows in another order the loss and all gradients stay the same, "
            "although other values change them; one row counts for all predictions",
            "predictions are compared with the labels of all rows: often shapes (N,) and (N, 1) "
            "broadcast to (N, N)",
            "give both the same shape, as y[:, None] or outputs[:, 0]",
            event.call.line,
        )


def _trains_otherwise(usual: TriedStep, other: TriedStep) -> bool:
    """Return whether losses differ, or gradients by more than the rounding of all of them."""
    pairs = paired(usual.gradients, other.gradients)
    change = norm_of_all(as_floats(x) - as_floats(y) for x, y in pairs)
    is_larger = change > ROUNDING * norm_of_all(x for x, _ in pairs)
    return bool(effects(usual, other)["losses"]) or is_larger


def _swapped(trials: Trials) -> Iterator[Finding]:
    """Yield losses and metrics whose prediction is an array of the batch, and y_true an output."""
    both = [trial for trial in (trials.usual, trials.validated) if trial is not None]
    arrays = [leaf.array for trial in both for leaf in leaves_of(trial.batch)]
    outputs = [x for trial in both for x in trial.outputs.values()]
    for trial in both:
        losses = [(event.get("y_true"), event.get("y_pred")) for event in trial.of(LOSS)]
        for event in (*trial.of(LOSS), *trial.of(METRIC)):
            target, given, of = event.get("y_true"), event.get("y_pred"), event.call.of
            if target is None or given is None or not type(of).__module__.startswith("keras."):
                continue  # a loss of the user may take its arguments in any order
            if isinstance(of, (keras.losses.KLDivergence, keras.metrics.KLDivergence)):
                continue  # a divergence in the other direction
            if any(_same(x, given) and _same(y, target) for x, y in losses):
                continue  # the step also compares them with exchanged roles: a symmetric loss
            exchanged = _is_one(given, arrays) and _is_one(target, outputs)
            if exchanged and not _is_one(target, arrays) and _asymmetric(event, target, given):
                yield mistake_in(
                    event,
                    "L-swapped",
                    "y_pred is an array of the batch, and y_true is the output of a layer",
                    "it is not the same with both exchanged: it takes y_true first",
                    "exchange the arguments",
                )


def _is_one(array: Array, arrays: list[Array]) -> bool:
    x = as_floats(array)
    return x.size > 1 and any(
        y.size == x.size and not differs(x.reshape(-1), as_floats(y).reshape(-1)) for y in arrays
    )


def _asymmetric(event: Event, target: Array, given: Array) -> bool:
    """Return whether a loss or metric has another value with its arguments exchanged."""
    of: Any = event.call.of
    try:
        values = list[float]()
        for pair in ((target, given), (given, target)):
            is_metric = event.call.kind == METRIC
            compare = type(of).from_config(of.get_config()) if is_metric else of.call
            values.append(float(as_floats(keras.ops.convert_to_numpy(compare(*pair))).mean()))
    except Exception:  # it refuses the shapes or values
        return event.call.kind != METRIC
    return differs(*values)


def _regularizers(trials: Trials, terms: Terms) -> Iterator[Finding]:
    """Yield regularization and added losses that reach no loss."""
    usual = trials.usual
    if terms.trial is None or not usual.of(GRADIENTS) or not terms.expected:
        return
    found = effects(usual, terms.trial)
    if not found["losses"] and not found["gradients"]:
        yield Finding(
            "L-regularizer",
            ", ".join(list(dict.fromkeys(terms.names))[:4]),
            f"regularization and added losses of together {terms.expected:.3g} were doubled, and "
            "losses and gradients stay the same",
            "they have no influence on training",
            "add sum(model.losses) to the loss",
            usual.of(GRADIENTS)[0].call.line,
        )
