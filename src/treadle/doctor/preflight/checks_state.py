"""Checks of state: averages that nothing uses, Python values, frozen layers."""

import dis
from collections.abc import Iterator
from types import CodeType
from typing import Any, Final

from keras import ops
from keras.optimizers.schedules import LearningRateSchedule

from ...core.attributes import attributes_of
from ..numbers import Array, as_floats, norm_of
from .guarding import guarded
from .initial import has_initial_value
from .recording import LAYER
from .report import Finding
from .trials import Trial, Trials, distance

PARALLEL: Final = 0.999
"""The cosine from which a change counts as one towards another variable."""

OFTEN: Final = 50
"""The number of steps between two compilations that is too small."""

REMAINS: Final = 0.5
"""The share of the first weights in an average at the end of a run from which it is too slow."""


def check(trials: Trials, steps: int | None) -> Iterator[Finding]:
    """Check averages of weights, Python values that steps change, and frozen layers.

    Args:
        trials: The trials.
        steps: The number of training steps that are planned; None if unknown.
    """
    yield from guarded(trials, _python_values, trials)
    yield from guarded(trials, _changed_by_hooks, trials)
    yield from guarded(trials, _unused_schedules, trials)
    yield from guarded(trials, _frozen, trials)
    yield from guarded(trials, _own_averages, trials)
    for path, optimizer in trials.state.optimizers.items():
        yield from guarded(trials, _averages_of, path, optimizer, trials, steps)


def _python_values(trials: Trials) -> Iterator[Finding]:
    """Find Python values of the task that a step changes."""
    for path, (old, new) in trials.moving.items():
        yield Finding(
            "R-python-state",
            "error",
            path,
            f"train_step changes this Python value from {old} to {new}",
            "a compiled step does that only while it is traced, and a resumed run starts again",
            "store changing values in a keras.Variable, or compute them from treadle.step()",
        )


def _changed_by_hooks(trials: Trials) -> Iterator[Finding]:
    """Find Python values that a function of a hook changes every few steps."""
    task = trials.task
    methods = _methods(task)
    inner = _reached(methods, "train_step")
    read = {name for key in inner for name in _names(methods[key])}
    read &= {name for name, value in attributes_of(task).items() if isinstance(value, (int, float))}
    written = {name for key, code in methods.items() if key not in inner for name in _stored(code)}
    if not read & written or not hasattr(task, "hooks"):
        return
    for hook in task.hooks():
        when, function = getattr(hook, "when", None), getattr(hook, "function", None)
        code, called = getattr(function, "__code__", None), getattr(function, "__name__", "")
        if when is None or code is None or not when.repeat or when.span.of != "step":
            continue
        for name in sorted(_stored(code) & read):
            if when.span.amount < OFTEN:
                yield Finding(
                    "S-recompiles",
                    "warning",
                    name,
                    f"{called} changes this Python value every {when.span.amount:g} steps",
                    "it is a constant of the compiled step, which is compiled again for each value",
                    "store it in a keras.Variable, or compute it from treadle.step()",
                )


def _stored(code: CodeType) -> set[str]:
    """Return the attributes that a function assigns."""
    return {x.argval for x in dis.get_instructions(code) if x.opname == "STORE_ATTR"}


def _unused_schedules(trials: Trials) -> Iterator[Finding]:
    """Find schedules of the task that no optimizer has, although one has their first value."""
    optimizers = trials.state.all_optimizers
    used = {id(getattr(optimizer, "_learning_rate", None)) for optimizer in optimizers.values()}
    for name, schedule in attributes_of(trials.task).items():
        if not isinstance(schedule, LearningRateSchedule) or id(schedule) in used:
            continue
        first = float(ops.convert_to_numpy(schedule(ops.convert_to_tensor(0, "int32"))))
        for path, optimizer in optimizers.items():
            rate = optimizer._learning_rate
            if isinstance(rate, LearningRateSchedule) or trials.base[0].changed(
                trials.state.path_of(rate)
            ):
                continue
            value = float(ops.convert_to_numpy(rate))
            if abs(value - first) <= 1e-6 * abs(first) and not _matters(trials, name, schedule):
                yield Finding(
                    "O-schedule-unused",
                    "warning",
                    path,
                    f"its learning rate is always {value:.3g}, the first value of {name}, which no "
                    "optimizer has",
                    "the schedule was evaluated once, when the optimizer was made",
                    f"pass the schedule itself as learning_rate, not {name}(0)",
                )


def _matters(trials: Trials, name: str, schedule: Any) -> bool:
    """Return whether a step computes something else with twice the values of a schedule.

    Values that it only returns do not count. A schedule may be of a weight, and not of the rate.
    """
    last, task = trials.last, trials.task

    def doubled(step: Any) -> Any:
        return 2.0 * schedule(step)

    object.__setattr__(task, name, doubled)
    try:
        trial = trials.attempt("O-schedule-unused", last.batch)
    finally:
        object.__setattr__(task, name, schedule)
    return trial is None or any(distance(x, last.after[p]) > 1e-6 for p, x in trial.after.items())


def _frozen(trials: Trials) -> Iterator[Finding]:
    """Find frozen layers that the step uses, and that nothing has trained or loaded."""
    called = {event.info.path: event.info.line for event in trials.last.of(LAYER)}
    state = trials.state
    found: list[str] = []
    for layer in state.layers:
        path = state.layer_paths.get(id(layer), "")
        own = getattr(layer, "_trainable_variables", ())
        if path not in called or not own or any(v.trainable for v in own):
            continue
        moved = any(state.path_of(v) in trials.assigned for v in own)
        if not moved and has_initial_value(layer):
            found.append(path)
    if found:
        yield Finding(
            "O-frozen-initial",
            "warning",
            found[0],
            f"{len(found)} frozen layers that the step uses hold the values of their initializers",
            "they are random, and never learn",
            "load their weights before training, or make them trainable",
            called[found[0]],
        )


