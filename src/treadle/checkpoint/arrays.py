"""Arrays of numbers in `.safetensors` files: their dtypes, bytes and hashes, without pickle.

Files are produced in pieces, so that they can be hashed while they are written, and arrays are not
copied as a whole. The same arrays always give the same bytes, since files contain no timestamps.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import ml_dtypes  # NumPy's names of bfloat16 and the like; comes with Keras
import numpy as np
from safetensors import SafetensorError, safe_open

from ..core.folder import Folder
from ..errors import StateError

Array = np.ndarray[Any, np.dtype[Any]]
DType = np.dtype[Any]
Piece = bytes | memoryview
T = TypeVar("T")

SUFFIX = ".safetensors"
METADATA = "__metadata__"  # reserved by the format
# Small enough for a piece to stay in the CPU cache while it is hashed and written.
PIECE = 1 << 20

# Dtypes that NumPy lacks, by name.
FOREIGN: dict[str, DType] = {
    np.dtype(kind).name: np.dtype(kind)
    for kind in vars(ml_dtypes).values()
    if isinstance(kind, type) and issubclass(kind, np.generic)
}
_NUMBERS = re.compile("[<>|][biufc][0-9]{1,2}")
# The dtypes that every version of safetensors supports, by their names in its files. Arrays of
# other dtypes, such as complex ones, are stored as bytes, with their dtype in the metadata.
_SUPPORTED: dict[str, str] = {
    **{"|b1": "BOOL", "|u1": "U8", "<u2": "U16", "<u4": "U32", "<u8": "U64"},
    **{"|i1": "I8", "<i2": "I16", "<i4": "I32", "<i8": "I64"},
    **{"<f2": "F16", "<f4": "F32", "<f8": "F64"},
    **{"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"},
}
_DTYPES = {stored: np.dtype(FOREIGN.get(name, name)) for name, stored in _SUPPORTED.items()}


def name_of(dtype: DType) -> str | None:
    """Return the name under which a dtype is stored, or None if it is not numeric.

    Example:
        >>> name_of(np.dtype("float32")), name_of(np.dtype(ml_dtypes.bfloat16))
        ('<f4', 'bfloat16')
        >>> name_of(np.dtype(object))
    """
    if dtype.name in FOREIGN:
        return dtype.name
    return dtype.str if _NUMBERS.fullmatch(dtype.str) else None


def dtype_named(name: str) -> DType:
    """Return the dtype for a name returned by `name_of`.

    Raises:
        ValueError: If the name is not of a numeric dtype. Files can thus never create object
            arrays.
    """
    try:
        return FOREIGN[name] if name in FOREIGN else np.dtype(_NUMBERS.fullmatch(name)[0])  # type: ignore[index]
    except TypeError as error:
        raise ValueError(f"{name[:40]!a} is not a numeric dtype") from error


def dtype_called(name: str) -> DType:
    """Return the dtype that a framework calls `float32`, `bfloat16` and so on.

    Example:
        >>> dtype_called("bfloat16").itemsize
        2
    """
    return FOREIGN.get(name) or np.dtype(name)


def in_file_order(arrays: Iterable[T], dtype: Callable[[T], DType]) -> list[T]:
    """Sort arrays by the size of their elements, the largest first.

    Each array is then aligned in the file, which readers that map files into memory require.
    """
    return sorted(arrays, key=lambda array: -dtype(array).itemsize)


def header(arrays: Iterable[tuple[str, tuple[int, ...], DType]]) -> bytes:
    """Return the bytes of a `.safetensors` file before its numbers.

    The library's own writer is not used: it opens a file by its name, and would neither sync it
    nor compute its hash, which takes a second pass over a checkpoint. It cannot store all dtypes.

    Args:
        arrays: The unique name, shape and dtype of each array, in the order of the file.
    """
    record: dict[str, Any] = {}
    metadata: dict[str, str] = {}
    end = 0
    for name, shape, dtype in arrays:
        start, end = end, end + prod(shape) * dtype.itemsize
        stored = name_of(dtype) or ""
        if stored not in _SUPPORTED:
            metadata[_dtype_key(name)] = stored
            shape = (*shape, dtype.itemsize)
        record[name] = {
            "dtype": _SUPPORTED.get(stored, "U8"),
            "shape": shape,
            "data_offsets": (start, end),
        }
    if metadata:
        record = {METADATA: metadata, **record}
    text = json.dumps(record, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def pieces(arrays: Iterable[tuple[str, Array]]) -> Iterator[Piece]:
    """Yield the bytes of a `.safetensors` file, without copying contiguous arrays.

    Args:
        arrays: Pairs of a unique name and an array of numbers.

    Example:
        >>> from safetensors.numpy import load_file
        >>> arrays = [("a", np.zeros(2)), ("b/c", np.ones(()))]
        >>> _ = Path("a.safetensors").write_bytes(b"".join(pieces(arrays)))
        >>> load_file("a.safetensors")["b/c"]
        array(1.)
    """
    ordered = in_file_order(arrays, lambda pair: pair[1].dtype)
    yield header((name, array.shape, array.dtype) for name, array in ordered)
    for _, array in ordered:
        numbers = np.asarray(array, order="C").reshape(-1).view(np.uint8).data
        for start in range(0, numbers.nbytes, PIECE):
            yield numbers[start : start + PIECE]


def read_numbers(
    file: BinaryIO,
    shape: tuple[int, ...],
    dtype: DType,
    update: Callable[[memoryview], object] = len,
) -> Array:
    """Read the numbers of an array from the position of a file.

    Args:
        file: The file.
        shape: The shape of the array, which must fit into the file.
        dtype: The dtype of the array.
        update: Called with each piece, as `update` of a hash.

    Raises:
        EOFError: If the file ends too early.
        ValueError: If NumPy does not support the shape.
    """
    numbers = np.empty(prod(shape) * dtype.itemsize, np.uint8)
    left = numbers.data
    while left.nbytes:
        count = file.readinto(left[:PIECE])  # type: ignore[attr-defined]
        if not count:
            raise EOFError("an array ends too early")
        update(left[:count])
        left = left[count:]
    return numbers.view(dtype).reshape(shape)


def _read_tensors(
    file: BinaryIO, path: Path, update: Callable[[Piece], object] = len
) -> dict[str, Array]:
    """Read all arrays of a `.safetensors` file, whose header the library parses and validates.

    The library's `load_file` is not used: it cannot read float8 into NumPy.

    Args:
        file: The file.
        path: Its path, since the library opens files by name.
        update: Called with each piece of the file, as `update` of a hash.

    Raises:
        SafetensorError, ValueError, KeyError, EOFError, OverflowError: If the file is not valid.
    """
    described: list[tuple[str, tuple[int, ...], DType]] = []
    with safe_open(path, framework="np") as found:
        metadata = found.metadata() or {}
        for name in found.offset_keys():
            part = found.get_slice(name)
            described.append((name, tuple(part.get_shape()), _dtype_of(part.get_dtype())))
    length = file.read(8)
    update(length + file.read(int.from_bytes(length, "little")))
    arrays: dict[str, Array] = {}
    # The library accepts no gaps between arrays, so that their order determines their places.
    for name, shape, dtype in described:
        arrays[name] = read_numbers(file, shape, dtype, update)
        if _dtype_key(name) in metadata:
            dtype = dtype_named(metadata[_dtype_key(name)])
            arrays[name] = arrays[name].reshape(-1).view(dtype).reshape(shape[:-1])
    return arrays


def _dtype_of(stored: str) -> DType:
    if stored not in _DTYPES:
        raise ValueError(f"the dtype {stored} is not supported")
    return _DTYPES[stored]


def _dtype_key(name: str) -> str:
    """Return the key in a file's metadata with the dtype of an array that is stored as bytes."""
    return f"dtype of {name}"


