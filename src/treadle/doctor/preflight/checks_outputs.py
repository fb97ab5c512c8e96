"""Checks of outputs: logits and probabilities, targets that an activation reaches, softmax."""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from ..numbers import Array, as_floats, norm_of
from .checks_losses import enters_a_layer, same
from .guarding import guarded
from .intervening import changed_outputs, constant, losses_of, outer_calls
from .recording import ACTIVATION, ENTROPY, LAYER, LOSS, Event, Info
from .report import Finding
from .trials import Trial, Trials, leaves_of

CATEGORICAL: Final = "categorical_crossentropy"
MANY: Final = 16
"""The least number of outputs that may be judged by their range alone."""


def check(trials: Trials) -> Iterator[Finding]:
    """Check the outputs of models, as losses get them in a training and an evaluation step."""
    for trial in (trials.last, trials.evaluation):
        if trial is not None:
            for event in trial.of(ENTROPY):
                yield from guarded(trials, _logits, event, trial)
            for event in trial.of(LOSS):
                yield from guarded(trials, _divergence, event)
                yield from guarded(trials, _targets, event, trial)
    yield from guarded(trials, _targets_by_hand, trials)
    yield from guarded(trials, _inputs_as_targets, trials)
    yield from guarded(trials, _generated, trials.last)
    yield from guarded(trials, _softmax_twice, trials.last)
    yield from guarded(trials, _softmax_over_others, trials.last)
    yield from guarded(trials, _softmax_of_one, trials.last)
    yield from guarded(trials, _several_labels, trials)


def _logits(event: Event, trial: Trial) -> Iterator[Finding]:
    """Find logits taken as probabilities, and probabilities taken as logits."""
    outputs, binary = as_floats(event["pred"]), event.info.kind.startswith("binary")
    if not np.isfinite(outputs).all() or not outputs.size:
        return
    least, most = float(outputs.min()), float(outputs.max())
    within = least >= 0 and most <= 1
    sums = outputs.sum(-1) if not binary else np.ones(1)
    # Sums in half precision are off by a percent, and rows of padding may be zero.
    normed = float((np.abs(sums - 1) < 0.02).mean()) > 0.5
    spread = f"the outputs range from {least:.3g} to {most:.3g}"
    if not event.info.more["from_logits"] and not (within and normed):
        sentence = spread if not within else f"{spread}, and rows sum to {sums.flat[0]:.3g}"
        yield Finding(
            "L-logits-not-told",
            "error",
            event.info.path,
            f"from_logits=False, but {sentence}: these are logits",
            "the loss clips or divides them, and its gradients are wrong or zero",
            "pass from_logits=True, or end the model with softmax (sigmoid for binary labels)",
            event.info.line,
        )
    elif event.info.more["from_logits"] and within and outputs.size >= MANY:
        certain = _activation(outputs, trial) in ("softmax", "sigmoid")
        if certain or (normed and not binary and outputs.shape[-1] > 1):
            yield Finding(
                "L-probabilities-as-logits",
                "error" if certain else "warning",
                event.info.path,
                f"from_logits=True, but {spread}: these are probabilities",
                "softmax is applied twice: gradients are small, and the loss cannot fall far",
                "pass from_logits=False, or end the model without softmax or sigmoid",
                event.info.line,
            )


def _divergence(event: Event) -> Iterator[Finding]:
    """Find a divergence of logits, or of logarithms, which Keras clips to 0 and 1."""
    if getattr(getattr(event.info.of, "fn", None), "__name__", "") != "kl_divergence":
        return
    for name, what in (("true", "y_true"), ("pred", "y_pred")):
        x = event.get(name)
        if x is None or not x.size:
            continue
        if float(x.min()) < -1e-3 or float(x.max()) > 1 + 1e-3:
            yield Finding(
                "L-logits-not-told",
                "error",
                event.info.path,
                f"it takes probabilities, and {what} ranges from {x.min():.3g} to {x.max():.3g}",
                "the loss clips it to 0 and 1, and most of its gradients are zero",
                "apply softmax to both arguments",
                event.info.line,
            )


