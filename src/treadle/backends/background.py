"""Running a window in a background thread while the main thread reads the next one."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

# A single thread, so that windows run in order. Compiled calls release the GIL; submitting one
# costs about 50 µs.
_worker = ThreadPoolExecutor(1, thread_name_prefix="treadle-window")

Results = tuple[dict[str, Any], dict[str, Any], list[str]]


class Running:
    """The results of a window that runs in the background thread.

    Args:
        compute: A function that runs the window in the background thread, and returns its results
            as NumPy arrays.
        settle: A function that updates the state from the result of `compute`, in the thread that
            calls `fetch`.
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
        finally:  # after an interrupt too, the window must end before the state is read
            wait([self._future])
        return self._settle(results)

    def running(self) -> bool:
        """Return whether the window is still running."""
        return not self._future.done()

    @property
    def ended(self) -> float:
        """The time when the computation ended, by the monotonic clock; valid after `fetch`."""
        return self._ended

    @property
    def seconds(self) -> float:
        """The duration of the computation; valid after `fetch`."""
        return self._ended - self._started

    def _timed(self, compute: Callable[[], Any]) -> Any:
        try:
            return compute()
        finally:
            self._ended = time.monotonic()


def submit(compute: Callable[[], Any]) -> Callable[[], Any]:
    """Run a function in the background thread; return a function that waits for its result."""
    return _worker.submit(compute).result


class Done:
    """The results of a window that already ran in the calling thread.

    Args:
        results: A function that returns the results for `fetch`.
        seconds: The duration of the computation.
    """

    def __init__(self, results: Callable[[], Results], seconds: float) -> None:
        self._results = results
        self.seconds = seconds
        self.ended = time.monotonic()

    def running(self) -> bool:
        """Return False: the window has finished."""
        return False

    def fetch(self) -> Results:
        """Return values and explicit weights per name, and violations."""
        return self._results()


def start(
    compute: Callable[[], Any],
    settle: Callable[[Any], Results] = lambda results: results,
    background: bool = True,
) -> Running | Done:
    """Run a window in the background thread, or in this one before returning.

    Args:
        compute: As for `Running`.
        settle: As for `Running`.
        background: Whether this thread has other work meanwhile.
    """
    if background:
        return Running(compute, settle)
    started = time.monotonic()
    results = compute()
    return Done(lambda: settle(results), time.monotonic() - started)
