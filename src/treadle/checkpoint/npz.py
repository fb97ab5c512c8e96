"""Writing and reading `.npz` files of numbers, uncompressed and without pickle."""

import os
import re
import zipfile
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np

from .dtypes import FOREIGN, Array, dtype_named
from .tensor_file import read_numbers

# The entry with the dtypes that NumPy's format does not support: rows of (name, dtype).
DTYPES = "__dtypes__"

_LONGEST_HEADER = 10_000
_HEADER = re.compile(
    rb"\{'descr': '([^']{1,20})', 'fortran_order': (True|False), 'shape': \(([0-9, ]{0,1000})\), \}"
    rb" *\n"
)
_TEXTS = re.compile("[<>]U[0-9]{1,4}")


def write_npz(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays by name; those of dtypes that NumPy lacks as integers with the same bits."""
    foreign = [(name, a.dtype.name) for name, a in arrays.items() if a.dtype.name in FOREIGN]
    stored = {**arrays, DTYPES: np.array(foreign)} if foreign else arrays
    # Not np.savez: it takes names as keyword arguments, so no array could be called `file`.
    with zipfile.ZipFile(path, "x") as archive:
        for name, array in stored.items():
            if array.dtype.name in FOREIGN:
                array = np.asarray(array, order="C").view(f"u{array.dtype.itemsize}")
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)


def read_npz(file: BinaryIO) -> dict[str, Array]:
    """Read the arrays by name, with the dtypes that they were written with.

    NumPy's reader is not used: it allocates what a header claims, and accepts other files than
    archives.

    Raises:
        ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile: If the file is not valid,
            or contains Python objects, or is compressed. `RuntimeError` includes the
            `NotImplementedError` for unknown features of the format.
    """
    arrays: dict[str, Array] = {}
    with zipfile.ZipFile(file) as archive:
        _check_sizes(archive, os.fstat(file.fileno()).st_size)
        for info in archive.infolist():
            with archive.open(info) as entry:
                arrays[info.filename.removesuffix(".npy")] = _read_entry(entry, info)  # type: ignore[arg-type]
    for name, dtype in arrays.pop(DTYPES, np.empty((0, 2), np.str_)):
        arrays[str(name)] = arrays[name].view(dtype_named(str(dtype)))
    return arrays


def _read_entry(entry: BinaryIO, info: zipfile.ZipInfo) -> Array:
    """Read a `.npy` file in an archive, whose size limits the memory that it takes."""
    shown = ascii(info.filename[:80])
    start = entry.read(8)
    width = {b"\x93NUMPY\x01\x00": 2, b"\x93NUMPY\x02\x00": 4}.get(start)
    if width is None:
        raise ValueError(f"{shown} in it is not an array")
    length = int.from_bytes(entry.read(width), "little")
    header = entry.read(min(length, _LONGEST_HEADER))
    found = _HEADER.fullmatch(header)
    if found is None:
        raise ValueError(f"{shown} in it is not an array of numbers")
    descr, order, sizes = (part.decode("ascii") for part in found.groups())
    texts = info.filename == f"{DTYPES}.npy" and _TEXTS.fullmatch(descr)
    dtype = np.dtype(descr) if texts else dtype_named(descr)
    shape = tuple(int(size) for size in sizes.replace(" ", "").split(",") if size)
    claimed, size = prod(shape) * dtype.itemsize, info.file_size - 8 - width - length
    if claimed != size or len(shape) > 32:
        raise ValueError(f"{shown} in it claims {claimed:,} bytes of numbers, and has {size:,}")
    if order == "False":
        return read_numbers(entry, shape, dtype)
    return read_numbers(entry, shape[::-1], dtype).transpose()


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
    encrypted = next((info for info in infos if info.flag_bits & 1), None)
    if encrypted is not None:
        raise ValueError(f"{encrypted.filename[:80]!a} in it is encrypted")
    claimed = sum(info.file_size for info in infos)
    if claimed > size:
        raise ValueError(f"its entries claim {claimed:,} bytes, and it has {size:,}")
