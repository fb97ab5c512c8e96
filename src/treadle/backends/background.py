"""A window at work beside the interpreter, which reads the next one meanwhile."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

# One thread, so that windows never overtake each other. Compiled calls let go of the interpreter:
# handing one over costs about 50 µs.
_worker = ThreadPoolExecutor(1, thread_name_prefix="treadle-window")

Results = tuple[dict[str, Any], dict[str, Any], list[str]]


class Running:
    """Results on their way.

    Args:
        compute: Runs a window and returns its results as NumPy arrays, in the other thread.
        settle: Given what `compute` returned, changes the state in the thread that fetches.
    """

    def __init__(
        self, compute: Callable[[], Any], settle: Callable[[Any], Results] = lambda results: results
    ) -> None:
        self._settle = settle
        self._ended = 0.0
        self._started = time.monotonic()
        self._future = _worker.submit(self._timed, compute)

    def fetch(self) -> Results:
        """Wait, and return values and explicit weights per name, and violations."""
        try:
            results = self._future.result()
        finally:  # after an interrupt too the window ends before anybody sees the state
            wait([self._future])
        return self._settle(results)

    def running(self) -> bool:
        """Say whether the window is still at work."""
        return not self._future.done()

    @property
    def ended(self) -> float:
        """When the computation ended, by the monotonic clock; to be asked for after `fetch`."""
        return self._ended

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self._ended - self._started

    def _timed(self, compute: Callable[[], Any]) -> Any:
        try:
            return compute()
        finally:
            self._ended = time.monotonic()


class Done:
    """Results that are there already, where a window ran in the thread that asked for it.

    Args:
        results: What `fetch` returns; computed by now.
        seconds: How long that took.
    """

    def __init__(self, results: Callable[[], Results], seconds: float) -> None:
        self._results = results
        self.seconds = seconds
        self.ended = time.monotonic()

    def running(self) -> bool:
        """Say that nothing is."""
        return False

    def fetch(self) -> Results:
        """Return values and explicit weights per name, and violations."""
        return self._results()