def _activation(outputs: Array, trial: Trial, layers_only: bool = False) -> str:
    """Return the activation that computed these outputs, or an empty string."""
    functions = [] if layers_only else trial.of(ACTIVATION)
    for event in reversed((*functions, *trial.of(LAYER))):
        if any(same(outputs, x) for name, x in event.arrays.items() if name.startswith("out")):
            if event.what == ACTIVATION or event.info.kind in ("Softmax", "ReLU"):
                return event.info.kind.lower()
            name = str(getattr(getattr(event.info.of, "activation", None), "__name__", ""))
            if name and name != "linear":
                return name
    return ""


RANGES: Final = {
    "sigmoid": (0.0, 1.0),
    "softmax": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
    "relu": (0.0, np.inf),
}


def _targets(event: Event, trial: Trial) -> Iterator[Finding]:
    """Find targets that the activation of the last layer cannot reach."""
    true, pred = event.get("true"), event.get("pred")
    if true is None or pred is None or true.size != pred.size:
        return
    targets, weight = as_floats(true), event.get("weight")
    if weight is not None and len(weight) == len(targets):
        targets = targets[as_floats(weight).reshape(len(targets), -1).any(-1)]
    activation = _activation(as_floats(pred), trial)
    yield from _outside(activation, targets, event.info)


def _targets_by_hand(trials: Trials) -> Iterator[Finding]:
    """Find targets beyond the last activation, if no `keras.losses` object compares the two.

    Only if the loss compares targets with the outputs as they are: with the outputs as targets its
    gradients vanish, which they do not if the step scales the outputs first.
    """
    trial = trials.last
    leaves, calls = leaves_of(trial.batch), trial.of(LAYER)
    targets = [leaf for leaf in leaves if not enters_a_layer(trial, leaf)]
    if len(leaves) != 2 or len(targets) != 1 or trial.of(LOSS) or not calls:
        return
    outputs, target = calls[-1].get("outputs"), targets[0].array
    if outputs is None or outputs.size != target.size or not trial.gradients:
        return
    activation = _activation(as_floats(outputs), trial, layers_only=True)
    found = list(_outside(activation, as_floats(target), calls[-1].info))
    if not found:
        return
    reached = outputs.reshape(target.shape).astype("float32")
    ideal = trials.attempt("L-range", targets[0].with_(reached))
    if ideal is None or ideal.gradients.keys() != trial.gradients.keys():
        return
    sizes = [
        (norm_of(as_floats(ideal.gradients[p])), norm_of(as_floats(g)))
        for p, g in trial.gradients.items()
    ]
    if all(size <= 1e-3 * before for size, before in sizes):
        yield from found


def _inputs_as_targets(trials: Trials) -> Iterator[Finding]:
    """Find inputs, as of an autoencoder, that the last activation cannot reach.

    They are targets if the loss is least where the outputs equal them, and rises on both sides.
    """
    trial = trials.last
    calls = outer_calls(trial)
    for number, event in list(calls.items())[-1:]:
        output = event.get("outputs")
        activation = "" if output is None else _activation(as_floats(output), trial, True)
        for leaf in leaves_of(trial.batch):
            if (
                output is None
                or output.shape != leaf.array.shape
                or not enters_a_layer(trial, leaf)
            ):
                continue
            found = list(_outside(activation, as_floats(leaf.array), event.info))
            if found and _is_least_at(trials, number, output, as_floats(leaf.array)):
                yield from found


def _is_least_at(trials: Trials, number: int, output: Array, target: Array) -> bool:
    losses: list[Array] = []
    for share in (1.0, 0.0, -1.0):
        value = (target + share * (as_floats(output) - target)).astype("float32")

        def placed(name: str, tensor: Any, value: Array = value) -> Any:
            return constant(value, tensor) if name == "outputs" else tensor

        with changed_outputs({number: placed}):
            trial = trials.attempt("L-range", trials.last.batch)
        losses.append(np.array([np.nan] if trial is None else losses_of(trial)))
    there, at, beyond = losses
    even = np.abs(there - beyond) < 0.05 * np.abs(there)
    return bool((even & (at < 0.1 * there)).any())


