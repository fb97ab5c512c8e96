"""Checks of gradients and updates: which variables learn, from which loss, by which optimizer."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from ...core.attributes import attributes_of
from ..numbers import Array, as_floats, norm_of
from .checks_losses import noisy
from .checks_state import is_named_elsewhere
from .guarding import guarded
from .initial import has_initial_value
from .intervening import losses_of
from .recording import APPLY, CLIP, FROZEN, GRADIENTS, LAYER, OBJECTIVE
from .report import Finding
from .spying import halved_clips, scaled_losses
from .trials import Trial, Trials, distance

MOST_PERTURBED: Final = 8
"""How many variables with zero gradients are changed, to see whether the loss depends on them."""

PARALLEL: Final = 0.999
"""The cosine from which two gradients count as the same direction."""


def check(trials: Trials) -> Iterator[Finding]:
    """Compare the gradients of three steps with what was applied, and with what changed."""
    yield from guarded(trials, _without_gradient, trials)
    yield from guarded(trials, _not_trained, trials)
    yield from guarded(trials, _outside_of_layers, trials)
    yield from guarded(trials, _several_optimizers, trials.last)
    yield from guarded(trials, _wrong_gradients, trials.last)
    yield from guarded(trials, _unused_clipping, trials)
    yield from guarded(trials, _underflow, trials)


def _without_gradient(trials: Trials) -> Iterator[Finding]:
    """Find variables whose gradients are zero in every step."""
    zero = set(trials.last.gradients)
    for trial in trials.base:
        zero &= {path for path, g in trial.gradients.items() if not as_floats(g).any()}
    lines = {
        path: event.info.line
        for event in trials.last.of(GRADIENTS)
        for path in event.info.more["paths"]
    }
    if zero:
        zero -= _learns_elsewhere(trials)
    for number, path in enumerate(sorted(zero)):
        seen = f"its gradient is zero in {len(trials.base)} steps"
        if number < MOST_PERTURBED and _loss_depends_on(trials, path):
            yield Finding(
                "G-blocked",
                "error",
                path,
                f"{seen}, but the loss changes with it",
                "the loss depends on it, and it does not learn",
                "look for stop_gradient, rounding, argmax or a conversion to NumPy between it and "
                "the loss",
                lines.get(path, ""),
            )
        else:
            owner = path.rpartition("/")[0]
            cancels = any(
                p.rpartition("/")[0] == owner for p in trials.last.gradients if p not in zero
            )
            yield Finding(
                "G-dead",
                "note" if cancels else "warning",  # as the last bias of a WGAN's critic
                path,
                seen,
                "it does not learn",
                "use its output in the loss, or leave it out of the variables",
                lines.get(path, ""),
            )


def _learns_elsewhere(trials: Trials) -> set[str]:
    """Return variables that have a gradient if all variables are changed a little.

    A zero-initialized layer hides the layers before it until its first update.
    """
    changed = {path: noisy(trials.last.before[path], 0.05, 1) for path in trials.last.gradients}
    trial = trials.attempt("G-blocked", trials.last.batch, changed)
    if trial is None:
        return set()
    return {path for path, g in trial.gradients.items() if as_floats(g).any()}


def _loss_depends_on(trials: Trials, path: str) -> bool:
    """Return whether a change of a variable changes a loss that is differentiated by it."""
    changed = {path: noisy(trials.last.before[path], 0.5, 0)}
    trial = trials.attempt("G-blocked", trials.last.batch, changed)
    return trial is not None and any(
        distance(a["loss"], b["loss"]) > 1e-4
        for a, b in zip(trial.of(OBJECTIVE), trials.last.of(OBJECTIVE), strict=False)
        if path in b.info.more["paths"]
    )


def _not_trained(trials: Trials) -> Iterator[Finding]:
    """Find trainable variables that no optimizer gets, and optimizers that are not applied."""
    state, last = trials.state, trials.last
    called = {event.info.path for event in last.of(LAYER)}
    updated = {path for path in trials.assigned if path in state.variables}
    # `compile` gives a model an optimizer, as a teacher that was trained by `fit` has.
    compiled = {id(getattr(layer, "optimizer", None)) for layer in state.layers}
    compiled -= {id(value) for value in attributes_of(trials.task).values()}
    for path, optimizer in state.optimizers.items():
        if id(optimizer) not in trials.applied and id(optimizer) not in compiled:
            yield Finding(
                "O-unused",
                "warning",
                path,
                "train_step never applies it",
                "what it was made for does not learn",
                "apply it to its variables, or remove it",
            )
    frozen = [
        path
        for layer in state.layers
        for v in _own_variables(layer)
        if not v.trainable and (path := state.path_of(v)) in last.applied
    ]
    if frozen:
        yield Finding(
            "O-frozen-updated",
            "warning",
            frozen[0],
            f"an optimizer updates {len(frozen)} variables of layers with trainable = False",
            "the layers are not frozen: lists of variables that were made before still hold them",
            "set trainable = False first, and pass model.trainable_variables afterwards",
        )
    chosen = {path for event in last.of(FROZEN) for path in event.info.more["paths"]}
    owners = {id(v): x for x in state.layers for v in _own_variables(x)}
    for path, variable in state.variables.items():
        layer = owners.get(id(variable))
        if layer is None or not variable.trainable or path in updated or path in chosen:
            continue
        owner, part = state.layer_paths[id(layer)], path.partition("/")[0]
        siblings = [other for other in updated if other.partition("/")[0] == part]
        if owner in called and not siblings and updated and has_initial_value(layer):
            yield Finding(
                "O-not-updated",
                "warning",
                path,
                f"the step uses it and updates {len(updated)} other variables, but not this one, "
                "which has the value of its initializer",
                "it keeps this value",
                "pass its variables to gradients and to apply too, load its weights, or set "
                "trainable = False",
            )
        elif owner in called and siblings:
            yield Finding(
                "O-not-updated",
                "warning",
                path,
                f"the step uses it and updates {len(siblings)} other variables of {part}, but "
                "not this one",
                "it keeps its initial value",
                "pass all of model.trainable_variables to gradients and to apply, or set "
                "trainable = False if that is intended",
            )
        elif owner not in called and siblings:
            yield Finding(
                "O-never-used",
                "warning",
                path,
                f"train_step never calls {owner}, a trainable layer of {part}",
                "it keeps its initial value",
                "call the layer, or remove it",
            )


def _outside_of_layers(trials: Trials) -> Iterator[Finding]:
    """Find trainable variables of the task itself that a trained loss depends on.

    A note: a constant may be kept in a variable too, and a hook may assign it.
    """
    state, last = trials.state, trials.last
    owned = {id(v) for layer in state.layers for v in layer.variables}
    owned |= {id(v) for x in state.all_optimizers.values() for v in x.variables}
    owned |= {id(v) for x in state.metrics.values() for v in x.variables}
    for path, variable in state.variables.items():
        if id(variable) in owned or not getattr(variable, "trainable", False):
            continue
        known = path in trials.assigned or path in last.gradients or path not in last.before
        if known or last.before[path].dtype.kind != "f":
            continue
        if is_named_elsewhere(trials.task, path.partition("/")[0]):
            continue
        trial = trials.attempt(
            "O-not-updated", last.batch, {path: noisy(last.before[path], 0.5, 0)}
        )
        pairs = [] if trial is None else zip(losses_of(trial), losses_of(last), strict=False)
        if any(abs(a - b) > 1e-4 * abs(b) for a, b in pairs):
            yield Finding(
                "O-not-updated",
                "note",
                path,
                "the loss depends on it, and it is not among the variables that are trained",
                "it keeps its initial value",
                "pass it to gradients and to apply too, or make it with trainable=False",
            )


def _own_variables(layer: object) -> list[Any]:
    return [*getattr(layer, "_trainable_variables", ())]


def _several_optimizers(trial: Trial) -> Iterator[Finding]:
    """Find variables that two optimizers update in one step."""
    owners: dict[str, dict[str, str]] = {}
    for event in trial.of(APPLY):
        for path in event.arrays:
            owners.setdefault(path, {})[event.info.path] = event.info.line
    shared = {path: found for path, found in owners.items() if len(found) > 1}
    for names, count in Counter(tuple(sorted(found)) for found in shared.values()).items():
        path = next(p for p, found in shared.items() if tuple(sorted(found)) == names)
        yield Finding(
            "O-two-optimizers",
            "warning",
            path,
            f"{' and '.join(names)} update {count} variables in the same step",
            "each optimizer keeps moments of its own, and undoes part of what the other did",
            "give each optimizer its own variables",
            shared[path][names[-1]],
        )


def _wrong_gradients(trial: Trial) -> Iterator[Finding]:
    """Compare the gradient that each variable got with the gradients that were computed."""
    computed = {p: g for p, g in trial.gradients.items() if as_floats(g).any()}
    applied = {p: g for p, g in trial.applied.items() if as_floats(g).any()}
    lines = {p: e.info.line for e in trial.of(APPLY) for p in e.arrays}
    opposite = [
        p for p, g in applied.items() if p in computed and _cosine(g, computed[p]) < -PARALLEL
    ]
    if opposite and len(opposite) == len([p for p in applied if p in computed]):
        yield Finding(
            "O-ascent",
            "error" if _is_loss(trial) else "note",
            opposite[0],
            f"the gradients that are applied to {len(opposite)} variables are the computed ones "
            "with the opposite sign",
            "the step climbs the loss",
            "apply the gradients as treadle.gradients returns them; optimizers descend",
            lines[opposite[0]],
        )
    for path, got in applied.items():
        if path not in computed or computed[path].size < 2:
            continue
        own = abs(_cosine(got, computed[path]))
        others = {
            p: abs(_cosine(got, g))
            for p, g in computed.items()
            if p != path and g.shape == got.shape
        }
        best = max(others, key=lambda p: others[p], default="")
        theirs = applied.get(best)
        if theirs is not None and abs(_cosine(theirs, computed[best])) > PARALLEL:
            continue  # it has its own gradient: the two are parallel by chance
        if best and others[best] > PARALLEL and own < others[best] - 0.05:
            yield Finding(
                "O-wrong-pairs",
                "error",
                path,
                f"the gradient that is applied to it is the one of {best} (cosine "
                f"{others[best]:.3f}; with its own {own:.3f})",
                "both variables move in directions that reduce no loss",
                "pass gradients and variables to apply in the same order",
                lines[path],
            )


def _is_loss(trial: Trial) -> bool:
    """Return whether what is differentiated is returned as a loss, not as a score or a reward."""
    found = [as_floats(event["loss"]) for event in trial.of(OBJECTIVE)]
    names = [n for n, x in trial.values.items() if any(distance(x, y) < 1e-5 for y in found)]
    return not names or any("loss" in name.lower() or "error" in name.lower() for name in names)


def _unused_clipping(trials: Trials) -> Iterator[Finding]:
    """Halve what the clipping functions return: what is applied must change."""
    clips = trials.last.of(CLIP)
    if not clips or not trials.last.applied:
        return
    with halved_clips():
        trial = trials.again()
    if all(distance(x, trials.last.after[path]) <= 1e-6 for path, x in trial.after.items()):
        yield Finding(
            "O-clip-unused",
            "error",
            clips[0].info.path,
            "half of the gradients that it returns are applied just the same",
            "its result is not used: gradients are not clipped",
            "apply what it returns; clip_by_global_norm returns (gradients, norm)",
            clips[0].info.line,
        )


def _underflow(trials: Trials) -> Iterator[Finding]:
    """Scale the losses down before they are differentiated, and the gradients up afterwards.

    In float32 this changes nothing. Gradients that pass through float16 vanish.
    """
    if not trials.last.of(GRADIENTS):
        return
    with scaled_losses(2.0**-24):
        trial = trials.attempt("G-half", trials.last.batch)
    if trial is None:
        return
    for path, gradient in trials.last.gradients.items():
        small = as_floats(trial.gradients[path])
        lost = (small == 0) & (as_floats(gradient) != 0)
        if lost.mean() > 0.05 and distance(small, gradient) > 0.01:
            yield Finding(
                "G-half",
                "warning",
                path,
                f"{lost.mean():.0%} of its gradient vanishes if the loss is scaled by 2^-24 before "
                "it is differentiated: something between it and the loss is computed in float16",
                "small gradients underflow in float16, and only layers of dtype mixed_float16 "
                "make Treadle scale the loss",
                "use a layer with dtype='mixed_float16', cast to bfloat16, or assign a "
                "treadle.LossScale to the task's loss_scale",
            )
            return


def _cosine(a: Array, b: Array) -> float:
    x, y = as_floats(a).ravel(), as_floats(b).ravel()
    if x.shape != y.shape:
        return 0.0
    sizes = norm_of(x) * norm_of(y)
    return float(x @ y / sizes) if sizes and np.isfinite(sizes) else 0.0
