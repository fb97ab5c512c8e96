"""Facts about layers: their calls, their mode, and what they do to their inputs."""

import inspect
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import keras
import numpy as np

from ...core import structures
from ...steps.layer_statistics import units_of
from ...steps.probes import ACTIVATION, CLIP, LAYER
from ..numbers import Array, apart, as_floats, is_float, norm_of_all
from ..recording import Event
from ..trials import ROUNDING, Trials, TriedStep, differs, leaves_of
from .influences import Influences, changed_at, is_used, offsets
from .lines import EFFECT, NUMBER, SETTING, WIRING, Line, Lines, names_of, short
from .losses import computed_in, looks_like

Calls = Mapping[str, Sequence[Event]]
"""The calls of a layer in training, and in evaluation if there is one."""

SETTINGS: Final = ("rate", "momentum", "mask_zero", "stddev", "factor", "axis", "scale", "offset")
"""The attributes of layers that are shown."""

SQUASHING: Final = ("softmax", "log_softmax", "sigmoid")

WITH_MODE: Final = (
    keras.layers.BatchNormalization,
    *(keras.layers.Dropout, keras.layers.GaussianDropout, keras.layers.GaussianNoise),
    *(keras.layers.AlphaDropout, keras.layers.AugMix, keras.layers.CutMix, keras.layers.MixUp),
    *(getattr(keras.layers, name) for name in dir(keras.layers) if name.startswith("Rand")),
)
"""The public layers of Keras that behave differently in training, and return the same shape."""

CLOSE: Final = 0.01
"""How near to its bounds a sigmoid or tanh is saturated."""


def layer_facts(trials: Trials, influences: Influences) -> list[Line]:
    """Return facts about each layer that no other layer of the task contains, or that is a leaf."""
    lines, phases = Lines("layers"), {"training": trials.usual}
    if trials.evaluation is not None:
        phases["evaluation"] = trials.evaluation
    for path, layer in _leaves(trials):
        calls = {
            name: [e for e in x.of(LAYER) if e.call.path == path] for name, x in phases.items()
        }
        first = calls["training"][:1]
        outputs = first[0].get("outputs") if first else None
        one = _activation(layer) == "softmax" and outputs is not None and outputs.shape[-1:] == (1,)
        mark = "softmax over one entry" if one else ""
        lines.add(path, "class", _described(layer), "object", WIRING if one else SETTING, mark)
        _called(lines, path, layer, calls, trials)
        _mode(lines, path, layer, calls, trials)
        for event in first:
            _numbers(lines, path, layer, event)
    _mixing(lines, trials, influences)
    _softmaxes(lines, trials)
    _clips(lines, trials)
    return lines.found


def _leaves(trials: Trials) -> Iterator[tuple[str, Any]]:
    """Yield the layers without models and metrics, and without the parts of Keras' own layers."""
    seen: set[int] = set()
    hidden: set[int] = set()
    for layer in trials.state.layers:
        path = trials.state.layer_paths[id(layer)]
        if id(layer) in seen or isinstance(layer, (keras.Model, keras.layers.InputLayer)):
            continue
        seen.add(id(layer))
        if type(layer).__module__.startswith("keras."):
            hidden |= {id(part) for part in _parts(layer)}
        if id(layer) not in hidden:
            yield path, layer


def _parts(layer: Any) -> list[Any]:
    """Return the layers within a layer, at any depth."""
    inner = [x for x in vars(layer).get("_layers", ()) if isinstance(x, keras.layers.Layer)]
    return [part for x in inner for part in (x, *_parts(x))]


def _described(layer: Any) -> str:
    """Return the class of a layer, its units, activation and rates."""
    parts = [type(layer).__name__]
    units = getattr(layer, "units", None) or getattr(layer, "filters", None)
    parts += [str(units)] if isinstance(units, int) else []
    parts.append(_activation(layer).replace("linear", ""))
    values = [(name, getattr(layer, name, None)) for name in SETTINGS]
    parts += [f"{n}={x}" for n, x in values if isinstance(x, (int, float)) and x is not False]
    parts.append(getattr(layer, "compute_dtype", "float32").replace("float32", ""))
    return " ".join(part for part in parts if part)


def _activation(layer: Any) -> str:
    """Return the name of the activation that a layer ends with; empty if it has none."""
    return getattr(getattr(layer, "activation", None), "__name__", "")


def _called(lines: Lines, path: str, layer: Any, calls: Calls, trials: Trials) -> None:
    text = [f"{len(events)}× in {phase}" for phase, events in calls.items()]
    never = not any(calls.values())
    mark = "never called" if never and layer.variables and layer.trainable else ""
    lines.add(path, "called", text, "recorded", WIRING, mark)
    inputs = {_source(event, trials) for event in calls["training"] if event.call.facts["outer"]}
    if inputs:
        lines.add(path, "gets", names_of(sorted(inputs)), "recorded", WIRING, "", False)


def _source(event: Event, trials: Trials) -> str:
    """Return which array of the batch a call gets, if it gets one as it is."""
    given = event.given
    for leaf in leaves_of(trials.usual.batch):
        if given is not None and given.shape == leaf.array.shape and not differs(given, leaf.array):
            return leaf.name
    return "computed values"


