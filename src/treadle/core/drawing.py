"""Common style of all plots, drawn with Matplotlib, which is only imported to draw a plot."""

import importlib.util
import io
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, did_you_mean
from .folder import Folder

KINDS = ("png", "svg", "pdf")
LINE = "#2563a8"
MORE_LINES = ("#d9730d", "#2e8b57", "#8e44ad", "#b03a5b", "#7a6a3a")


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
            f"{path} cannot be drawn, because Matplotlib is not installed: pip install "
            "'treadle[report]'"
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