def write_arrays(path: str | Path, arrays: Mapping[str, Any]) -> None:
    """Write named arrays of numbers durably to a `.safetensors` file.

    Arrays of dtypes that the format does not support are stored as bytes, and the names of the
    dtypes next to them.

    Args:
        path: The file, whose name ends in `.safetensors`.
        arrays: The arrays by name, or what has their `shape`, `dtype` and `nbytes` and becomes one
            when it is written, in the order of the file.

    Raises:
        StateError: If the name of the file does not end in `.safetensors`, or an array is not
            numeric.
        DirectoryError: If the file cannot be written. An existing file is unchanged then.

    Example:
        >>> write_arrays("weights.safetensors", {"model/kernel": np.ones(3, "bfloat16")})
        >>> read_arrays("weights.safetensors")["model/kernel"].dtype
        dtype(bfloat16)
    """
    path = _checked(path)
    for name, array in arrays.items():
        if name_of(array.dtype) is None or name == METADATA:
            raise StateError(
                f"{name} of dtype {array.dtype} cannot be written to {path}: only arrays of "
                "numbers can. Nothing was written"
            )
    size = sum(array.nbytes for array in arrays.values())
    with Folder.open(path.parent) as folder:
        folder.write(path.name, pieces(arrays.items()), size)


def read_arrays(path: str | Path, update: Callable[[Piece], object] = len) -> dict[str, Array]:
    """Read arrays written by `write_arrays`, with their original dtypes. Runs no code in the file.

    Args:
        path: The file, whose name ends in `.safetensors`.
        update: Called with each piece of the file, as `update` of a hash.

    Raises:
        StateError: If the file is damaged or of another format, or its name does not end in
            `.safetensors`.
        FileNotFoundError: If there is no file.

    Example:
        >>> write_arrays("weights.safetensors", {"model/bias": np.zeros(2)})
        >>> read_arrays("weights.safetensors")
        {'model/bias': array([0., 0.])}
    """
    path = _checked(path)
    real = path.resolve()
    if not real.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    with Folder.open(real.parent, error=StateError) as folder, folder.opened(real.name) as opened:
        file, size = opened
        try:
            return _read_tensors(file, real, update)
        except (ValueError, KeyError, EOFError, OverflowError, SafetensorError) as error:
            raise StateError(
                f"{path} does not hold arrays as Treadle writes them: {error}"
            ) from error
        except MemoryError as error:
            raise StateError(f"{path} of {size:,} bytes does not fit into memory") from error


