"""Shutdown requests by SIGINT and SIGTERM, recorded by a handler and handled between windows.

A signal handler may run between any two instructions, so it only records the signal. The loop
checks for it after each window, saves a checkpoint and exits. A second signal ends the run at once.
"""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from ..errors import Terminated

WATCHED = (signal.SIGINT, signal.SIGTERM)


class ShutdownRequest:
    """The shutdown request of a run.

    Attributes:
        signal: The first signal received, or None.
        over: Whether the run has ended, so that the request is not checked any more.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.over = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: record the first one, and raise an exception for the second.

        Raises:
            KeyboardInterrupt, Terminated: It is the second signal, or the run is over. The latter
                happens if two loops run alternately and the first to start is the first to end:
                then the handlers of an ended loop may still be installed.
        """
        if self.signal is not None or self.over:
            raise self.error(signal.Signals(number))
        self.signal = signal.Signals(number)

    def error(self, number: signal.Signals | None = None) -> BaseException:
        """Return the exception for a signal; default: the first signal received."""
        number = number or self.signal
        return KeyboardInterrupt() if number == signal.SIGINT else Terminated()


def missing_handlers() -> str:
    """Return a warning if signal handlers cannot be installed, else an empty string."""
    if threading.current_thread() is threading.main_thread():
        return ""
    return (
        "the loop runs outside the main thread, where Python cannot handle signals: SIGINT and "
        "SIGTERM end the process without saving a checkpoint, so a resumed run starts from the "
        "newest existing one"
    )


@contextmanager
def handled_signals() -> Generator[ShutdownRequest]:
    """Install handlers for SIGINT and SIGTERM, and restore the previous handlers afterwards.

    Only the main thread can install handlers: in other threads, signals have their usual effect.
    The same holds for a signal that the program ignores, for example under `nohup`.
    """
    asked = ShutdownRequest()
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in WATCHED:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, asked.handle)
    try:
        yield asked
    finally:
        asked.over = True
        for number, handler in before.items():
            if signal.getsignal(number) == asked.handle:
                signal.signal(number, handler)
