"""Waiting for what other threads and processes do, on a machine that may be slow or busy."""

import time
from collections.abc import Callable

# Seconds after which a test gives up on what hangs: far more than anything takes on a busy machine,
# and less than the limit of pytest. No outcome depends on how much of it was needed.
WATCHDOG = 600.0


def until(holds: Callable[[], object], what: str = "it") -> None:
    """Wait until something holds."""
    end = time.monotonic() + WATCHDOG
    while not holds():
        assert time.monotonic() < end, f"{what} did not happen within {WATCHDOG:.0f} s"
        time.sleep(0.01)
