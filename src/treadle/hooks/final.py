"""What a run leaves at its end: its models as Keras saves them, and all its variables."""

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # NumPy's names of bfloat16 and the like; comes with Keras
import numpy as np

from ..directory import INTERRUPTED_STATE, STATE
from ..errors import StateError
from ..hook import Hook, LoopView
from ..options import without_tensorflow

Array = np.ndarray[Any, np.dtype[Any]]

# The entry that names the dtypes which NumPy's format does not know: rows of (path, dtype).
DTYPES = "__dtypes__"


class FinalModel(Hook):
    """Writes the models and all variables into the run directory when training ends.

    Each Keras model that is an attribute of the task becomes `<attribute>.keras`; `state.npz` holds
    every variable by path, see `read_arrays`. A model that Keras cannot save, for example one of a
    class without `get_config`, is told of in the log: its weights are in `state.npz`.

    Where an error or an interrupt ended the run, all variables as they then are become
    `state.interrupted.npz`, and models are not written.

    Example:
        >>> import treadle
        >>> final = treadle.hooks.FinalModel()  # there by itself where a run has a directory
    """

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Write the files, or only the variables where an error ended the run."""
        if loop.directory is None or loop.progress.step == 0:
            return
        interrupted = loop.directory / INTERRUPTED_STATE
        if error is not None:
            write_arrays(interrupted, loop.state.arrays())
            return
        import keras  # late: it fixes the backend, which nobody may have chosen at import

        # Variables first: whatever becomes of the models, nothing that was learnt is lost.
        write_arrays(loop.directory / STATE, loop.state.arrays())
        interrupted.unlink(missing_ok=True)
        for name, value in vars(loop.task).items():
            if isinstance(value, keras.Model):
                fault = _save(value, loop.directory / f"{name}.keras")
                if fault:
                    warning = f"{name}.keras was not written: Keras cannot save it. {fault}"
                    loop.log({"warning": f"{warning}. Its weights are in state.npz"})


def write_arrays(path: str | Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays of numbers by name as `.npz`: complete, or not at all.

    Dtypes that NumPy's format does not know, as bfloat16, are stored as unsigned integers of the
    same bits, and named by an entry of their own.

    Raises:
        StateError: An array holds Python objects.

    Example:
        >>> write_arrays("weights.npz", {"model/kernel": np.ones(3, ml_dtypes.bfloat16)})
        >>> read_arrays("weights.npz")["model/kernel"].dtype
        dtype(bfloat16)
    """
    stored: dict[str, Array] = {}
    foreign: list[tuple[str, str]] = []
    for name, array in arrays.items():
        if array.dtype.hasobject or array.dtype.names is not None or name == DTYPES:
            raise StateError(
                f"{name} of dtype {array.dtype} cannot be written to {path}: only arrays of "
                "numbers can. Nothing was written"
            )
        if array.dtype.kind == "V":
            foreign.append((name, array.dtype.name))
            array = array.view(f"u{array.dtype.itemsize}")
        stored[name] = array
    if foreign:
        stored[DTYPES] = np.array(foreign)
    path = Path(path)
    temporary = path.with_name(f"{path.name}.partial")
    # By hand: np.savez takes names as its parameters, so that a variable cannot be called `file`.
    with temporary.open("wb") as file:
        with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
            for name, array in stored.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_arrays(path: str | Path) -> dict[str, Array]:
    """Read what `write_arrays` wrote, every array with its true dtype; runs no code of the file.

    Raises:
        StateError: The file is none of its kind, or holds Python objects.

    Example:
        >>> write_arrays("weights.npz", {"model/bias": np.zeros(2)})
        >>> read_arrays("weights.npz")
        {'model/bias': array([0., 0.])}
    """
    try:
        # Opened here: np.load leaves a file that it cannot read open.
        with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        for name, dtype in arrays.pop(DTYPES, np.empty((0, 2), np.str_)):
            arrays[name] = arrays[name].view(getattr(ml_dtypes, dtype))
    except (ValueError, AttributeError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise StateError(f"{path} does not hold arrays as Treadle writes them: {error}") from error
    return arrays


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
