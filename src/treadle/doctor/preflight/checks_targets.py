"""Checks of target networks and averages: never updated, followed too fast, differentiated."""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from ..numbers import Array, as_floats, norm_of
from .checks_losses import same
from .checks_state import PARALLEL, is_named_elsewhere
from .guarding import guarded
from .intervening import changed_outputs, held, losses_of, outer_calls
from .recording import BRANCH, LAYER, OBJECTIVE, Event
from .report import Finding
from .spying import without_updates
from .trials import Leaf, Trial, Trials, distance, leaves_of, rows_of

FAST: Final = 0.9
"""The share of the new weights in an average from which it hardly averages."""


def check(trials: Trials) -> Iterator[Finding]:
    """Check copies of models, averages of weights, and values of the next state."""
    yield from guarded(trials, _copies, trials)
    yield from guarded(trials, _evaluated_copies, trials)
    yield from guarded(trials, _fast_averages, trials)
    yield from guarded(trials, _momentum, trials)
    yield from guarded(trials, _through_the_target, trials)
    yield from guarded(trials, _trained_targets, trials)


def _trained_targets(trials: Trials) -> Iterator[Finding]:
    """Find averages that an optimizer updates, too: they move although no optimizer is applied."""
    last = trials.last
    shapes = [tuple(last.after[path].shape) for path in last.applied if path in last.after]
    if len(shapes) < 2 or all(shapes.count(shape) < 2 for shape in shapes):
        return
    with without_updates(trials.state.optimizers):
        trial = trials.attempt("G-through-target", last.batch)
    if trial is None:
        return
    for path in last.applied:
        before, after = (as_floats(x.get(path, np.zeros(0))) for x in (trial.before, trial.after))
        change = (after - before).ravel()
        if not change.any() or change.size < 2:
            continue
        gaps = [
            (as_floats(trial.after[other]) - before).ravel()
            for other in last.applied
            if other != path and other in trial.after and trial.after[other].shape == before.shape
        ]
        if any(float(change @ g) > PARALLEL * norm_of(change) * norm_of(g) > 0 for g in gaps):
            yield Finding(
                "G-through-target",
                "warning",
                path,
                "it moves towards other weights as an average does, and an optimizer updates it",
                "gradients change the target itself, and both networks can agree on a constant",
                "wrap what it returns in ops.stop_gradient, and leave its variables out of "
                "gradients and of apply",
            )
            return


def _inputs(event: Event) -> list[Array]:
    return [x for name, x in event.arrays.items() if name.startswith("inputs")]


def _copies(trials: Trials) -> Iterator[Finding]:
    """Find copies of a trained model that nothing updates, and that get other inputs than it.

    A reference, as for a divergence from the first policy, gets the inputs of the model.
    """
    last, state = trials.last, trials.state
    models: dict[int, list[Event]] = {}
    for event in outer_calls(last).values():
        models.setdefault(id(event.info.of), []).append(event)
    paths = {
        key: [state.path_of(v) for v in events[0].info.of.weights] for key, events in models.items()
    }
    for key, events in models.items():
        if any(path in last.gradients or path in trials.assigned for path in paths[key]):
            continue
        for other, theirs in models.items():
            if other == key or not _copy_of(trials, paths[key], paths[other]):
                continue
            known = [x for event in theirs if _trains(trials, event) for x in _inputs(event)]
            if all(any(same(x, y) for y in known) for e in events for x in _inputs(e)):
                continue
            path = events[0].info.path
            if is_named_elsewhere(trials.task, path.partition("/")[0]):
                continue
            yield Finding(
                "O-copy-not-updated",
                "warning",
                path,
                f"it began as a copy of {theirs[0].info.path}, and train_step never updates it",
                "as a target network it stays at the first, random weights",
                "update it in train_step: treadle.blend(target, model, 0.005), or a copy inside "
                "treadle.cond every few hundred steps",
                events[0].info.line,
            )
            break


