"""The source at work: one open reader, taken up again where it was left."""

import time
from typing import Any

from .backends.window import Window
from .data.source import Reader, Source
from .errors import noting
from .hook import LoopView
from .options import run_seed
from .progress import Progress


class Feed:
    """Reads windows for a loop.

    Attributes:
        waited: Seconds spent waiting for data so far.
    """

    def __init__(self) -> None:
        self._open: tuple[Any, int, Reader] | None = None
        self.waited = 0.0

    def open(self, source: Source, progress: Progress, loop: LoopView) -> None:
        """Open the current epoch; the same source left in its midst is taken up again."""
        if self._open is not None and self._open[:2] == (source, progress.epoch):
            return
        self.close()
        with noting("the source", progress):
            reader = source.read(progress.epoch, progress.batch, seed=run_seed(), loop=loop)
        self._open = source, progress.epoch, reader

    def take(self, most: int, progress: Progress) -> Window | None:
        """Return the next window, at most `most` batches; at the epoch's end None, and close."""
        if self._open is None:
            return None
        started = time.monotonic()
        with noting("the source", progress):
            window = self._open[2].take(most)
        self.waited += time.monotonic() - started
        if window is None:
            self.close()
        return window

    def first(self, progress: Progress) -> Window | None:
        """Return the next batch without taking it away."""
        window = self.take(1, progress)
        if window is not None and self._open is not None:
            self._open[2].put_back(window)
        return window

    def close(self) -> None:
        """Let go of the source."""
        if self._open is not None:
            self._open[2].close()
            self._open = None
