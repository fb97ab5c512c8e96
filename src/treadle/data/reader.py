"""How sources that give one batch after another are read in windows."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

import numpy as np

from ..backends.window import Window
from ..errors import DataError
from ..hook import LoopView
from . import random_states
from .leaves import Array, Path, as_array, examples_in, flattened, packed, refuse_lists, sliced

DRAWING_SECONDS: Final = 0.3
"""A window is closed after this time: a slow source must not hide a run for many batches."""


class CountingReader(ABC):
    """What readers share: they count what they give, and an epoch without a batch is an error.

    Attributes:
        position: How many batches of the epoch were given, those passed over at the start included.
    """

    def __init__(self, epoch: int, start: int) -> None:
        self.position = start
        self._epoch = epoch

    def take(self, most: int) -> Window | None:
        """Return the next batches, at most `most` and all of equal form; None at the epoch's end.

        Raises:
            DataError: The epoch has no batch at all.
        """
        window = self._draw(most)
        if window is not None:
            self.position += window.count
        elif self.position == 0:
            raise DataError(
                f"the source gave no batch in epoch {self._epoch + 1}: is it empty, or spent?"
            )
        return window

    def put_back(self, window: Window) -> None:
        """Take back what was taken last and not trained on: the next `take` begins with it."""
        self._return(window)
        self.position -= window.count

    @abstractmethod
    def close(self) -> None:
        """Let go of threads and files."""

    @abstractmethod
    def _draw(self, most: int) -> Window | None:
        """Return the next batches, or None at the epoch's end."""

    @abstractmethod
    def _return(self, window: Window) -> None:
        """Let `_draw` begin with this window."""


@dataclass(frozen=True, slots=True)
class Reading:
    """From where an epoch is read, and for whom.

    Attributes:
        epoch: The epoch's number, from 0.
        start: Batches of this epoch to pass over.
        seed: The source's own seed, or else the run's.
        loop: What is running, or None outside a loop.
    """

    epoch: int
    start: int
    seed: int
    loop: LoopView | None = None


@dataclass(frozen=True, slots=True)
class _Batch:
    structure: Any
    paths: list[Path]
    leaves: list[Array | None]

    @classmethod
    def of(cls, structure: Any) -> "_Batch":
        if structure is None:
            raise DataError("the source gave None where a batch was expected")
        pairs = flattened(structure)
        refuse_lists(structure, pairs)
        return cls(structure, [p for p, _ in pairs], [as_array(p, leaf) for p, leaf in pairs])

    def is_like(self, other: "_Batch") -> bool:
        return self.paths == other.paths and all(
            (a is None and b is None)
            or (a is not None and b is not None and a.shape == b.shape and a.dtype == b.dtype)
            for a, b in zip(self.leaves, other.leaves, strict=True)
        )


