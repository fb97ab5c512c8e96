"""Reading iterators of batches in windows, with resumable positions."""

import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Final

import numpy as np

from ..backends.window import Window, form_of
from ..core import structures
from ..errors import DataError
from . import random_states
from .iterables import StackingIterator
from .leaves import Array, as_arrays, each_of, refuse_lists, window_of
from .source import BaseSource, Position, ReadRequest
from .states import Keeper, Resumable

STATES_KEPT: Final = 12
"""The number of iterator states that are kept, with older ones further apart. A resumed run starts
from the newest state at or before the trained batches, and draws the batches in between again."""

DRAWING_SECONDS: Final = 0.3
"""A window ends after this time, so that a slow source does not delay progress for many batches."""


class CountingReader(ABC):
    """Base class of readers that counts batches and rejects an epoch without batches.

    Attributes:
        given: The number of batches of the epoch returned so far, including those skipped at the
            start.
    """

    def __init__(self, epoch: int, start: int) -> None:
        self.given = start
        self._epoch = epoch

    def take(self, most: int) -> Window | None:
        """Return up to `most` batches with equal shapes and dtypes; None at the end of the epoch.

        Raises:
            DataError: If the epoch has no batches.
        """
        window = self._draw(most)
        if window is not None:
            self.given += window.count
        elif self.given == 0:
            raise DataError(
                f"the source gave no batch in epoch {self._epoch + 1}: is it empty or exhausted?"
            )
        return window

    def put_back(self, window: Window) -> None:
        """Put back the window taken last; the next `take` returns it first."""
        self._return(window)
        self.given -= window.count

    @abstractmethod
    def position(self, ahead: int = 0) -> Position | None:
        """Return the state needed, in addition to (epoch, batch), to continue from here."""

    @abstractmethod
    def close(self) -> None:
        """Release threads and files."""

    @abstractmethod
    def _draw(self, most: int) -> Window | None:
        """Return the next batches, or None at the end of the epoch."""

    @abstractmethod
    def _return(self, window: Window) -> None:
        """Make the next `_draw` return this window first."""


@dataclass(frozen=True, slots=True)
class _Batch:
    structure: Any
    leaves: list[Array]
    form: Hashable

    @classmethod
    def of(cls, structure: Any) -> "_Batch":
        if structure is None:
            raise DataError("the source gave None where a batch was expected")
        refuse_lists(structure)
        arrays = as_arrays(structure)
        return cls(arrays, structures.flatten(arrays), form_of(arrays))


