"""Plots of the history of a run, drawn with Matplotlib, which is only imported to draw one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .drawing import LINE as TRAINING
from .drawing import MORE_LINES as VALIDATION
from .drawing import count_in_thousands, new_figure, style_axes
from .logs import Array, Record, plain

MOST_POINTS = 4000  # of a noisy line; more would not be visible
SMOOTHED_OVER = 40  # the window of the moving mean is the number of steps divided by this
LOG_SCALE_FROM = 100.0  # two decades

Line = tuple[Array, Array]


def draw(panels: Sequence["Panel"]) -> Any:
    """Return a Matplotlib figure with a subplot for each panel."""
    columns = 2 if len(panels) in (2, 4) else min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(5.0 * columns + 0.6, 3.6 * rows)
    axes: Any = None
    for position, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, position, sharex=axes)
        _draw_panel(axes, panel)
    return figure


@dataclass
class Panel:
    """The data of one subplot.

    Attributes:
        name: The name of the value.
        noisy: The steps and the value at each; empty if steps do not return it.
        points: For each label, the value of each epoch or validation by step.
    """

    name: str
    noisy: Line
    points: dict[str, dict[int, float]] = field(default_factory=lambda: {})

    @property
    def smooth(self) -> Line:
        """The moving mean of the values returned by steps."""
        steps, values = self.noisy
        width = max(1, len(values) // SMOOTHED_OVER)
        if width == 1:
            return steps, values
        sums = np.cumsum(np.concatenate([[0.0], values]))
        middles = steps[width // 2 :][: len(values) - width + 1]
        return middles, (sums[width:] - sums[:-width]) / width

    def shown(self) -> Array:
        """Return the values that determine the axis limits, without outliers of single steps."""
        points = [value for line in self.points.values() for value in line.values()]
        parts = [self.smooth[1], np.asarray(points, float)]
        if len(self.noisy[1]):
            parts.append(np.percentile(self.noisy[1], [0.5, 99.5]))
        values = np.concatenate(parts)
        return values[np.isfinite(values)]


def panels(
    steps: Mapping[str, Array],
    first_step: int,
    records: Iterable[Record],
    names: Sequence[str] = (),
) -> list[Panel]:
    """Group the values of a history into subplots; the loss comes first.

    Args:
        steps: The value of each step, by name.
        first_step: The number of the first step.
        records: The records.
        names: Values of steps to include, although no epoch or validation recorded them.
    """
    records = [record for record in records if record.kind in ("epoch", "validation")]
    recorded = list(dict.fromkeys(name for record in records for name in record.values))
    training = [name for name in recorded if not name.startswith("val_")]
    by_epoch = any(record.kind == "epoch" for record in records)
    found: dict[str, Panel] = {}
    for name in ["loss", *recorded, *(name for name in names if name in steps)]:
        base, _ = split_name(name, training)
        if base not in found:
            found[base] = Panel(base, _finite(steps.get(base, np.empty(0)), first_step))
    for record in records:
        for name, value in record.values.items():
            base, label = split_name(name, training)
            number = plain(value)
            # Within an epoch, the record of a validation has the means of an unfinished epoch.
            partial = label == "training" and by_epoch and record.kind == "validation"
            if not partial and isinstance(number, (int, float)):
                found[base].points.setdefault(label, {})[record.progress.step] = float(number)
    for panel in found.values():
        if len(panel.noisy[0]):
            panel.points.pop("training", None)  # the smoothed line shows the same
    return [panel for panel in found.values() if len(panel.shown())]


def split_name(name: str, training: Sequence[str]) -> tuple[str, str]:
    """Split a name into metric and data set: `val_extra_loss` is the loss on `extra`."""
    if not name.startswith("val_"):
        return name, "training"
    rest = name.removeprefix("val_")
    if rest not in training:
        for base in sorted(training, key=len, reverse=True):
            if rest.endswith(f"_{base}"):
                return base, f"validation, {rest.removesuffix(f'_{base}')}"
    return rest, "validation"


def _finite(values: Array, first_step: int) -> Line:
    """Return the steps with a finite value, and the values."""
    values = np.asarray(values, float)
    steps = first_step + np.arange(len(values))
    finite = np.isfinite(values)
    return steps[finite], values[finite]


def _draw_panel(axes: Any, panel: Panel) -> None:
    steps, values = panel.noisy
    if len(steps):
        every = -(-len(steps) // MOST_POINTS)
        noisy = len(steps) // SMOOTHED_OVER > 1
        if noisy:
            axes.plot(steps[::every], values[::every], color=TRAINING, alpha=0.2, linewidth=0.8)
        axes.plot(*panel.smooth, color=TRAINING, linewidth=1.8, label="training")
    colors = iter(VALIDATION * len(panel.points))
    for label, line in panel.points.items():
        axes.plot(
            list(line),
            list(line.values()),
            color=TRAINING if label == "training" else next(colors),
            linewidth=1.8,
            marker="o",
            markersize=4 if len(line) <= 30 else 0,
            label=label,
        )
    _scale(axes, panel)
    style_axes(axes, panel.name, "step", panel.name)
    count_in_thousands(axes)
    axes.legend(frameon=False)


def _scale(axes: Any, panel: Panel) -> None:
    shown = panel.shown()
    low, high = float(shown.min()), float(shown.max())
    if "loss" in panel.name and low > 0 and high / low > LOG_SCALE_FROM:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.3, high * 1.3)
    elif high > low:
        axes.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))
