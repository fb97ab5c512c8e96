"""Facts about the losses that a step differentiates."""

from collections.abc import Iterator
from math import log, log2
from typing import Any, Final

import keras
import numpy as np

from ...core import structures
from ...steps.probes import CROSS_ENTROPY, GRADIENTS, INPUT_GRADIENTS, LOSS, Key
from ..numbers import Array, as_floats, norm_of_all, scalar, shape_of
from ..recording import Event
from ..trials import Trials, TriedStep, differs, leaves_of
from .influences import is_used, name_of_loss
from .lines import EFFECT, NUMBER, WIRING, Line, Lines, names_of, range_of, short
from .terms import NEAR, Terms

STEP: Final = 0.005
"""The part of the loss, and of the weights' norm, by which weights are moved at most."""

SAME: Final = 1e-4
"""How far the ratio of equal numbers may be from 1."""

WHOLE: Final = 1e-3
"""How far the ratio of a multiple may be from an integer."""

FEWEST_NUMBERS: Final = 8
"""The most different numbers whose dtype is not judged."""


def loss_facts(trials: Trials, terms: Terms) -> list[Line]:
    """Return facts about each loss."""
    lines, usual = Lines("losses"), trials.usual
    events, count = usual.of(GRADIENTS), len(usual.losses)
    moved = {i: _moved(trials, i, event) for i, event in enumerate(events)}
    twice = _twice(trials)
    for i, value in enumerate(trials.base[0].losses[:count]):
        name = name_of_loss(i, count)
        event = events[i] if i < len(events) else None
        _value(lines, name, value, event, trials)
        if event is None:
            continue
        _used(lines, trials, event, name)
        same = [e for e in events if e.call.facts["objective"] == event.call.facts["objective"]]
        for term in _inside(usual, LOSS, event) + _inside(usual, CROSS_ENTROPY, event):
            if event is same[0]:  # of several losses of one objective it is not known which
                subject = name if len(same) == 1 else "losses of one objective"
                _term(lines, subject, term, usual, moved[i])
        if text := terms.in_loss(trials, i):
            mark = "they have no influence on this loss" if text == "not in it" else ""
            lines.add(name, "regularization and added losses:", text, "terms", WIRING, mark)
        for fact, about, text in _slopes(usual, i):
            shown = text not in ("all", "float32", "falls and rises")
            lines.add(name, fact, text, "slopes", WIRING, "", shown, about)
        if not all(np.isfinite(as_floats(x)).all() for x in event.by_path.values()):
            lines.add(name, "gradient is", "NaN or infinite", "recorded", WIRING, "not finite")
        elif not any(x.any() for x in event.by_path.values()):
            lines.add(name, "gradient is", "zero", "recorded", WIRING, "nothing is learned from it")
        _gradient(lines, name, moved[i])
        if twice is not None and i < len(twice.losses):
            lines.add(name, "reduced over rows:", _reduction(usual, twice, i), "twice", WIRING)
    _repeats(lines, trials)
    _returned(lines, usual)
    _inputs_moved(lines, trials)
    return lines.found


def _inside(trial: TriedStep, kind: str, loss: Event) -> list[Event]:
    """Return the calls of a kind in the objective of a loss."""
    prefix: Key = loss.call.facts["objective"]
    return [event for event in trial.of(kind) if event.call.key[: len(prefix)] == prefix]


def _value(lines: Lines, name: str, value: float, event: Event | None, trials: Trials) -> None:
    mark = "" if np.isfinite(value) else "not finite"
    lines.add(name, "at the start", value, "recorded", NUMBER, mark)
    if event is None:
        return
    guess = _guess(trials.usual, event)
    if guess:
        lines.add(name, "an uninformed guess has", guess, "recorded", EFFECT)
    paths = event.call.facts["paths"]
    trained = names_of([path.partition("/")[0] for path in paths])
    lines.add(name, "trains", [*trained, f"{len(paths)} variables"], "recorded", WIRING)


