"""Writing and reading named arrays of numbers, without pickle."""

import errno
import os
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..core.folder import Folder
from ..errors import StateError
from .dtypes import Array, name_of
from .npz import DTYPES, read_npz, write_npz
from .tensor_file import METADATA, SUFFIX, Piece, pieces, read_tensors

# What the readers raise for files that are damaged or of another format.
_INVALID = (
    ValueError,
    KeyError,
    EOFError,
    OverflowError,
    RuntimeError,
    struct.error,
    zipfile.BadZipFile,
    SafetensorError,
)


def write_arrays(path: str | Path, arrays: Mapping[str, Any]) -> None:
    """Write named arrays of numbers durably, to a `.safetensors` file or an `.npz` file.

    Arrays of dtypes that a format does not support are stored as bytes or unsigned integers with
    the same bits, and the names of the dtypes next to them.

    Args:
        path: The file. Names that do not end in `.safetensors` give an `.npz` file.
        arrays: The arrays by name, or what has their `shape`, `dtype` and `nbytes` and becomes one
            when it is written, in the order of the file.

    Raises:
        StateError: If an array is not numeric.
        DirectoryError: If the file cannot be written. An existing file is unchanged then.

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
    with Folder.open(path.parent) as folder:
        if path.suffix == SUFFIX:
            size = sum(array.nbytes for array in arrays.values())
            folder.write(path.name, pieces(arrays.items()), size)
        else:
            folder.write_with(path.name, lambda new: write_npz(new, arrays))


def read_arrays(path: str | Path, update: Callable[[Piece], object] = len) -> dict[str, Array]:
    """Read arrays written by `write_arrays`, with their original dtypes. Runs no code in the file.

    Args:
        path: The file.
        update: Called with each piece of a `.safetensors` file, as `update` of a hash.

    Raises:
        StateError: If the file has another format, contains Python objects, or is compressed. A
            compressed file could have any size in memory.
        FileNotFoundError: If there is no file.

    Example:
        >>> write_arrays("weights.safetensors", {"model/bias": np.zeros(2)})
        >>> read_arrays("weights.safetensors")
        {'model/bias': array([0., 0.])}
    """
    path = Path(path)
    real = path.resolve()
    if not real.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    with Folder.open(real.parent, error=StateError) as folder, folder.opened(real.name) as opened:
        file, size = opened
        try:
            return read_tensors(file, real, update) if path.suffix == SUFFIX else read_npz(file)
        except _INVALID as error:
            raise StateError(
                f"{path} does not hold arrays as Treadle writes them: {error}"
            ) from error
        except MemoryError as error:
            raise StateError(f"{path} of {size:,} bytes does not fit into memory") from error
