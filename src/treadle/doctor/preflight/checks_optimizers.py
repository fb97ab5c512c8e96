"""Checks of optimizers: schedules, sizes of updates, weight decay, accumulation."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule

from ..numbers import as_floats, norm_of
from .guarding import guarded
from .report import Finding
from .spying import without_updates
from .trials import Trial, Trials

FEWEST: Final = 16
"""The least number of weights of a kernel whose updates are judged."""

LARGE: Final = 0.5
SMALL: Final = 1e-8
"""Sizes of an update relative to its weights that are far from the usual 0.001."""

IDLE: Final = 8
"""The number of steps with a learning rate of zero that is too large."""

LOST: Final = 0.3
"""The share of weights that an update leaves as they are from which it is lost in rounding."""


def check(trials: Trials, steps: int | None) -> Iterator[Finding]:
    """Check every optimizer of the task.

    Args:
        trials: The trials.
        steps: The number of training steps that are planned; None if unknown.
    """
    for path, optimizer in trials.state.all_optimizers.items():
        if steps is not None:
            yield from guarded(trials, _schedule, path, optimizer, steps)
    for path, optimizer in trials.state.optimizers.items():
        yield from guarded(trials, _accumulation, path, optimizer)
        yield from guarded(trials, _decay, trials, path, optimizer)
        yield from guarded(trials, _sizes, trials, path, optimizer)
    yield from guarded(trials, _idle, trials)


def _rate(schedule: Any, step: int) -> float:
    return float(ops.convert_to_numpy(schedule(ops.convert_to_tensor(step, "int32"))))


def _schedule(path: str, optimizer: Any, steps: int) -> Iterator[Finding]:
    """Compare the length of a schedule with that of the run."""
    schedule = getattr(optimizer, "_learning_rate", None)
    if not isinstance(schedule, LearningRateSchedule) or steps < 10:
        return
    points = np.unique(np.linspace(0, steps - 1, 101).astype(int))
    rates = np.array([_rate(schedule, int(step)) for step in points])
    most, final = float(rates.max()), float(rates[-1])
    constant = np.flatnonzero(rates != final)
    share = points[constant[-1] + 1] / steps if constant.size else 0.0
    if constant.size and share < 0.5 and final < 0.1 * most:
        yield Finding(
            "O-over-early",
            "warning",
            path,
            f"its schedule reaches {final:.3g} after {share:.0%} of the {steps} steps and stays "
            "there",
            "most of the run trains with the last, small learning rate",
            "give the schedule the length of the run in steps (epochs × batches)",
        )
    rises = bool((np.diff(rates) > 0).all())
    if rises and final == most and _rate(schedule, 2 * steps) > 1.5 * most:
        yield Finding(
            "O-over-late",
            "warning",
            path,
            f"its schedule still rises at the end of the {steps} steps, from {rates[0]:.3g} to "
            f"{final:.3g}",
            "the run ends in the warmup",
            "give the warmup a small part of the run, in steps",
        )
        return
    later = np.array([_rate(schedule, int(steps * factor)) for factor in (2, 10, 100)])
    ends = _rate(schedule, steps * 200) == later[-1]  # an exponential decay has no end
    falls = ends and bool((np.diff(np.array([final, *later])) <= 1e-12).all())
    if falls and later[-1] < 0.2 * most and final > 0.6 * most:
        yield Finding(
            "O-over-late",
            "warning",
            path,
            f"at the end of the {steps} steps its schedule is still at {final / most:.0%} of its "
            f"maximum, and it falls to {later[-1]:.3g} later",
            "the run ends before the learning rate has decayed",
            "give the schedule the length of the run in steps, not in epochs or examples",
        )


def _idle(trials: Trials) -> Iterator[Finding]:
    """Find a run in which every schedule begins with many steps whose rate is exactly zero.

    One of several may begin later on purpose, and a warmup may begin with one step of zero.
    """
    applied = {p: x for p, x in trials.state.optimizers.items() if id(x) in trials.applied}
    schedules = [getattr(optimizer, "_learning_rate", None) for optimizer in applied.values()]
    if not all(isinstance(schedule, LearningRateSchedule) for schedule in schedules):
        return
    iterations = [int(ops.convert_to_numpy(x.iterations)) for x in applied.values()]
    if schedules and all(
        _rate(schedule, first + step) == 0
        for schedule, first in zip(schedules, iterations, strict=True)
        for step in range(IDLE)
    ):
        yield Finding(
            "O-small-updates",
            "warning",
            next(iter(applied)),
            f"the learning rate of its schedule is 0 in the first {IDLE} steps and more",
            "nothing is learned in these steps",
            "let the warmup rise from the first step: look for an integer division (//) in it",
        )


def _accumulation(path: str, optimizer: Any) -> Iterator[Finding]:
    count = getattr(optimizer, "gradient_accumulation_steps", None)
    if not count:
        return
    scheduled = isinstance(getattr(optimizer, "_learning_rate", None), LearningRateSchedule)
    for used, what in (
        (scheduled, "a schedule"),
        (getattr(optimizer, "use_ema", False), "use_ema"),
    ):
        if used:
            yield Finding(
                "O-accumulates",
                "warning",
                path,
                f"gradient_accumulation_steps={count} together with {what}",
                f"Keras counts every micro-batch as a step of {what}",
                "accumulate with treadle.Accumulator, which applies once for all micro-batches",
            )


def _decay(trials: Trials, path: str, optimizer: Any) -> Iterator[Finding]:
    """Find weight decay of biases and normalization layers."""
    if not getattr(optimizer, "weight_decay", None) or not hasattr(optimizer, "_use_weight_decay"):
        return
    decayed = [
        trials.state.path_of(v)
        for v in optimizer._trainable_variables
        if len(v.shape) == 1 and optimizer._use_weight_decay(v)
    ]
    if decayed:
        yield Finding(
            "O-decays-biases",
            "note",
            path,
            f"weight_decay={optimizer.weight_decay:g} also shrinks {len(decayed)} biases and "
            f"scales of normalization, such as {decayed[0]}",
            "usually only kernels are decayed",
            'optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"]) before the '
            "first step",
        )


def _sizes(trials: Trials, path: str, optimizer: Any) -> Iterator[Finding]:
    """Compare the updates of kernels with their size."""
    first = trials.base[0]  # later, too large updates have made the weights large as well
    kernels = [
        trials.state.path_of(variable)
        for variable in getattr(optimizer, "_trainable_variables", ())
        if len(variable.shape) > 1 and variable.shape[0] * variable.shape[1] >= FEWEST
    ]
    ratios = [_relative_update(first, name) for name in kernels if _is_updated(first, name)]
    if not ratios or getattr(optimizer, "gradient_accumulation_steps", None):
        return
    largest = max(
        _relative_update(trial, name)
        for trial in trials.base
        for name in kernels
        if _is_updated(trial, name)
    )
    ratio = float(np.median(ratios))
    scheduled = isinstance(getattr(optimizer, "_learning_rate", None), LearningRateSchedule)
    if ratio > LARGE and not _moved_otherwise(trials, kernels):
        yield Finding(
            "O-large-updates",
            "warning",
            path,
            f"one step changes kernels by {ratio:.0%} of their size (usual: 0.1 %)",
            "the learning rate is probably far too large",
            "divide the learning rate by 10 or more; treadle find-lr suggests one",
        )
    elif not scheduled and (
        largest < SMALL or (largest < 1e-6 and _lost(trials.base, kernels) > LOST)
    ):
        yield Finding(
            "O-small-updates",
            "warning",
            path,
            f"steps change kernels by {largest:.1e} of their size or less (usual: 1e-3)",
            "in float32 such updates are lost, or nothing is learned",
            "increase the learning rate; treadle find-lr suggests one",
        )


def _moved_otherwise(trials: Trials, names: Sequence[str]) -> bool:
    """Return whether the step changes kernels without updates, as by clipping the weights."""
    with without_updates(trials.state.optimizers):
        trial = trials.attempt("O-large-updates", trials.last.batch, trials.base[0].before)
    return trial is None or any(trial.changed(name) for name in names)


def _lost(trials: Sequence[Trial], names: Sequence[str]) -> float:
    """Return the share of weights with a gradient that a step leaves as they are, by rounding."""
    shares = [
        np.mean((trial.after[name] == trial.before[name])[as_floats(trial.applied[name]) != 0])
        for trial in trials
        for name in names
        if _is_updated(trial, name)
    ]
    return float(np.min(shares, initial=1.0)) if shares else 0.0


def _is_updated(trial: Trial, name: str) -> bool:
    weights = trial.before.get(name)
    gradient = trial.applied.get(name)
    return (
        weights is not None
        and gradient is not None
        and bool(as_floats(gradient).any())
        and norm_of(as_floats(weights).ravel()) > 1e-6
    )


def _relative_update(trial: Trial, name: str) -> float:
    """Return the size of an update relative to the weights, or to a usual size if that is larger.

    Embeddings and adapters often begin with much smaller weights than Glorot's.
    """
    weights = as_floats(trial.before[name])
    update = as_floats(trial.after[name]) - weights
    inputs = weights.size / weights.shape[-1]
    usual = (2 * weights.size / (inputs + weights.shape[-1])) ** 0.5
    return norm_of(update.ravel()) / max(norm_of(weights.ravel()), usual)