def _guess(usual: TriedStep, loss: Event) -> str:
    """Return the loss of a guess that knows nothing of the inputs.

    Returns:
        Empty if that is unknown: also if the loss is not the mean of a single loss of Keras.
    """
    value = loss.arrays["loss"]
    entropies = _inside(usual, CROSS_ENTROPY, loss)
    found = entropies or _inside(usual, LOSS, loss)
    if len(found) != 1 or differs(
        scalar(value), float(as_floats(found[0].arrays["outputs"]).mean())
    ):
        return ""
    outputs, target = found[0].get("y_pred"), found[0].get("y_true")
    if entropies and outputs is not None:
        is_binary = found[0].call.path == "binary_crossentropy" or not outputs.ndim
        classes = 2 if is_binary else outputs.shape[-1]
        return f"log {classes} = {log(classes):.4g}" if classes > 1 else ""
    if isinstance(found[0].call.of, keras.losses.MeanSquaredError) and target is not None:
        return f"{short(float(as_floats(target).var(axis=0).mean()))} (the mean)"
    return ""


def _used(lines: Lines, trials: Trials, event: Event, name: str) -> None:
    """Add whether other gradients change what the step does, if it computes several."""
    if len(trials.usual.of(GRADIENTS)) + len(trials.usual.of(INPUT_GRADIENTS)) < 2:
        return
    used = is_used(trials, f"use of {name}", event, _reversed)
    if used is not None:
        mark = "" if used else "unused"
        lines.add(name, "gradients are used", used, "changed call", WIRING, mark, False)


def _reversed(gradients: Any) -> Any:
    """Return half of the gradients with the other sign."""
    return [-0.5 * g for g in gradients]


def _term(lines: Lines, name: str, event: Event, usual: TriedStep, moved: Any) -> None:
    """Add what a loss of Keras is given."""
    kind = event.call.path if event.call.of is None else type(event.call.of).__name__
    kind = event.call.path if kind == "LossFunctionWrapper" else kind  # of a loss by name
    target, outputs = event.get("y_true"), event.get("y_pred")
    if target is None or outputs is None:
        return
    again = [] if moved is None else moved[0].of(event.call.kind)
    there = [e.get("y_true") for e in again if e.call.key == event.call.key]
    moves = any(x is not None and differs(target, x) for x in there)
    mark = "its targets change with the weights that it trains" if moves else ""
    text = [source_of(target, usual), f"{shape_of(target)} and {shape_of(outputs)}"]
    shown = event.call.kind == LOSS or not usual.of(LOSS)
    lines.add(name, "{} of", text, "recorded", WIRING, mark, shown, [kind])
    if event.call.kind == CROSS_ENTROPY:
        given = "logits" if event.call.facts["from_logits"] else "probabilities"
        kind_of = looks_like(outputs)
        text = f"{kind_of} ({range_of(outputs)})"
        lines.add(name, "{} takes", given, "recorded", WIRING, about=[kind])
        lines.add(name, "{} gets", kind_of, "recorded", WIRING, shown=False, about=[kind])
        lines.add(name, "{} gets", text, "recorded", NUMBER, about=[kind])
    else:
        reduction = str(getattr(event.call.of, "reduction", None))
        lines.add(name, "{} reduces by", reduction, "object", shown=False, about=[kind])
        weighted = event.get("sample_weight") is not None
        lines.add(
            name, "{} gets weights", weighted, "recorded", WIRING, shown=weighted, about=[kind]
        )


def looks_like(array: Array) -> str:
    """Return `probabilities` if entries are from 0 to 1, or `numbers`."""
    x = as_floats(array)
    return "probabilities" if x.size and (x >= 0).all() and (x <= 1 + 1e-5).all() else "numbers"


def source_of(target: Array, usual: TriedStep) -> str:
    """Return where an array comes from: the batch, inputs of a model, or a computation."""
    flat = as_floats(target).reshape(-1)
    for leaf in leaves_of(usual.batch):
        if leaf.array.size == flat.size and not differs(leaf.array.reshape(-1), flat):
            return leaf.name
    for event in usual.outer.values():
        inputs = event.given
        if inputs is None or inputs.shape != target.shape or inputs.ndim != 2:
            continue
        if np.array_equal(inputs, target):
            return f"inputs of {event.call.path}"
        if np.array_equal(inputs[:, 1:], target[:, :-1]):
            return f"inputs of {event.call.path}, one position later"
    return f"{short(flat[0])} everywhere" if flat.size and (flat == flat[0]).all() else "computed"


