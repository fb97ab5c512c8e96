"""The learning-rate range test, which finds a learning rate to start training with."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule

from ..core import views
from ..core.drawing import draw_chart
from ..core.hook import Hook, LoopView
from ..core.logs import StepLogs
from ..core.options import Options
from ..data import as_source
from ..errors import ConfigurationError, did_you_mean, whole_number
from ..hooks.nonfinite import NonFinite
from ..loop import Loop
from ..schedules import optimizers_of
from ..steps.helpers import step
from ..steps.probes import shadowed
from .trials import unchanged

FEWEST = 10  # the smallest number of steps that gives a usable curve
SMOOTHED_OVER = 25  # smoothing averages over 1/25 of all steps on either side


@dataclass(frozen=True)
class RangeTest:
    """The result of a learning-rate range test.

    Attributes:
        optimizer: The path of the tested optimizer.
        monitor: The name of the monitored value.
        rates: The learning rate of each step.
        losses: The monitored value of each step.
        smoothed: The losses before divergence, each averaged with its neighbors.
        planned: The number of planned steps.
        steepest: The learning rate at which the smoothed loss fell fastest.
        lowest: The learning rate at which the smoothed loss was lowest.

    Example:
        >>> rates, losses = (0.001, 0.01, 0.1, 1.0), (2.0, 1.9, 1.0, 5.0)
        >>> found = RangeTest("optimizer", "loss", rates, losses, losses[:3], 4, 0.03, 0.1)
        >>> found.suggestion, found.tenth, found.diverged
        (0.03, 0.01, True)
    """

    optimizer: str
    monitor: str
    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    planned: int
    steepest: float
    lowest: float

    @property
    def suggestion(self) -> float | None:
        """The learning rate at which the loss fell fastest; None if the loss never fell."""
        fell = min(self.smoothed) < mean_at_first(self.losses) and self.lowest > self.rates[0]
        return self.steepest if fell else None

    @property
    def tenth(self) -> float:
        """A tenth of the learning rate with the lowest loss, as an alternative suggestion.

        That learning rate itself is at the limit: beyond it the loss rises.
        """
        return self.lowest / 10

    @property
    def diverged(self) -> bool:
        """Whether the loss diverged before the largest learning rate."""
        return len(self.smoothed) < self.planned

    def lines(self) -> list[str]:
        """Return the result as lines of text."""
        first, least = mean_at_first(self.losses), min(self.smoothed)
        end = "where it diverged" if self.diverged else "the end of the range"
        found = [
            f"{self.optimizer}: {len(self.smoothed)} steps at learning rates from "
            f"{self.rates[0]:.2g} to {self.rates[len(self.smoothed) - 1]:.2g}, {end}"
        ]
        if self.suggestion is None:
            return [*found, f"{self.monitor} never fell below {first:.4g}: nothing to suggest"]
        if not self.diverged:
            found.append(f"{self.monitor} did not diverge: try a larger last learning rate")
        return [
            *found,
            f"{self.monitor} fell from {first:.4g} to {least:.4g} at {self.lowest:.2g}; a tenth of "
            f"that is {self.tenth:.2g}",
            f"suggested, where it fell fastest: {self.suggestion:.2g}",
        ]

    def facts(self) -> dict[str, Any]:
        """Return the result in JSON's types."""
        names = ("optimizer", "monitor", "suggestion", "steepest", "lowest", "tenth", "diverged")
        curves = {name: [*getattr(self, name)] for name in ("rates", "losses", "smoothed")}
        return {name: getattr(self, name) for name in names} | curves

    def _curves(self) -> tuple[list[views.Curve], list[tuple[str, float]]]:
        """Return the curves of losses over learning rates, and the marked learning rates."""
        good, rates = len(self.smoothed), np.array(self.rates)
        lines = [
            views.Curve("", rates, np.array(self.losses), faint=True),
            views.Curve(f"{self.monitor}, smoothed", rates[:good], np.array(self.smoothed)),
        ]
        return lines, [] if self.suggestion is None else [("suggested", self.suggestion)]

    def _repr_html_(self) -> str:
        """Return the curve and the suggestion, which a notebook displays."""
        lines, marks = self._curves()
        image = views.chart("range test", lines, "learning rate", logarithmic=True, marks=marks)
        found = {"suggested": self.suggestion, "lowest": self.lowest, "a tenth": self.tenth}
        rows = [(name, f"{rate:.2g}") for name, rate in found.items() if rate is not None]
        first, *rest = self.lines()
        table = views.table(("learning rate", ""), rows)
        return views.block(first, views.curves([image]), table, *map(views.paragraph, rest))

    def draw(self, path: str | Path) -> None:
        """Plot the loss over the learning rate, with the suggested learning rates.

        Args:
            path: The image file, which ends in .png, .svg or .pdf.

        Raises:
            ConfigurationError: The file cannot be written, or its format is not supported.
        """
        lines, marks = self._curves()
        if marks:
            marks += [("lowest", self.lowest), ("a tenth of that", self.tenth)]
        draw_chart(path, "learning-rate range test", lines, f"rate of {self.optimizer}", marks)


