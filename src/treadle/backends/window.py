"""Windows: consecutive batches of equal structure, shapes and dtypes."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..core import structures

CAPACITIES = (8, 64)


@dataclass(frozen=True, slots=True)
class Rows:
    """Batches as row indices of a data set that is in memory as a whole.

    An executor may copy the data set to the device once and gather the batches there.

    Attributes:
        owner: The object that holds the arrays; it can be weakly referenced.
        arrays: The data set's structure, each leaf an array of shape (examples, …) or None; the
            same objects in all windows of an owner.
        indices: The rows of each batch, int64 of shape (count, examples in a batch).
    """

    owner: Any
    arrays: Any
    indices: Any

    @property
    def nbytes(self) -> int:
        """Bytes of the data set."""
        return _nbytes(self.arrays)

    @property
    def starts(self) -> list[int] | None:
        """The first row of each batch if the rows of all batches are consecutive, else None."""
        rows = self.indices.ravel()
        return self.indices[:, 0].tolist() if bool((np.diff(rows) == 1).all()) else None


@dataclass(frozen=True, slots=True)
class Shares:
    """What each process has read of the batches of a window, if each reads its own share.

    Attributes:
        counts: The number of rows of a batch that each process has read, by rank.
        whole: Whether the arrays hold the rows of all processes. Otherwise they hold those of this
            process in their places; the others are zeros or repeat them.
    """

    counts: tuple[int, ...]
    whole: bool


def own_rows(examples: int, rank: int, size: int) -> tuple[int, int]:
    """Return the first row of a batch that one of several processes computes, and their number.

    Each process computes consecutive rows: the first ones may have one more than others.

    Args:
        examples: The number of rows of the whole batch.
        rank: The number of the process.
        size: The number of processes.

    Example:
        >>> [own_rows(5, rank, 3) for rank in range(3)]
        [(0, 2), (2, 2), (4, 1)]
    """
    each, more = divmod(examples, size)
    return rank * each + min(rank, more), each + (rank < more)


class Window:
    """Consecutive batches of equal structure, shapes and dtypes.

    Args:
        batches: The batches in their own structure (tuple, dict, nested …), each leaf an array of
            shape (count, *batch shape), stacked along the new first axis; None leaves stay None.
        count: The number of batches.
        examples: The number of examples per batch, as `examples_of` counts them.
        rows: The batches as rows of a data set, if `batches` is None; they are gathered on first
            access.
        shares: What each process has read of them; None if each has read all.
    """

    def __init__(
        self,
        batches: Any,
        count: int,
        examples: int,
        rows: Rows | None = None,
        shares: Shares | None = None,
    ) -> None:
        self._batches, self.count, self.examples, self.rows = batches, count, examples, rows
        self.shares = shares

    @classmethod
    def of_rows(cls, rows: Rows) -> "Window":
        """Create a window of rows that are not gathered yet."""
        return cls(None, *rows.indices.shape, rows=rows)

    @property
    def batches(self) -> Any:
        """The stacked batches."""
        if self._batches is None and self.rows is not None:
            self._batches = structures.mapped(
                lambda x: x.take(self.rows.indices, axis=0),  # type: ignore[union-attr]
                self.rows.arrays,
            )
        return self._batches

    @cached_property  # read several times in each step, then without a call of Python
    def form(self) -> Hashable:
        """Structure, shapes and dtypes of a batch, equal to `form_of(batch)`."""
        rows = self.rows
        if self._batches is None and rows is not None:
            examples = rows.indices.shape[1:]
            return _form(rows.arrays, lambda x: (*examples, *x.shape[1:]))
        return _form(self._batches, lambda x: x.shape[1:])

    @property
    def stacked_bytes(self) -> int:
        """Bytes of the stacked batches; 0 if they are rows of a data set."""
        if self.rows is not None:
            return 0
        return _nbytes(self._batches)

    def streamed(self) -> "Window":
        """Return this window with its batches gathered, and without the data set."""
        return self if self.rows is None else Window(self.batches, self.count, self.examples)

    def batch(self, index: int) -> Any:
        """Return one batch as NumPy arrays; None leaves stay None."""
        if self._batches is None and self.rows is not None:
            chosen = self.rows.indices[index]
            return structures.mapped(lambda x: x.take(chosen, axis=0), self.rows.arrays)
        return row(self._batches, index)

    def views(self) -> Iterator[Any]:
        """Yield the batches, without copies if they are consecutive rows of the data set.

        Their arrays must not be modified.
        """
        rows = self.rows if self._batches is None else None
        starts = rows and rows.starts
        if rows is None or starts is None:
            yield from map(self.batch, range(self.count))
            return
        for start in starts:
            part = slice(start, start + self.examples)
            yield structures.mapped(lambda x, part=part: x[part], rows.arrays)

    def split(self, count: int) -> tuple["Window", "Window"]:
        """Return the first `count` batches and the rest, as views of the arrays."""
        return self._part(slice(None, count), count), self._part(
            slice(count, None), self.count - count
        )

    def repeated(self, times: int) -> "Window":
        """Return a window that repeats these batches `times` times."""
        if self.rows is not None:
            chosen = np.concatenate([self.rows.indices] * times)
            return Window.of_rows(replace(self.rows, indices=chosen))
        stacked = structures.mapped(lambda x: np.concatenate([x] * times), self._batches)
        return Window(stacked, self.count * times, self.examples, shares=self.shares)

    def followed_by(self, other: "Window") -> "Window":
        """Return this window and another one of the same data set as one window of rows."""
        assert self.rows is not None and other.rows is not None
        chosen = np.concatenate([self.rows.indices, other.rows.indices])
        return Window.of_rows(replace(self.rows, indices=chosen))

    def joined(self, following: Sequence["Window"]) -> "Window":
        """Concatenate this window and other windows of equal form, copying each batch once."""
        if not following:
            return self
        windows = [self, *following]
        stacked = structures.mapped(
            lambda *parts: np.concatenate(parts), *[window.batches for window in windows]
        )
        count = sum(window.count for window in windows)
        return Window(stacked, count, self.examples, shares=self.shares)

    def of_each(self, part: slice) -> "Window":
        """Return a window with these rows of each batch, where an array has one per example."""
        if self.rows is not None:
            return Window.of_rows(replace(self.rows, indices=self.rows.indices[:, part]))
        own = structures.mapped(
            lambda x: x[:, part] if x.ndim > 1 and x.shape[1] == self.examples else x, self._batches
        )
        return Window(own, self.count, len(range(self.examples)[part]))

    def is_like(self, other: "Window") -> bool:
        """Return whether another window may follow in one with this: its batches have equal forms.

        If each process reads its own share of them, the shares are equal too.
        """
        return self.form == other.form and self.shares == other.shares

    def _part(self, part: slice, count: int) -> "Window":
        if self.rows is not None:
            chosen = replace(self.rows, indices=self.rows.indices[part])
            window = Window(None, count, self.examples, chosen)
        else:
            stacked = structures.mapped(lambda x: x[part], self._batches)
            window = Window(stacked, count, self.examples, shares=self.shares)
        window.form = self.form
        return window


Following = Callable[[int], Window | None]
"""A function that returns up to that many batches after a window, if they have been read."""


def capacity(count: int, largest: int, sizes: tuple[int, ...] = CAPACITIES) -> int:
    """Return the number of batches to compile a program for that runs `count` of them.

    XLA needs a static maximum. Few different maxima are used, so that few programs are compiled.
    The maximum is never 1, since XLA would simplify the loop, which rounds differently.

    Example:
        >>> [capacity(count, 256) for count in (1, 8, 9, 200)]
        [8, 8, 64, 256]
    """
    return next((size for size in sizes if count <= size < largest), max(count, largest, 2))


def padded(x: Any, rows: int) -> Any:
    """Return an array padded with zeros to this many rows."""
    missing = rows - x.shape[0]
    return np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)]) if missing > 0 else x


def examples_of(batch: Any, axis: int = 0) -> int:
    """Return a batch's number of examples: the length of the first axis of its arrays.

    Scalars do not count. If arrays have different lengths, that of the first array counts.

    Args:
        batch: The batch, or stacked batches.
        axis: The axis of the examples: 1 in stacked batches.

    Example:
        >>> examples_of({"alpha": np.float32(0.5), "x": np.zeros((8, 2))})
        8
    """
    return next((x.shape[axis] for x in structures.flatten(batch) if len(x.shape) > axis), 1)


def form_of(batch: Any) -> Hashable:
    """Return a key that is equal for batches of equal structure, shapes and dtypes.

    Example:
        >>> short, full = {"x": np.zeros(3)}, {"x": np.zeros(8)}
        >>> form_of(full) == form_of({"x": np.ones(8)}), form_of(full) == form_of(short)
        (True, False)
    """
    return structures.form(batch, lambda x: (x.dtype, x.shape) if hasattr(x, "dtype") else type(x))


def _form(structure: Any, shape: Callable[[Any], tuple[int, ...]]) -> Hashable:
    return structures.form(
        structure, lambda x: (x.dtype, shape(x)) if hasattr(x, "dtype") else type(x)
    )


def _nbytes(structure: Any) -> int:
    return sum(getattr(x, "nbytes", 0) for x in structures.flatten(structure))


def row(batches: Any, index: int) -> Any:
    """Return one batch of stacked batches; None leaves stay None."""
    return structures.mapped(lambda x: x[index], batches)
