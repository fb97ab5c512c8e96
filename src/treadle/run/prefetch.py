"""Reading a source: one open reader, prefetched while a window runs, and its saved position."""

import time
from collections.abc import Callable
from contextlib import closing
from typing import Final

from ..backends.background import take_back
from ..backends.window import Window
from ..core.hook import LoopView
from ..core.options import run_seed
from ..core.progress import Progress
from ..core.tracebacks import noting
from ..data.source import Position, Reader, ReadRequest, Source, position_of, read_from, shards_of

# The number of batches read together if each batch takes time. If they take less, as many are read
# together as this time allows: reading them costs less, but another window may wait for it.
PIECE: Final = 4
PIECE_SECONDS: Final = 0.025
# A batch that takes longer to read than this is read while a step runs in another thread. Handing
# the step over and waiting for it costs about half as much.
SLOW_SECONDS: Final = 2e-4
# After a slow read, so many batches are read fast before steps run without another thread.
SLOW_FOR: Final = 16
# The number of batches read ahead if they are only row indices of arrays: two of the largest
# windows. Drawing the order of 64 examples takes about 20 µs.
ROWS_AHEAD: Final = 512
# The number of batches of a window that waits for its rows.
FIRST_ROWS: Final = 32


class Feed:
    """Reads windows from a source for a loop, with prefetching.

    The next window is read in the loop's thread while the current window runs in a background
    thread, so sources are only accessed from the loop's thread. Prefetched batches that were not
    trained on are put back when the source is closed.

    Args:
        even: Whether the sizes of windows must not depend on the time that reading takes, as in
            several processes: all must read windows of equal size.
        evaluates_at: The progress of the run if the source is one of an evaluation, which counts
            its batches from 0; for notes on errors.

    Attributes:
        waited: Seconds spent waiting for data; reading while a window runs does not count.
    """

    def __init__(self, even: bool = False, evaluates_at: Progress | None = None) -> None:
        self._even, self._evaluates_at = even, evaluates_at
        self._open: tuple[Source, int, Reader] | None = None
        self._at_end: tuple[Source, int] | None = None  # the source and epoch of an ended reader
        # The newest reader that was read from or opened at a position, for `position`.
        self._last_reader: tuple[Source, Reader] | None = None
        self._prefetched: Window | None = None
        self._failure: BaseException | None = None
        self._more_rows = False  # whether batches like the prefetched rows may follow them
        self._read_until = 0.0
        self.waited = 0.0
        self._batches_until_fast = SLOW_FOR

    def open(
        self,
        source: Source,
        progress: Progress,
        loop: LoopView,
        position: Position | None = None,
        began: int = 0,
        since: int = 0,
    ) -> None:
        """Open a source at the current epoch and batch; does nothing if it is already open.

        A position is opened once, since some sources cannot go back: neither is an epoch that was
        found to be at its end.

        Args:
            source: The source.
            progress: The epoch and batch to start from.
            loop: The running loop.
            position: The result of `position` at this point, in this process or another.
            began: The number of batches of the epoch before the first one of this source.
            since: The epoch in which the loop began with this source.
        """
        wanted = source, progress.epoch
        if position and wanted == self._at_end:
            return
        if self._open is not None and wanted == self._open[:2]:
            if getattr(source, "intact", True):
                return
            position = self.position()  # what was read ahead is read again
        self.close()
        with self._noting(progress):
            start, seed = progress.batch - began, run_seed()
            request = ReadRequest(progress.epoch, start, seed, loop, position=position, since=since)
            reader = read_from(source, request)
        self._open = source, progress.epoch, reader
        if position is not None:
            self._last_reader = source, reader
        elif self._last_reader is not None and self._last_reader[0] is not source:
            self._last_reader = None

    def position(self) -> Position | None:
        """Return what is needed in addition to the progress to resume reading.

        Must be called at a window boundary, when every batch that was taken has been trained on.
        Between epochs, it is the position from which the next epoch starts.

        Returns:
            The position, or None if epoch and batch are enough.
        """
        if self._last_reader is None:
            return None
        return position_of(
            self._last_reader[1], 0 if self._prefetched is None else self._prefetched.count
        )

    @property
    def shards(self) -> int | None:
        """Into how many shares the source is divided, of which each process reads one, or None."""
        return None if self._last_reader is None else shards_of(self._last_reader[0])

    def take(self, most: int, progress: Progress) -> Window | None:
        """Return a window of up to `most` batches, or close and return None at the epoch's end.

        An error of the source closes it too, so that a later call reads again.
        """
        if self._open is None:
            return None
        try:
            window = self._taken(self._open, most, progress)
        except BaseException:
            self.close()
            raise
        if window is None:
            at_end = self._open[:2]
            self.close()
            self._at_end = at_end
        return window

    def shortened(self, window: Window, count: int) -> Window:
        """Return the first batches of the window that was taken last; the others come next.

        If it has no more batches, or if `count` is 0, it is returned as it is.
        """
        if not 0 < count < window.count:
            return window
        window, rest = window.split(count)
        ahead = self._prefetched  # of the same form
        if ahead is not None:
            rest = rest.joined([ahead]) if rest.rows is None else rest.followed_by(ahead)
        self._prefetched = rest
        return window

    def _taken(
        self, opened: tuple[Source, int, Reader], most: int, progress: Progress
    ) -> Window | None:
        """Return a window of up to `most` batches, or None at the end of the epoch."""
        source, _, reader = opened
        started = time.monotonic()
        window, self._prefetched = self._prefetched, None
        if window is None or (window.rows is not None and window.count < most):
            with self._noting(progress):
                if window is not None:
                    reader.put_back(window)
                failure, self._failure = self._failure, None
                if failure is not None:
                    raise failure
                # No window is running: return the first batches without waiting for more.
                few = min(most, FIRST_ROWS)
                window = self._read_batches(reader, few, lambda: False)
        self._last_reader = source, reader
        if window is not None and window.count > most:
            window, self._prefetched = window.split(most)
        self.waited += time.monotonic() - started
        return window

    def read_ahead(
        self,
        size: Callable[[], int],
        placed: Callable[[Window], Window],
        running: Callable[[], bool],
    ) -> None:
        """Prefetch the next window while another one runs; `take` raises errors that occur here.

        Args:
            size: Returns the maximum number of batches; called if batches are to be read.
            placed: Places the window in memory for execution.
            running: Returns whether the other window still runs. If batches take time to read,
                reading stops as soon as it returns False.
        """
        if self._open is None or self._open[0].closed_loop or self._failure is not None:
            return
        if self._prefetched is not None:
            try:
                self._read_rows(self._prefetched)
            except BaseException as failure:
                self._failure = failure
            return
        reader, window, most = self._open[2], None, size()
        started, ran_meanwhile = time.monotonic(), running()
        if self._even:
            running = _always
        try:
            window = self._read_batches(reader, most, running)
            ready = None if window is None else placed(window)
            more = ROWS_AHEAD - ROWS_AHEAD % most
            if window is not None and more > most and ready is not None and ready.rows is not None:
                again, window = window, None
                reader.put_back(again)
                ready, self._more_rows = reader.take(more), True
            self._prefetched = ready
        except BaseException as failure:  # also interrupts: the running window must be recorded
            self._failure = failure
            if window is not None:
                reader.put_back(window)
        ended = time.monotonic()
        count = self._prefetched.count if self._prefetched is not None else 1
        slow = (ended - started) / count > SLOW_SECONDS
        self._batches_until_fast = SLOW_FOR if slow else max(0, self._batches_until_fast - count)
        if ran_meanwhile:
            self._read_until = ended
        else:
            self.waited += ended - started

    def _read_rows(self, ahead: Window) -> None:
        """Read further rows if only half of those read ahead are left."""
        if not self._more_rows or ahead.count > ROWS_AHEAD // 2 or self._open is None:
            return
        reader, rows = self._open[2], ahead.rows
        window = reader.take(ROWS_AHEAD // 2)
        if window is None or rows is None or not ahead.is_like(window):
            self._more_rows = False
            if window is not None:
                reader.put_back(window)
        else:
            self._prefetched = ahead.followed_by(window)

    def _read_batches(
        self, reader: Reader, most: int, running: Callable[[], bool]
    ) -> Window | None:
        """Return up to `most` batches; reads further batches only while a window is running."""
        started = time.monotonic()
        window = reader.take(min(most, PIECE))
        if window is None:
            return None
        unread = self._open is not None and self._open[0].closed_loop  # while a window runs
        # Rows of arrays are read at once, which costs nothing, and arrays that change too: a
        # function of a closed loop gives one batch.
        if window.rows is not None or (unread and window.count == PIECE < most):
            reader.put_back(window)
            return reader.take(most)
        if self._even and not running() and self._open and not unread:
            most, running = min(most, PIECE), _always  # a reader may stop after some time
        pieces: list[Window] = []
        missing = most - window.count
        while missing > 0 and running():
            each = (time.monotonic() - started) / (most - missing)
            try:
                piece = reader.take(min(missing, max(PIECE, int(PIECE_SECONDS / max(each, 1e-9)))))
            except BaseException as failure:  # the batches before the error are trained on
                self._failure = failure
                break
            if piece is None:
                break
            if not piece.is_like(window):
                reader.put_back(piece)
                break
            pieces.append(piece)
            missing -= piece.count
        return window.joined(pieces)

    def following(self, most: int) -> Window | None:
        """Return up to `most` batches that will be taken next, if they are rows already read."""
        ahead = self._prefetched
        if ahead is None or ahead.rows is None or most < 1:
            return None
        return ahead.split(min(most, ahead.count))[0]

    @property
    def slow(self) -> bool:
        """Whether reading a batch lately took longer than handing a step to another thread.

        Batches of closed loops are not read while a step runs.
        """
        if self._open is not None and self._open[0].closed_loop:
            return False
        return self._batches_until_fast > 0

    def ran(self, until: float) -> None:
        """Add the waiting time for a window that ended at `until` while the next one was read."""
        self.waited += max(0.0, self._read_until - until)
        self._read_until = 0.0

    def first(self, progress: Progress) -> Window | None:
        """Peek at the next batch without consuming it."""
        if self._prefetched is None:
            if self._open is not None:
                position_of(self._open[2])  # keeps the position: a save may precede the first step
            window = self.take(1, progress)
            if window is not None and self._open is not None:
                self._open[2].put_back(window)
            return window
        return self._prefetched.split(1)[0]

    def sample(self, source: Source, progress: Progress, loop: LoopView) -> Window | None:
        """Return the first batch of an epoch, which is not trained on, and close the source."""
        self.close()
        request = ReadRequest(progress.epoch, seed=run_seed(), loop=loop)
        with self._noting(progress), closing(read_from(source, request)) as reader:
            window = reader.take(1)
            if window is not None:  # an iterator yields each batch only once
                reader.put_back(window)
            return window

    def _noting(self, progress: Progress) -> noting:
        """Return a context that notes on errors of the source where the run is."""
        if self._evaluates_at is None:
            return noting("the source", progress)
        what = "the source of an evaluation, which always reads its epoch 1"
        return noting(what, self._evaluates_at)

    def close(self) -> None:
        """Close the source, and put prefetched batches back."""
        self._at_end = None
        if self._open is not None:
            reader, self._open = self._open[2], None
            ahead, self._prefetched, self._failure = self._prefetched, None, None
            if ahead is not None:
                reader.put_back(ahead)
            reader.close()
            take_back()  # what computes next need not be a window


def _always() -> bool:
    return True
