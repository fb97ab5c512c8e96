"""Schedules in addition to those of Keras, for learning rates and other quantities.

All are subclasses of `keras.optimizers.schedules.LearningRateSchedule`. An optimizer takes one as
its learning rate and evaluates it at its own count of updates. For any other quantity (a
probability, a temperature, the weight of a loss), call `schedule(treadle.step())` in the step.

A step is an integer, an integer tensor of any shape, or an integer variable. Steps are counted and
divided as integers, because float32 is not exact beyond 16,777,216.

One file holds all of it, so that `treadle.schedules` is a single public module; over a third of its
lines are docstrings.
"""

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule

from .backends.base import active
from .backends.types import Tensor
from .core.drawing import (
    LINE,
    MORE_LINES,
    checked_picture,
    count_in_thousands,
    new_figure,
    save,
    style_axes,
)
from .core.keras_internals import multi_optimizers
from .errors import ConfigurationError, did_you_mean, whole_number

MODES = ("triangular", "triangular2", "exp_range")
MOST_POINTS = 2000  # of a drawn line; more would not be visible
LOG_SCALE_FROM = 1000.0  # three decades

Value = float | LearningRateSchedule
"""A constant, or a schedule."""


@dataclass(eq=False)
class _Schedule(LearningRateSchedule):
    """Base class of the schedules: the dataclass fields are the Keras configuration."""

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, with nested schedules in Keras' serialized form."""
        found: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: keras.saving.serialize_keras_object(x) for name, x in found.items()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Any:
        """Create a schedule from the result of `get_config`."""
        return cls(**{k: keras.saving.deserialize_keras_object(x) for k, x in config.items()})


@dataclass(eq=False)
class Cyclic(_Schedule):
    """Cyclic schedule between two values (Smith 2017, https://arxiv.org/abs/1506.01186).

    With `t` the step, in the paper's notation::

        cycle = floor(1 + t / (2 step_size))
        x = |t / step_size - 2 cycle + 1|
        triangular    low + (high - low) max(0, 1 - x)
        triangular2   low + (high - low) max(0, 1 - x) / 2^(cycle - 1)
        exp_range     gamma^t (low + (high - low) max(0, 1 - x))

    In `exp_range` both bounds decay, as in the paper. In some other libraries only the upper bound
    decays: they multiply `high - low` by `gamma^t`.

    Args:
        low: The value at the beginning and the end of a cycle.
        high: The value in the middle of a cycle.
        step_size: The number of steps in half a cycle; the paper recommends 2 to 10 epochs.
        mode: `"triangular"`, `"triangular2"` or `"exp_range"`.
        gamma: The decay factor per step, for `exp_range`.

    Raises:
        ConfigurationError: An argument is invalid.

    Example:
        >>> schedule = Cyclic(0.0, 1.0, step_size=4)
        >>> [float(schedule(step)) for step in range(9)]
        [0.0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0]
    """

    low: float
    high: float
    step_size: int
    mode: Literal["triangular", "triangular2", "exp_range"] = "triangular"
    gamma: float = 1.0

    def __post_init__(self) -> None:
        self.low, self.high = _real("Cyclic", "low", self.low), _real("Cyclic", "high", self.high)
        self.step_size = whole_number("step_size", self.step_size, ConfigurationError)
        if self.mode not in MODES:
            raise ConfigurationError(
                f"unknown mode {self.mode!r} of Cyclic.{did_you_mean(str(self.mode), MODES)}"
            )
        self.gamma = _real("Cyclic", "gamma", self.gamma)
        if not 0 < self.gamma <= 1:
            raise ConfigurationError(
                f"Cyclic needs a gamma above 0 and up to 1, not {self.gamma!r}: it multiplies at "
                "each step"
            )

    def __call__(self, step: Any) -> Tensor:
        """Return the value at a step."""
        step = ops.convert_to_tensor(step)
        within = _number(ops.mod(step, 2 * self.step_size))
        height = 1.0 - ops.abs(within / self.step_size - 1.0)
        if self.mode == "triangular2":
            cycle = _number(ops.floor_divide(step, 2 * self.step_size))
            height = height * ops.power(2.0, -cycle)
        value = self.low + (self.high - self.low) * height
        if self.mode == "exp_range":  # by exp, since float32 rounds gamma and thus its powers
            value = value * ops.exp(_number(step) * math.log(self.gamma))
        return value


