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

from ..backends.base import Caller
from ..backends.window import Window, own_rows
from ..core import structures
from ..core.processes import ProcessGroup
from ..run.predictions import Array, Predictions
from .dividing.agreement import completed, first_rows, lacking_memory, rows_to_compare
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
        own = window.of_each(self._part(window.examples))
        known = self._known.get(window.form)
        # If a Python value of the task has changed, the caller is a new one: perhaps in one process
        # only, since each has other forms of rows.
        is_new = known is None or known[0] is not self._caller_of(own if known[1] else window)
        if any(self._group.exchange(is_new, AT)) or known is None:
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

    def _part(self, examples: int) -> slice:
        """Return the rows of a batch that this process computes; the first one if it has none."""
        first, count = self._place(examples)
        return slice(first, first + count) if count else slice(0, 1)

    def _is_divisible(self, window: Window) -> bool:
        """Return whether in all processes the predictions of rows equal those of a batch.

        If a process has too little memory for a batch, its first rows are compared.
        """
        batch, examples = completed(window.split(1)[0], self._group).batch(0), window.examples
        for count in (examples, rows_to_compare(examples, self._group.size)):
            equal: bool | None = None
            with lacking_memory():
                equal = self._is_equal(first_rows(batch, examples, count), count)
            everyone = self._group.exchange(equal, AT)
            if None not in everyone:
                return all(everyone)
        return False

    def _is_equal(self, batch: Any, examples: int) -> bool:
        """Return whether the predictions of the rows of this process equal those of a batch."""
        place = self._part(examples)
        own = structures.mapped(lambda x: x[place] if has_rows(x, examples) else x, batch)
        whole = self._caller(batch).start([batch], 0)()
        try:  # it may fail for so many rows
            part = self._caller(own).start([own], 0)()
            pairs = zip(structures.flatten(whole), structures.aligned(part, whole), strict=True)
            return all([_equal(np.asarray(a), np.asarray(b), examples, place) for a, b in pairs])
        except Exception:
            return False


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