def _evaluated_copies(trials: Trials) -> Iterator[Finding]:
    """Find a copy of the trained model that is evaluated in its place, and that nothing updates."""
    state, evaluation = trials.state, trials.evaluation
    if evaluation is None:
        return
    moving = {*trials.assigned, *trials.last.gradients}
    calls = list(outer_calls(evaluation).values())
    weights = [[state.path_of(v) for v in event.info.of.weights] for event in calls]
    if not calls or any(path in moving for paths in weights for path in paths):
        return
    trained = [
        [state.path_of(v) for v in event.info.of.weights]
        for event in outer_calls(trials.last).values()
    ]
    for event, paths in zip(calls, weights, strict=True):
        name = event.info.path.partition("/")[0]
        if not any(_copy_of(trials, paths, model) for model in trained):
            continue
        if not is_named_elsewhere(trials.task, name):
            yield Finding(
                "O-copy-not-updated",
                "warning",
                event.info.path,
                "eval_step computes with it alone; it began as a copy of the trained model, and "
                "train_step never updates it",
                "the evaluation is that of the first, random weights",
                "update it in train_step: treadle.blend(average, model, 0.01)",
                event.info.line,
            )
            return


def _trains(trials: Trials, event: Event) -> bool:
    """Return whether gradients flow through a call: they change if what it returns is held."""
    with changed_outputs({event.info.more["outer"]: held(event)}):
        trial = trials.attempt("O-copy-not-updated", trials.last.batch)
    return trial is None or any(
        distance(g, trial.gradients[p]) > 1e-4 for p, g in trials.last.gradients.items()
    )


def _copy_of(trials: Trials, copy: list[str], model: list[str]) -> bool:
    """Return whether variables began with the values of other ones, some of which are trained."""
    before = trials.base[0].before
    if len(copy) != len(model) or not any(path in trials.last.gradients for path in model):
        return False
    pairs = [(before.get(a), before.get(b)) for a, b in zip(copy, model, strict=True)]
    if any(a is None or b is None or not np.array_equal(a, b) for a, b in pairs):
        return False
    return any(a is not None and a.size > 1 and len(np.unique(a)) > 2 for a, _ in pairs)


def _fast_averages(trials: Trials) -> Iterator[Finding]:
    """Find averages that are nearly the new weights after each of the first steps."""
    rates: dict[str, list[float]] = {}
    for trial in trials.base:
        for path, rate in _rates(trial).items():
            rates.setdefault(path, []).append(rate)
    found = {
        path: float(np.mean(x))
        for path, x in rates.items()
        if len(x) >= 2 and min(x) >= FAST and max(x) - min(x) < 0.01  # others warm up
    }
    copied = bool(trials.last.of(BRANCH)) and any(rate > 0.9999 for rate in found.values())
    if found and not copied:
        path = min(found)
        yield Finding(
            "O-average-fast",
            "warning",
            path,
            f"after each step it has moved by {found[path]:.1%} of the way to the new weights",
            "it is no average, and as a target network it follows every step",
            "exchange the two factors: 0.999 * average + 0.001 * weights",
        )


def _rates(trial: Trial) -> dict[str, float]:
    """Return how far each variable moves towards weights that the step has updated, from 0 to 1."""
    found: dict[str, float] = {}
    for path, after in trial.after.items():
        if path in trial.applied or path not in trial.before or after.size < 2:
            continue
        if after.dtype.kind != "f":
            continue
        change = as_floats(after) - as_floats(trial.before[path])
        if not change.any():
            continue
        for other in trial.applied:
            weights = trial.after.get(other)
            if weights is None or weights.shape != after.shape:
                continue
            if np.array_equal(as_floats(weights), as_floats(trial.before[other])):
                continue
            gap = (as_floats(weights) - as_floats(trial.before[path])).ravel()
            sizes = norm_of(change.ravel()) * norm_of(gap)
            if sizes and float(change.ravel() @ gap) > PARALLEL * sizes:
                found[path] = norm_of(change.ravel()) / norm_of(gap)
    return found


def _momentum(trials: Trials) -> Iterator[Finding]:
    """Find momenta of averages that are the share of the new value, as PyTorch's are."""
    for event in trials.last.of(LAYER):
        layer = event.info.of
        momentum = getattr(layer, "momentum", None)
        if not hasattr(layer, "moving_mean") or not isinstance(momentum, float):
            continue
        if 0 < momentum <= 0.1:
            yield _slow_side(event.info.path, "momentum", momentum, event.info.line)
    for path, optimizer in trials.state.optimizers.items():
        momentum = getattr(optimizer, "ema_momentum", None)
        if getattr(optimizer, "use_ema", False) and momentum is not None and momentum <= 0.1:
            yield _slow_side(path, "ema_momentum", momentum, "")


