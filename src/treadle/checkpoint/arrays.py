"""Writing and reading arrays of numbers as uncompressed, unpickled `.npz` files.

Files are produced in pieces, so that they can be hashed while they are written, and arrays are not
copied as a whole. The same arrays always give the same bytes, since files contain no timestamps.
"""

import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # NumPy's names of bfloat16 and the like; comes with Keras
import numpy as np

from ..errors import StateError

Array = np.ndarray[Any, np.dtype[Any]]
DType = np.dtype[Any]
Piece = bytes | memoryview

# The entry with the dtypes that NumPy's format does not support: rows of (path, dtype).
DTYPES = "__dtypes__"

# Small enough for a piece to stay in the CPU cache while it is checksummed, hashed and written.
_PIECE = 1 << 20

# Dtypes that NumPy's format does not support, by name. They are stored as unsigned integers.
_FOREIGN: dict[str, DType] = {
    np.dtype(kind).name: np.dtype(kind)
    for kind in vars(ml_dtypes).values()
    if isinstance(kind, type) and issubclass(kind, np.generic)
}
_NUMBERS = re.compile("[<>|][biufc][0-9]{1,2}")


def name_of(dtype: DType) -> str | None:
    """Return the name under which a dtype is stored, or None if it is not numeric.

    Example:
        >>> name_of(np.dtype("float32")), name_of(np.dtype(ml_dtypes.bfloat16))
        ('<f4', 'bfloat16')
        >>> name_of(np.dtype(object))
    """
    if dtype.name in _FOREIGN:
        return dtype.name
    return dtype.str if _NUMBERS.fullmatch(dtype.str) else None


def dtype_named(name: str) -> DType:
    """Return the dtype for a name returned by `name_of`.

    Raises:
        ValueError: If the name is not of a numeric dtype. Files can thus never create object
            arrays.
    """
    try:
        return _FOREIGN[name] if name in _FOREIGN else np.dtype(_NUMBERS.fullmatch(name)[0])  # type: ignore[index]
    except TypeError as error:
        raise ValueError(f"{name[:40]!a} is not a numeric dtype") from error


def npy_header(shape: tuple[int, ...], dtype: DType) -> bytes:
    """Return the header of a `.npy` file for an array in C order.

    NumPy's own writer is not used, since readers compare headers byte by byte instead of parsing
    them: the bytes must not change with the NumPy version.
    """
    if dtype.name in _FOREIGN:
        dtype = np.dtype(f"u{dtype.itemsize}")
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': {shape!r}, }}".encode()
    padding = -(10 + len(text) + 1) % 64
    length = (len(text) + padding + 1).to_bytes(2, "little")
    return b"\x93NUMPY\x01\x00" + length + text + b" " * padding + b"\n"


class Npz:
    """An `.npz` file, produced in pieces.

    Attributes:
        checksums: The CRC-32 of each entry; complete after all pieces are produced.

    Args:
        arrays: Pairs of a unique entry name and an array.

    Example:
        >>> archive = Npz([("a", np.zeros(2)), ("b/c", np.ones(()))])
        >>> _ = Path("a.npz").write_bytes(b"".join(archive.pieces()))
        >>> np.load("a.npz")["b/c"]
        array(1.)
    """

    def __init__(self, arrays: Iterable[tuple[str, Array]]) -> None:
        self._arrays = list(arrays)
        self.checksums: dict[str, int] = {}

    def pieces(self) -> Iterator[Piece]:
        """Yield the bytes of the file. Each piece is valid only until the next one is produced."""
        sink = _Sink()
        # Not np.savez: it takes entry names as keyword arguments, so none could be called `file`.
        with zipfile.ZipFile(sink, "w", allowZip64=True) as archive:  # type: ignore[arg-type]
            for name, array in self._arrays:
                info = zipfile.ZipInfo(f"{name}.npy")
                with archive.open(info, "w", force_zip64=True) as entry:
                    entry.write(npy_header(array.shape, array.dtype))
                    numbers = np.asarray(array, order="C").reshape(-1).view(np.uint8).data
                    for start in range(0, numbers.nbytes, _PIECE):
                        entry.write(numbers[start : start + _PIECE])
                        yield from sink.take()
                self.checksums[name] = info.CRC
        yield from sink.take()


class _Sink:
    """A write-only stream for ZipFile. It cannot seek, so written pieces never change."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []

    def write(self, piece: Piece) -> int:
        self._pieces.append(piece)
        return len(piece)

    def flush(self) -> None:
        pass

    def take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces


def write_arrays(path: str | Path, arrays: Mapping[str, Array]) -> None:
    """Write named arrays of numbers to an `.npz` file atomically.

    Dtypes that NumPy's format does not support, such as bfloat16, are stored as unsigned integers
    with the same bits. A separate entry stores their names.

    Raises:
        StateError: If an array is not numeric.

    Example:
        >>> write_arrays("weights.npz", {"model/kernel": np.ones(3, ml_dtypes.bfloat16)})
        >>> read_arrays("weights.npz")["model/kernel"].dtype
        dtype(bfloat16)
    """
    for name, array in arrays.items():
        if name_of(array.dtype) is None or name == DTYPES:
            raise StateError(
                f"{name} of dtype {array.dtype} cannot be written to {path}: only arrays of "
                "numbers can. Nothing was written"
            )
    foreign = [(n, a.dtype.name) for n, a in arrays.items() if a.dtype.name in _FOREIGN]
    stored = {**arrays, DTYPES: np.array(foreign)} if foreign else arrays
    path = Path(path)
    temporary = path.with_name(f"{path.name}.partial")
    with temporary.open("wb") as file:
        for piece in Npz(stored.items()).pieces():
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_arrays(path: str | Path) -> dict[str, Array]:
    """Read arrays written by `write_arrays`, with their original dtypes. Runs no code in the file.

    Raises:
        StateError: If the file has another format, contains Python objects, or is compressed. A
            compressed file could have any size in memory.

    Example:
        >>> write_arrays("weights.npz", {"model/bias": np.zeros(2)})
        >>> read_arrays("weights.npz")
        {'model/bias': array([0., 0.])}
    """
    try:
        # Opened here, since np.load does not close a file that it cannot read.
        with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as archive:
            _check_sizes(archive.zip, os.fstat(file.fileno()).st_size)
            arrays = {name: archive[name] for name in archive.files}
        for name, dtype in arrays.pop(DTYPES, np.empty((0, 2), np.str_)):
            arrays[name] = arrays[name].view(dtype_named(str(dtype)))
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise StateError(f"{path} does not hold arrays as Treadle writes them: {error}") from error
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
