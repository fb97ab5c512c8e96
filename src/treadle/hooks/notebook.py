"""The progress display of a notebook cell: one output that is updated in place."""

import html
import importlib
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.segment import Segment
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

from ..core.terminal import printable
from .display import Display

# Lines in one output. Each update sends all of them, so a further output is begun after these.
MOST_LINES = 200
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

    Args:
        display: The progress.
    """

    def __init__(self, display: Display) -> None:
        self._display = display
        self._console = Console(
            width=WIDTH, force_terminal=True, force_jupyter=False, color_system="truecolor"
        )
        self._lines: list[Text] = []
        self._handle: Any = None
        self._stopped = False

    def start(self, refresh: bool = False) -> None:
        """Show the output."""
        if self._handle is None:
            self._handle = _display_function()(_Output(*self._rendered()), display_id=True)
        elif refresh:
            self.refresh()

    def refresh(self) -> None:
        """Draw the output again."""
        if self._handle is not None:
            self._handle.update(_Output(*self._rendered()))

    def stop(self) -> None:
        """Remove the progress, and keep the lines."""
        self._stopped = True
        self.refresh()

    def print(self, text: str, style: str = "") -> None:
        """Add a line that stays."""
        if len(self._lines) >= MOST_LINES:
            self._stopped = True
            self.refresh()
            self._lines, self._handle, self._stopped = [], None, False
            self.start()
        self._lines.append(Text(printable(text), style))
        self.refresh()

    def _rendered(self) -> tuple[str, str]:
        """Return the output as HTML and as plain text."""
        shown: list[Any] = [*self._lines, *([] if self._stopped else [self._display])]
        options = self._console.options
        segments = [s for part in shown for s in self._console.render(part, options)]
        pieces: list[str] = []
        for text, style, control in Segment.simplify(segments):
            if control:
                continue
            rule = style.get_html_style(DEFAULT_TERMINAL_THEME) if style else ""
            text = html.escape(text)
            pieces.append(f'<span style="{rule}">{text}</span>' if rule else text)
        plain = "".join(segment.text for segment in segments if not segment.control)
        return f'<pre style="{_STYLE}">{"".join(pieces)}</pre>', plain


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