@dataclass(eq=False)
class OneCycle(_Schedule):
    """The 1cycle schedule of super-convergence (Smith & Topin, https://arxiv.org/abs/1708.07120).

    The value rises linearly from `initial` to `peak`, falls linearly back to `initial` in the same
    number of steps, and in the remaining steps falls to `final`, several orders of magnitude lower.
    After `steps` it stays at `final`.

    Args:
        peak: The largest value, in the middle of the cycle.
        steps: The total number of training steps.
        initial: The value at the beginning and the end of the cycle; default: `peak / 10`.
        final: The value at the last step; default: `initial / 1000`.
        cycle: The fraction of all steps that the cycle takes.

    Raises:
        ConfigurationError: An argument is invalid.

    Example:
        >>> schedule = OneCycle(1.0, steps=10, initial=0.2, final=0.0, cycle=0.8)
        >>> [round(float(schedule(step)), 6) for step in (0, 2, 4, 6, 8, 9, 10, 99)]
        [0.2, 0.6, 1.0, 0.6, 0.2, 0.1, 0.0, 0.0]
    """

    peak: float
    steps: int
    initial: float | None = None
    final: float | None = None
    cycle: float = 0.9

    def __post_init__(self) -> None:
        self.peak = _real("OneCycle", "peak", self.peak)
        self.steps = whole_number("steps", self.steps, ConfigurationError, least=2)
        initial = self.peak / 10 if self.initial is None else self.initial
        self.initial = _real("OneCycle", "initial", initial)
        final = self.initial / 1000 if self.final is None else self.final
        self.final = _real("OneCycle", "final", final)
        self.cycle = _real("OneCycle", "cycle", self.cycle)
        if not 0 < self.cycle <= 1:
            raise ConfigurationError(
                f"OneCycle needs a cycle above 0 and up to 1, not {self.cycle!r}: it is the part "
                "of all steps that the cycle takes"
            )

    def __call__(self, step: Any) -> Tensor:
        """Return the value at a step."""
        assert self.initial is not None and self.final is not None
        at = _number(ops.minimum(ops.convert_to_tensor(step), self.steps))
        half = self.cycle * self.steps / 2
        rest = self.steps - 2 * half or 1.0  # avoids a division by zero if cycle=1
        in_cycle = self.initial + (self.peak - self.initial) * (1.0 - ops.abs(at / half - 1.0))
        after = self.final + (self.initial - self.final) * (self.steps - at) / rest
        return ops.where(at <= 2 * half, in_cycle, after)


@dataclass(eq=False)
class WarmUp(_Schedule):
    """Linear warm-up to another schedule (Goyal et al. 2017, https://arxiv.org/abs/1706.02677).

    The value rises linearly to the first value of the other schedule and then follows it. The other
    schedule counts its steps from the end of the warm-up.

    Args:
        to: The schedule after the warm-up, or a number.
        steps: The number of warm-up steps.
        start: The value at step 0.

    Raises:
        ConfigurationError: An argument is invalid.

    Example:
        >>> schedule = WarmUp(Cyclic(1.0, 2.0, step_size=2), steps=4)
        >>> [float(schedule(step)) for step in range(8)]
        [0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 1.5]
    """

    to: Value
    steps: int
    start: float = 0.0

    def __post_init__(self) -> None:
        self.to = _part("WarmUp", "to", self.to)
        self.steps = whole_number("steps", self.steps, ConfigurationError)
        self.start = _real("WarmUp", "start", self.start)

    def __call__(self, step: Any) -> Tensor:
        """Return the value at a step."""
        step = ops.convert_to_tensor(step)
        then = value_at(self.to, ops.maximum(step - self.steps, 0))  # in warm-up: its first value
        rise = self.start + (then - self.start) * (_number(step) / self.steps)
        return ops.where(step < self.steps, rise, then)


@dataclass(eq=False)
class Piecewise(_Schedule):
    """A sequence of schedules, joined at boundaries; each counts its steps from its own start.

    Args:
        schedules: Schedules and numbers.
        boundaries: The steps at which the second, third, … schedule begins, in increasing order:
            one less than there are schedules.

    Raises:
        ConfigurationError: An argument is invalid.

    Example:
        >>> decay = keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)
        >>> schedule = Piecewise([0.125, decay, 0.0], boundaries=[2, 5])
        >>> [float(schedule(step)) for step in range(7)]
        [0.125, 0.125, 1.0, 0.5, 0.25, 0.0, 0.0]
    """

    schedules: Sequence[Value]
    boundaries: Sequence[int]

    def __post_init__(self) -> None:
        self.schedules = [
            _part("Piecewise", f"schedules[{i}]", part) for i, part in enumerate(self.schedules)
        ]
        self.boundaries = [
            whole_number(f"boundaries[{i}]", step, ConfigurationError)
            for i, step in enumerate(self.boundaries)
        ]
        count = len(self.schedules)
        if count != len(self.boundaries) + 1:
            raise ConfigurationError(
                f"Piecewise has {count} schedules and {len(self.boundaries)} boundaries: it needs "
                f"one boundary between each two schedules, so {max(count - 1, 0)}"
            )
        if sorted(set(self.boundaries)) != self.boundaries:
            raise ConfigurationError(
                f"the boundaries of Piecewise must increase, but they are {self.boundaries}"
            )

    def __call__(self, step: Any) -> Tensor:
        """Return the value at a step."""
        step = ops.convert_to_tensor(step)
        value = value_at(self.schedules[0], step)
        for part, begin in zip(self.schedules[1:], self.boundaries, strict=True):
            value = ops.where(step < begin, value, value_at(part, ops.maximum(step - begin, 0)))
        return value


for _kind in (Cyclic, OneCycle, WarmUp, Piecewise):
    keras.saving.register_keras_serializable("treadle")(_kind)


