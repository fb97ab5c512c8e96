"""Writing and reading `.npz` files of numbers, uncompressed and without pickle."""

import os
import zipfile
from collections.abc import Mapping
from typing import BinaryIO

import numpy as np

from .dtypes import FOREIGN, Array, dtype_named

# The entry with the dtypes that NumPy's format does not support: rows of (name, dtype).
DTYPES = "__dtypes__"


def write_npz(file: BinaryIO, arrays: Mapping[str, Array]) -> None:
    """Write arrays by name; those of dtypes that NumPy lacks as integers with the same bits."""
    foreign = [(name, a.dtype.name) for name, a in arrays.items() if a.dtype.name in FOREIGN]
    stored = {**arrays, DTYPES: np.array(foreign)} if foreign else arrays
    # Not np.savez: it takes names as keyword arguments, so no array could be called `file`.
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in stored.items():
            if array.dtype.name in FOREIGN:
                array = np.asarray(array, order="C").view(f"u{array.dtype.itemsize}")
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)


def read_npz(file: BinaryIO) -> dict[str, Array]:
    """Read the arrays by name, with the dtypes that they were written with.

    Raises:
        ValueError, KeyError, EOFError, zipfile.BadZipFile: If the file is not valid, or contains
            Python objects, or is compressed.
    """
    with np.load(file, allow_pickle=False) as archive:
        _check_sizes(archive.zip, os.fstat(file.fileno()).st_size)
        arrays = {name: archive[name] for name in archive.files}
    for name, dtype in arrays.pop(DTYPES, np.empty((0, 2), np.str_)):
        arrays[name] = arrays[name].view(dtype_named(str(dtype)))
    return arrays


def _check_sizes(archive: zipfile.ZipFile, size: int) -> None:
    """Reject an archive that would need more memory than the size of the file.

    Raises:
        ValueError: If the archive is compressed, or its entries claim to be larger than the file.
    """
    infos = archive.infolist()
    compressed = next((i for i in infos if i.compress_type != zipfile.ZIP_STORED), None)
    if compressed is not None:
        raise ValueError(
            f"{compressed.filename[:80]!a} in it is compressed. Write it with numpy.savez instead "
            "of numpy.savez_compressed"
        )
    claimed = sum(info.file_size for info in infos)
    if claimed > size:
        raise ValueError(f"its entries claim {claimed:,} bytes, and it has {size:,}")
