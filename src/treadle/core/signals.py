"""Signals that ask a run to end: noted when they come, obeyed where nothing is lost.

A signal handler may run between any two instructions, so it does nothing but take a note; the loop
looks at it after each window, saves, and leaves. A second signal does not wait.
"""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from ..errors import Terminated

WATCHED = (signal.SIGINT, signal.SIGTERM)


class Asked:
    """What signals have asked for.

    Attributes:
        signal: The first one that came, or None.
        over: Nobody looks at it any more.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.over = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Take a note of the first signal; leave at the second.

        Raises:
            KeyboardInterrupt, Terminated: It is the second one, or the run is over: of two loops
                that rest in turns, the one that began first may leave the other one's handlers.
        """
        if self.signal is not None or self.over:
            raise self.error(signal.Signals(number))
        self.signal = signal.Signals(number)

    def error(self, number: signal.Signals | None = None) -> BaseException:
        """Return what the first signal, or another one, would have raised."""
        number = number or self.signal
        return KeyboardInterrupt() if number == signal.SIGINT else Terminated()


def deaf() -> str:
    """Say that signals are not noted here, if so."""
    if threading.current_thread() is threading.main_thread():
        return ""
    return (
        "the loop runs outside the main thread, where Python hears no signals: SIGINT and SIGTERM "
        "end the process without a checkpoint of that moment, and a resume begins at the newest one"
    )


@contextmanager
def noted() -> Generator[Asked]:
    """Note SIGINT and SIGTERM for as long as this is open, and put their handlers back afterwards.

    Only the main thread may set handlers: elsewhere nothing is noted, and signals do what they did
    before. The same holds for a signal that the program ignores, as under `nohup`.
    """
    asked = Asked()
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