def _own_averages(trials: Trials) -> Iterator[Finding]:
    """Find averages of weights that neither step reads, by other values of them."""
    last = trials.last
    groups: dict[str, list[str]] = {}
    for path in set(_averages(last)) - _owned(trials):
        groups.setdefault(path.partition("/")[0], []).append(path)
    for name, paths in groups.items():
        values = {path: as_floats(last.before[path]) + 1.0 for path in paths}
        trial = trials.attempt("O-average-unused", last.batch, values)
        if trial is None or not _same_without(trial, last, paths):
            continue
        evaluation = trials.evaluation
        if evaluation is not None:
            noisy = {path: as_floats(evaluation.before[path]) + 1.0 for path in paths}
            if not _same_without(trials.evaluated_again(noisy), evaluation, paths):
                continue
        if is_named_elsewhere(trials.task, name):
            continue
        yield Finding(
            "O-average-unused",
            "note" if evaluation is None else "warning",
            name,
            f"{len(paths)} averages of weights are updated, and with other values of them "
            f"train_step{'' if evaluation is None else ' and eval_step'} compute the same",
            "the averages cost time, and what is measured are the weights without them",
            "compute with the averages in eval_step and predict_step, or remove them",
        )


def _owned(trials: Trials) -> set[str]:
    """Return the variables of optimizers, and of layers that the step calls."""
    state = trials.state
    called = {event.info.path for event in trials.last.of(LAYER)}
    owners = [layer for layer in state.layers if state.layer_paths.get(id(layer)) in called]
    own = [v for x in owners for v in (*x._trainable_variables, *x._non_trainable_variables)]
    own += [v for optimizer in state.all_optimizers.values() for v in optimizer.variables]
    return {state.path_of(variable) for variable in own}


def _averages(trial: Trial) -> list[str]:
    """Return the variables that a step moves towards others of their shape, or away from them."""
    trained = [path for path in trial.applied if path in trial.after]
    found: list[str] = []
    for path, after in trial.after.items():
        if path in trial.applied or not after.size > 1 or after.dtype.kind != "f":
            continue
        change = as_floats(after) - as_floats(trial.before[path])
        if change.any() and any(
            _is_towards(change, as_floats(weights[other]) - as_floats(trial.before[path]))
            for other in trained
            if trial.after[other].shape == after.shape
            for weights in (trial.after, trial.before)
        ):
            found.append(path)
    return found


def _is_towards(change: Array, difference: Array) -> bool:
    sizes = norm_of(change.ravel()) * norm_of(difference.ravel())
    return bool(sizes) and float(change.ravel() @ difference.ravel()) > PARALLEL * sizes


def _same_without(a: Trial, b: Trial, paths: list[str]) -> bool:
    """Return whether two steps returned and computed the same, except for some variables."""
    return (
        all(distance(x, b.values[name]) <= 1e-6 for name, x in a.values.items())
        and all(distance(g, b.gradients[p]) <= 1e-6 for p, g in a.gradients.items())
        and all(distance(x, b.after[p]) <= 1e-6 for p, x in a.after.items() if p not in paths)
    )


def is_named_elsewhere(task: Any, name: str) -> bool:
    """Return whether a method that `train_step` does not call, such as a hook's, names it."""
    methods = _methods(task)
    inner = {"__init__", "eval_step", *_reached(methods, "train_step")}
    return any(name in _names(code) for key, code in methods.items() if key not in inner)


def _methods(task: Any) -> dict[str, CodeType]:
    methods: dict[str, CodeType] = {}
    for kind in reversed(type(task).__mro__[:-1]):
        if not kind.__module__.startswith("treadle.steps"):
            functions = {key: getattr(x, "fget", x) for key, x in vars(kind).items()}
            methods |= {key: f.__code__ for key, f in functions.items() if hasattr(f, "__code__")}
    return methods


def _reached(methods: dict[str, CodeType], first: str) -> set[str]:
    """Return the methods that one calls, directly or through others, itself included."""
    reached: set[str] = set()
    waiting = [first]
    while waiting:
        key = waiting.pop()
        if key in methods and key not in reached and key not in ("__init__", "eval_step"):
            reached.add(key)
            waiting += _names(methods[key])
    return reached


def _names(code: CodeType) -> set[str]:
    """Return the attributes and globals that a function uses, with those of functions in it."""
    nested = [x for x in code.co_consts if isinstance(x, CodeType)]
    return {*code.co_names, *(name for part in nested for name in _names(part))}


def _averages_of(path: str, optimizer: Any, trials: Trials, steps: int | None) -> Iterator[Finding]:
    """Check the averages that an optimizer keeps (`use_ema`), which a run ends with."""
    if not getattr(optimizer, "use_ema", False) or id(optimizer) not in trials.applied:
        return
    momentum = float(optimizer.ema_momentum)
    if steps is not None and momentum**steps > REMAINS:
        yield Finding(
            "O-average-slow",
            "warning",
            path,
            f"use_ema with ema_momentum={momentum:g}: after the {steps} steps of the run, "
            f"{momentum**steps:.0%} of the averages are still the first weights",
            "the run ends with these averages in place of the trained weights",
            f"use a momentum of about {max(0.0, 1 - 10 / steps):.3g} or a longer run",
        )
