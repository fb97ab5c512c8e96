"""Predictions of several processes, each of which computes those of its rows of every batch.

They are divided only if that changes nothing: for the first batch of each form, the predictions
of its first rows, as many as one process computes, are compared with those of the same rows divided
among all. If they differ in one process, because examples are combined, random numbers are drawn,
or an output has no row for each example, all processes compute all of them.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np

from ..backends.base import Caller
from ..backends.window import Window, own_rows
from ..core import structures
from ..core.processes import ProcessGroup
from ..run.predictions import Array, Predictions
from .dividing.agreement import completed, first_rows, rows_to_compare
from .dividing.rows import has_rows

MOST_WORDS: Final = 4 << 20
"""The most numbers of four bytes that processes sum in one message."""
TOGETHER: Final = 64
"""The number of batches whose outputs processes exchange together."""
CLOSE: Final = {2: 2e-2, 4: 1e-4, 8: 1e-4}
"""By how much floats of so many bytes may differ, relative to the largest one: by rounding."""
AT: Final = "comparing predictions of rows with those of a batch"


class DividedPredictions:
    """Joins the outputs of batches, of which this process has computed its rows or all.

    Args:
        group: The processes.
        total: Returns the sum of an array over all processes.
        predictions: Joins outputs with the rows of all processes.
        caller: Returns the compiled function for batches like the given one.
        known: For each form of batch, its compiled function, and whether predictions of rows equal
            those of the whole batch; it is updated.
    """

    def __init__(
        self,
        group: ProcessGroup,
        total: Callable[[Array], Array],
        predictions: Predictions,
        caller: Callable[[Any], Caller],
        known: dict[Any, tuple[Caller, bool]],
    ) -> None:
        self._group, self._total, self._predictions = group, total, predictions
        self._caller, self._known = caller, known
        # The rows of whole batches that run, and whether their outputs are those of own rows.
        self._expected: deque[tuple[int, bool]] = deque()
        self._waiting: list[Any] = []

    def __bool__(self) -> bool:
        """Return whether any outputs were added."""
        return bool(self._waiting or self._predictions)

    def own_part(self, window: Window) -> Window:
        """Return the rows of a window for this process to predict on, or the whole window."""
        own = self._rows_of(window)
        known = self._known.get(window.form)
        # If a Python value of the task has changed, the caller is a new one.
        if known is None or known[0] is not self._caller_of(own if known[1] else window):
            is_divided = self._is_divisible(window)
            known = self._caller_of(own if is_divided else window), is_divided
            self._known[window.form] = known
        self._expected.extend([(window.examples, known[1])] * window.count)
        return own if known[1] else completed(window, self._group)

    def add_all(self, batches: Iterable[Any]) -> None:
        """Add the outputs of the next batches."""
        for outputs in batches:
            self._waiting.append(outputs)
            if len(self._waiting) == TOGETHER:
                self._complete()

    def joined(self) -> Any:
        """Return the structure of joined arrays, equal in all processes."""
        self._complete()
        return self._predictions.joined()

    def _complete(self) -> None:
        """Complete the outputs that wait with the rows of other processes."""
        waiting = [(outputs, *self._expected.popleft()) for outputs in self._waiting]
        self._waiting = []
        rows = [
            self._in_place(np.asarray(x), examples)
            for outputs, examples, divided in waiting
            if divided
            for x in structures.flatten(outputs)
        ]
        completed = iter(self._summed(rows) if rows else ())
        for outputs, _, divided in waiting:
            if divided:
                outputs = structures.mapped(lambda _: next(completed), outputs)
            self._predictions.add(outputs)

    def _in_place(self, own: Array, examples: int) -> Array:
        """Return an array for the whole batch, with zeros in the rows of others."""
        first, count = self._place(examples)
        whole = np.zeros((examples, *own.shape[1:]), own.dtype)
        whole[first : first + count] = own[:count]  # a process without rows has computed one
        return whole

    def _summed(self, arrays: Sequence[Array]) -> list[Array]:
        """Sum arrays over the processes; each byte is nonzero in at most one of them."""
        raw = [x.reshape(-1).view("uint8") for x in arrays]
        size = sum(map(len, raw))
        words = np.concatenate([*raw, np.zeros(-size % 4, "uint8")]).view("int32")
        for start in range(0, len(words), MOST_WORDS):
            part = slice(start, start + MOST_WORDS)
            words[part] = self._total(words[part])
        parts = np.split(words.view("uint8")[:size], np.cumsum([len(x) for x in raw])[:-1])
        return [part.view(x.dtype).reshape(x.shape) for part, x in zip(parts, arrays, strict=True)]

    def _caller_of(self, window: Window) -> Caller:
        return self._caller(next(window.views()))

    def _place(self, examples: int) -> tuple[int, int]:
        return own_rows(examples, self._group.rank, self._group.size)

    def _rows_of(self, window: Window) -> Window:
        """Return the rows of each batch that this process computes; one if it has none."""
        first, count = self._place(window.examples)
        return window.of_each(slice(first, first + count) if count else slice(0, 1))

    def _is_divisible(self, window: Window) -> bool:
        """Return whether in all processes the predictions of rows equal those of a batch.

        Compared are the first rows of the window, as many as one process computes.
        """
        examples, size = window.examples, self._group.size
        few = rows_to_compare(examples, size)
        is_apart = window.shares is not None and not window.shares.whole
        batch = first_rows(window.batch(0), examples, few, self._group if is_apart else None)
        first, count = self._place(few)
        place = slice(first, first + count) if count else slice(0, 1)
        part = structures.mapped(lambda x: x[place] if has_rows(x, few) else x, batch)
        try:  # it may fail for so many rows
            whole, own = (self._caller(rows).start([rows], 0)() for rows in (batch, part))
            pairs = zip(structures.flatten(whole), structures.aligned(own, whole), strict=True)
            equal = all([_equal(np.asarray(a), np.asarray(b), few, place) for a, b in pairs])
        except Exception:
            equal = False
        return all(self._group.exchange(equal, AT))


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
