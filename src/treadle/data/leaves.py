"""Flattening, naming and converting the leaves of a batch to NumPy arrays; None stays None."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..backends.window import Window
from ..errors import DataError

Array = np.ndarray[Any, np.dtype[Any]]
Path = tuple[Any, ...]

ORDINALS = ("first", "second", "third", "fourth")

NUMBERS = (bool, int, float)
NO_NUMBERS = "OUSMmT"
"""NumPy's kinds of dtypes that no backend supports: objects, strings, bytes, dates."""


def flattened(structure: Any) -> list[tuple[Path, Any]]:
    """Return `(path, leaf)` of every leaf, including None, in the order of `keras.tree`."""
    from keras import tree

    return tree.flatten_with_path(structure)


def packed(structure: Any, leaves: Sequence[Any]) -> Any:
    """Return `structure` with its leaves, in the order of `flattened`, replaced by `leaves`."""
    from keras import tree

    return tree.pack_sequence_as(structure, leaves)


def mapped(function: Callable[[Array], Any], structure: Any) -> Any:
    """Return `structure` with `function` applied to every leaf but None."""
    from keras import tree

    return tree.map_structure(lambda leaf: None if leaf is None else function(leaf), structure)


def named(path: Path) -> str:
    """Return the name of a leaf in messages; the empty path is `the batch`.

    Example:
        >>> named((1,)), named(("image",)), named((0, "image")), named(())
        ('the second array', "the array 'image'", "the array [0]['image']", 'the batch')
    """
    if len(path) != 1:
        return f"the array {''.join(f'[{key!r}]' for key in path)}" if path else "the batch"
    key: Any = next(iter(path))
    place = isinstance(key, int) and key < len(ORDINALS)
    return f"the {ORDINALS[key]} array" if place else f"the array {key!r}"


def refuse_lists(structure: Any, leaves: Sequence[tuple[Path, Any]]) -> None:
    """Reject lists of Python numbers in a batch, since each number would become a separate array.

    Args:
        structure: The batch.
        leaves: Its leaves, as returned by `flattened`.

    Raises:
        DataError: If the batch contains a list of numbers.
    """
    for path, leaf in leaves:
        if path and type(leaf) in NUMBERS:
            holders = [structure]
            for key in path[:-1]:
                holders.append(holders[-1][key])
            if isinstance(holders[-1], list) and all(type(x) in NUMBERS for x in holders[-1]):
                lists = (i for i, x in enumerate(holders) if isinstance(x, list))
                # The batch itself may be a list of arrays.
                outer = next(i for i in lists if i > 0 or len(holders) == 1)
                raise DataError(
                    f"{named(path[:outer])} is a list of Python numbers, not an array: make it one "
                    "with numpy.asarray, or a tuple if each number is a separate input"
                )


def as_array(path: Path, leaf: Any) -> Array | None:
    """Convert a leaf to a NumPy array with the same dtype, without a copy if possible.

    Args:
        path: The path of the leaf, for messages.
        leaf: A NumPy, TensorFlow, JAX or PyTorch array, a number, or None.

    Raises:
        DataError: If the leaf is not numeric, or is a sparse tensor.
    """
    if leaf is None:
        return None
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
    return array


def _from_torch(path: Path, tensor: Any) -> Array:
    import ml_dtypes  # NumPy's name for bfloat16; comes with Keras

    if str(tensor.layout) != "torch.strided":
        raise DataError(f"{named(path)} is a torch tensor of layout {tensor.layout}: make it dense")
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        return tensor.view(sys.modules["torch"].int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def examples_in(leaves: Sequence[Array | None]) -> int:
    """Return the first axis of the first leaf; 1 for a scalar or without leaves."""
    first = next((leaf for leaf in leaves if leaf is not None), None)
    return 1 if first is None or first.ndim == 0 else first.shape[0]


def window_of(batches: Any, count: int) -> Window:
    """Return a window of stacked batches, in which each leaf has shape (count, …)."""
    first = next((leaf for _, leaf in flattened(batches) if leaf is not None), None)
    return Window(batches, count, 1 if first is None or first.ndim == 1 else first.shape[1])


def sliced(batches: Any, part: slice | int) -> Any:
    """Return a part of stacked batches, as views of their arrays."""
    return mapped(lambda leaf: leaf[part], batches)
