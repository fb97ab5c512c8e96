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
    """Exchanges what differs between the processes of a run, and decides for all of them.

    In a run of one process, it does nothing.
    """

    def __init__(self) -> None:
        self._left, self._waited = 0, 0.0

    def after_window(self, call: Call, seconds: float, feed: Feed) -> float | None:
        """Agree after a window, and return the seconds that it took in the slowest process.

        Many short windows share one exchange; the others return None.

        Args:
            call: The running call.
            seconds: The seconds that the window took in this process.
            feed: Reads the batches; the time of waiting for them counts too.
        """
        if process_group().size == 1:
            return seconds
        if self._left > 0:
            self._left -= 1
            return None
        seconds += feed.waited - self._waited
        self._waited = feed.waited
        longest = self._exchange(call, seconds, "a window of steps")
        self._left = min(MOST_WINDOWS, int(SECONDS / max(longest, 1e-6)))
        return longest

    def at_end(self, call: Call) -> None:
        """Agree at the end of a call, so that all processes heed the same signals."""
        if process_group().size > 1:
            self._exchange(call, 0.0, "the end of a call of the loop")
            self._left = 0

    def _exchange(self, call: Call, seconds: float, at: str) -> float:
        received = call.request.signal
        mine = [time.monotonic(), seconds, None if received is None else +received]
        found = process_group().exchange(mine, at)
        agree_on_time([theirs[0] for theirs in found])
        numbers = [number for _, _, number in found if number is not None]
        if numbers:
            call.agreed = signal.Signals(numbers[0])
        return max(theirs[1] for theirs in found)
