"""The progress display of a notebook cell: one output that is updated in place."""

import html
import importlib
from collections.abc import Callable
from time import monotonic
from typing import Any

from rich.console import Console
from rich.segment import Segment
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

from ..core.terminal import printable
from .display import Display

# Lines in one output. Each update sends all of them, so a further output is begun after these.
MOST_LINES = 200
PAUSE = 0.1  # seconds between two updates for new lines
WIDTH = 110  # columns; a notebook scrolls wider lines
_STYLE = "white-space:pre;overflow-x:auto;line-height:normal;margin:0"


def shows(console: Console) -> bool:
    """Return whether a console writes into a notebook whose outputs can be updated."""
    if not console.is_jupyter:
        return False
    try:
        _display_function()
    except ImportError:
        return False
    return True


class NotebookDisplay:
    """Shows the lines of a run, and below them its progress, as one output of a cell.

    The output is updated through its display id, which every front end of Jupyter supports without
    further packages. When the display stops, the lines stay, also in a saved notebook.
    """

    def __init__(self, display: Display) -> None:
        self._display = display
        self._console = Console(
            width=WIDTH, force_terminal=True, force_jupyter=False, color_system="truecolor"
        )
        self._lines: list[tuple[str, str]] = []  # as HTML and as plain text
        self._handle: Any = None
        self._stopped = False
        self._drawn = 0.0

    def start(self, refresh: bool = False) -> None:
        """Show the output."""
        if self._handle is None:
            self._handle = _display_function()(self._output(), display_id=True)
        elif refresh:
            self.refresh()

    def refresh(self) -> None:
        """Draw the output again."""
        if self._handle is not None:
            self._handle.update(self._output())
            self._drawn = monotonic()

    def stop(self) -> None:
        """Remove the progress, and keep the lines."""
        self._stopped = True
        self.refresh()

    def print(self, text: str, style: str = "") -> None:
        """Add a line that stays.

        Of lines that follow each other quickly, as those of short epochs, some are shown only with
        the next update: drawing each of them would slow down training.
        """
        if len(self._lines) >= MOST_LINES:
            stopped, self._stopped = self._stopped, True
            self.refresh()
            self._lines, self._handle, self._stopped = [], None, stopped
            self.start()
        self._lines.append(self._rendered(Text(printable(text), style)))
        if self._stopped or monotonic() - self._drawn >= PAUSE:
            self.refresh()

    def _output(self) -> "_Output":
        shown = [*self._lines, *([] if self._stopped else [self._rendered(self._display)])]
        markup, plain = (
            ("".join(parts) for parts in zip(*shown, strict=True)) if shown else ("", "")
        )
        return _Output(f'<pre style="{_STYLE}">{markup}</pre>', plain)

    def _rendered(self, part: Text | Display) -> tuple[str, str]:
        """Return a line, or the progress, as HTML and as plain text."""
        segments = list(self._console.render(part, self._console.options))
        pieces: list[str] = []
        for text, style, control in Segment.simplify(segments):
            if control:
                continue
            rule = style.get_html_style(DEFAULT_TERMINAL_THEME) if style else ""
            text = html.escape(text)
            pieces.append(f'<span style="{rule}">{text}</span>' if rule else text)
        plain = "".join(segment.text for segment in segments if not segment.control)
        return "".join(pieces), plain


class _Output:
    """What IPython displays."""

    def __init__(self, markup: str, plain: str) -> None:
        self._markup, self._plain = markup, plain

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": self._plain, "text/html": self._markup}


def _display_function() -> Callable[..., Any]:
    """Return IPython's `display`.

    Raises:
        ImportError: If IPython is not installed.
    """
    return importlib.import_module("IPython.display").display