def _generated(trial: Trial) -> Iterator[Finding]:
    """Find data that a generator cannot reach: both are the input of one layer."""
    calls = list(outer_calls(trial).values())
    for judge in calls:
        given = [e.arrays.get("inputs[0]") for e in calls if e.info.of is judge.info.of]
        real = [x for x in leaves_of(trial.batch) if any(_equal(y, x.array) for y in given)]
        for maker in calls:
            output = maker.get("outputs")
            if maker.info.of is judge.info.of or not any(_equal(y, output) for y in given):
                continue
            for leaf in real:
                activation = _activation(as_floats(output), trial, layers_only=True)
                yield from _outside(activation, as_floats(leaf.array), maker.info)


def _equal(a: Array | None, b: Array | None) -> bool:
    return a is not None and b is not None and a.shape == b.shape and same(a, b)


def _outside(activation: str, targets: Array, info: Info) -> Iterator[Finding]:
    """Compare the range of targets with that of an activation."""
    if activation not in RANGES or not targets.size:
        return
    least, most = RANGES[activation]
    room = 1e-3
    outside = float(((targets < least - room) | (targets > most + room)).mean())
    if outside > 0.001:
        yield Finding(
            "L-range",
            "warning",
            info.path,
            f"{outside:.0%} of the targets lie outside of what {activation} can return: they range "
            f"from {targets.min():.3g} to {targets.max():.3g}",
            "the model cannot reach these targets",
            "scale the targets, or remove the activation of the last layer",
            info.line,
        )


def _softmax_twice(trial: Trial) -> Iterator[Finding]:
    """Find softmax layers and functions whose inputs are probabilities already."""
    for event in trial.of(ACTIVATION):
        inputs = event.get("inputs")
        again = event.info.kind in ("softmax", "log_softmax") and inputs is not None
        if again and _from_softmax(as_floats(inputs), trial):
            yield _twice(event)
        gate = event.info.kind == "sigmoid" and inputs is not None
        if gate and _activation(as_floats(inputs), trial, layers_only=True) == "sigmoid":
            yield Finding(
                "T-softmax-twice",
                "error",
                event.info.path,
                "its inputs are what a layer with sigmoid returns",
                "sigmoid of a probability lies between 0.5 and 0.73",
                "apply sigmoid once",
                event.info.line,
            )
    for event in trial.of(LAYER):
        activation = getattr(getattr(event.info.of, "activation", None), "__name__", "")
        own_weights = bool(getattr(event.info.of, "_trainable_variables", ()))
        if event.info.kind != "Softmax" and (activation != "softmax" or own_weights):
            continue
        inputs = event.get("inputs[0]")
        if inputs is None or inputs.shape[-1] < 2:
            continue
        x = as_floats(inputs)
        if x.min() >= 0 and np.abs(x.sum(-1) - 1).max() < 1e-4:
            yield _twice(event)


def _twice(event: Event) -> Finding:
    return Finding(
        "T-softmax-twice",
        "error",
        event.info.path,
        "its inputs are probabilities already: rows sum to 1",
        "softmax of probabilities is nearly uniform, so the model cannot be certain",
        "apply softmax once",
        event.info.line,
    )


def _from_softmax(x: Array, trial: Trial) -> bool:
    """Return whether an array is a multiple, as by a temperature, of what a softmax returned."""
    if x.ndim < 2 or x.shape[-1] < 2 or not np.isfinite(x).all() or x.min() < 0:
        return False
    sums = x.sum(-1, keepdims=True)
    if sums.min() <= 0 or np.ptp(sums) > 1e-4 * sums.max():
        return False
    found = [e for e in trial.of(ACTIVATION) if e.info.kind == "softmax"]
    found += [
        event
        for event in trial.of(LAYER)
        if event.info.kind == "Softmax"
        or getattr(getattr(event.info.of, "activation", None), "__name__", "") == "softmax"
    ]
    outputs = [y for event in found if (y := event.get("outputs")) is not None]
    return any(y.shape == x.shape and np.allclose(x / sums, y, atol=1e-5) for y in outputs)


