"""Limiting the number of batches per epoch, also for endless streams."""

from dataclasses import replace
from typing import Any, Final

from ..backends.window import Window
from ..errors import DataError, whole_number
from .foreign.sources import as_source
from .reader import refuse_beyond
from .source import (
    DerivedReader,
    DerivedSource,
    Position,
    Reader,
    ReadRequest,
    Source,
    position_of,
    read_from,
    shards_of,
)

DISCARDED_AT_ONCE: Final = 16
"""The number of batches read at once when a stream is read and discarded up to a position."""


def limited(source: Any, batches: int) -> "LimitedSource":
    """Limit each epoch of a source to at most `batches` batches.

    If the length of the source is known, every epoch consists of its first `batches` batches. Any
    other source (an endless stream, a generator) is continued: each epoch starts where the previous
    one ended. If such a stream ends, the epoch ends too, and the next epoch restarts the stream.
    Reading epoch 0 again restarts at the first batch.

    Args:
        source: A source, or any object that `as_source` accepts.
        batches: The maximum number of batches in an epoch.

    Raises:
        DataError: If `batches` is not a positive integer.

    Example:
        >>> import itertools
        >>> source = limited(itertools.count(), 3)
        >>> [source.read(epoch).take(5).batches.tolist() for epoch in (0, 1)]
        [[0, 1, 2], [3, 4, 5]]
    """
    batches = whole_number("batches", batches, DataError)
    return LimitedSource(as_source(source), batches)


class LimitedSource(DerivedSource):
    """A source with a limited number of batches per epoch; created by `limited`.

    Attributes:
        source: The underlying source.
        batches: The maximum number of batches in an epoch; None if another source ends it.
        continues: Whether an epoch begins where the one before has ended, also if the length of the
            source is known; as in `fit` of Keras with `steps_per_epoch`.
    """

    def __init__(self, source: Source, batches: int | None, continues: bool = False) -> None:
        self.source = source
        self.batches = batches
        self.continues = continues and not source.endless
        self._stream: Stream | None = None

    @property
    def length(self) -> int | None:
        """The number of batches in an epoch; None if the source may end sooner."""
        if self.source.endless:
            return self.batches
        known = self.source.length
        if (
            known is None
            or self.batches is None
            or (self.continues and known > self.batches and known % self.batches)
        ):
            return None
        return min(known, self.batches)

    @property
    def endless(self) -> bool:
        """Whether an epoch is known never to end: only without a maximum."""
        return self.batches is None

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the source's data, or None if it has none."""
        return getattr(self.source, "fingerprint", None)

    @property
    def shards(self) -> int | None:
        """Into how many shares the source is divided, of which each process reads one, or None."""
        return shards_of(self.source)

    def open(self, request: ReadRequest) -> "Head | Stream":
        """Open a reader of the first batches of an epoch, or of the next batches of a stream.

        If a stream is at this batch already, reading continues there. Otherwise, the stream is
        reopened at its position. Without a position, a stream that cannot seek is restarted, and
        all batches before the start, including those of earlier epochs of the same source, are read
        and discarded.

        Raises:
            DataError: If the epoch has fewer than `start` batches.
        """
        start, position = request.start, request.position
        refuse_beyond(start, None if self.length_varies else self.length, request.epoch)
        known = self.source.length is not None and not self.continues
        if self.batches is not None and known:
            return Head(read_from(self.source, request), self.batches - start)
        epoch = request.epoch - request.since
        request = replace(request, since=0)
        stream = self._stream
        # Arrays that were unlocked may have changed: what the stream has read is read again.
        if not getattr(self.source, "intact", True):
            stream = None
        if stream is None or stream.request != request.at(0) or not stream.at(epoch, start):
            stream = Stream(self.source, self.batches, request.at(0))
            if position is not None:
                stream.jump(epoch, start, position)
            elif self.source.endless:
                before = epoch * (self.batches or 0)
                stream.jump(epoch, start, {"pass": 0, "batch": before + start})
            else:
                stream.discard_until(epoch, start)
            self._stream = stream
        return stream


