"""The hooks `FinalModel` and `LearningCurve`, which write files when a run ends."""

import importlib.util
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint.arrays import dtype_called, in_file_order, write_arrays
from ..checkpoint.arrays import read_arrays as read_arrays
from ..core.directory import STATE
from ..core.drawing import draw_panels, save
from ..core.folder import Folder
from ..core.history import History, panels_of
from ..core.hook import Hook, LoopView
from ..core.options import without_tensorflow
from ..core.processes import is_chief
from ..core.user_code import attributes_of
from ..errors import DirectoryError


class FinalModel(Hook):
    """Saves the models and all variables in the run directory when training ends.

    Each Keras model that is an attribute of the task is saved as `<attribute>.keras`;
    `state.safetensors` contains every variable by path, see `read_arrays`. If Keras cannot save a
    model, for example because its class has no `get_config`, a warning is logged; its weights are
    in `state.safetensors`.

    If an error or an interrupt ends the run, nothing is written: the run resumes from its last
    checkpoint.

    Example:
        >>> import treadle
        >>> final = treadle.hooks.FinalModel()  # a default hook of runs with a directory
    """

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Write the files, unless the run is unfinished."""
        if loop.directory is None or loop.progress.step == 0:
            return
        if error is not None or loop.unfinished:  # the last checkpoint has the weights
            return
        import keras  # late: it fixes the backend, which may not be chosen yet at import

        from ..backends.base import active

        # Variables first: they are saved even if saving a model fails.
        state = loop.state
        split = active().is_split(state.variables.values())
        if not is_chief():
            unread = [_Unread(v) for v in state.variables.values()] if split else []
            for variable in in_file_order(unread, lambda x: x.dtype):
                np.asarray(variable)  # all processes take part in reading what they hold parts of
            return
        arrays = {p: _Unread(v) for p, v in state.variables.items()} if split else state.arrays()
        write_arrays(loop.directory / STATE, arrays)
        with Folder.open(loop.directory) as folder:
            for name, value in attributes_of(loop.task).items():
                if isinstance(value, keras.Model):
                    split = active().is_split(value.variables)
                    fault = _SPLIT if split else _save(value, folder, f"{name}.keras")
                    if fault:
                        folder.remove_file(f"{name}.keras")  # of an earlier end of the run
                        warning = f"{name}.keras was not written: Keras cannot save it. {fault}"
                        loop.log({"warning": f"{warning}. Its weights are in {STATE}"})


class _Unread:
    """A variable that is read when it is written: if it is split, no others are held meanwhile."""

    def __init__(self, variable: Any) -> None:
        import keras

        self._variable = variable
        self.shape = tuple(variable.shape)
        self.dtype = dtype_called(keras.backend.standardize_dtype(variable.dtype))
        self.nbytes = prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        from ..backends.base import active

        return active().read(self._variable)


_SPLIT = "Its weights are split among processes"


def _save(model: Any, folder: Folder, name: str) -> str | None:
    """Save a model; return why Keras cannot save it, or None on success."""
    try:
        with without_tensorflow():
            folder.write_with(name, model.save)
    # Keras raises these for layers without a configuration. A full disk is a DirectoryError.
    except (NotImplementedError, TypeError, ValueError) as error:
        first = str(error).strip().split("\n\n")[0]  # Keras appends code examples
        return " ".join(first.split()).rstrip(".")
    return None


class LearningCurve(Hook):
    """Saves a plot of the run as `curves.png` in the run directory when training ends.

    The plot is also saved after an error or interrupt. Without Matplotlib, the hook does
    nothing and logs no warning.

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
    save(draw_panels(panels), path)
    return True