def _slow_side(path: str, name: str, momentum: float, line: str) -> Finding:
    return Finding(
        "O-average-fast",
        "warning",
        path,
        f"{name}={momentum:g}: each step replaces {1 - momentum:.0%} of the averages",
        "they are those of the last batch or step",
        f"Keras' momentum is the share that stays: {name}={1 - momentum:g}",
        line,
    )


def _through_the_target(trials: Trials) -> Iterator[Finding]:
    """Find values of the next state, of the trained model itself, that are differentiated.

    They count like the reward, but discounted: a shift of them changes the loss as a smaller shift
    of the reward does. They are differentiated if gradients change when these values are held.
    """
    last, rows = trials.last, rows_of(trials.last.batch)
    leaves, calls = leaves_of(last.batch), outer_calls(last)
    if rows is None or len(leaves) < 3 or not last.of(OBJECTIVE):
        return
    rewards = [x for x in leaves if x.array.size == rows and x.array.dtype.kind == "f"]
    # What marks the end of an episode is no reward, if there is another array that may be one.
    rewards = [x for x in rewards if not np.isin(x.array, (0, 1)).all()] or rewards
    for number, event in calls.items():
        values = event.get("outputs")
        twins = [e for n, e in calls.items() if n != number and e.info.of is event.info.of]
        if not twins or not rewards or values is None or values.ndim > 2 or len(values) != rows:
            continue
        if any(same(x, values) for e in calls.values() for x in _inputs(e)):
            continue  # features that another layer gets, as those of an actor and a critic
        theirs = _inputs(twins[0])  # none, if it was called with keyword arguments
        if not _of_a_leaf(event, leaves) or not theirs or same(_inputs(event)[0], theirs[0]):
            continue
        with changed_outputs({number: held(event)}):
            trial = trials.attempt("G-through-target", last.batch)
        if trial is None or all(
            distance(g, trial.gradients[p]) < 1e-4 for p, g in last.gradients.items()
        ):
            continue
        for leaf in rewards:
            share = _discount(trials, number, leaf)
            if share is not None:
                yield Finding(
                    "G-through-target",
                    "warning",
                    event.info.path,
                    f"its values of a second array count in the loss like {leaf.name}, discounted "
                    f"to {share:.2f}, and gradients flow through them",
                    "the gradients also change the values of the next states, which are the target",
                    "wrap the target in ops.stop_gradient, or compute it with a target network",
                    event.info.line,
                )
                return


def _of_a_leaf(event: Event, leaves: list[Leaf]) -> bool:
    return any(same(x, leaf.array) for x in _inputs(event) for leaf in leaves)


def _discount(trials: Trials, number: int, reward: Leaf) -> float | None:
    """Return the factor of values in the loss relative to that of rewards, if it is below 1."""
    size = max(1.0, float(np.abs(reward.array).max()))

    def bend(batches: list[Any], changes: list[Any]) -> Array | None:
        found: list[Array] = []
        for batch, change in zip(batches, changes, strict=True):
            with changed_outputs(change):
                trial = trials.attempt("G-through-target", batch)
            if trial is None:
                return None
            found.append(np.array(losses_of(trial)))
        return found[0] + found[1] - 2 * np.array(losses_of(trials.last))

    batch, shifts = trials.last.batch, (0.5 * size, -0.5 * size)
    along_rewards = bend(
        [reward.with_((reward.array + s).astype(reward.array.dtype)) for s in shifts], [{}, {}]
    )
    along_values = bend(
        [batch, batch], [{number: lambda name, tensor, s=s: tensor + s} for s in shifts]
    )
    if along_rewards is None or along_values is None:
        return None
    for a, b in zip(along_values, along_rewards, strict=True):
        if b > 1e-6 and 0.2 < a / b < 0.9995:
            return float(np.sqrt(a / b))
    return None
