"""Text on a terminal: lines broken between words, and a line that says what takes long."""

import textwrap
import threading
from collections.abc import Callable
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing it takes a tenth of a second
    import rich.console

INTERVAL = 0.25  # seconds between two drawings on a terminal
PLAIN_INTERVAL = 30.0  # seconds between two lines elsewhere


def wrapped(text: str, width: int) -> str:
    """Return a text with lines broken between words; a longer word, as a path, stays whole.

    Example:
        >>> print(wrapped("saved in runs/one", 10))
        saved in
        runs/one
    """
    broken: list[str] = []
    for line in text.split("\n"):
        if len(line) <= width:
            broken.append(line)
        else:
            broken += textwrap.wrap(
                line, width, break_long_words=False, break_on_hyphens=False, tabsize=1
            )
    return "\n".join(broken)


class Waiting:
    """Shows an activity and its seconds, on a terminal over itself, elsewhere as plain lines.

    Args:
        text: What is shown, or a function that returns it.
        to: Where; rich's own console, on the standard output, if not given.
        quiet: Show nothing.
        at_once: Elsewhere than on a terminal, print a line at the start, not only after 30 seconds.

    Example:
        >>> with Waiting("importing jax", quiet=True):
        ...     pass
    """

    def __init__(
        self,
        text: str | Callable[[], str],
        to: "rich.console.Console | None" = None,
        quiet: bool = False,
        at_once: bool = True,
    ) -> None:
        import rich

        self._text = text if callable(text) else lambda: text
        self._console = to or rich.get_console()
        self._quiet, self._at_once = quiet, at_once
        self._terminal = self._console.is_interactive and not self._console.is_jupyter
        self._began = 0.0
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Waiting":
        """Show the first line."""
        self._began = monotonic()
        if not self._quiet:
            if self._terminal:
                self._draw()
            elif self._at_once:
                self._console.print(f"{self._text()} …", soft_wrap=True, highlight=False)
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the line from a terminal."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            with self._lock:
                self._erase()

    def print(self, text: str) -> None:
        """Print a line that stays."""
        with self._lock:
            self._erase()
            self._console.print(text, soft_wrap=True, highlight=False, markup=False)
        if self._thread is not None and self._terminal:
            self._draw()

    def _run(self) -> None:
        while not self._ended.wait(INTERVAL if self._terminal else PLAIN_INTERVAL):
            if self._terminal:
                self._draw()
            else:
                self._console.print(self._line(), soft_wrap=True, highlight=False)

    def _line(self) -> str:
        return f"{self._text()} … {monotonic() - self._began:.0f} s"

    def _draw(self) -> None:
        with self._lock:
            if not self._ended.is_set():
                line = self._line()
                width = self._console.width - 1  # a full line would wrap
                line = line if len(line) <= width else f"{line[: width - 1]}…"
                self._console.file.write(f"\r\x1b[2m{line}\x1b[0m\x1b[K")
                self._console.file.flush()

    def _erase(self) -> None:
        if self._terminal and self._thread is not None:
            self._console.file.write("\r\x1b[K")
            self._console.file.flush()