def _checked(path: str | Path) -> Path:
    """Return the path of a file of arrays, after checking its name."""
    path = Path(path)
    if path.suffix != SUFFIX:
        raise StateError(
            f"{path} is not the name of a file of arrays: expected a name that ends in {SUFFIX}, "
            f"but found {path.suffix or 'no suffix'!r}. Use {path.stem + SUFFIX!r}"
        )
    return path


class Digest:
    """Computes the SHA-256 and size of pieces as they are written."""

    def __init__(self) -> None:
        self._hash, self._size = hashlib.sha256(), 0

    def update_from(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Yield the pieces, and include them."""
        for piece in pieces:
            self._hash.update(piece)
            self._size += len(piece)
            yield piece

    def result(self) -> dict[str, Any]:
        """Return the hash and the size, as a manifest has them."""
        return {"sha256": self._hash.hexdigest(), "size": self._size}


def digest_of(pieces: Iterable[Piece]) -> dict[str, Any]:
    """Return the hash and the size of pieces."""
    digest = Digest()
    for _ in digest.update_from(iter(pieces)):
        pass
    return digest.result()


def digest_of_file(file: BinaryIO) -> dict[str, Any]:
    """Return the hash and the size of an open file, from its position on."""
    return digest_of(iter(lambda: file.read(PIECE), b""))
