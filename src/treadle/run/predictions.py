"""The predictions of all batches, joined on the first axis without a second copy of them."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..backends.window import Window
from ..core import structures
from ..errors import StepError

Array = np.ndarray[Any, np.dtype[Any]]


class Predictions:
    """Joins the outputs of batches on their first axis.

    Args:
        batches: The number of batches if it is known: the arrays for all of them are then created
            with the first one, so that the memory holds one copy of the result. Without it, parts
            are joined at the end.

    Example:
        >>> predictions = Predictions(batches=2)
        >>> predictions.add({"x": np.array([1, 2])})
        >>> predictions.add({"x": np.array([3])})
        >>> predictions.joined()["x"].tolist()
        [1, 2, 3]
    """

    def __init__(self, batches: int | None) -> None:
        self._batches = batches
        self._is_empty, self._outline = True, None
        self._columns: list[_Column] = []

    def __bool__(self) -> bool:
        """Return whether any outputs were added."""
        return not self._is_empty

    def own_part(self, window: Window) -> Window:
        """Return what this process computes of a window; its outputs are added next."""
        return window

    def add(self, outputs: Any) -> None:
        """Add the outputs of the next batch, a structure of NumPy arrays.

        Raises:
            StepError: The structure differs from that of the first batch, or an array has no axis
                of examples, or differs in its other axes.
        """
        if self._is_empty:
            self._is_empty, self._outline = False, structures.outline(outputs)
            named = structures.with_paths(outputs)
            leaves = [np.asarray(leaf) for _, leaf in named]
            self._columns = [
                _Column(leaf, self._batches, path)
                for leaf, (path, _) in zip(leaves, named, strict=True)
            ]
        else:
            leaves = leaves_like(outputs, self._outline)
        for column, leaf in zip(self._columns, leaves, strict=True):
            column.add(leaf)

    def add_all(self, batches: Iterable[Any]) -> None:
        """Add the outputs of the next batches."""
        for outputs in batches:
            self.add(outputs)

    def joined(self) -> Any:
        """Return the structure of joined arrays."""
        arrays = [column.joined() for column in self._columns]
        return structures.pack(self._outline, arrays)


def leaves_like(outputs: Any, outline: Any) -> list[Array]:
    """Return the arrays of the outputs of a batch, in the order of those of the first batch.

    Raises:
        StepError: The structures differ.
    """
    try:
        return [np.asarray(leaf) for leaf in structures.aligned(outputs, outline)]
    except ValueError as error:
        raise StepError(
            f"predict_step must return the same structure for every batch: {error}"
        ) from error


def check_rows(part: Array, first: Array, path: structures.Path) -> None:
    """Check that an output of a batch can be joined with that of the first batch.

    Raises:
        StepError: It has no axis of examples, or differs in its other axes.
    """
    output = f"the output {structures.text_of(path)}" if path else "an output"
    if part.ndim == 0:
        raise StepError(
            f"predict_step returned {output} without an axis: the outputs of all batches are "
            "joined on their first axis, so return one entry for each example"
        )
    if part.shape[1:] != first.shape[1:]:
        raise StepError(
            f"predict_step returned {output} with shape {part.shape} for a batch, and "
            f"{first.shape} for the first one: all batches are joined on the first axis, so only "
            "that one may differ. Pad the outputs to one shape, or reduce them"
        )


class _Column:
    """One array of the outputs, for all batches.

    Args:
        first: The array of the first batch.
        batches: The number of batches if it is known.
        path: The path of the array in the outputs.
    """

    def __init__(self, first: Array, batches: int | None, path: structures.Path) -> None:
        check_rows(first, first, path)
        self._first, self._path = first, path
        self._parts: list[Array] = []
        self._filled = 0
        self._whole: Array | None = None
        if batches is not None:
            # The system provides memory when it is written to: a shorter last batch costs nothing.
            self._whole = np.empty((batches * len(first), *first.shape[1:]), first.dtype)

    def add(self, part: Array) -> None:
        """Add the array of the next batch."""
        check_rows(part, self._first, self._path)
        whole = self._whole
        if whole is None:
            self._parts.append(part)
        elif part.dtype == whole.dtype and self._filled + len(part) <= len(whole):
            whole[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
        else:
            self._parts, self._whole = [whole[: self._filled], part], None

    def joined(self) -> Array:
        """Return the arrays of all batches, joined on the first axis."""
        if self._whole is not None:
            return self._whole[: self._filled]
        return np.concatenate(self._parts)
