"""Epochs of at most so many batches, also of streams that have none of their own."""

from collections.abc import Callable
from typing import Any, Final

from ..backends.window import Window
from ..core.hook import LoopView
from ..errors import DataError, whole_number
from .foreign.sources import as_source
from .reader import refuse_beyond
from .source import Position, Reader, Source, position_of, read_from

DISCARDED_AT_ONCE: Final = 16
"""Batches that lie in memory together while a stream is drawn up to a position."""


def limited(source: Any, batches: int) -> "LimitedSource":
    """End each epoch after at most `batches` batches.

    Where the source knows its length, every epoch reads its first `batches` batches. Any other
    source (an endless stream, a generator) goes on: each epoch begins where the one before it
    ended. Where such a stream turns out to end, the epoch ends there, and the next one begins
    the stream anew. Reading epoch 0 again begins at the first batch again.

    Args:
        source: Anything that is accepted as a source.
        batches: The most batches in an epoch.

    Raises:
        DataError: `batches` is no whole number from 1.

    Example:
        >>> import itertools
        >>> source = limited(itertools.count(), 3)
        >>> [source.read(epoch).take(5).batches.tolist() for epoch in (0, 1)]
        [[0, 1, 2], [3, 4, 5]]
    """
    batches = whole_number("batches", batches, DataError)
    return LimitedSource(as_source(source), batches)


class LimitedSource:
    """A source whose epochs end early; made by `limited`.

    Attributes:
        source: What is read.
        batches: The most batches in an epoch.
        endless: False: every epoch ends.
    """

    def __init__(self, source: Source, batches: int) -> None:
        self.source = source
        self.batches = batches
        self.endless = False
        self._stream: Stream | None = None

    @property
    def length(self) -> int | None:
        """Batches in an epoch; None where the source may end sooner and cannot tell."""
        if self.source.endless:
            return self.batches
        return None if self.source.length is None else min(self.source.length, self.batches)

    @property
    def batch_examples(self) -> int | None:
        """Examples in a full batch."""
        return self.source.batch_examples

    @property
    def fingerprint(self) -> str | None:
        """What tells other data of the same shapes, where the source can tell."""
        return getattr(self.source, "fingerprint", None)

    @property
    def inexact(self) -> str | None:
        """Why the source cannot be resumed exactly."""
        return self.source.inexact

    @property
    def closed(self) -> bool:
        """Whether the source's batches depend on the state of the run."""
        return self.source.closed

    def read(
        self,
        epoch: int,
        start: int = 0,
        *,
        seed: int = 0,
        loop: LoopView | None = None,
        ordered: bool = False,
        position: Position | None = None,
    ) -> "Head | Stream":
        """Read an epoch from its batch number `start` on.

        A stream goes on where it was left. Anywhere else it is begun again, with the pass that its
        position tells; without one, where it cannot seek, all batches before the start, those of
        earlier epochs too, are drawn and discarded.

        Raises:
            DataError: The epoch has fewer batches than `start`.
        """

        def open_pass(number: int, first: int, at: Position | None) -> Reader:
            return read_from(self.source, number, first, at, seed=seed, loop=loop, ordered=ordered)

        refuse_beyond(start, self.length, epoch)
        if self.source.length is not None:
            return Head(open_pass(epoch, start, position), self.batches - start)
        stream = self._stream
        if stream is None or stream.asked != (seed, loop, ordered) or not stream.at(epoch, start):
            stream = Stream(open_pass, self.batches, (seed, loop, ordered))
            if position is not None:
                stream.jump(epoch, start, position)
            elif self.source.endless:
                stream.jump(epoch, start, {"pass": 0, "batch": epoch * self.batches + start})
            else:
                stream.discard_until(epoch, start)
            self._stream = stream
        return stream


