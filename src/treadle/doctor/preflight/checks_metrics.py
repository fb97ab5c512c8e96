"""Checks of metrics: their kind, logits and probabilities, updates."""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from ..numbers import Array, as_floats
from .guarding import guarded
from .recording import METRIC, Event
from .report import Finding
from .trials import Trials

THRESHOLD_METRICS: Final = (
    "BinaryAccuracy",
    "Precision",
    "Recall",
    "AUC",
    "F1Score",
    "TruePositives",
    "FalsePositives",
    "TrueNegatives",
    "FalseNegatives",
    "PrecisionAtRecall",
    "RecallAtPrecision",
    "SensitivityAtSpecificity",
    "SpecificityAtSensitivity",
    "BinaryCrossentropy",
)


def check(trials: Trials) -> Iterator[Finding]:
    """Check the calls of metrics in a training and an evaluation step."""
    for trial in (trials.last, trials.evaluation):
        if trial is not None:
            for event in trial.of(METRIC):
                yield from guarded(trials, _metric_arguments, event)
    yield from guarded(trials, _unused_metrics, trials)


def _metric_arguments(event: Event) -> Iterator[Finding]:
    """Find metrics that are of the wrong kind for the labels or the outputs."""
    kind, true, pred = event.info.kind, event.get("true"), event.get("pred")
    if true is None or pred is None or not pred.size:
        return
    outputs, labels = as_floats(pred), as_floats(true)
    if kind in THRESHOLD_METRICS and not getattr(event.info.of, "from_logits", False):
        if getattr(event.info.of, "_from_logits", False):
            return
        least, most = float(outputs.min()), float(outputs.max())
        if (least < 0 or most > 1) and not _takes_logits(event.info.of):
            yield Finding(
                "M-logits",
                "warning",
                event.info.path,
                f"{kind} takes probabilities, and got values from {least:.3g} to {most:.3g}",
                "its thresholds, such as 0.5, mean something else for logits",
                "apply ops.sigmoid to the outputs, or set the threshold to 0",
                event.info.line,
            )
    classes = pred.shape[-1] if pred.ndim > 1 else 1
    sparse = true.ndim == pred.ndim - 1 or (true.ndim == pred.ndim and true.shape[-1] == 1)
    wrong = ""
    if kind in ("CategoricalAccuracy", "TopKCategoricalAccuracy") and classes > 1 and sparse:
        wrong = f"{kind} takes one-hot labels, and got labels of shape {true.shape}"
    elif kind.startswith("Sparse") and classes > 1 and true.shape == pred.shape:
        wrong = f"{kind} takes class numbers, and got labels of shape {true.shape}"
    elif kind == "BinaryAccuracy" and classes > 1 and sparse and labels.max(initial=0) > 1:
        wrong = f"BinaryAccuracy takes labels 0 and 1, and got classes up to {labels.max():.0f}"
    elif kind == "Accuracy" and not (outputs == np.round(outputs)).all():
        wrong = "Accuracy counts outputs that equal the labels, and the outputs are no classes"
    elif kind == "BinaryAccuracy" and _one_of_several(labels, outputs):
        wrong = (
            f"BinaryAccuracy takes each of {classes} classes for a question of its own: with these "
            f"one-hot labels it is {1 - 1 / classes:.0%} if no class is ever chosen"
        )
    if wrong:
        yield Finding(
            "M-labels",
            "error",
            event.info.path,
            wrong,
            "its value means nothing",
            "use SparseCategoricalAccuracy for class numbers, CategoricalAccuracy for one-hot "
            "labels, BinaryAccuracy for 0 and 1",
            event.info.line,
        )


def _one_of_several(labels: Array, outputs: Array) -> bool:
    """Return whether labels are one-hot, and outputs are probabilities of several classes."""
    if labels.shape != outputs.shape or labels.ndim < 2 or labels.shape[-1] < 3:
        return False
    one_hot = np.isin(labels, (0, 1)).all() and (labels.sum(-1) == 1).all()
    sums_to_one = np.abs(outputs.sum(-1) - 1).max() < 0.02  # not of several independent labels
    return bool(one_hot and sums_to_one and outputs.min() >= 0)


def _takes_logits(metric: Any) -> bool:
    """Return whether a metric's threshold is 0, that of logits."""
    own = [getattr(metric, "threshold", None), *(getattr(metric, "thresholds", None) or ())]
    own += [(getattr(metric, "_fn_kwargs", None) or {}).get("threshold")]
    given = [x for x in own if x is not None]
    return bool(given) and all(x <= 0 for x in given)


def _unused_metrics(trials: Trials) -> Iterator[Finding]:
    """Find metrics that neither step updates."""
    if trials.evaluation is None and trials.evaluates:
        return  # eval_step may update them
    for name in trials.state.metrics:
        if name not in trials.updated_metrics:
            yield Finding(
                "M-unused",
                "warning",
                name,
                "neither train_step nor eval_step updates it",
                "it is never logged",
                "call its update_state, or remove it",
            )
