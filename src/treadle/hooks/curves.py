"""The `LearningCurve` hook, which plots the history of a run with Matplotlib."""

import importlib.util
from pathlib import Path

from ..core import curves
from ..core.drawing import save
from ..core.history import History, panels_of
from ..core.hook import Hook, LoopView
from ..errors import DirectoryError


class LearningCurve(Hook):
    """Saves a plot of the run as `curves.png` in the run directory when training ends.

    The plot is also saved after an error or interrupt. Without Matplotlib (installed by
    `treadle[report]`), the hook does nothing and logs no warning.

    Example:
        >>> import treadle
        >>> curve = treadle.hooks.LearningCurve()  # a default hook of runs with a directory
    """

    chief_only = True

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Plot the history."""
        if isinstance(error, DirectoryError):  # the directory belongs to another process
            return
        installed = importlib.util.find_spec("matplotlib") is not None
        if installed and loop.directory is not None:
            draw(loop.history, loop.directory / "curves.png")


def draw(history: History, path: str | Path) -> bool:
    """Plot the loss and every metric of a history over the steps, training next to validation.

    Values returned by every step are drawn as a faint line with a smoothed line on top. Values of
    epochs and validations are drawn as points. A loss that spans more than two orders of magnitude
    has a logarithmic scale.

    Args:
        history: The history of a run.
        path: The image file; its extension selects the format.

    Returns:
        False if there is nothing to plot; no file is written then.

    Raises:
        ImportError: If Matplotlib is not installed.

    Example:
        >>> from treadle.core.logs import Record
        >>> from treadle.core.progress import Progress
        >>> history = History([Record("epoch", Progress(step=9), {"loss": 0.5, "val_loss": 0.6})])
        >>> draw(history, "curves.png")
        True
    """
    panels = panels_of(history)
    if not panels:
        return False
    save(curves.draw(panels), path)
    return True