def _softmax_over_others(trial: Trial) -> Iterator[Finding]:
    """Find a softmax of the outputs over the rows of a batch, or over positions, not the classes.

    Only after the last layer: inside a model, as in slot attention, it is intended.
    """
    labels = [x for x in leaves_of(trial.batch) if not enters_a_layer(trial, x)]
    last = max((i for i, event in enumerate(trial.events) if event.what == LAYER), default=-1)
    for event in trial.events[last + 1 :]:
        outputs = event.get("outputs") if event.what == ACTIVATION else None
        if event.info.kind not in ("softmax", "log_softmax") or outputs is None:
            continue
        axis = event.info.more.get("axis")
        if not isinstance(axis, int) or outputs.ndim < 2 or axis % outputs.ndim == outputs.ndim - 1:
            continue
        axis %= outputs.ndim
        if any(_names_the_last_axis(leaf.array, outputs.shape, axis) for leaf in labels):
            over = f"the {outputs.shape[0]} rows of the batch" if axis == 0 else f"axis {axis}"
            yield Finding(
                "L-axis",
                "warning",
                event.info.kind,
                f"it normalizes outputs of shape {outputs.shape} over {over}, and the classes that "
                "labels name are the last axis",
                "the classes of a row or position do not sum to 1, and each depends on the others",
                "pass axis=-1",
                event.info.line,
            )


def _names_the_last_axis(labels: Array, shape: tuple[int, ...], axis: int) -> bool:
    """Return whether labels fit to the last axis of outputs, and not to another one.

    A square matrix compares rows with each other.
    """
    classes, places = shape[-1], shape[:-1]
    if classes < 2 or not labels.ndim or len(labels) != shape[0]:
        return False
    if len(shape) == 2:
        return classes != shape[0] and labels.size in (shape[0], shape[0] * classes)
    if labels.shape == shape:
        x = as_floats(labels)
        return bool(np.isin(x, (0, 1)).all() and (x.sum(-1) == 1).all() and (x.sum(axis) > 1).any())
    if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= classes:
        return False
    flat = labels.shape[:-1] if labels.shape[-1] == 1 else labels.shape
    return flat == places and flat != shape[:axis] + shape[axis + 1 :]


def _softmax_of_one(trial: Trial) -> Iterator[Finding]:
    """Find outputs that are a softmax over one unit: they are always 1."""
    losses = [(e.get("pred"), e) for e in (*trial.of(LOSS), *trial.of(ENTROPY))]
    outer = [(e.get("outputs"), e) for e in list(outer_calls(trial).values())[-1:]]
    for x, event in (*losses, *outer):
        if x is None or x.ndim < 2 or x.shape[-1] != 1 or not (as_floats(x) == 1).all():
            continue
        if _activation(as_floats(x), trial) == "softmax":
            yield Finding(
                "L-axis",
                "error",
                event.info.path,
                f"outputs of shape {x.shape} are a softmax over one unit: always 1",
                "nothing changes the outputs, so nothing is learned",
                'use activation="sigmoid" for one unit, or one unit for each class',
                event.info.line,
            )
            return


def _several_labels(trials: Trials) -> Iterator[Finding]:
    """Find rows with different numbers of labels in a cross-entropy of classes.

    A note if no row is without labels: classes may share a row on purpose, as the next words of a
    text do.
    """
    given = [e["true"] for t in trials.base for e in t.of(ENTROPY) if e.info.kind == CATEGORICAL]
    given = [as_floats(y) for y in given if y.ndim == 2 and y.shape[1] > 1]
    inputs = [x for e in trials.last.of(LAYER) if (x := e.get("inputs[0]")) is not None]
    if any(x.shape == y.shape and same(x, y) for x in inputs for y in given):
        return  # an autoencoder of sets of items: a multinomial likelihood
    if not given or any(y.shape[1] != given[0].shape[1] for y in given):
        return
    labels = np.concatenate(given)
    counts = labels.sum(-1)
    if not np.isin(labels, (0, 1)).all() or counts.max() < 2 or np.ptp(counts) == 0:
        return
    yield Finding(
        "L-several",
        "note" if counts.min() > 0 else "warning",
        CATEGORICAL,
        f"rows have from {counts.min():.0f} to {counts.max():.0f} labels, and the "
        "chances of all classes sum to 1",
        "each label lowers the chances of the others, and rows without labels do not count",
        "use sigmoid and BinaryCrossentropy: each label is a question of its own",
    )
