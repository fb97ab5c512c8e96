"""Checks of layers: training and inference mode, regularizers, seeds, hidden state."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, Final

import keras
import numpy as np

from ..numbers import as_floats
from .checks_losses import same
from .checks_state import is_named_elsewhere
from .guarding import guarded
from .intervening import floats_of, outer_calls
from .recording import ADDED_LOSS, DRAW, LAYER, Event
from .report import Finding
from .trials import Trial, Trials, distance

SCALE: Final = 100.0
"""The factor of regularization losses in the trial that shows whether they reach the gradients."""

SAMPLES: Final = 3
"""The calls with equal inputs from which an evaluation samples outputs on purpose."""


def check(trials: Trials) -> Iterator[Finding]:
    """Check modes of layers, regularization losses and randomness."""
    yield from guarded(trials, _not_training, trials)
    yield from guarded(trials, _frozen_in_training_mode, trials)
    if trials.evaluation is not None:
        yield from guarded(trials, _training_in_evaluation, trials, trials.evaluation)
        yield from guarded(trials, _first_statistics, trials, trials.evaluation)
    yield from guarded(trials, _regularization, trials)
    yield from guarded(trials, _constant_seeds, trials.last)
    yield from guarded(trials, _not_repeatable, trials)


def _drops(event: Event) -> bool | None:
    """Return whether a Dropout layer changed its input; None for other layers and rates of 0."""
    rate = getattr(event.info.of, "rate", getattr(event.info.of, "stddev", 0))
    if "seed_generator" not in vars(event.info.of) or not isinstance(rate, float) or rate <= 0:
        return None
    inputs, outputs = event.get("inputs[0]"), event.get("outputs")
    if inputs is None or outputs is None or inputs.shape != outputs.shape:
        return None
    if not as_floats(inputs).any():
        return None
    return not np.array_equal(as_floats(inputs), as_floats(outputs))


def _normalizes(event: Event) -> bool:
    return hasattr(event.info.of, "moving_mean") and hasattr(event.info.of, "momentum")


def _statistics(trials: Trials, event: Event) -> list[str]:
    layer = event.info.of
    return [trials.state.path_of(v) for v in (layer.moving_mean, layer.moving_variance)]


def _not_training(trials: Trials) -> Iterator[Finding]:
    """Find Dropout and BatchNormalization that run in inference mode in every training step."""
    active, idle = set[str](), dict[str, Event]()
    for trial in trials.base:
        for event in trial.of(LAYER):
            if not getattr(event.info.of, "trainable", True):
                continue
            works = _drops(event)
            if _normalizes(event):
                works = any(trial.changed(path) for path in _statistics(trials, event))
            if works is not None:
                (active.add(event.info.path) if works else idle.setdefault(event.info.path, event))
    trained = {path.partition("/")[0] for path in trials.last.gradients}
    for path, event in idle.items():
        if path not in active and path.partition("/")[0] in trained:
            pretrained = _normalizes(event) and any(
                trials.last.before[statistic].any() for statistic in _statistics(trials, event)[:1]
            )
            yield Finding(
                "T-off-in-train",
                "note" if pretrained else "warning",
                path,
                f"{event.info.kind} runs in inference mode in train_step",
                "it does not regularize, or keeps its first statistics",
                "call the model with training=True in train_step",
                event.info.line,
            )


def _frozen_in_training_mode(trials: Trials) -> Iterator[Finding]:
    """Find Dropout in a model that nothing trains and whose outputs are targets, as a teacher's."""
    last, state = trials.last, trials.state
    calls = list(outer_calls(last).values())
    inputs = [x for e in calls for name, x in e.arrays.items() if name.startswith("inputs")]
    for outer in calls:
        model = outer.info.of
        paths = [state.path_of(variable) for variable in model.weights]  # without seeds
        if not paths or any(p in trials.assigned or p in last.gradients for p in paths):
            continue
        if any(same(x, y) for x in inputs for y in floats_of(outer).values()):
            continue  # features of a frozen body
        inner = outer.info.path + "/"
        for event in last.of(LAYER):
            if event.info.path.startswith(inner) and _drops(event):
                yield Finding(
                    "T-on-in-target",
                    "warning",
                    event.info.path,
                    f"{event.info.kind} runs in training mode in a model that is not trained",
                    "the targets that this model computes are noisy",
                    "call it with training=False",
                    event.info.line,
                )
                break


def _sampled(trial: Trial) -> set[str]:
    """Return paths of models that get equal inputs several times, as for Monte Carlo dropout."""
    calls = [(e.info.path, e.get("inputs[0]")) for e in outer_calls(trial).values()]
    return {
        path
        for path, x in calls
        if x is not None
        and sum(p == path and y is not None and same(x, y) for p, y in calls) >= SAMPLES
    }


