"""Facts about randomness, about evaluation compared with training, and about metrics."""

from typing import Any

import numpy as np

from ...steps.probes import DRAW, METRIC
from ..numbers import scalar, shape_of
from ..recording import Event
from ..trials import Trials, TriedStep, leaves_of
from .influences import effects
from .lines import EFFECT, NUMBER, WIRING, Line, Lines, names_of, range_of, short
from .losses import looks_like, source_of
from .variables import owners_of


def random_facts(trials: Trials) -> list[Line]:
    """Return facts about the random numbers that the steps draw by `keras.random`."""
    lines = Lines("randomness")
    first, last = (trial.of(DRAW) for trial in (trials.base[0], trials.last))
    before = {(e.call.path, e.call.key): e for e in first}
    for number, event in enumerate(last, 1):
        name = f"{event.call.path} {number}" if len(last) > 1 else event.call.path
        x, other = event.get("outputs"), before.get((event.call.path, event.call.key))
        y = None if other is None else other.get("outputs")
        if x is None:
            continue
        lines.add(name, "shape", shape_of(x), "recorded")
        if y is not None and x.shape == y.shape and len(trials.base) > 1:
            same = bool(np.array_equal(x, y)) and x.size > 0
            mark = "the same numbers in each step" if same else ""
            lines.add(name, "repeats in each step", same, "both", WIRING, mark)
        seed = event.call.facts["seed"]
        text = "none or a generator" if seed is None else str(seed)
        lines.add(name, "seed", text, "recorded", shown=seed is not None)
    if trials.evaluation is not None:
        drawn = [e.call.path for e in trials.evaluation.of(DRAW)]
        if drawn:
            lines.add("evaluation", "draws", names_of(drawn), "evaluated", WIRING)
    return lines.found


def evaluation_facts(trials: Trials) -> list[Line]:
    """Return facts about the evaluation: what it returns and changes, compared with training."""
    lines, evaluation = Lines("evaluation"), trials.evaluation
    if evaluation is None:
        text = "not measured" if "evaluation" in trials.failed else "there is no evaluation"
        lines.add("eval_step", "evaluation", text, "object")
        return lines.found
    if trials.validation is None:
        lines.add("eval_step", "evaluated on", "a batch of the training data", "evaluated", WIRING)
    for name, x in evaluation.values.items():
        if x.size == 1:
            lines.add(f"evaluated {name!r}", "is", scalar(x), "evaluated", NUMBER)
    owned = {path for owner in owners_of(trials) for path in owner.paths}
    changed = [
        path
        for path in evaluation.before
        if path in owned or path.partition("/")[0] in trials.state.optimizers
        if evaluation.changed(path)
    ]
    mark = "it changes what is trained" if changed else ""
    lines.add("eval_step", "changes", names_of(changed), "evaluated", WIRING, mark)
    _random(lines, trials, evaluation)
    _same_batch(lines, trials, evaluation)
    return lines.found


def _random(lines: Lines, trials: Trials, evaluation: TriedStep) -> None:
    paths = [trials.state.path_of(variable) for variable in trials.state.seeds]
    seeds = {
        path: evaluation.before[path] + np.ones_like(evaluation.before[path])
        for path in paths
        if path in evaluation.before
    }
    if not seeds:
        return
    again = trials.evaluated_again("randomness of the evaluation", variables=seeds)
    if again is None:
        return
    found = effects(evaluation, again)
    random = bool(found["returned values"] or found["predictions"])
    mark = "its results depend on random numbers" if random else ""
    lines.add("eval_step", "random numbers change its results", random, "seeds", WIRING, mark)


def _same_batch(lines: Lines, trials: Trials, evaluation: TriedStep) -> None:
    """Add how outputs of a model for the training batch differ between training and evaluation."""
    usual = trials.usual
    shapes = [[leaf.array.shape[1:] for leaf in leaves_of(t.batch)] for t in (evaluation, usual)]
    if shapes[0] != shapes[1]:
        return
    trial = trials.evaluated_again("evaluation of the training batch", batch=usual.batch)
    if trial is None:
        return
    for name, x in trial.values.items():
        y = usual.values.get(name)
        if y is not None and x.size == y.size == 1:
            text = f"{short(scalar(x))} in evaluation, {short(scalar(y))} in training"
            lines.add(f"evaluated {name!r}", "of the training batch:", text, "train batch", EFFECT)


def metric_facts(trials: Trials) -> list[Line]:
    """Return facts about each metric: what updates it, and with what."""
    lines = Lines("metrics")
    updated = trials.updated_metrics
    phases = {"training": trials.usual, "evaluation": trials.evaluation}
    for name, metric in trials.state.metrics.items():
        lines.add(name, "class", type(metric).__name__, "object")
        events = {
            phase: [e for e in trial.of(METRIC) if e.call.path == name]
            for phase, trial in phases.items()
            if trial is not None
        }
        by = [phase for phase, found in events.items() if found]
        by = by or (["a branch"] if name in updated else [])
        mark = "" if by else "never updated"
        lines.add(name, "updated by", by, "recorded", WIRING, mark)
        first = next((phase for phase, found in events.items() if found), None)
        if first is not None:
            _fed(lines, name, events[first][0], phases[first])
    return lines.found


def _fed(lines: Lines, name: str, event: Event, trial: Any) -> None:
    """Add what a metric gets."""
    target, outputs = event.get("y_true"), event.get("y_pred")
    if outputs is None:
        return
    lines.add(name, "gets", [looks_like(outputs), shape_of(outputs)], "recorded", WIRING)
    lines.add(name, "outputs from", range_of(outputs), "recorded", EFFECT, "", False)
    if target is not None:
        text = [source_of(target, trial), shape_of(target)]
        lines.add(name, "labels are", text, "recorded", WIRING)
        weighted = event.get("sample_weight") is not None
        lines.add(name, "gets weights", weighted, "recorded", WIRING, "", weighted)
    threshold = getattr(event.call.of, "threshold", None)
    if isinstance(threshold, float):
        lines.add(name, "threshold", threshold, "object")
