"""Facts about variables: gradients, updates, what is held and not reached."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import keras
import numpy as np
from keras import ops

from ...steps.probes import APPLY, LAYER
from ..numbers import Array, as_floats, is_float, norm_of, norm_of_all
from ..trials import Trials
from .influences import effects
from .lines import EFFECT, WIRING, Line, Lines, names_of, short

KERNELS = {
    "kernel": "kernel_initializer",
    "_kernel": "kernel_initializer",
    "depthwise_kernel": "depthwise_initializer",
    "embeddings": "embeddings_initializer",
    "_embeddings": "embeddings_initializer",
}
"""The attributes of Keras' layers that hold a random variable, with those of its initializer."""

ALONG: Final = 1e-3
"""How far a change may be from the direction towards another variable, relative to it."""


@dataclass(frozen=True, eq=False)
class Owner:
    """A layer, or a variable outside of layers, with the variables that it holds itself."""

    path: str
    layer: Any
    paths: Sequence[str]


def owners_of(trials: Trials) -> list[Owner]:
    """Return layers and variables of the task without optimizers, metrics and random states."""
    state = trials.state
    layers = {state.layer_paths[id(layer)]: layer for layer in reversed(state.layers)}
    metrics = {id(v) for metric in state.metrics.values() for v in metric.variables}
    optimizers = {id(v) for o in state.all_optimizers.values() for v in o.variables}
    left_out = metrics | optimizers | {id(v) for v in state.seeds}
    grouped: dict[str, list[str]] = {}
    for path, variable in state.variables.items():
        if id(variable) in left_out or path.startswith("random/"):
            continue
        parent, _, last = path.rpartition("/")
        # A variable in a list belongs to the attribute that holds it: `kept` holds `kept/0`.
        holder = parent if last.isdigit() and parent else path
        while parent and parent not in layers:
            parent = parent.rpartition("/")[0]
        holder = parent or holder
        grouped.setdefault(holder, []).append(path)
    return [Owner(path, layers.get(path), paths) for path, paths in grouped.items()]


def variable_facts(trials: Trials) -> list[Line]:
    """Return facts about the variables of each layer, and of those outside of layers."""
    lines = Lines("variables")
    updated = _updated_by(trials)
    called = {
        e.call.path for trial in (*trials.base, trials.evaluation) if trial for e in trial.of(LAYER)
    }
    tracked, averages = list[Owner](), set[str]()
    for owner in owners_of(trials):
        gradients = {
            p: trials.usual.gradients[p] for p in owner.paths if p in trials.usual.gradients
        }
        trained = [p for p in owner.paths if p in updated]
        others = [p for p in owner.paths if p not in updated]
        moved = [p for p in others if any(trial.changed(p) for trial in trials.base)]
        _trainable(lines, owner, trials)
        if gradients:
            _gradients(lines, owner.path, gradients, trials)
        by = names_of([name for path in owner.paths for name in updated.get(path, [])])
        if by or gradients or _is_trainable(owner, trials):
            is_used = owner.path in called or owner.layer is None
            assigned = any(_trainable_variable(trials, p) for p in moved)
            is_still = is_used and not (by or assigned)
            mark = "trainable, and nothing updates it" if is_still else ""
            partly = [p for p in owner.paths if _trainable_variable(trials, p) and p not in updated]
            text = [*by, f"all but {', '.join(map(_name, partly))}"] if by and partly else by
            mark = mark or ("some are not updated" if by and partly else "")
            lines.add(owner.path, "updated by", text, "dry run", WIRING, mark)
        if len(by) > 1:
            lines.add(owner.path, "optimizers", len(by), "recorded", WIRING, "two optimizers")
        if trained:
            _updates(lines, owner.path, trained, trials)
        if moved:
            statistics = isinstance(owner.layer, keras.layers.BatchNormalization)
            text = "moving statistics" if statistics else names_of([_name(p) for p in moved])
            lines.add(owner.path, "the step assigns", text, "recorded", WIRING)
            if not statistics:
                tracked.append(owner)
                if _assigned(lines, owner, moved, trials, updated):
                    averages.add(owner.path.partition("/")[0])
        is_frozen = not _is_trainable(owner, trials) and not moved
        if is_frozen and owner.layer is not None and _initial(owner.layer):
            mark = "frozen with its initial values" if owner.path in called else ""
            lines.add(owner.path, "holds its initial values", True, "object", WIRING, mark)
    _tracked(lines, tracked, averages, trials)
    for path, (old, new) in trials.moving.items():
        mark = "a Python value that a step changes"
        lines.add(path, "the step changes it", f"from {old} to {new}", "recorded", WIRING, mark)
    return lines.found


def _name(path: str) -> str:
    return path.rpartition("/")[-1]


def _updated_by(trials: Trials) -> Mapping[str, list[str]]:
    """Return the optimizers that update each variable, in any branch."""
    found: dict[str, list[str]] = {}
    for trial in trials.base:
        for event in trial.of(APPLY):
            for path in event.by_path:
                if event.call.path not in found.setdefault(path, []):
                    found[path].append(event.call.path)
    for name, optimizer in trials.state.optimizers.items():
        if id(optimizer) in trials.applied:
            for variable in getattr(optimizer, "_trainable_variables", ()):
                path = trials.state.path_of(variable)
                if path in trials.assigned and path not in found:
                    found[path] = [name]
    return found


def _trainable_variable(trials: Trials, path: str) -> bool:
    return bool(getattr(trials.state.variables[path], "trainable", False))


def _is_trainable(owner: Owner, trials: Trials) -> bool:
    return any(_trainable_variable(trials, path) for path in owner.paths)