def _slopes(usual: TriedStep, number: int) -> Iterator[tuple[str, list[str], str]]:
    """Yield how a loss depends on the outputs of each outermost call of a layer.

    Yields:
        The name of a fact, the paths that it is about, and the fact.
    """
    paths = [event.call.path for event in usual.outer.values()]
    order = {key: i for i, key in enumerate(usual.outer)}
    for (loss, key, part), slope in usual.slopes.items():
        if loss != number:
            continue
        path = usual.outer[key].call.path
        again = paths[: order[key]].count(path)
        name = path + part + (f" (call {again + 1})" if paths.count(path) > 1 else "")
        yield "as outputs of {} rise, it", [name], _direction(slope)
        if not slope.any():
            continue
        if slope.ndim > 1:
            counts = (slope.reshape(len(slope), -1) if slope.ndim == 2 else slope).any(axis=-1)
            text = "all" if counts.all() else f"{int(counts.sum())} of {counts.size}"
            kind = "rows" if slope.ndim == 2 else "positions"
            yield f"{kind} of {{}} that count:", [name], text
        for leaf, moves in _towards(slope, usual.outputs[key, part], usual):
            yield "as outputs of {} move to {}, it", [name, leaf], moves
        if text := computed_in(slope):
            yield "slopes of {} are computed in", [name], text


def computed_in(array: Array) -> str:
    """Return whether float32 numbers were computed in float16; empty if there are too few."""
    if array.dtype != np.float32 or len(np.unique(np.abs(array))) <= FEWEST_NUMBERS:
        return ""
    return "float16" if (array.astype("float16") == array).all() else "float32"


def _direction(slope: Array) -> str:
    x = as_floats(slope)
    if not x.any():
        return "stays"
    if (x <= 0).all():
        return "falls"
    return "rises" if (x >= 0).all() else "falls and rises"


def _towards(slope: Array, output: Array, usual: TriedStep) -> Iterator[tuple[str, str]]:
    """Yield arrays of the batch, and whether a loss falls when outputs move towards them."""
    g, x = as_floats(slope), as_floats(output)
    for leaf in leaves_of(usual.batch):
        y = as_floats(leaf.array)
        whole = leaf.array.dtype.kind in "iub"
        if y.size == x.size and not (whole and y.max() > 1):
            change = float((g * (y.reshape(x.shape) - x)).sum())
        elif whole and x.ndim > 1 and y.size * x.shape[-1] == x.size and x.shape[-1] > y.max():
            labels = y.reshape(-1, 1).astype(int)
            change = float(np.take_along_axis(g.reshape(-1, x.shape[-1]), labels, -1).sum())
        else:
            continue
        if change and np.isfinite(change):
            yield leaf.name, "falls" if change < 0 else "rises"


def _moved(trials: Trials, number: int, event: Event) -> tuple[TriedStep, TriedStep, float] | None:
    """Move the weights that a loss trains along its gradient and themselves, and back.

    Returns:
        Both steps, and the measured slope relative to that of the gradient; None if there is none.
    """
    gradients = {path: as_floats(x) for path, x in event.by_path.items()}
    weights = {path: as_floats(trials.last.before[path]) for path in gradients}
    norm, size = norm_of_all(gradients.values()), norm_of_all(weights.values())
    loss = trials.usual.losses[number]
    if not (np.isfinite(norm) and norm and np.isfinite(loss)):
        return None
    # Along the weights, too: penalties of weights change them in this direction.
    along = sum(float((x * weights[path]).sum()) for path, x in gradients.items())
    share = np.copysign(1 / size, along) if size else 0.0
    way = {path: x / norm + share * weights[path] for path, x in gradients.items()}
    expected = norm + abs(along) * abs(share)
    amount = STEP * min(size or 1.0, (abs(loss) + STEP) / norm)
    found = list[TriedStep]()
    for sign in (1, -1):
        values = {
            path: (weights[path] + sign * amount * x).astype(trials.last.before[path].dtype)
            for path, x in way.items()
        }
        trial = trials.attempt(f"slope of loss {number + 1}", variables=values)
        if trial is None or number >= len(trial.losses):
            return None
        found.append(trial)
    rise = found[0].losses[number] - found[1].losses[number]
    return found[0], found[1], rise / (2 * amount) / expected


def _gradient(lines: Lines, name: str, moved: tuple[TriedStep, TriedStep, float] | None) -> None:
    if moved is None:
        return
    text, mark = "the slope of the whole loss", ""
    if abs(moved[-1] - 1) > NEAR:
        text = "against the slope of the loss" if moved[-1] < 0 else f"not {text}"
        mark = "a part of it is held constant"
    lines.add(name, "gradient is", text, "weights", WIRING, mark)