def _training_in_evaluation(trials: Trials, trial: Trial) -> Iterator[Finding]:
    """Find layers that run in training mode in `eval_step`, and variables that it changes."""
    found: dict[str, Event] = {}
    explained: set[str] = set()
    sampled = _sampled(trial)
    for event in trial.of(LAYER):
        works = _drops(event) and not any(event.info.path.startswith(x) for x in sampled)
        if _normalizes(event):
            paths = _statistics(trials, event)
            works = any(trial.changed(path) for path in paths)
            explained |= {path for path in paths if works}
        if works:
            found.setdefault(event.info.path, event)
    for path, event in found.items():
        yield Finding(
            "T-on-in-eval",
            "warning",
            path,
            f"{event.info.kind} runs in training mode in eval_step",
            "the evaluation is noisy, or uses statistics of its own batch",
            "call the model with training=False in eval_step",
            event.info.line,
        )
    metrics = {trials.state.path_of(v) for m in trials.state.metrics.values() for v in m.variables}
    seeds = {trials.state.path_of(v) for v in trials.state.seeds}
    for path, variable in trials.state.variables.items():
        if path in trial.before and path not in metrics | seeds | explained and trial.changed(path):
            yield Finding(
                "E-trains",
                "error" if variable.trainable else "warning",
                path,
                "eval_step changes it",
                "the change is undone after each evaluation, so later batches are evaluated with "
                "other values than training has",
                "only compute values and update metrics in eval_step",
            )
            return


def _first_statistics(trials: Trials, trial: Trial) -> Iterator[Finding]:
    """Find an evaluated copy whose weights are updated, and whose statistics are the first ones."""
    trained = {event.info.path for event in trials.last.of(LAYER)}
    for event in trial.of(LAYER):
        if not _normalizes(event) or event.info.path in trained:
            continue
        paths = _statistics(trials, event)
        mean, variance = (as_floats(trial.before[path]) for path in paths)
        if mean.any() or (variance != 1).any() or any(p in trials.assigned for p in paths):
            continue
        copy = event.info.path.partition("/")[0]
        updated = [p for p in trials.assigned if p.partition("/")[0] == copy]
        if updated and not is_named_elsewhere(trials.task, copy):
            yield Finding(
                "O-not-updated",
                "warning",
                paths[0],
                f"eval_step normalizes with it, and train_step updates {len(updated)} other "
                f"variables of {copy}, but not this one",
                "it keeps its initial value, so the evaluation normalizes with mean 0, variance 1",
                "average or copy all variables, with the statistics: treadle.blend, or "
                "model.variables instead of model.trainable_variables",
                event.info.line,
            )
            return


@contextmanager
def _scaled_regularization(layers: list[Any]) -> Generator[None]:
    """Multiply regularization losses and those of `add_loss` by `SCALE`."""
    changed: list[tuple[Any, Any]] = []
    for layer in layers:
        for variable in getattr(layer, "_trainable_variables", ()):
            regularizer = getattr(variable, "regularizer", None)
            if regularizer is not None:
                changed.append((variable, regularizer))
                variable.regularizer = lambda x, r=regularizer: SCALE * r(x)
    original: Any = keras.layers.Layer.add_loss

    def add_loss(self: Any, loss: Any) -> None:
        parts = loss if isinstance(loss, (list, tuple)) else [loss]
        original(self, [SCALE * part for part in parts])

    keras.layers.Layer.add_loss = add_loss
    try:
        yield
    finally:
        keras.layers.Layer.add_loss = original
        for variable, regularizer in changed:
            variable.regularizer = regularizer


def _regularization(trials: Trials) -> Iterator[Finding]:
    """Scale all regularization losses: the gradients must change."""
    last = trials.last
    layers = {id(event.info.of): event.info.of for event in last.of(LAYER)}
    regularized = [
        layer
        for layer in layers.values()
        if any(
            getattr(v, "regularizer", None) and v.trainable
            for v in getattr(layer, "_trainable_variables", ())
        )
    ]
    regularized += [event.info.of for event in last.of(ADDED_LOSS)]
    if not regularized or not last.gradients:
        return
    with _scaled_regularization(list(trials.state.layers)):
        scaled = trials.again()
    if all(distance(g, last.gradients[p]) < 1e-6 for p, g in scaled.gradients.items()):
        yield Finding(
            "L-regularizer",
            "error",
            str(trials.state.layer_paths.get(id(regularized[0]), regularized[0].name)),
            f"{len({id(layer) for layer in regularized})} layers have regularizers or "
            f"add_loss, and {SCALE:g} times their losses leave all gradients as they are",
            "the losses have no effect",
            "add sum(model.losses) to the loss, inside the objective",
        )


def _constant_seeds(trial: Trial) -> Iterator[Finding]:
    for event in trial.of(DRAW):
        yield Finding(
            "R-constant-seed",
            "error",
            event.info.path,
            f"it draws with the constant seed {event.info.more['seed']}",
            "every step draws the same numbers",
            "pass a keras.random.SeedGenerator that the task holds",
            event.info.line,
        )


def _not_repeatable(trials: Trials) -> Iterator[Finding]:
    """Repeat the last step from equal state, batch and random numbers."""
    again = trials.again()
    if again.equals(trials.last):
        return
    differs = [
        *(n for n, x in again.values.items() if distance(x, trials.last.values[n]) > 1e-5),
        *(p for p, x in again.after.items() if distance(x, trials.last.after[p]) > 1e-5),
    ]
    yield Finding(
        "R-not-repeatable",
        "error",
        differs[0] if differs else "the gradients",
        f"repeated from equal state, batch and random numbers, {len(differs)} values differ",
        "the step depends on the clock, on random numbers of its own or on Python state, which a "
        "compiled step freezes and a resumed run loses",
        "use keras.random with a SeedGenerator, treadle.step() for time, keras.Variable for state",
    )
