"""Predictions of several processes, each of which computes those of its rows of every batch.

They are divided only if that changes nothing: for the first batch of each form, every process
computes the predictions of the whole batch and of its rows, and compares them. If they differ in
one process, because examples are combined, random numbers are drawn, or an output has no row for
each example, all processes compute all of them.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np

from ..backends.base import active
from ..backends.window import Rows, Window
from ..core import structures
from ..core.exchanged_arrays import exchange_arrays
from ..core.processes import own_rows, process_group
from .predictions import check_rows, leaves_like

Array = np.ndarray[Any, np.dtype[Any]]
MOST_WORDS: Final = 4 << 20
"""The most numbers of four bytes that processes sum in one message."""
CLOSE: Final = {2: 2e-2, 4: 1e-4, 8: 1e-4}
"""By how much floats of so many bytes may differ, relative to the largest one: by rounding."""
AT: Final = "comparing predictions of rows with those of a batch"


class DividedPredictions:
    """Joins the outputs of batches, of which this process has computed its rows or all.

    Args:
        total: Returns the sum of an array over all processes.
    """

    def __init__(self, total: Callable[[Array], Array]) -> None:
        self._total = total
        self._expected: deque[tuple[int, bool]] = deque()
        self._outline: Any = None
        self._paths: list[structures.Path] = []
        self._parts: list[tuple[int, bool, list[Array]]] = []

    def __bool__(self) -> bool:
        """Return whether any outputs were added."""
        return bool(self._parts)

    def expect(self, count: int, examples: int, divided: bool) -> None:
        """Note what the next outputs to add are.

        Args:
            count: The number of batches.
            examples: The number of rows of each whole batch.
            divided: Whether the outputs are those of the rows of this process.
        """
        self._expected.extend([(examples, divided)] * count)

    def add_all(self, batches: Iterable[Any]) -> None:
        """Add the outputs of the next batches."""
        for outputs in batches:
            if not self._parts:
                self._outline = structures.outline(outputs)
                self._paths = [path for path, _ in structures.with_paths(outputs)]
            leaves = leaves_like(outputs, self._outline)
            firsts = self._parts[0][2] if self._parts else leaves
            for leaf, first, path in zip(leaves, firsts, self._paths, strict=True):
                check_rows(leaf, first, path)
            examples, divided = self._expected.popleft()
            if divided:
                count = own_rows(examples)[1]  # a process without rows has computed one
                self._parts.append((examples, True, [x[:count] for x in leaves]))
            else:
                self._parts.append((len(leaves[0]), False, leaves))

    def joined(self) -> Any:
        """Return the structure of joined arrays, equal in all processes."""
        arrays: list[Array] = []
        for column in range(len(self._parts[0][2])):
            parts = [leaves[column] for *_, leaves in self._parts]
            if not any(divided for _, divided, _ in self._parts):
                arrays.append(np.concatenate(parts))
            else:
                arrays.append(self._summed(parts))
        return structures.pack(self._outline, arrays)

    def _summed(self, parts: Sequence[Array]) -> Array:
        """Return the rows of all processes: a sum in which the bytes of all others are zero."""
        sizes = [
            examples if divided else len(x)
            for (examples, divided, _), x in zip(self._parts, parts, strict=True)
        ]
        own = np.concatenate(parts)
        shape = sum(sizes), *own.shape[1:]
        nbytes = int(np.prod(shape)) * own.itemsize
        memory = np.zeros(-(-nbytes // 4), "int32")
        whole = memory.view("uint8")[:nbytes].view(own.dtype).reshape(shape)
        first = taken = 0
        for size, (_, divided, _), part in zip(sizes, self._parts, parts, strict=True):
            place = first + (own_rows(size)[0] if divided else 0)
            if divided or process_group().rank == 0:
                whole[place : place + len(part)] = own[taken : taken + len(part)]
            first, taken = first + size, taken + len(part)
        for start in range(0, len(memory), MOST_WORDS):
            words = slice(start, start + MOST_WORDS)
            memory[words] = self._total(memory[words])
        return whole


def own_part(window: Window) -> Window:
    """Return the rows of each batch that this process computes; one if it has none."""
    examples = window.examples
    first, count = own_rows(examples)
    part = slice(first, first + count) if count else slice(0, 1)
    if window.rows is not None:
        rows = window.rows
        return Window.of_rows(Rows(rows.owner, rows.arrays, rows.indices[:, part]))
    own = structures.mapped(lambda x: x[:, part] if _has_rows(x, examples) else x, window.batches)
    return Window(own, window.count, max(count, 1))


def completed(window: Window) -> Window:
    """Return a window with the rows of all processes, of which each has its own in their places."""
    if window.shares is None or window.shares.whole:
        return window
    first, count = own_rows(window.examples)
    leaves = structures.flatten(window.batches)
    received = exchange_arrays([x[:, first : first + count] for x in leaves], AT)
    whole = [np.concatenate(parts, axis=1) for parts in zip(*received, strict=True)]
    return Window(structures.pack(window.batches, whole), window.count, window.examples)


def agree_on_dividing(whole: Any, own: Any, examples: int) -> bool:
    """Return whether in all processes the predictions of rows equal those of the whole batch.

    Args:
        whole: The predictions of a batch.
        own: Those of the rows of this process, or of one row if it has none.
        examples: The number of rows of the batch.
    """
    first, count = own_rows(examples)
    place = slice(first, first + count) if count else slice(0, 1)
    try:
        pairs = zip(structures.flatten(whole), structures.aligned(own, whole), strict=True)
        equal = all([_equal(np.asarray(a), np.asarray(b), examples, place) for a, b in pairs])
    except (ValueError, TypeError):
        equal = False
    return all(process_group().exchange(equal, AT))


def summation() -> Callable[[Array], Array] | None:
    """Return what sums an array over processes of which each computes alone, or None."""
    return active().summation() if process_group().size > 1 else None


def _equal(whole: Array, own: Array, examples: int, place: slice) -> bool:
    """Return whether outputs have a row for each example, and rows equal those of the batch."""
    if whole.ndim == 0 or len(whole) != examples:
        return False
    rows = whole[place]
    if rows.shape != own.shape or rows.dtype != own.dtype:
        return False
    if rows.dtype.kind in "biu":
        return bool((rows == own).all())
    a, b = rows.astype("float64"), own.astype("float64")
    size = float(np.nanmax(np.abs(np.where(np.isfinite(a), a, 0)), initial=0))
    limit = CLOSE.get(rows.itemsize, 1e-4) * size + 1e-7
    return bool(np.allclose(a, b, rtol=0, atol=limit, equal_nan=True))


def _has_rows(x: Array, examples: int) -> bool:
    return x.ndim > 1 and x.shape[1] == examples