def find_learning_rate(
    task: Any,
    train: Any,
    *,
    optimizer: str | None = None,
    monitor: str = "loss",
    begin: float = 1e-6,
    end: float = 10.0,
    steps: int = 100,
    options: Options | None = None,
) -> RangeTest:
    """Run a learning-rate range test: train while the learning rate rises, and record the loss.

    This is the range test of Smith (https://arxiv.org/abs/1506.01186, section 3.3), with a learning
    rate that rises by a constant factor per step. During the test a schedule replaces the
    optimizer's learning rate; steps are compiled as usual. The test stops early if the loss
    diverges: if it is not finite, or if its smoothed value exceeds the mean of the first ten losses
    by more than that mean's absolute value and by more than the loss had fallen.

    Afterwards all variables, random states and the optimizer are restored. A model that is built by
    its first batch stays built, and a one-time iterator is consumed.

    Args:
        task: The task.
        train: A source of batches; it is restarted as often as needed.
        optimizer: The path of the optimizer, if the task has several.
        monitor: The name of a value that steps return.
        begin: The first learning rate.
        end: The last learning rate.
        steps: The number of steps. More steps reduce the noise of small batches.
        options: Execution options.

    Returns:
        The result, with the suggested learning rate.

    Raises:
        ConfigurationError: An argument is invalid; the task has no optimizer, or has several and
            `optimizer` is not given; steps do not return `monitor`; or the loss diverged at once.

    Example:
        >>> import keras, numpy as np, treadle
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> task = treadle.Supervised(model, "mse", keras.optimizers.SGD(0.1))
        >>> x = np.random.default_rng(0).normal(size=(64, 2)).astype("float32")
        >>> data = treadle.data.from_arrays(x, x[:, :1], batch_size=8)
        >>> found = treadle.doctor.find_learning_rate(task, data)
        >>> 0.001 < found.suggestion < 1.0
        True
    """
    ramp = _Ramp(begin, end, steps)
    source, reach = as_source(train), ramp.steps // SMOOTHED_OVER
    watch = _LossRecorder(monitor, reach)
    hooks = [watch, NonFinite(action="stop")]
    with Loop(task, hooks=hooks, options=options, console=False) as loop:
        loop.prepare(source)
        path, chosen = _only(optimizers_of(loop.state.all_optimizers, optimizer))
        # Assigning `learning_rate` would lose the variable, and could not replace a schedule later.
        with unchanged(task), shadowed(chosen, "_learning_rate", ramp):
            loop.fit(source, steps=ramp.steps)
    return _result(path, monitor, ramp, watch.losses, reach)