def _mode(lines: Lines, path: str, layer: Any, calls: Calls, trials: Trials) -> None:
    """Add whether a layer that behaves differently in training does so in each phase."""
    has_mode = isinstance(layer, WITH_MODE) or (  # else, its parts may have modes
        "training" in inspect.signature(layer.call).parameters and not _parts(layer)
    )
    if not has_mode or not any(calls.values()):
        return
    modes: dict[str, list[str]] = {}
    for phase, events in calls.items():
        trial = trials.usual if phase == "training" else trials.evaluation
        found = {_is_on(layer, event, trial, trials) for event in events}
        modes[phase] = names_of(sorted(found - {""}))
    # Any layer that returns its inputs in one of its modes is on in the other.
    if not isinstance(layer, WITH_MODE) and not any("off" in found for found in modes.values()):
        return
    for phase, found in modes.items():
        unusual = "off" if phase == "training" else "on"
        # Other layers may be meant for evaluation only, as one that clips what it returns.
        is_known = isinstance(layer, WITH_MODE) and layer.trainable
        mark = f"{unusual} in {phase}" if unusual in found and is_known else ""
        if found:
            lines.add(path, f"in {phase}", found, "recorded", WIRING, mark)
    if isinstance(layer, keras.layers.BatchNormalization):
        name, evaluation = trials.state.path_of(layer.moving_mean), trials.evaluation
        moves = trials.last.changed(name)
        lines.add(path, "moving statistics are updated", moves, "recorded", WIRING)
        if evaluation is not None and evaluation.changed(name):
            lines.add(path, "updated by evaluation", True, "evaluated", WIRING, "evaluation trains")


def _is_on(layer: Any, event: Event, trial: TriedStep | None, trials: Trials) -> str:
    """Return whether a call was on, as in training, or off; empty if that cannot be seen."""
    given, outputs = event.given, event.get("outputs")
    if given is None or outputs is None or trial is None:
        return ""
    if not isinstance(layer, keras.layers.BatchNormalization):
        same = given.shape == outputs.shape and not differs(given, outputs)
        return "" if not getattr(layer, "rate", 1) else "off" if same else "on"
    y, path_of = as_floats(outputs), trials.state.path_of
    axes = tuple(i for i in range(y.ndim) if i != layer.axis % y.ndim)
    if len(y) < 2 or path_of(layer.moving_mean) not in trial.before:
        return ""
    beta = as_floats(trial.before[path_of(layer.beta)]) if layer.center else 0.0
    return "on" if np.abs(y.mean(axis=axes) - beta).max() < CLOSE else "off"


def _numbers(lines: Lines, path: str, layer: Any, event: Event) -> None:
    """Add the scale of inputs, and the shares of outputs that are zero, dead or saturated."""
    given, outputs = event.given, event.get("outputs")
    has_kernel = getattr(layer, "kernel", None) is not None
    if given is not None and given.dtype.kind == "f" and given.size:
        x = as_floats(given)
        size = float(np.sqrt((x * x).mean(where=~np.isnan(x)))) if not np.isnan(x).all() else np.nan
        mark = "large inputs" if has_kernel and size > 10 else ""
        lines.add(path, "inputs of size", size, "recorded", EFFECT, mark)
    if outputs is None or not outputs.size or not is_float(outputs):
        return
    y = as_floats(outputs)
    if not np.isfinite(y).all():
        lines.add(path, "outputs", "NaN or infinite", "recorded", WIRING, "not finite")
        return
    name = _activation(layer)
    if units_of(layer, keras.ops.convert_to_tensor(outputs)) is not None:
        dead = float((y.reshape(-1, y.shape[-1]) == 0).all(axis=0).mean())
        mark = "units without output" if dead > 0.5 else ""
        lines.add(path, "zeros in outputs", short(float((y == 0).mean())), "recorded", EFFECT)
        if dead:
            lines.add(path, "dead units", short(dead), "recorded", EFFECT, mark)
    elif name in ("sigmoid", "tanh", "softmax"):
        low = -1.0 if name == "tanh" else 0.0
        near = (y < low + CLOSE) | (y > 1 - CLOSE)
        lines.add(path, "saturated", short(float(near.mean())), "recorded", EFFECT)
    text = computed_in(outputs)
    if text and has_kernel and layer.compute_dtype == "float32":
        lines.add(path, "computes in", text, "recorded", shown=text == "float16")


def _mixing(lines: Lines, trials: Trials, influences: Influences) -> None:
    """Add the layers whose outputs in a row, or at a position, depend on others."""
    shown, mixing = dict(_leaves(trials)), dict[str, Any]()
    for trial in influences.rows.values() if trials.rows is not None else ():
        for path, x, inside, outside in _changes(trials.usual, trial, 0):
            if len(x) and inside and len(outside) > len(inside):
                mixing[path] = shown.get(path)
    for path, layer in mixing.items():
        if layer is not None:
            normalizes = isinstance(layer, keras.layers.BatchNormalization)
            mark = "" if normalizes else "rows depend on one another"
            lines.add(path, "mixes rows", True, "row", WIRING, mark)
    places: dict[str, str] = {}
    for position in influences.positions.values():
        axis, place = position.axis, position.place
        for path, x, inside, outside in _changes(trials.usual, position.trial, axis):
            if inside == [place] and len(outside) > 1 and path in shown:
                places[path] = offsets(outside, place, x.shape[axis])
    for path, text in places.items():
        lines.add(path, "a position changes outputs at", text, "position", WIRING)


