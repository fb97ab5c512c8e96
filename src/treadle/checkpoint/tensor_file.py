"""Writing and reading arrays of numbers as `.safetensors` files.

Files are produced in pieces, so that they can be hashed while they are written, and arrays are not
copied as a whole. The same arrays always give the same bytes, since files contain no timestamps.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from safetensors import safe_open

from .dtypes import FOREIGN, Array, DType, dtype_named, name_of

Piece = bytes | memoryview
T = TypeVar("T")

# Small enough for a piece to stay in the CPU cache while it is hashed and written.
PIECE = 1 << 20

# The dtypes that every version of safetensors supports, by their names in its files. Arrays of
# other dtypes, such as complex ones, are stored as bytes, with their dtype in the metadata.
_SUPPORTED: dict[str, str] = {
    **{"|b1": "BOOL", "|u1": "U8", "<u2": "U16", "<u4": "U32", "<u8": "U64"},
    **{"|i1": "I8", "<i2": "I16", "<i4": "I32", "<i8": "I64"},
    **{"<f2": "F16", "<f4": "F32", "<f8": "F64"},
    **{"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"},
}
_DTYPES = {stored: np.dtype(FOREIGN.get(name, name)) for name, stored in _SUPPORTED.items()}
METADATA = "__metadata__"  # reserved by the format
SUFFIX = ".safetensors"


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


def read_tensors(
    file: BinaryIO, path: Path, update: Callable[[Piece], object] = len
) -> dict[str, Array]:
    """Read all arrays of a `.safetensors` file, whose header the library parses and validates.

    The library's `load_file` is not used: it cannot read float8 into NumPy.

    Args:
        file: The file.
        path: Its path, since the library opens files by name.
        update: Called with each piece of the file, as `update` of a hash.

    Raises:
        SafetensorError, ValueError, KeyError, EOFError: If the file is not valid.
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