class Head(DerivedReader):
    """Reads the first batches of an epoch.

    Args:
        reader: The reader of the whole epoch.
        left: The remaining number of batches.
    """

    def __init__(self, reader: Reader, left: int) -> None:
        super().__init__(reader)
        self._left = left

    def take(self, most: int) -> Window | None:
        """Return the next batches; None at the end of the epoch or at the limit."""
        if self._left == 0:  # do not read a batch beyond the limit
            self.finish()
            return None
        window = self._reader.take(min(most, self._left))
        if window is not None:
            self._left -= window.count
        return window

    def put_back(self, window: Window) -> None:
        """Put back a window; the next `take` returns it again."""
        self._reader.put_back(window)
        self._left += window.count


class Stream:
    """Reads consecutive epochs from a source that is continued across epochs.

    A pass is one iteration over the whole source. An epoch may end within a pass.

    Args:
        source: The source, whose epochs are the passes.
        batches: The maximum number of batches in an epoch; None if another source ends it.
        request: The request for the first pass.
    """

    def __init__(self, source: Source, batches: int | None, request: ReadRequest) -> None:
        self.request: Final = request
        self._source: Final = source
        self._batches: Final = batches
        self._pass = 0
        self._given = 0  # number of batches read in this pass
        self._part: Position | None = None
        self._reader: Reader | None = None
        self._epoch = 0
        self._batch = 0
        self._ended = self._failed = False

    def at(self, epoch: int, start: int) -> bool:
        """Return whether the next batch is this one; the next epoch starts where the last ended.

        An epoch may end before the maximum, by another source or a `break`.
        """
        if epoch == self._epoch + 1 and start == 0:
            self._epoch, self._batch, self._ended = epoch, 0, False
        return (epoch, start) == (self._epoch, self._batch)

    def jump(self, epoch: int, start: int, position: Position) -> None:
        """Start at this batch of this epoch, with the stream at the given position."""
        inside = position.get("epoch") == epoch
        self._epoch, self._batch = epoch, position["at"] if inside else start
        self._pass, self._given = position["pass"], position["batch"]
        self._part = position.get("part")

    def discard_until(self, epoch: int, start: int) -> None:
        """Read and discard all batches before this position.

        Raises:
            DataError: If the epoch has fewer than `start` batches.
        """
        while self._epoch < epoch:
            while self.take(DISCARDED_AT_ONCE) is not None:
                pass
            self.at(self._epoch + 1, 0)
        while self._batch < start:
            if self.take(min(DISCARDED_AT_ONCE, start - self._batch)) is None:
                refuse_beyond(start, self._batch, epoch)

    def take(self, most: int) -> Window | None:
        """Return the next batches of the epoch, or None at its end."""
        if self._ended or self._batch == self._batches:
            return None
        reader = self._open_pass() if self._reader is None else self._reader
        if self._batches is not None:
            most = min(most, self._batches - self._batch)
        try:
            window = reader.take(most)
        except Exception:
            self._failed = True
            raise
        if window is None and self._batch == 0:  # the pass ended exactly with the previous epoch
            reader.close()
            self._pass, self._given, self._part = self._pass + 1, 0, None
            window = self._open_pass().take(most)
        if window is None:
            self._ended = True
        else:
            self._batch += window.count
            self._given += window.count
        return window

    def put_back(self, window: Window) -> None:
        """Put back a window; the next `take` returns it again."""
        if self._reader is not None:
            self._reader.put_back(window)
        self._batch -= window.count
        self._given -= window.count
        self._ended = False

    def position(self, ahead: int = 0) -> Position:
        """Return the position of the next batch in the pass and in the epoch."""
        part = self._part if self._reader is None else position_of(self._reader, ahead)
        passed = {"pass": self._pass, "batch": self._given - ahead, "part": part}
        return {**passed, "epoch": self._epoch, "at": self._batch - ahead}

    def close(self) -> None:
        """Do nothing, since the next epoch continues with the open pass, unless reading failed.

        The pass is then opened again at the batch that could not be read.
        """
        if self._failed and self._reader is not None:
            self._part = position_of(self._reader)
            self._reader.close()
            self._reader = None
        self._failed = False

    def _open_pass(self) -> Reader:
        """Open the reader of the current pass at the current batch."""
        request = self.request.at(self._pass, self._given, self._part)
        self._reader = reader = read_from(self._source, request)
        return reader