def _only(found: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the path of the only optimizer, and the optimizer.

    Raises:
        ConfigurationError: There are several.
    """
    if len(found) > 1:
        raise ConfigurationError(
            f"the task has {len(found)} optimizers ({', '.join(found)}): choose one, for "
            f"example optimizer={next(iter(found))!r}"
        )
    ((path, optimizer),) = found.items()
    return path, optimizer


class _Ramp(LearningRateSchedule):
    """Rises by a constant factor per step of the loop, even if a step applies several updates.

    Raises:
        ConfigurationError: An argument is invalid.
    """

    def __init__(self, begin: float, end: float, steps: int) -> None:
        self.steps = whole_number("steps", steps, ConfigurationError, least=FEWEST)
        if not 0 < begin < end < math.inf:
            raise ConfigurationError(
                f"learning rates must satisfy 0 < begin < end, not begin={begin!r}, end={end!r}"
            )
        self._begin, self._growth = begin, math.log(end / begin) / (self.steps - 1)

    def __call__(self, _: Any) -> Any:
        return self._begin * ops.exp(self._growth * ops.cast(step(), "float32"))

    def rate(self, number: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return self._begin * math.exp(self._growth * number)


class _LossRecorder(Hook):
    """Records the losses, and stops the run when they diverge."""

    def __init__(self, monitor: str, reach: int) -> None:
        self.losses: list[float] = []
        self._monitor, self._reach = monitor, reach

    def steps(self, loop: LoopView, logs: StepLogs) -> None:
        """Record the losses of a window."""
        if self._monitor not in logs.values:
            raise ConfigurationError(
                f"train_step returns no {self._monitor!r} to monitor."
                f"{did_you_mean(self._monitor, logs.values)}"
            )
        self.losses += [float(value) for value in logs.values[self._monitor]]
        if good_steps(self.losses, self._reach) < len(self.losses):
            loop.stop("the loss diverged")


def good_steps(losses: Sequence[float], reach: int) -> int:
    """Return the number of steps before the loss diverges; see `find_learning_rate`.

    Example:
        >>> good_steps([2.0] * 10 + [1.0, 3.9, 4.1, 9.0], 0), good_steps([1.0, float("nan")], 0)
        (12, 1)
    """
    finite = next((i for i, x in enumerate(losses) if not math.isfinite(x)), len(losses))
    found, first = smooth(losses[:finite], reach), mean_at_first(losses)
    for i in range(FEWEST, finite):
        if found[i] > first + max(first - min(found[: i + 1]), abs(first)):
            return i
    return finite


def mean_at_first(losses: Sequence[float]) -> float:
    """Return the mean of the first ten losses, at learning rates that are too small to matter."""
    return sum(losses[:FEWEST]) / max(1, len(losses[:FEWEST]))


def smooth(losses: Sequence[float], reach: int) -> list[float]:
    """Return the centered moving average over `reach` neighbors on either side.

    It is centered because a trailing average would shift the curve to higher learning rates.

    Example:
        >>> smooth([0.0, 0.0, 3.0, 0.0, 0.0], 1)
        [0.0, 1.0, 1.0, 1.0, 0.0]
    """
    parts = [losses[max(0, i - reach) : i + reach + 1] for i in range(len(losses))]
    return [sum(part) / len(part) for part in parts]


def _result(path: str, monitor: str, ramp: _Ramp, losses: list[float], reach: int) -> RangeTest:
    """Compute the result from the losses.

    Raises:
        ConfigurationError: The loss diverged after too few steps.
    """
    good = good_steps(losses, reach)
    if good < FEWEST:
        raise ConfigurationError(
            f"{monitor} diverged after {good} steps, at a learning rate of {ramp.rate(good):.2g}: "
            "start with a lower one, and make sure that the loss is finite before training"
        )
    smoothed = smooth(losses[:good], reach)
    least = smoothed.index(min(smoothed))
    falls = [
        smoothed[max(0, i - reach - 1)] - smoothed[min(good - 1, i + reach + 1)]
        for i in range(least + 1)
    ]
    return RangeTest(
        optimizer=path,
        monitor=monitor,
        rates=tuple(ramp.rate(i) for i in range(len(losses))),
        losses=tuple(losses),
        smoothed=tuple(smoothed),
        planned=ramp.steps,
        steepest=ramp.rate(falls.index(max(falls))),
        lowest=ramp.rate(least),
    )