class BatchReader(CountingReader):
    """Reads an iterator of batches, and stacks batches with equal shapes and dtypes into windows.

    Every batch is copied into its window immediately, since an iterator may reuse its arrays. A
    batch that differs from the previous ones starts the next window. An exception is also deferred
    to the next window, so that the batches before it can be trained on.

    Args:
        batches: Returns the iterator; called when the first batch is needed. The iterator is a
            `Resumable` if it has a state.
        reading: The starting point, which also determines the random states.
        closed_loop: Read one batch at a time, since batches depend on previous steps.
        length: Returns the number of batches of the epoch, if it is a part of the position.
    """

    def __init__(
        self,
        batches: Callable[[], Iterator[Any]],
        reading: ReadRequest,
        *,
        closed_loop: bool = False,
        length: Callable[[], int | None] | None = None,
    ) -> None:
        super().__init__(reading.epoch, reading.start)
        self._open: Final = batches
        self._reading: Final = reading
        self._closed_loop: Final = closed_loop
        self._length: Final = length
        self._iterator: Iterator[Any] | None = None
        # Whether the iterator ended, and whether the newest state is one after its end.
        self._ended = self._kept_at_end = reading.ended()
        self._let_go = False
        self._drawn = reading.start if self._ended else reading.first
        self._states: list[tuple[int, Any]] = []  # pairs: number of batches drawn, state after
        self._waiting: deque[_Batch] = deque()
        self._failure: Exception | None = None

    def position(self, ahead: int = 0) -> Position | None:
        """Return a state of the iterator, and the number of batches drawn before it."""
        iterator = self._iterator
        if iterator is None:
            return self._reading.position
        if not isinstance(iterator, Resumable):
            return None
        at_rest = not ahead and self._failure is None
        here = at_rest and not self._waiting
        over = at_rest and (self._ended or self._let_go) and iterator.lasting
        if here and iterator.opening is None and (over or not self._let_go):
            self._keep_state(iterator, overwrite=over)
        target = self.given - ahead
        known = [kept for kept in self._states if kept[0] <= target]
        batch, state = known[-1] if known else (target, iterator.state())
        found = {"epoch": self._reading.epoch, "batch": batch, "state": state}
        if self._length is not None:
            found["length"] = self._length()
        if over and (iterator.opening is not None or not here):
            found["after"] = iterator.state()
        ended = here and self._kept_at_end and iterator.opening is None
        return found | {"ended": True} if ended else found

    def catch_up(self) -> None:
        """Draw and discard the batches before the start, to restore the source state there."""
        with random_states.preserved():
            if self._iterator is None:
                self._iterator = self._opened()
            self._next(until=self._reading.start)

    def close(self) -> None:
        """Release threads and files, by closing a generator; forget an error.

        An iterator that can be read only once continues after an error, if it can.
        """
        self._let_go, self._failure = True, None
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()

    def take_each(self, most: int) -> list[Any]:
        """Return up to `most` batches of any shapes, not stacked; none at the end of the epoch."""
        found: list[Any] = []
        if self._stacking() is None:
            until = monotonic() + DRAWING_SECONDS
            with random_states.preserved(), suppress(Exception):  # `take` raises it again
                while len(found) < most and monotonic() < until and (batch := self._next()):
                    found.append(structures.pack(batch.structure, map(np.array, batch.leaves)))
        self.given += len(found)
        return found or each_of(self.take(most))

    def _draw(self, most: int) -> Window | None:
        most = 1 if self._closed_loop else most
        if isinstance(self._iterator, Resumable) and not self._waiting and not self._ended:
            if self._iterator.costly:
                self._states = [kept for kept in self._states if kept[0] == self._drawn]
            elif self._iterator.opening is None:
                self._keep_state(self._iterator)
        stacking = self._stacking()
        if stacking is not None:
            return self._draw_stacked(stacking, most)
        with random_states.preserved():
            batch = self._next()
            if batch is None:
                return None
            stacks = [np.empty((most, *leaf.shape), leaf.dtype) for leaf in batch.leaves]
            count, following = 0, batch
            until = monotonic() + DRAWING_SECONDS
            while following is not None and following.form == batch.form:
                for stack, leaf in zip(stacks, following.leaves, strict=True):
                    stack[count] = leaf
                count += 1
                try:
                    more = count < most and monotonic() < until
                    following = self._next() if more else None
                except Exception:
                    following = None  # `_next` raises it again
            if following is not None:
                self._waiting.appendleft(following)
        stacked = structures.pack(batch.structure, [stack[:count] for stack in stacks])
        window = window_of(stacked, count)
        window.form = batch.form
        return window

    def finish(self) -> None:
        """End the epoch here, if the iterator must know of its end, although batches may follow."""
        finish = getattr(self._unwrapped, "finish", None)
        if callable(finish) and not self._ended:
            with random_states.preserved():
                finish()
            self._waiting.clear()
            self._states = [kept for kept in self._states if kept[0] <= self.given]
            self._ended, self._failure, self._drawn = True, None, self.given

    @property
    def _unwrapped(self) -> Iterator[Any] | None:
        iterator = self._iterator
        return iterator.iterator if isinstance(iterator, Resumable) else iterator

    def _stacking(self) -> StackingIterator | None:
        """Return the iterator if it stacks batches itself, and the next ones come from it."""
        iterator = self._unwrapped
        next_ones = not self._waiting and not self._ended and self._failure is None
        if next_ones and self._drawn >= self._reading.start:
            return iterator if isinstance(iterator, StackingIterator) else None
        return None

    def _draw_stacked(self, iterator: StackingIterator, most: int) -> Window | None:
        """Draw a window from an iterator that draws from no random state and reuses no array."""
        try:
            structure, count = iterator.stacked(most, DRAWING_SECONDS)
            batches = _Batch.of(structure).structure
        except StopIteration:
            self._ended = True
            return None
        except Exception as error:
            self._fail(error, self._drawn)
            raise
        self._drawn += count
        return window_of(batches, count)

    def _fail(self, error: Exception, number: int) -> None:
        """Keep an error of a batch, which is raised again by later calls."""
        error.add_note(
            f"while the source was giving batch {number + 1} of epoch {self._reading.epoch + 1}"
        )
        self._failure = error

    def _return(self, window: Window) -> None:
        self._waiting.extendleft(map(_Batch.of, reversed(each_of(window))))

    def _opened(self) -> Iterator[Any]:
        """Create the iterator with the random states of the epoch's first batch."""
        random_states.seed_for_batch(self._reading.seed, self._reading.epoch, 0)
        iterator = self._open()
        if not isinstance(iterator, Resumable):
            return iterator
        try:
            state = iterator.state() if iterator.opening is None else iterator.opening
        except DataError as error:
            if not iterator.optional:
                raise
            message = f"{error}. A resumed run draws and discards the batches before its position"
            warnings.warn(message, stacklevel=2)
            return iterator.iterator
        self._states.append((self._drawn, state))
        return iterator

    def _keep_state(self, iterator: Resumable, overwrite: bool = False) -> None:
        """Keep the state at this batch; `overwrite` replaces a state kept there before."""
        if self._states and self._states[-1][0] == self._drawn:
            if not overwrite:
                return
            del self._states[-1]
        kept = self._states
        kept.append((self._drawn, iterator.state()))
        self._kept_at_end = self._ended
        if len(kept) > STATES_KEPT:  # drop the state whose neighbours are closest for its age
            ages = [self._drawn - batch for batch, _ in kept]
            del kept[
                min(range(1, len(kept) - 1), key=lambda i: (ages[i - 1] - ages[i + 1]) / ages[i])
            ]

    def _next(self, until: int | None = None) -> _Batch | None:
        """Return the next batch at or after the start; None at the end or at batch `until`."""
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
                if number:  # the first batch continues with the random states of `_opened`
                    random_states.seed_for_batch(self._reading.seed, epoch, number)
                structure = next(self._iterator)
                self._drawn += 1
                if number >= start:
                    return _Batch.of(structure)
            except StopIteration:
                self._ended = True
            except Exception as error:
                self._fail(error, number)
                raise
        if self._drawn < start:
            raise DataError(
                f"epoch {epoch + 1} ended after {self._drawn} batches, but {start} of its batches "
                f"were trained on before: this is not the data that the run began with"
            )
        return None