def _changes(
    usual: TriedStep, other: TriedStep, axis: int
) -> Iterator[tuple[str, Array, list[int], list[int]]]:
    """Yield path and outputs of calls, and the places along an axis where both steps differ.

    The places of inputs come before those of outputs, which must have as many.
    """
    others = {event.call.key: event for event in other.of(LAYER)}
    for event in usual.of(LAYER):
        again = others.get(event.call.key)
        if again is None:
            continue
        pairs = [(event.given, again.given), (event.get("outputs"), again.get("outputs"))]
        (a, b), (x, y) = pairs
        if a is None or b is None or x is None or y is None or min(a.ndim, x.ndim) <= axis:
            continue
        if a.shape[axis] == x.shape[axis]:
            inside, outside = changed_at(a, b, axis), changed_at(x, y, axis)
            yield event.call.path, x, inside, outside


def _softmaxes(lines: Lines, trials: Trials) -> None:
    """Add over what each softmax and sigmoid is, and whether its inputs are probabilities."""
    counts: Counter[str] = Counter()
    probabilities = list[Array]()
    for event in trials.usual.events:
        name, axis, alone = squashing(event)
        given, outputs = event.given, event.get("outputs")
        if not name or not alone or given is None or not given.ndim:
            continue
        subject = event.call.path
        if event.call.kind == ACTIVATION:
            counts[name] += 1
            subject = f"ops.{name}" + (f" {counts[name]}" if counts[name] > 1 else "")
        if "softmax" in name:
            axis = axis % given.ndim
            over = "rows" if axis == 0 and given.ndim > 1 else f"axis {axis}"
            text, mark = f"{over} of {given.shape[axis]}", ""
            if given.shape[axis] == 1 or over == "rows":
                mark = "over one entry" if given.shape[axis] == 1 else "over the rows of the batch"
            lines.add(subject, "softmax over", text, "recorded", WIRING, mark)
        twice = any(_is_multiple(given, x) for x in probabilities) or sums_to_one(given)
        if event.call.kind == ACTIVATION or twice:
            mark = "its inputs are probabilities" if twice else ""
            text = "probabilities" if twice else looks_like(given)
            lines.add(subject, "its inputs are", text, "recorded", WIRING, mark)
        if outputs is not None and "log" not in name:
            probabilities.append(outputs)


def squashing(event: Event) -> tuple[str, int, bool]:
    """Return the softmax or sigmoid that a call ends with, its axis, and whether it does no more.

    The name is empty if there is none.
    """
    layer: Any = event.call.of
    if event.call.kind == ACTIVATION:
        name, axis = event.call.path, event.call.facts["axis"]
    elif event.call.kind == LAYER and not isinstance(layer, keras.Model):
        is_softmax = isinstance(layer, keras.layers.Softmax)
        name, axis = "softmax" if is_softmax else _activation(layer), getattr(layer, "axis", -1)
    else:
        name, axis = "", -1
    alone = isinstance(layer, (keras.layers.Softmax, keras.layers.Activation, type(None)))
    return name if name in SQUASHING else "", axis if isinstance(axis, int) else -1, alone


def _is_multiple(array: Array, other: Array) -> bool:
    x, y = as_floats(array), as_floats(other)
    return x.shape == y.shape and min(apart(x, y), apart(x, -y)) < ROUNDING


def sums_to_one(array: Array) -> bool:
    """Return whether the last axis of an array has several probabilities whose sum is 1."""
    x = as_floats(array)
    wide = x.ndim > 1 and x.shape[-1] > 1
    return bool(wide and (x >= 0).all() and not differs(x.sum(axis=-1), np.ones(x.shape[:-1])))


def _clips(lines: Lines, trials: Trials) -> None:
    """Add what each call of a clipping function does."""
    for number, event in enumerate(trials.usual.of(CLIP), 1):
        name = f"{event.call.path} {number}" if number > 1 else event.call.path
        used = is_used(trials, f"use of {name}", event, scaled)
        if used is not None:
            mark = "" if used else "what it returns is not used"
            lines.add(name, "its result is used", used, "changed call", WIRING, mark)
        after, before = (norm_of_all(event.floats(x).values()) for x in ("outputs", "inputs"))
        if before:
            lines.add(name, "leaves of the norm", short(after / before), "recorded", NUMBER)


def scaled(gradients: Any) -> Any:
    """Multiply each entry by another factor, so that a later normalization does not undo it."""

    def change(x: Any) -> Any:
        factors = np.linspace(0.25, 0.75, math.prod(x.shape)).reshape(x.shape)
        return x * keras.ops.convert_to_tensor(factors, x.dtype)

    return structures.mapped(change, gradients)
