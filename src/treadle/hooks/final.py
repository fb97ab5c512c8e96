"""What a run leaves at its end: its models as Keras saves them, and all its variables."""

import os
from pathlib import Path
from typing import Any

from ..checkpoint.arrays import read_arrays as read_arrays
from ..checkpoint.arrays import write_arrays
from ..core.directory import STATE
from ..core.hook import Hook, LoopView
from ..core.options import without_tensorflow


class FinalModel(Hook):
    """Writes the models and all variables into the run directory when training ends.

    Each Keras model that is an attribute of the task becomes `<attribute>.keras`; `state.npz` holds
    every variable by path, see `read_arrays`. A model that Keras cannot save, for example one of a
    class without `get_config`, is told of in the log: its weights are in `state.npz`.

    Where an error or an interrupt ended the run, nothing is written: it goes on from its last
    checkpoint.

    Example:
        >>> import treadle
        >>> final = treadle.hooks.FinalModel()  # there by itself where a run has a directory
    """

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Write the files, unless the run is to go on."""
        if loop.directory is None or loop.progress.step == 0:
            return
        if error is not None or loop.unfinished:  # what was learnt is in the last checkpoint
            return
        import keras  # late: it fixes the backend, which nobody may have chosen at import

        # Variables first: whatever becomes of the models, nothing that was learnt is lost.
        write_arrays(loop.directory / STATE, loop.state.arrays())
        for name, value in vars(loop.task).items():
            if isinstance(value, keras.Model):
                fault = _save(value, loop.directory / f"{name}.keras")
                if fault:
                    warning = f"{name}.keras was not written: Keras cannot save it. {fault}"
                    loop.log({"warning": f"{warning}. Its weights are in state.npz"})


def _save(model: Any, path: Path) -> str | None:
    """Save a model; returns why it cannot be saved, None where it was."""
    temporary = path.with_name(f"{path.stem}.partial.keras")
    try:
        with without_tensorflow():
            model.save(temporary)
    # What Keras raises about layers without a configuration; a full disk is an OSError and no
    # matter of the model's.
    except (NotImplementedError, TypeError, ValueError) as error:
        temporary.unlink(missing_ok=True)
        first = str(error).strip().split("\n\n")[0]  # Keras adds whole examples below it
        return " ".join(first.split()).rstrip(".")
    os.replace(temporary, path)
    return None