class Head:
    """Reads the first batches of an epoch.

    Args:
        reader: Reads the epoch.
        left: How many batches may still be given.
    """

    def __init__(self, reader: Reader, left: int) -> None:
        self._reader = reader
        self._left = left

    def take(self, most: int) -> Window | None:
        """Return the next batches; None at the epoch's end or where enough were given."""
        if self._left == 0:  # a source that is asked for nothing draws nothing
            return None
        window = self._reader.take(min(most, self._left))
        if window is not None:
            self._left -= window.count
        return window

    def put_back(self, window: Window) -> None:
        """Give this window again."""
        self._reader.put_back(window)
        self._left += window.count

    def position(self, ahead: int = 0) -> Position | None:
        """Return the position of the epoch's reader."""
        return position_of(self._reader, ahead)

    def close(self) -> None:
        """Close the epoch's reader."""
        self._reader.close()


class Stream:
    """Reads one epoch after another from the passes of a source.

    Args:
        open_pass: Given the number of a pass, of its first batch, and the position there, returns a
            reader.
        batches: The most batches in an epoch.
        asked: Seed, loop and order that the passes are read with.
    """

    def __init__(
        self,
        open_pass: Callable[[int, int, Position | None], Reader],
        batches: int,
        asked: tuple[int, LoopView | None, bool],
    ) -> None:
        self.asked: Final = asked
        self._open_pass: Final = open_pass
        self._batches: Final = batches
        self._pass = 0
        self._given = 0  # batches of the pass
        self._part: Position | None = None
        self._reader: Reader | None = None
        self._epoch = 0
        self._batch = 0
        self._ended = False

    def at(self, epoch: int, start: int) -> bool:
        """Say whether the next batch is this one, after going on to the next epoch if need be."""
        if epoch == self._epoch + 1 and start == 0 and self._epoch_is_over():
            self._epoch, self._batch, self._ended = epoch, 0, False
        return (epoch, start) == (self._epoch, self._batch)

    def jump(self, epoch: int, start: int, position: Position) -> None:
        """Begin at this batch of this epoch, where the position says how the stream stood."""
        inside = position.get("epoch") == epoch
        self._epoch, self._batch = epoch, position["at"] if inside else start
        self._pass, self._given = position["pass"], position["batch"]
        self._part = position.get("part")

    def discard_until(self, epoch: int, start: int) -> None:
        """Draw and discard all batches before this position.

        Raises:
            DataError: The epoch has fewer batches than `start`.
        """
        while self._epoch < epoch:
            while self.take(DISCARDED_AT_ONCE) is not None:
                pass
            self.at(self._epoch + 1, 0)
        while self._batch < start:
            if self.take(min(DISCARDED_AT_ONCE, start - self._batch)) is None:
                refuse_beyond(start, self._batch, epoch)

    def take(self, most: int) -> Window | None:
        """Return the next batches of the epoch; None at its end."""
        if self._epoch_is_over():
            return None
        if self._reader is None:
            self._reader = self._open_pass(self._pass, self._given, self._part)
        most = min(most, self._batches - self._batch)
        window = self._reader.take(most)
        if window is None and self._batch == 0:  # the pass ended just where the last epoch did
            self._reader.close()
            self._pass, self._given, self._part = self._pass + 1, 0, None
            self._reader = self._open_pass(self._pass, 0, None)
            window = self._reader.take(most)
        if window is None:
            self._ended = True
        else:
            self._batch += window.count
            self._given += window.count
        return window

    def put_back(self, window: Window) -> None:
        """Give this window again."""
        if self._reader is not None:
            self._reader.put_back(window)
        self._batch -= window.count
        self._given -= window.count
        self._ended = False

    def position(self, ahead: int = 0) -> Position:
        """Return where the next batch lies: in which pass of the source, and in which epoch."""
        part = self._part if self._reader is None else position_of(self._reader, ahead)
        passed = {"pass": self._pass, "batch": self._given - ahead, "part": part}
        return {**passed, "epoch": self._epoch, "at": self._batch - ahead}

    def close(self) -> None:
        """Keep the source open: the next epoch goes on with it."""

    def _epoch_is_over(self) -> bool:
        return self._ended or self._batch == self._batches
