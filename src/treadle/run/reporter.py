"""Messages about a run: in the console if progress is shown, else as Python warnings."""

import sys
import warnings
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager

from ..core.terminal import printable
from ..errors import TreadleWarning
from ..hooks.console import Console


class Reporter:
    """Prints messages and warnings about a run.

    Args:
        consoles: The hooks that show progress; warnings become Python warnings if there is none.
        silent: Print and warn nothing, as in a replay, whose caller reports the findings.
    """

    def __init__(self, consoles: Sequence[Console] = (), silent: bool = False) -> None:
        self._consoles, self._silent = tuple(consoles), silent
        self._warned: set[str] = set()

    @property
    def has_console(self) -> bool:
        """Whether progress and logged values are shown in the console."""
        return bool(self._consoles)

    def print(self, text: str, style: str = "dim") -> None:
        """Print a text in the console, if progress is shown and the text is not empty."""
        if text:
            for console in self._consoles:
                console.print(text, style)

    @contextmanager
    def activity(self, text: str) -> Generator[None]:
        """Show an activity before the first step in the console, if progress is shown."""
        with ExitStack() as stack:
            for console in self._consoles:
                stack.enter_context(console.activity(text))
            yield

    def warn(self, text: str, logged: bool = False) -> bool:
        """Print a warning in the console if progress is shown, else issue a Python warning.

        Each text comes once in a run. An empty text does nothing.

        Args:
            text: The warning.
            logged: Whether it is logged too: a console shows what is logged.

        Returns:
            Whether this is the first time.
        """
        if not text or text in self._warned:
            return False
        self._warned.add(text)
        if self._consoles:
            if not logged:
                self.print(f"warning: {text}", "yellow")
        elif not self._silent:
            # With a registry of its own: Python's would show the text once in a process, and the
            # next run would not have it.
            caller = sys._getframe(1)  # type: ignore[reportPrivateUsage]
            warnings.warn_explicit(
                printable(text),
                TreadleWarning,
                caller.f_code.co_filename,
                caller.f_lineno,
                caller.f_globals.get("__name__"),
                registry={},
            )
        return True
