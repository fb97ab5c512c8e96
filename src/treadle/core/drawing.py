"""Plots, such as the curves of a history. Matplotlib is only imported to draw one."""

import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, did_you_mean
from .folder import Folder

KINDS = ("png", "svg", "pdf")
LINE = "#2563a8"
MORE_LINES = ("#d9730d", "#2e8b57", "#8e44ad", "#b03a5b", "#7a6a3a")
MOST_POINTS = 4000  # of a noisy line; more would not be visible
LOG_SCALE_FROM = 100.0  # two decades


def checked_picture(path: str | Path) -> Path:
    """Return a picture's path after checking that it can be written; call it before long work.

    Raises:
        ConfigurationError: Matplotlib is not installed, the file extension is not that of a
            picture, or the folder does not exist.

    Example:
        >>> checked_picture("rate.png").name
        'rate.png'
    """
    path = Path(path)
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError(
            f"{path} cannot be drawn, because Matplotlib is not installed: pip install matplotlib"
        )
    kind = path.suffix.removeprefix(".").lower()
    if kind not in KINDS:
        raise ConfigurationError(
            f"{path} cannot be drawn: unknown kind of picture {kind!r}.{did_you_mean(kind, KINDS)}"
        )
    if not path.absolute().parent.is_dir():
        raise ConfigurationError(f"{path} cannot be drawn: there is no folder {path.parent}")
    return path


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of a size in inches, which a notebook displays.

    It is created without pyplot, which would choose a GUI backend and keep a reference to the
    figure until the process ends.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import TightLayoutEngine

    class DisplayedFigure(Figure):
        """A figure that IPython displays, also if pyplot was never imported."""

        def _repr_png_(self) -> bytes:
            return picture(self, "png", dpi=100)

    figure = DisplayedFigure(
        figsize=(width, height), layout=TightLayoutEngine(w_pad=2.5, h_pad=2.0)
    )
    FigureCanvasAgg(figure)
    return figure


def style_axes(axes: Any, title: str, x: str, y: str) -> None:
    """Set the title and labels of axes, add a grid behind the lines, and remove the frame."""
    axes.set_title(title, loc="left", fontweight="bold", fontsize=12)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, which="major", color="0.88", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def count_in_thousands(axes: Any) -> None:
    """Format step numbers with thousands separators, as 10,000."""
    axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")


def save(figure: Any, path: str | Path) -> None:
    """Write a figure to a file.

    Raises:
        DirectoryError: If the file cannot be written.
    """
    path = Path(path)
    data = picture(figure, path.suffix.removeprefix(".").lower() or "png")
    with Folder.open(path.parent) as folder:
        folder.write(path.name, [data], len(data))


def picture(figure: Any, kind: str, dpi: int = 150) -> bytes:
    """Return a figure as the content of a file, such as that of a `"png"`."""
    content = io.BytesIO()
    figure.savefig(content, dpi=dpi, format=kind)
    return content.getvalue()


def draw_chart(
    path: str | Path,
    title: str,
    lines: Sequence[Any],
    x_label: str,
    marks: Sequence[tuple[str, float]] = (),
) -> None:
    """Write curves, `core.views.Curve`, over a logarithmic axis to a picture file.

    The curves that are not faint determine the vertical range.

    Raises:
        ConfigurationError: The picture cannot be written: see `checked_picture`.
    """
    path = checked_picture(path)
    figure = new_figure(7.0, 4.2)
    axes = figure.add_subplot()
    for line in lines:
        style = {"alpha": 0.25, "linewidth": 0.9} if line.faint else {"linewidth": 1.8}
        axes.plot(line.x, line.y, color=LINE, label=line.label or None, **style)
    for color, (name, x) in zip(MORE_LINES, marks, strict=False):
        axes.axvline(x, color=color, linewidth=1.4, linestyle="--", label=f"{name}: {x:.2g}")
    shown = [y for line in lines if not line.faint for y in line.y]
    room = 0.2 * (max(shown) - min(shown)) or 1.0
    axes.set_ylim(min(shown) - room, max(shown) + room)
    axes.set_xscale("log")
    style_axes(axes, title, x_label, "")
    axes.legend(frameon=False)
    save(figure, path)


def draw_panels(panels: Sequence[Any]) -> Any:
    """Return a Matplotlib figure with a subplot for each panel, see `core.history.Panel`."""
    columns = 2 if len(panels) in (2, 4) else min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(5.0 * columns + 0.6, 3.6 * rows)
    axes: Any = None
    for position, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, position, sharex=axes)
        _draw_panel(axes, panel)
    return figure


def _draw_panel(axes: Any, panel: Any) -> None:
    steps, values = panel.noisy
    if len(steps):
        every = -(-len(steps) // MOST_POINTS)
        if len(steps) > len(panel.smooth[0]):
            axes.plot(steps[::every], values[::every], color=LINE, alpha=0.2, linewidth=0.8)
        axes.plot(*panel.smooth, color=LINE, linewidth=1.8, label="training")
    colors = iter(MORE_LINES * len(panel.points))
    for label, line in panel.points.items():
        axes.plot(
            list(line),
            list(line.values()),
            color=LINE if label == "training" else next(colors),
            linewidth=1.8,
            marker="o",
            markersize=4 if len(line) <= 30 else 0,
            label=label,
        )
    _scale(axes, panel)
    style_axes(axes, panel.name, "step", panel.name)
    count_in_thousands(axes)
    axes.legend(frameon=False)


def _scale(axes: Any, panel: Any) -> None:
    shown = panel.shown()
    low, high = float(shown.min()), float(shown.max())
    if "loss" in panel.name and low > 0 and high / low > LOG_SCALE_FROM:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.3, high * 1.3)
    elif high > low:
        axes.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))