def _twice(trials: Trials) -> TriedStep | None:
    """Return a step with each row twice; None if rows cannot be counted."""
    if trials.rows is None or not trials.usual.losses:
        return None
    double = structures.mapped(
        lambda x: np.concatenate([x, x]) if np.ndim(x) else x, trials.last.batch
    )
    return trials.attempt("reduction over rows", batch=double, taps={})


def _reduction(usual: TriedStep, twice: TriedStep, number: int) -> str:
    a, b = (norm_of_all(x.of(GRADIENTS)[number].by_path.values()) for x in (usual, twice))
    pairs = [(a, b), (usual.losses[number], twice.losses[number])]
    ratios = [log2(y / x) for x, y in pairs if x and y / x > 0]
    powers = {round(ratio) for ratio in ratios if abs(ratio) < 1.5}
    if 1 in powers:
        return "sum"
    return "mean, divided by the rows again" if -1 in powers else "mean"


def _repeats(lines: Lines, trials: Trials) -> None:
    """Add whether the step repeats from equal state."""
    usual, last = trials.usual, trials.last
    for i, (a, b) in enumerate(zip(last.losses, trials.repeated.losses, strict=False)):
        equal = not differs(a, b)
        mark = "" if equal else "something else than state, batch and seeds changes it"
        name = name_of_loss(i, len(usual.losses))
        lines.add(name, "repeats from equal state", equal, "repeated", WIRING, mark, False)


def _returned(lines: Lines, usual: TriedStep) -> None:
    """Add which returned value each loss is, and what other values named `loss` are."""
    losses = usual.losses if usual.of(GRADIENTS) else []
    values = {n: scalar(x) for n, x in usual.values.items() if x.size == 1}
    names = [name_of_loss(i, len(losses)) for i in range(len(losses))]
    for name, loss in zip(names, losses, strict=True):
        same = [n for n, x in values.items() if not differs(x, loss)]
        lines.add(name, "returned as", same, "recorded", WIRING)
    for name, value in values.items():
        if "loss" not in name.lower() or not losses:
            continue
        pairs = zip(names, losses, strict=True)
        found = next((text for n, x in pairs if (text := _relation(value, x, n))), "another number")
        mark = "" if found in names else "it is not the loss that is trained"
        lines.add(f"returned {name!r}", "is", found, "recorded", WIRING, mark, bool(mark))


def _relation(value: float, loss: float, name: str) -> str:
    """Describe a returned value as a multiple or a part of a loss; empty if it is neither."""
    if value == loss or (np.isnan(value) and np.isnan(loss)):
        return name
    if not (loss and value and np.isfinite(value / loss)):
        return ""
    ratio = value / loss
    if abs(abs(ratio) - 1) < SAME:
        return name if ratio > 0 else f"{name} with the other sign"
    for text, factor in (
        (f"{short(1 / ratio)}th of {name}", 1 / ratio),
        (f"{short(ratio)} × {name}", ratio),
    ):
        if round(factor) > 1 and abs(factor - round(factor)) < WHOLE:
            return text
    return ""


def _inputs_moved(lines: Lines, trials: Trials) -> None:
    """Add which way later inputs of a model are moved along gradients of inputs, and their use."""
    usual = trials.usual
    for number, event in enumerate(usual.of(INPUT_GRADIENTS)):
        inputs, slope = event.get("inputs[0]"), event.get("outputs[0]")
        if inputs is None or slope is None:
            continue
        name = f"input gradients {number + 1}"
        used = is_used(trials, f"use of {name}", event, _reversed)
        if used is not None:
            mark = "" if used else "unused"
            lines.add(name, "are used", used, "changed call", WIRING, mark)
        for other in usual.outer.values():
            later = other.given
            if later is not None and later.shape == inputs.shape and differs(later, inputs):
                along = float(((as_floats(later) - as_floats(inputs)) * as_floats(slope)).sum())
                if along:
                    text, about = f"{'up' if along > 0 else 'down'} its slope", [other.call.path]
                    lines.add(name, "inputs of {} are moved", text, "recorded", WIRING, about=about)
                    break
        if event.get("value") is not None and slope.ndim > 1:
            norms = np.linalg.norm(as_floats(slope).reshape(len(slope), -1), axis=1)
            lines.add(name, "norm of a row", float(norms.mean()), "recorded", EFFECT)