@dataclass(eq=False)
class BatchSource(BaseSource):
    """A source defined by a function that returns an iterator of batches.

    Attributes:
        batches: Returns an iterator over the batches of an epoch, starting at `ReadRequest.first`.
        length: The number of batches in the epoch that was opened last; None if unknown or endless.
        endless: Whether an epoch is known never to end.
        batch_examples: The number of examples in a full batch; None if unknown.
        inexact: The reason why the source cannot be resumed exactly; None if it can.
        seeks: Whether `batches` can start at any batch. Otherwise it starts with the first batch of
            the epoch or of a position, and batches before the start are discarded.
        seed: The seed of the source, or None for the seed of the run.
        closed_loop: Whether batches depend on previous steps.
        is_stored: Whether the batches are stored, so that reading one leaves no trace.
        zeros: Returns a batch of zeros, given the number of its examples, of a source that knows
            the form of its batches; None otherwise.
        count: Returns the number of batches of the epoch that begins; None if all have `length`.
        varies: Whether the data itself may change its length between epochs.
    """

    batches: Callable[[ReadRequest], Iterator[Any]]
    length: int | None
    endless: bool = False
    batch_examples: int | None = None
    inexact: str | None = None
    seeks: bool = True
    seed: int | None = None
    closed_loop: bool = False
    is_stored: bool = False
    zeros: Callable[[int], Any] | None = None
    count: Callable[[], int | None] | None = None
    varies: bool = False

    @property
    def length_varies(self) -> bool:
        """Whether the data itself may change its length between epochs."""
        return self.varies

    def open(self, request: ReadRequest) -> BatchReader:
        """Open a reader of the iterator of an epoch. `ordered` is ignored.

        Raises:
            DataError: If the epoch has fewer than `start` batches.
        """
        epoch, start, position = request.epoch, request.start, request.position
        inside = position is not None and position["epoch"] == epoch
        if position is not None and inside:
            self.length = position.get("length", self.length)
        elif self.count is not None and start == 0:
            self.length = self.count()
        refuse_beyond(start, self.length, epoch)
        if self.seed is not None:
            request = replace(request, seed=self.seed)
        reading = request.drawn(self.seeks)
        reader = BatchReader(
            lambda: self.batches(reading),
            reading,
            closed_loop=self.closed_loop,
            length=(lambda: self.length) if self.varies else None,
        )
        if start and inside:
            reader.catch_up()  # now, since the caller may continue with the next epoch
        return reader


def lasting(
    batches: Callable[[ReadRequest], Iterator[Any]], keeper: Keeper | None, costly: bool = False
) -> Callable[[ReadRequest], Iterator[Any]]:
    """Wrap `batches` so that the state of the object that makes them is saved and restored.

    Args:
        batches: Returns an iterator over the batches of an epoch, starting at `ReadRequest.first`.
        keeper: Saves and restores the object's state; None if it has none.
        costly: Save the state only when necessary.
    """
    if keeper is None:
        return batches

    def opened(reading: ReadRequest) -> Iterator[Any]:
        state = reading.last_state()
        if state is not None:
            keeper.restore(state)
            random_states.seed_for_batch(reading.seed, reading.epoch, 0)
        iterator = batches(reading)
        return Resumable(iterator, keeper.state, name=keeper.name, lasting=True, costly=costly)

    return opened


def refuse_beyond(start: int, length: int | None, epoch: int) -> None:
    """Reject a position beyond the end of an epoch.

    Raises:
        DataError: If the epoch has fewer than `start` batches.
    """
    if length is not None and start > length:
        raise DataError(
            f"epoch {epoch + 1} has {length} batches, but {start} of its batches were trained on "
            f"before: this is not the data that the run began with"
        )
