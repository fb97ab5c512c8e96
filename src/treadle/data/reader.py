"""How sources that give one batch after another are read in windows."""

import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

import numpy as np

from ..backends.window import Window
from ..core.hook import LoopView
from ..errors import DataError
from . import random_states
from .leaves import Array, Path, as_array, examples_in, flattened, packed, refuse_lists, sliced
from .reading import Reading
from .source import Position
from .states import Keeper, Resumable

STATES_KEPT: Final = 12
"""States of an iterator that are kept, the older the farther apart: a resumed run goes on from the
newest that is no newer than what was trained on, and draws again what lies between."""

DRAWING_SECONDS: Final = 0.3
"""A window is closed after this time: a slow source must not hide a run for many batches."""


class CountingReader(ABC):
    """What readers share: they count what they give, and an epoch without a batch is an error.

    Attributes:
        given: How many batches of the epoch were given, those passed over at the start included.
    """

    def __init__(self, epoch: int, start: int) -> None:
        self.given = start
        self._epoch = epoch

    def take(self, most: int) -> Window | None:
        """Return the next batches, at most `most` and all of equal form; None at the epoch's end.

        Raises:
            DataError: The epoch has no batch at all.
        """
        window = self._draw(most)
        if window is not None:
            self.given += window.count
        elif self.given == 0:
            raise DataError(
                f"the source gave no batch in epoch {self._epoch + 1}: is it empty, or spent?"
            )
        return window

    def put_back(self, window: Window) -> None:
        """Take back what was taken last and not trained on: the next `take` begins with it."""
        self._return(window)
        self.given -= window.count

    @abstractmethod
    def position(self, ahead: int = 0) -> Position | None:
        """Return what beside (epoch, batch) is needed to go on from here."""

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
        batches: Called when the first batch is needed; returns the iterator, a `Resumable` where it
            has a state.
        reading: From where; random states are keyed by it.
        closed: Draw one batch at a time: it may depend on the steps before it.
    """

    def __init__(
        self,
        batches: Callable[[], Iterator[Any]],
        reading: Reading,
        *,
        closed: bool = False,
    ) -> None:
        super().__init__(reading.epoch, reading.start)
        self._open: Final = batches
        self._reading: Final = reading
        self._closed: Final = closed
        self._iterator: Iterator[Any] | None = None
        self._ended = reading.ended()
        self._let_go = False
        self._drawn = reading.start if self._ended else reading.first
        self._states: list[tuple[int, Any]] = []  # each after so many batches were drawn
        self._waiting: deque[_Batch] = deque()
        self._failure: Exception | None = None

    def position(self, ahead: int = 0) -> Position | None:
        """Return a state of the iterator, and after how many batches of the epoch it was that."""
        iterator = self._iterator
        if iterator is None:
            return self._reading.position
        if not isinstance(iterator, Resumable):
            return None
        at_rest = not ahead and self._failure is None
        here = at_rest and not self._waiting
        over = at_rest and (self._ended or self._let_go) and iterator.lasting
        if here and iterator.opening is None and (over or not self._let_go):
            self._keep_state(iterator, anew=over)
        target = self.given - ahead
        known = [kept for kept in self._states if kept[0] <= target]
        batch, state = known[-1] if known else (target, iterator.state())
        found = {"epoch": self._reading.epoch, "batch": batch, "state": state}
        if over and (iterator.opening is not None or not here):
            found["after"] = iterator.state()
        ended = here and self._ended and iterator.opening is None
        return found | {"ended": True} if ended else found

    def catch_up(self) -> None:
        """Draw and discard what comes before the start now: what lasts is then as it was there."""
        with random_states.preserved():
            if self._iterator is None:
                self._iterator = self._opened()
            self._next(until=self._reading.start)

    def close(self) -> None:
        """Let go of threads and files: closes a generator."""
        self._let_go = True
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()

    def _draw(self, most: int) -> Window | None:
        most = 1 if self._closed else most
        if isinstance(self._iterator, Resumable) and not self._waiting and not self._ended:
            if self._iterator.costly:
                self._states = [kept for kept in self._states if kept[0] == self._drawn]
            elif self._iterator.opening is None:
                self._keep_state(self._iterator)
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

    def _opened(self) -> Iterator[Any]:
        """Return the iterator, made with the random states of the epoch's first batch."""
        random_states.seed_for_batch(self._reading.seed, self._reading.epoch, 0)
        iterator = self._open()
        if not isinstance(iterator, Resumable):
            return iterator
        try:
            state = iterator.state() if iterator.opening is None else iterator.opening
        except DataError as error:
            if not iterator.optional:
                raise
            told = f"{error}. A resumed run draws and discards the batches before its position"
            warnings.warn(told, stacklevel=2)
            return iterator.iterator
        self._states.append((self._drawn, state))
        return iterator

    def _keep_state(self, iterator: Resumable, anew: bool = False) -> None:
        """Keep the state at this batch, once unless asked for anew."""
        if self._states and self._states[-1][0] == self._drawn:
            if not anew:
                return
            del self._states[-1]
        kept = self._states
        kept.append((self._drawn, iterator.state()))
        if len(kept) > STATES_KEPT:  # the one goes whose neighbours are nearest, for its age
            ages = [self._drawn - batch for batch, _ in kept]
            del kept[
                min(range(1, len(kept) - 1), key=lambda i: (ages[i - 1] - ages[i + 1]) / ages[i])
            ]

    def _next(self, until: int | None = None) -> _Batch | None:
        """Return the next batch from the start on, or None at the end, or `until` this batch."""
        if self._waiting:
            return self._waiting.popleft()
        start, epoch = self._reading.start, self._reading.epoch
        if self._failure is not None:
            raise self._failure
        while not self._ended and self._drawn != until:
            number = self._drawn
            try:
                if self._iterator is None:
                    self._iterator = self._opened()
                if number:  # the first batch goes on with the random states of the opening
                    random_states.seed_for_batch(self._reading.seed, epoch, number)
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
        batches: Returns an iterator over the batches of an epoch, from `Reading.first` on.
        length: Batches in an epoch, or None where that is unknown or endless.
        endless: True where an epoch is known never to end.
        batch_examples: Examples in a full batch, or None where that is unknown.
        inexact: Why a run on this source cannot be resumed exactly; None where it can.
        seeks: Whether `batches` can begin anywhere; else it begins with the epoch's first batch, or
            with that of a position, and what comes before the start is discarded.
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
        position: Position | None = None,
    ) -> BatchReader:
        """Read an epoch from its batch number `start` on; the order is the source's own.

        Raises:
            DataError: The epoch has fewer batches than `start`.
        """
        refuse_beyond(start, self.length, epoch)
        seed = seed if self.seed is None else self.seed
        reading = Reading.of(epoch, start, seed, loop, position, self.seeks)
        reader = BatchReader(lambda: self.batches(reading), reading, closed=self.closed)
        if start and position is not None and position["epoch"] == epoch:
            reader.catch_up()  # nobody may ask for more of this epoch, and for the next one then
        return reader


def lasting(
    batches: Callable[[Reading], Iterator[Any]], keeper: Keeper | None, costly: bool = False
) -> Callable[[Reading], Iterator[Any]]:
    """Let the object that makes the batches go on from where a position says.

    Args:
        batches: Returns an iterator over the batches of an epoch, from `Reading.first` on.
        keeper: What keeps the object's state; None where it has none.
        costly: Ask for the state no more often than it must be.
    """
    if keeper is None:
        return batches

    def opened(reading: Reading) -> Iterator[Any]:
        state = reading.state()
        state = reading.before() if state is None else state
        if state is not None:
            keeper.restore(state)
            random_states.seed_for_batch(reading.seed, reading.epoch, 0)
        iterator = batches(reading)
        return Resumable(iterator, keeper.state, name=keeper.name, lasting=True, costly=costly)

    return opened


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
