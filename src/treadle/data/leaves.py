"""Naming the leaves of batches, converting them to NumPy arrays, and stacked batches."""

import sys
from typing import Any

import numpy as np

from ..backends.window import Window, examples_of
from ..core.structures import Path, flatten, mapped, pack, part_at, text_of, with_paths
from ..errors import DataError

Array = np.ndarray[Any, np.dtype[Any]]
ORDINALS = ("first", "second", "third", "fourth")

NUMBERS = (bool, int, float)
NO_NUMBERS = "OUSMmT"
"""NumPy's kinds of dtypes that no backend supports: objects, strings, bytes, dates."""


def named(path: Path) -> str:
    """Return the name of a leaf in messages; the empty path is `the batch`.

    Example:
        >>> named((1,)), named(("image",)), named((0, "image")), named(())
        ('the second array', "the array 'image'", "the array [0]['image']", 'the batch')
    """
    if len(path) != 1:
        return f"the array {text_of(path)}" if path else "the batch"
    key: Any = next(iter(path))
    place = isinstance(key, int) and key < len(ORDINALS)
    return f"the {ORDINALS[key]} array" if place else f"the array {key!r}"


def refuse_lists(structure: Any) -> None:
    """Reject lists of Python numbers in a batch, since each number would become a separate array.

    Raises:
        DataError: If the batch contains a list of numbers.
    """
    numbers = any(type(leaf) in NUMBERS for leaf in flatten(structure))  # faster than all paths
    for path, leaf in with_paths(structure) if numbers else ():
        if path and type(leaf) in NUMBERS:
            holders = [part_at(structure, path[:i]) for i in range(len(path))]
            if isinstance(holders[-1], list) and all(type(x) in NUMBERS for x in holders[-1]):
                lists = (i for i, x in enumerate(holders) if isinstance(x, list))
                # The batch itself may be a list of arrays.
                outer = next(i for i in lists if i > 0 or len(holders) == 1)
                raise DataError(
                    f"{named(path[:outer])} is a list of Python numbers, not an array: make it one "
                    "with numpy.asarray, or a tuple if each number is a separate input"
                )


def as_arrays(structure: Any) -> Any:
    """Return a batch with its leaves as NumPy arrays, as `as_array` converts them."""
    leaves = flatten(structure)
    own = [type(x) is np.ndarray and x.dtype.isnative and x.dtype.kind in "biufc" for x in leaves]
    if not all(own):  # most batches need no conversion, and no path for a message
        leaves = [as_array(path, leaf) for path, leaf in with_paths(structure)]
    return pack(structure, leaves)


def as_array(path: Path, leaf: Any) -> Array:
    """Convert a leaf to a NumPy array with the same dtype, without a copy if possible.

    Args:
        path: The path of the leaf, for messages.
        leaf: A NumPy, TensorFlow, JAX or PyTorch array, or a number.

    Raises:
        DataError: If the leaf is not numeric, or is a sparse tensor.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(leaf, torch.Tensor):
        array = _from_torch(path, leaf)
    else:
        array = np.asarray(leaf)
    if array.dtype.kind in NO_NUMBERS or array.dtype.names is not None:
        raise DataError(
            f"{named(path)} is a {type(leaf).__name__} of dtype {array.dtype}: batches are arrays "
            f"of numbers or booleans. Encode strings and categories as numbers, pad ragged arrays, "
            f"and make sparse arrays dense"
        )
    return native(path, array)


def native(path: Path, array: Array) -> Array:
    """Return an array in the byte order of this machine, which is the only one that backends know.

    Raises:
        DataError: If the array is a memory-mapped file in the other order.
    """
    if array.dtype.isnative:
        return array
    dtype = array.dtype.newbyteorder("=")
    if mapped_base(array) is not None:
        raise DataError(
            f"{named(path)} is a memory-mapped file of dtype {array.dtype.str}, whose byte order "
            f"is not that of this machine: write it once as {dtype.name}, or read it into memory "
            "with numpy.asarray(x).astype"
        )
    return array.astype(dtype)


def mapped_base(array: Any) -> Any:
    """Return the memory map that an array is, or is a view of; None if it is in memory."""
    while array is not None and not isinstance(array, np.memmap):
        array = getattr(array, "base", None)
    return array


def _from_torch(path: Path, tensor: Any) -> Array:
    import ml_dtypes  # NumPy's name for bfloat16; comes with Keras

    if str(tensor.layout) != "torch.strided":
        raise DataError(f"{named(path)} is a torch tensor of layout {tensor.layout}: make it dense")
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        return tensor.view(sys.modules["torch"].int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def window_of(batches: Any, count: int) -> Window:
    """Return a window of stacked batches, in which each leaf has shape (count, …)."""
    return Window(batches, count, examples_of(batches, axis=1))


def sliced(batches: Any, part: slice | int) -> Any:
    """Return a part of stacked batches, as views of their arrays."""
    return mapped(lambda leaf: leaf[part], batches)


def each_of(window: Window | None) -> list[Any]:
    """Return the batches of a window one by one; none of None."""
    return [] if window is None else [sliced(window.batches, i) for i in range(window.count)]
