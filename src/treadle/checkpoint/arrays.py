"""Writing and reading named arrays of numbers, without pickle."""

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError

from ..errors import StateError
from .dtypes import Array, name_of
from .npz import DTYPES, read_npz, write_npz
from .tensor_file import METADATA, SUFFIX, pieces, read_tensors


def write_arrays(path: str | Path, arrays: Mapping[str, Array]) -> None:
    """Write named arrays of numbers atomically, to a `.safetensors` file or an `.npz` file.

    Arrays of dtypes that a format does not support are stored as bytes or unsigned integers with
    the same bits, and the names of the dtypes next to them.

    Args:
        path: The file. Names that do not end in `.safetensors` give an `.npz` file.
        arrays: The arrays by name.

    Raises:
        StateError: If an array is not numeric.

    Example:
        >>> write_arrays("weights.safetensors", {"model/kernel": np.ones(3, "bfloat16")})
        >>> read_arrays("weights.safetensors")["model/kernel"].dtype
        dtype(bfloat16)
    """
    for name, array in arrays.items():
        if name_of(array.dtype) is None or name in (METADATA, DTYPES):
            raise StateError(
                f"{name} of dtype {array.dtype} cannot be written to {path}: only arrays of "
                "numbers can. Nothing was written"
            )
    path = Path(path)
    temporary = path.with_name(f"{path.name}.partial")
    with temporary.open("wb") as file:
        if path.suffix == SUFFIX:
            file.writelines(pieces(arrays.items()))
        else:
            write_npz(file, arrays)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_arrays(path: str | Path) -> dict[str, Array]:
    """Read arrays written by `write_arrays`, with their original dtypes. Runs no code in the file.

    Raises:
        StateError: If the file has another format, contains Python objects, or is compressed. A
            compressed file could have any size in memory.

    Example:
        >>> write_arrays("weights.safetensors", {"model/bias": np.zeros(2)})
        >>> read_arrays("weights.safetensors")
        {'model/bias': array([0., 0.])}
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            return read_tensors(file, path) if path.suffix == SUFFIX else read_npz(file)
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile, SafetensorError) as error:
        raise StateError(f"{path} does not hold arrays as Treadle writes them: {error}") from error
