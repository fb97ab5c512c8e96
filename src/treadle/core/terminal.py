"""Terminal output: cleaned and wrapped text, and a status line for activities that take long."""

import textwrap
import threading
import unicodedata
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing rich takes a tenth of a second
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

PER_SECOND = 4  # updates of the line on a terminal
_INDENT = " " * 4  # of the continuation of a line with names and values
PLAIN_INTERVAL = 30.0  # seconds between two lines if the output is not a terminal


def clean(text: object, limit: int | None = None, lines: bool = False) -> str:
    r"""Return a text from a file such that it can be printed on a terminal.

    Control characters, escape sequences and characters that change the direction of text are shown
    as escapes.

    Args:
        text: The text; other objects are converted with `str`.
        limit: The number of characters to show; a longer text ends with an ellipsis.
        lines: Keep line breaks and tabs.

    Example:
        >>> clean("loss\x1b[2J\n")
        'loss\\x1b[2J\\n'
    """
    text = str(text)
    if limit is not None and len(text) > limit:
        text = f"{text[: limit - 1]}…"
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        char
        if char.isprintable() or char in kept or unicodedata.category(char) == "Zs"
        else char.encode("unicode_escape").decode()
        for char in text
    )


def printable(text: str, width: int | None = None) -> str:
    r"""Return a text as it is printed: cleaned, and wrapped between words.

    Everything that is printed passes through this function, since names, settings and errors may
    come from files of others.

    Args:
        text: The text, which may have several lines.
        width: The width of the terminal; None if the output is not a terminal.

    Example:
        >>> printable("saved in runs/\x1b[2Jone")
        'saved in runs/\\x1b[2Jone'
    """
    text = clean(text, lines=True)
    return text if width is None else wrapped(text, width)


def wrapped(text: str, width: int) -> str:
    """Wrap the lines of a text between words; longer words, such as paths, are not broken.

    Lines with names and values, separated by two spaces, are only broken there.

    Example:
        >>> print(wrapped("saved in runs/one", 10))
        saved in
        runs/one
        >>> print(wrapped("epoch 1/3  loss 0.5  val_loss 0.25", 24))
        epoch 1/3  loss 0.5
            val_loss 0.25
    """
    broken: list[str] = []
    for line in text.split("\n"):
        parts = line.split("  ")
        if len(line) <= width:
            broken.append(line)
        elif len(parts) > 1 and all(parts) and max(map(len, parts)) + len(_INDENT) <= width:
            broken += _filled(parts, width)
        else:
            broken += textwrap.wrap(
                line, width, break_long_words=False, break_on_hyphens=False, tabsize=1
            )
    return "\n".join(broken)


def _filled(parts: list[str], width: int) -> list[str]:
    """Return lines of several parts, each as long as the width allows."""
    lines = parts[:1]
    for part in parts[1:]:
        longer = f"{lines[-1]}  {part}"
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(_INDENT + part)
    return lines


class Waiting:
    """Shows an activity and its elapsed seconds, as a context manager.

    On a terminal, the line is updated in place; elsewhere, plain lines are printed.

    Args:
        text: The text to show, or a function that returns it.
        to: The console; default: rich's global console, on the standard output.
        quiet: Show nothing.
        at_once: If the output is not a terminal, print a line at the start, not only after 30
            seconds.
        prints: Show standard output of the activity above the line.

    Example:
        >>> with Waiting("importing jax", quiet=True):
        ...     pass
    """

    def __init__(
        self,
        text: str | Callable[[], str],
        to: "Console | None" = None,
        quiet: bool = False,
        at_once: bool = True,
        prints: bool = True,
    ) -> None:
        self._text = text if callable(text) else lambda: text
        self._to, self._quiet, self._at_once, self._prints = to, quiet, at_once, prints
        self._began = 0.0
        self._ended = threading.Event()
        self._live: Live | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Waiting":
        """Show the first line."""
        self._began = monotonic()
        if self._quiet:
            return self
        if self._console.is_interactive and not self._console.is_jupyter:
            from rich.live import Live

            self._live = Live(
                get_renderable=self._line,
                console=self._console,
                refresh_per_second=PER_SECOND,
                transient=True,
                redirect_stdout=self._prints,
                redirect_stderr=False,
            )
            self._live.start(refresh=True)
            return self
        if self._at_once:
            self.print(f"{self._text()} …")
        self._thread = threading.Thread(target=self._repeat, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the line from a terminal."""
        self._ended.set()
        if self._live is not None:
            self._live.stop()
        if self._thread is not None:
            self._thread.join()

    def print(self, text: str) -> None:
        """Print a line that stays, wrapped between words on a terminal."""
        console = self._console
        text = printable(text, console.width if console.is_terminal else None)
        console.print(text, soft_wrap=True, highlight=False, markup=False)

    @property
    def _console(self) -> "Console":
        import rich

        return self._to or rich.get_console()

    def _repeat(self) -> None:
        while not self._ended.wait(PLAIN_INTERVAL):
            self.print(str(self._line()))

    def _line(self) -> "Text":
        from rich.text import Text

        line = clean(f"{self._text()} … {monotonic() - self._began:.0f} s")
        return Text(line, style="dim", no_wrap=True, overflow="ellipsis")
