"""Reading the arrays of checkpoints of format 1: uncompressed `.npz` files without pickle.

    step-000000000012/arrays.npz         variables, and the arrays of hooks and sources
    fixed/<its SHA-256>.npz              variables that no step changes, shared by all checkpoints

Dtypes that NumPy's format does not support are stored as unsigned integers. For each array, the
manifest also has the name of its entry and its CRC-32. Nothing writes this format any more.
"""

import hashlib
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..errors import CheckpointError
from .dtypes import FOREIGN, Array, DType
from .manifest import LONGEST_ENTRY, StoredArray, StoredFile, check_unique, shown
from .tensor_file import PIECE, read_numbers

# Upper bounds for the bytes that an archive needs for each entry in addition to its content, and
# for its end. They prevent an archive with far more entries than the manifest lists.
_PER_ENTRY, _PER_ARCHIVE = 200 + 2 * LONGEST_ENTRY, 200


def read_archive(
    path: Path, file: BinaryIO, stored: StoredFile, arrays: Sequence[StoredArray]
) -> dict[str, Array]:
    """Read the arrays of one file, by entry.

    Args:
        path: The path of the file, for error messages.
        file: The file, which has the size in the manifest.
        stored: The file as the manifest declares it.
        arrays: Its arrays as the manifest declares them.

    Raises:
        CheckpointError: If the file is damaged, or does not hold what the manifest says.
    """
    contents = sum(len(npy_header(a.shape, a.dtype)) + a.nbytes for a in arrays)
    if not contents <= stored.size <= contents + len(arrays) * _PER_ENTRY + _PER_ARCHIVE:
        raise CheckpointError(
            f"{path} does not hold what its manifest says: {stored.size:,} bytes for {len(arrays)} "
            f"arrays of {contents:,}"
        )
    digest = hashlib.sha256()
    while piece := file.read(PIECE):
        digest.update(piece)
    if digest.hexdigest() != stored.sha256:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one in its manifest")
    try:
        with zipfile.ZipFile(file) as archive:
            infos = _infos(archive, arrays)
            return {a.entry: _read_array(archive, infos[a.entry], a) for a in arrays}
    # All exceptions that zipfile can raise for a corrupt or malicious file.
    except (
        zipfile.BadZipFile,
        EOFError,
        ValueError,
        RuntimeError,
        OverflowError,
        struct.error,
    ) as error:
        raise CheckpointError(f"{path} does not hold what its manifest says: {error}") from error


def _infos(archive: zipfile.ZipFile, arrays: Sequence[StoredArray]) -> dict[str, zipfile.ZipInfo]:
    """Return the archive entry of each array; raise if entries are missing or unexpected."""
    infos = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
    check_unique(info.filename for info in archive.infolist())
    expected = {array.entry: array for array in arrays}
    for entry in (*infos, *expected):
        if entry not in expected:
            raise ValueError(f"it holds {shown(infos[entry].filename)} as well")
        if entry not in infos or infos[entry].filename != f"{entry}.npy":
            raise ValueError(f"it does not hold {shown(entry)}")
    for entry, array in expected.items():
        info, size = infos[entry], len(npy_header(array.shape, array.dtype)) + array.nbytes
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise ValueError(f"{entry} is compressed or encrypted")
        if info.file_size != size or info.compress_size != size or array.crc32 != info.CRC:
            raise ValueError(f"{entry} has another size or CRC-32")
    return infos


def _read_array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, array: StoredArray) -> Array:
    header = npy_header(array.shape, array.dtype)
    with archive.open(info) as entry:
        if entry.read(len(header)) != header:
            raise ValueError(
                f"{array.entry} is not an array of {array.dtype} and shape {array.shape}"
            )
        # Reading to the end verifies the CRC-32.
        return read_numbers(entry, array.shape, array.dtype)  # type: ignore[arg-type]


def npy_header(shape: tuple[int, ...], dtype: DType) -> bytes:
    """Return the header of a `.npy` file for an array in C order.

    Headers are compared byte by byte with this one instead of being parsed.
    """
    if dtype.name in FOREIGN:
        dtype = np.dtype(f"u{dtype.itemsize}")
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': {shape!r}, }}".encode()
    padding = -(10 + len(text) + 1) % 64
    length = (len(text) + padding + 1).to_bytes(2, "little")
    return b"\x93NUMPY\x01\x00" + length + text + b" " * padding + b"\n"