def value_at(schedule: Any, step: Any) -> Tensor:
    """Evaluate a schedule or a number at a step, in float32 or a wider dtype."""
    return _number(schedule(step) if callable(schedule) else schedule)


def values(schedule: Value, steps: int) -> tuple[Any, Any]:
    """Evaluate a schedule over a range of steps.

    Args:
        schedule: A schedule or a number.
        steps: The number of steps, from step 0. If there are more than 2,000, the schedule is
            evaluated at 2,000 evenly spaced steps.

    Returns:
        The steps and the values, as NumPy arrays.

    Example:
        >>> values(Cyclic(0.0, 1.0, step_size=2), 4)[1].tolist()
        [0.0, 0.5, 1.0, 0.5]
    """
    count = min(whole_number("steps", steps, ConfigurationError), MOST_POINTS)
    at = np.linspace(0, steps - 1, count).round().astype("int32")
    # One by one, since not every schedule accepts an array of steps.
    found = [float(active().to_numpy(value_at(schedule, int(step)))) for step in at]
    return at, np.array(found)


def draw(schedules: Mapping[str, Value], path: str | Path, steps: int) -> None:
    """Plot schedules over the steps, one line for each.

    The value axis is logarithmic if the values are positive and span more than three orders of
    magnitude.

    Args:
        schedules: Schedules by name.
        path: The picture file, ending in .png, .svg or .pdf.
        steps: The number of steps.

    Raises:
        ConfigurationError: The picture cannot be written: see `treadle.core.drawing`.

    Example:
        >>> draw({"rate": OneCycle(0.1, steps=100)}, "rate.png", steps=120)
    """
    path = checked_picture(path)
    figure = new_figure(7.0, 3.6)
    axes = figure.add_subplot()
    colors = (LINE, *MORE_LINES)
    shown: list[Any] = []
    for i, (name, schedule) in enumerate(schedules.items()):
        at, found = values(schedule, steps)
        axes.plot(at, found, color=colors[i % len(colors)], linewidth=1.8, label=name)
        shown.append(found)
    low, high = np.min(shown), np.max(shown)
    if low > 0 and high / low > LOG_SCALE_FROM:
        axes.set_yscale("log")
    several = len(schedules) > 1
    style_axes(axes, "schedules" if several else next(iter(schedules), ""), "step", "value")
    count_in_thousands(axes)
    if several:
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))  # outside the plot
    save(figure, path)


def optimizers_of(found: Mapping[str, Any], wanted: str | None = None) -> dict[str, Any]:
    """Return the optimizers that have a learning rate, by path.

    A `MultiOptimizer` has none of its own, so the optimizers in it are returned instead.

    Args:
        found: Optimizers by path, as in `State.optimizers`.
        wanted: The path of one optimizer; None for all.

    Raises:
        ConfigurationError: There is no optimizer, or none with this path.

    Example:
        >>> list(optimizers_of({"optimizer": keras.optimizers.SGD(0.1)}))
        ['optimizer']
    """
    each: dict[str, Any] = {}
    for path, optimizer in found.items():
        if isinstance(optimizer, multi_optimizers()):
            parts = enumerate(optimizer.optimizers)
            each |= {f"{path}/inner_optimizers/{i}": part for i, part in parts}
        else:
            each[path] = optimizer
    if not each:
        raise ConfigurationError(
            "the task holds no optimizer, so it has no learning rate: keep one as an attribute, "
            "such as self.optimizer"
        )
    if wanted is not None and wanted not in each:
        raise ConfigurationError(
            f"the task has no optimizer {wanted!r}.{did_you_mean(wanted, each)}"
        )
    return each if wanted is None else {wanted: each[wanted]}


def learning_rate_of(optimizer: Any) -> Any:
    """Return the learning rate of an optimizer: a variable or a schedule.

    Example:
        >>> learning_rate_of(keras.optimizers.SGD(OneCycle(0.1, steps=100))).peak
        0.1
    """
    return vars(optimizer)["_learning_rate"]


def _number(value: Any) -> Tensor:
    """Convert a value to a tensor of Keras' float dtype, but at least float32.

    Half precision cannot represent a step of 4,097 or a learning rate of 1e-5.
    """
    dtype = keras.backend.result_type(keras.config.floatx(), "float32")
    return ops.cast(ops.convert_to_tensor(value), dtype)


def _real(owner: str, name: str, value: Any) -> float:
    """Return an argument as a float.

    Raises:
        ConfigurationError: The value is not a finite number.
    """
    real = not isinstance(value, bool) and isinstance(value, numbers.Real)
    if not real or not math.isfinite(value):
        raise ConfigurationError(f"{owner} needs a number as {name}, not {value!r:.60}")
    return float(value)


def _part(owner: str, name: str, value: Any) -> Value:
    """Return an argument that is a schedule or a number.

    Raises:
        ConfigurationError: The value is neither a schedule nor a finite number.
    """
    if isinstance(value, LearningRateSchedule):
        return value
    if callable(value):
        raise ConfigurationError(
            f"{owner} needs a schedule or a number as {name}, not {value!r:.60}: inherit from "
            "keras.optimizers.schedules.LearningRateSchedule"
        )
    return _real(owner, name, value)
