"""What several processes agree on after each window: the time, and signals."""

import signal
import time

from ..core.processes import agree_on_time, process_group
from .call import Call
from .prefetch import Feed

# The time between two exchanges, each of which takes about 0.2 ms. Single steps may be shorter.
SECONDS = 0.05
MOST_WINDOWS = 1000


class Agreement:
    """Exchanges what differs between the processes of a run, and decides for all of them."""

    def __init__(self) -> None:
        self._left, self._waited = 0, 0.0
        self._windows, self._since = 0, time.monotonic()  # of the last exchange

    def after_window(self, call: Call, step: int, seconds: float, feed: Feed) -> float | None:
        """Agree after a window, and return the seconds that it took in the slowest process.

        Many short windows share one exchange; the others return None.

        Args:
            call: The running call.
            step: The last step of the window, which must be the same in all processes.
            seconds: The seconds that the window took in this process.
            feed: Reads the batches; the time of waiting for them counts too.
        """
        self._windows += 1
        if self._left > 0:
            self._left -= 1
            return None
        seconds += feed.waited - self._waited
        self._waited = feed.waited
        longest, between = self._exchange(call, seconds, f"the window that ends at step {step}")
        self._left = min(MOST_WINDOWS, int(SECONDS / max(between, 1e-6)))
        return longest

    def at_end(self, call: Call) -> None:
        """Agree at the end of a call, so that all processes heed the same signals."""
        if process_group().size > 1:
            self._exchange(call, 0.0, "the end of a call of the loop")
            self._left = 0

    def _exchange(self, call: Call, seconds: float, at: str) -> tuple[float, float]:
        """Return the longest time of a window, and the mean time from one window to the next.

        The latter includes hooks, validation and the body of a `for` loop: a signal or a time
        limit must not wait for many windows if these are slow.
        """
        received, now = call.request.signal, time.monotonic()
        between = (now - self._since) / max(1, self._windows)
        mine = [now, seconds, between, None if received is None else +received]
        found = process_group().exchange(mine, at)
        agree_on_time([theirs[0] for theirs in found])
        numbers = [theirs[3] for theirs in found if theirs[3] is not None]
        if numbers:
            call.agreed = signal.Signals(numbers[0])
        self._windows, self._since = 0, time.monotonic()
        return max(theirs[1] for theirs in found), max(theirs[2] for theirs in found)