class BatchReader(CountingReader):
    """Reads an iterator of batches, and stacks equal ones to windows.

    Every batch is copied into its window as soon as it is there, since an iterator may refill the
    arrays that it gave before. One that differs from those before it waits for the next window, and
    so does an exception: the batches before it can be trained on, however long windows are.

    Args:
        batches: Called when the first batch is needed; returns the iterator.
        reading: From where; random states are keyed by it.
        first: The number of the batch that the iterator gives first; those from there to the start
            are drawn and discarded.
        closed: Draw one batch at a time: it may depend on the steps before it.
    """

    def __init__(
        self,
        batches: Callable[[], Iterator[Any]],
        reading: Reading,
        *,
        first: int,
        closed: bool = False,
    ) -> None:
        super().__init__(reading.epoch, reading.start)
        self._open: Final = batches
        self._reading: Final = reading
        self._closed: Final = closed
        self._iterator: Iterator[Any] | None = None
        self._drawn = first
        self._waiting: deque[_Batch] = deque()
        self._ended = False
        self._failure: Exception | None = None

    def close(self) -> None:
        """Let go of threads and files: closes a generator."""
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()

    def _draw(self, most: int) -> Window | None:
        most = 1 if self._closed else most
        with random_states.preserved():
            batch = self._next()
            if batch is None:
                return None
            stacks = [
                None if leaf is None else np.empty((most, *leaf.shape), leaf.dtype)
                for leaf in batch.leaves
            ]
            count, following = 0, batch
            until = monotonic() + DRAWING_SECONDS
            while following is not None and following.is_like(batch):
                for stack, leaf in zip(stacks, following.leaves, strict=True):
                    if stack is not None:
                        stack[count] = leaf
                count += 1
                try:
                    more = count < most and monotonic() < until
                    following = self._next() if more else None
                except Exception:
                    following = None  # `_next` raises it again
            if following is not None:
                self._waiting.appendleft(following)
        leaves = [None if stack is None else stack[:count] for stack in stacks]
        return Window(packed(batch.structure, leaves), count, examples_in(batch.leaves))

    def _return(self, window: Window) -> None:
        rows = [_Batch.of(sliced(window.batches, index)) for index in range(window.count)]
        self._waiting.extendleft(reversed(rows))

    def _next(self) -> _Batch | None:
        """Return the next batch from the start on, or None at the end."""
        if self._waiting:
            return self._waiting.popleft()
        start, epoch = self._reading.start, self._reading.epoch
        if self._failure is not None:
            raise self._failure
        while not self._ended:
            number = self._drawn
            random_states.seed_for_batch(self._reading.seed, epoch, number)
            try:
                if self._iterator is None:
                    self._iterator = self._open()
                structure = next(self._iterator)
                self._drawn += 1
                if number >= start:
                    return _Batch.of(structure)
            except StopIteration:
                self._ended = True
            except Exception as error:
                error.add_note(
                    f"while the source was giving batch {number + 1} of epoch {epoch + 1}"
                )
                self._failure = error
                raise
        if self._drawn < start:
            raise DataError(
                f"epoch {epoch + 1} ended after {self._drawn} batches, but {start} of its batches "
                f"were trained on before: this is not the data that the run began with"
            )
        return None


@dataclass(frozen=True, eq=False)
class BatchSource:
    """A source made of a function that gives an iterator of batches.

    Attributes:
        batches: Returns an iterator over the batches of an epoch: from the start where the source
            seeks, else from the epoch's first batch, and those before the start are discarded.
        length: Batches in an epoch, or None where that is unknown or endless.
        endless: True where an epoch is known never to end.
        batch_examples: Examples in a full batch, or None where that is unknown.
        inexact: Why a run on this source cannot be resumed exactly; None where it can.
        seeks: Whether `batches` begins at the start that it is told.
        seed: The source's own seed, or None for the run's.
        closed: Whether a batch may depend on the steps before it.
    """

    batches: Callable[[Reading], Iterator[Any]]
    length: int | None
    endless: bool = False
    batch_examples: int | None = None
    inexact: str | None = None
    seeks: bool = True
    seed: int | None = None
    closed: bool = False

    def read(
        self,
        epoch: int,
        start: int = 0,
        *,
        seed: int = 0,
        loop: LoopView | None = None,
        ordered: bool = False,
    ) -> BatchReader:
        """Read an epoch from its batch number `start` on; the order is the source's own.

        Raises:
            DataError: The epoch has fewer batches than `start`.
        """
        refuse_beyond(start, self.length, epoch)
        reading = Reading(epoch, start, seed if self.seed is None else self.seed, loop)
        return BatchReader(
            lambda: self.batches(reading),
            reading,
            first=start if self.seeks else 0,
            closed=self.closed,
        )


def refuse_beyond(start: int, length: int | None, epoch: int) -> None:
    """Refuse a position that an epoch of this length does not have.

    Raises:
        DataError: There are fewer batches than `start`.
    """
    if length is not None and start > length:
        raise DataError(
            f"epoch {epoch + 1} has {length} batches, but {start} of its batches were trained on "
            f"before: this is not the data that the run began with"
        )