def _trainable(lines: Lines, owner: Owner, trials: Trials) -> None:
    chosen = [path for path in owner.paths if _trainable_variable(trials, path)]
    sizes = sum(int(np.prod(trials.state.variables[path].shape)) for path in owner.paths)
    text = "all" if len(chosen) == len(owner.paths) else f"{len(chosen)}" if chosen else "none"
    lines.add(owner.path, "size", f"{len(owner.paths)} variables, {sizes} numbers", "object")
    has_statistics = isinstance(owner.layer, keras.layers.BatchNormalization) and chosen
    lines.add(owner.path, "trainable", "all" if has_statistics else text, "object", WIRING)


def _gradients(lines: Lines, path: str, gradients: Mapping[str, Array], trials: Trials) -> None:
    norm = norm_of_all(gradients.values())
    first = trials.base[0].gradients
    zero = [p for p, x in gradients.items() if not x.any() and not first.get(p, np.zeros(1)).any()]
    if len(zero) == len(gradients):
        lines.add(path, "gradient", "zero", "both", WIRING, "no gradient")
        return
    lines.add(path, "gradient", norm, "recorded", EFFECT)
    if zero:
        names = names_of([_name(p) for p in zero])
        lines.add(path, "without gradient:", names, "both", WIRING, "no gradient")
    share = float(np.mean([float((x == 0).mean()) for x in gradients.values()]))
    if share > 0.5:
        lines.add(path, "zeros in the gradient", short(share), "recorded", EFFECT)


def _updates(lines: Lines, path: str, trained: Sequence[str], trials: Trials) -> None:
    """Add the size of an update, relative to that of the weights."""
    last = trials.base[0] if not any(map(trials.last.changed, trained)) else trials.last
    change = [as_floats(last.after[p]) - as_floats(last.before[p]) for p in trained]
    weights = [as_floats(last.before[p]) for p in trained]
    update, size = norm_of_all(change), norm_of_all(weights)
    if not update:
        lines.add(path, "update", "none", "both", EFFECT)
    elif size:
        text = f"{short(update / size)} of its norm"
        mark = "larger than its weights" if update > size and size > 1e-3 else ""
        lines.add(path, "update", text, "recorded", EFFECT, mark)


def _initial(layer: Any) -> bool:
    """Return whether a kernel or embedding is what its initializer returns, so not loaded.

    Keras' initializers return the same random numbers each time that they are called. A layer that
    was loaded or copied has an initializer with another seed.
    """
    for name, initializer_name in KERNELS.items():
        variable, initializer = vars(layer).get(name), getattr(layer, initializer_name, None)
        if variable is None or not callable(initializer):
            continue
        if isinstance(getattr(initializer, "seed", None), int):
            value = ops.convert_to_numpy(variable.value)
            again = ops.convert_to_numpy(initializer(tuple(value.shape), dtype=str(variable.dtype)))
            if np.allclose(value, again, rtol=1e-5, atol=1e-7):
                return True
    return False


def _assigned(
    lines: Lines, owner: Owner, moved: Sequence[str], trials: Trials, updated: Iterable[str]
) -> bool:
    """Add what a variable that the step assigns itself moves towards, and what it keeps.

    Returns:
        Whether it moves towards a variable that an optimizer updates.
    """
    last, path, averages = trials.last, moved[0], False
    before, after = (as_floats(x[path]) for x in (last.before, last.after))
    for other in updated:
        target = as_floats(last.after[other])
        if before.size < 2 or other in owner.paths or target.shape != before.shape:
            continue
        change, towards = after - before, target - before
        share = float((change * towards).sum() / ((towards * towards).sum() or 1.0))
        if share > 0 and norm_of(change - share * towards) <= ALONG * norm_of(change):
            text = f"{short(share)} of the way to {other} in a step"
            mark = "nearly a copy" if share > 0.5 else ""
            lines.add(owner.path, "moves", text, "recorded", WIRING, mark)
            averages = True
            break
    zero = not any(as_floats(last.after[p]).any() for p in moved)
    lines.add(owner.path, "after the step", "zero" if zero else "not zero", "recorded", EFFECT)
    return averages


def _tracked(
    lines: Lines, tracked: Sequence[Owner], averages: Collection[str], trials: Trials
) -> None:
    """Add whether anything depends on averages of weights."""
    every = (owner.path.partition("/")[0] for owner in tracked)
    names = dict.fromkeys(name for name in every if name in averages)
    before = trials.last.before
    for name in list(names)[:4]:
        paths = [
            p for owner in tracked if owner.path.partition("/")[0] == name for p in owner.paths
        ]
        values = {
            p: (1.1 * as_floats(before[p]) + 0.1).astype(before[p].dtype)
            for p in paths
            if p in before and is_float(before[p])
        }
        if not values:
            continue
        trial = trials.attempt(f"use of {name}", variables=values)
        if trial is None:
            continue
        found = effects(trials.usual, trial)
        own = {path for path in found["variables"] if path not in values}
        read = bool(found["losses"] or found["gradients"] or found["returned values"] or own)
        evaluated = trials.evaluated_again(f"use of {name} in evaluation", variables=values)
        lines.add(name, "read by the training step", read, "replaced", WIRING)
        if evaluated is not None and trials.evaluation is not None:
            found = effects(trials.evaluation, evaluated)
            used = bool(found["returned values"] or trials.metrics_of(found["variables"]))
            mark = "" if used or read else "nothing reads it"
            lines.add(name, "read by the evaluation", used, "replaced", WIRING, mark)
