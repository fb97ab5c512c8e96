"""The source at work: one open reader, read ahead while a window runs, taken up where it stood."""

import time
from collections.abc import Callable
from typing import Final

from ..backends.window import Window
from ..core.error_notes import noting
from ..core.hook import LoopView
from ..core.options import run_seed
from ..core.progress import Progress
from ..data.source import Position, Reader, Source, position_of, read_from

# Batches that are drawn together where each must be waited for.
PIECE: Final = 4


class Feed:
    """Reads windows for a loop.

    The next window is read in this thread while the present one runs in another, so a source meets
    no thread but its own, and nothing else happens while it is asked. What was read ahead and not
    trained on is put back when the source is closed.

    Attributes:
        waited: Seconds spent waiting for data so far: none for what was read while a window ran.
    """

    def __init__(self) -> None:
        self._open: tuple[Source, int, Reader] | None = None
        self._last: tuple[Source, Reader] | None = None  # that gave something, or began somewhere
        self._next: Window | None = None
        self._failure: BaseException | None = None
        self._read_until = 0.0
        self.waited = 0.0

    def open(
        self,
        source: Source,
        progress: Progress,
        loop: LoopView,
        position: Position | None = None,
    ) -> None:
        """Open the current epoch; the same source left in its midst is taken up again.

        Args:
            source: What is read.
            progress: From where.
            loop: What is running.
            position: What `position` returned there, in this process or another.
        """
        if self._open is not None and self._open[:2] == (source, progress.epoch):
            return
        self.close()
        with noting("the source", progress):
            reader = read_from(
                source, progress.epoch, progress.batch, position, seed=run_seed(), loop=loop
            )
        self._open = source, progress.epoch, reader
        if position is not None:
            self._last = source, reader
        elif self._last is not None and self._last[0] is not source:
            self._last = None

    def position(self) -> Position | None:
        """Return what beside the progress is needed to read on after what was trained on.

        To be asked at a boundary: when every batch that was taken has been trained on. Between
        epochs it is what the next one begins with; None where (epoch, batch) is enough.
        """
        if self._last is None:
            return None
        return position_of(self._last[1], 0 if self._next is None else self._next.count)

    def take(self, most: int, progress: Progress) -> Window | None:
        """Return the next window, at most `most` batches; at the epoch's end None, and close."""
        if self._open is None:
            return None
        started = time.monotonic()
        with noting("the source", progress):
            window, self._next = self._next, None
            if window is None:
                failure, self._failure = self._failure, None
                if failure is not None:
                    raise failure
                # Nothing runs: what comes first may begin.
                window = self._draw(self._open[2], most, lambda: False)
            self._last = self._open[0], self._open[2]
        if window is not None and window.count > most:
            window, self._next = window.split(most)
        self.waited += time.monotonic() - started
        if window is None:
            self.close()
        return window

    def read_ahead(
        self, most: int, placed: Callable[[Window], Window], running: Callable[[], bool]
    ) -> None:
        """Read the next window while another runs; what goes wrong is raised when it is taken.

        Args:
            most: The most batches.
            placed: Makes the window ready to be run.
            running: Whether the other one still does: then batches that must be drawn one by one
                are drawn on, and afterwards those that are there must do.
        """
        if self._open is None or self._open[0].closed:
            return
        if self._next is not None or self._failure is not None:
            return
        window = None
        try:
            window = self._draw(self._open[2], most, running)
            self._next = None if window is None else placed(window)
        except BaseException as failure:  # an interrupt too: the running window is accounted for
            self._failure = failure
            if window is not None:
                self._open[2].put_back(window)
        self._read_until = time.monotonic()

    def _draw(self, reader: Reader, most: int, running: Callable[[], bool]) -> Window | None:
        """Return at most so many batches, but none that would have to be waited for for long."""
        window = reader.take(min(most, PIECE))
        if window is None:
            return None
        if window.rows is not None:  # costs nothing
            reader.put_back(window)
            return reader.take(most)
        pieces: list[Window] = []
        missing = most - window.count
        while missing > 0 and running():
            try:
                piece = reader.take(min(missing, PIECE))
            except BaseException as failure:  # what came before it is trained on
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

    def ran(self, until: float) -> None:
        """Account for a window that ended at this moment while the next one was read."""
        self.waited += max(0.0, self._read_until - until)
        self._read_until = 0.0

    def first(self, progress: Progress) -> Window | None:
        """Return the next batch without taking it away."""
        if self._next is None:
            if self._open is not None:
                position_of(self._open[2])  # which keeps it: somebody may save before it is run
            window = self.take(1, progress)
            if window is not None and self._open is not None:
                self._open[2].put_back(window)
            return window
        return self._next.split(1)[0]

    def sample(self, source: Source, progress: Progress, loop: LoopView) -> Window | None:
        """Return the first batch of the epoch, which nobody trains on, and close."""
        with noting("the source", progress):
            reader = source.read(progress.epoch, seed=run_seed(), loop=loop)
            try:
                window = reader.take(1)
                if window is not None:  # an iterator has it once
                    reader.put_back(window)
                return window
            finally:
                reader.close()

    def close(self) -> None:
        """Let go of the source."""
        if self._open is not None:
            reader, self._open = self._open[2], None
            ahead, self._next, self._failure = self._next, None, None
            if ahead is not None:
                reader.put_back(ahead)
            reader.close()
