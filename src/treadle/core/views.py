"""HTML for notebooks: tables and curves of results. Every text is escaped, and no script is used.

The styles are inline and inherit the colors of the page, so that a view is readable in light and
dark notebooks. Curves are SVG, which needs no further package.
"""

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .drawing import LINE, MORE_LINES
from .logs import Array
from .terminal import clean

MOST_POINTS = 300  # of a curve, which is 320 pixels wide
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 320, 170, 52, 30, 22
_LONGEST = 300  # characters of a cell
_CELL = "text-align:left;padding:2px 10px 2px 0;vertical-align:top"


@dataclass(frozen=True)
class Curve:
    """A curve: the label, the numbers on both axes, and whether it is drawn faintly."""

    label: str
    x: Array
    y: Array
    faint: bool = False


def text(value: object, limit: int = _LONGEST) -> str:
    r"""Return a text such that HTML shows it as it is; control characters are escapes.

    Example:
        >>> text("<b>\x1b")
        '&lt;b&gt;\\x1b'
    """
    return html.escape(clean(value, limit))


def block(title: str, *parts: str) -> str:
    """Return a view: a title, which is escaped, above parts that are HTML."""
    return f"<div><p><b>{text(title)}</b></p>{''.join(parts)}</div>"


def paragraph(line: str) -> str:
    """Return a line of text as HTML."""
    return f"<p>{text(line, 2000)}</p>"


def table(header: Sequence[str], rows: Iterable[Sequence[object]], longest: int = _LONGEST) -> str:
    """Return a table of texts as HTML; empty without rows. Longer texts are cut.

    Example:
        >>> table(["name"], [])
        ''
    """
    cells = [
        "<tr>"
        + "".join(f'<td style="{_CELL}">{text(cell, longest)}</td>' for cell in row)
        + "</tr>"
        for row in rows
    ]
    head = "".join(f'<th style="{_CELL}">{text(name)}</th>' for name in header)
    return f"<table><tr>{head}</tr>{''.join(cells)}</table>" if cells else ""


def curves(charts: Iterable[str]) -> str:
    """Arrange charts next to each other; they wrap on a narrow page."""
    return f'<div style="display:flex;flex-wrap:wrap;gap:12px">{"".join(charts)}</div>'


def chart(
    title: str,
    lines: Sequence[Curve],
    x_label: str,
    logarithmic: bool = False,
    marks: Sequence[tuple[str, float]] = (),
) -> str:
    """Return curves as an SVG image.

    Args:
        title: The title.
        lines: The curves. Numbers that are not finite are gaps.
        x_label: The label of the horizontal axis.
        logarithmic: Whether the horizontal axis is logarithmic.
        marks: Vertical lines, each with a label and its place.
    """
    points = [list(zip(line.x.tolist(), line.y.tolist(), strict=True)) for line in lines]
    if logarithmic:
        points = [[(math.log10(x), y) for x, y in line if x > 0] for line in points]
        marks = [(label, math.log10(x)) for label, x in marks if x > 0]
    # A faint curve, of single values, may leave the frame: the others determine the scale.
    main = [p for p, line in zip(points, lines, strict=True) if not line.faint] or points
    finite = [(x, y) for line in main for x, y in line if math.isfinite(x) and math.isfinite(y)]
    if not finite:
        return ""
    xs, ys = zip(*finite, strict=True)
    frame = _Frame(min(xs), max(xs), min(ys), max(ys))
    colors = iter([LINE, *MORE_LINES * len(lines)])
    shapes: list[str] = []
    names: list[tuple[str, str]] = []
    for line, places in zip(lines, points, strict=True):
        color = LINE if line.faint else next(colors)
        if not line.faint:
            names.append((line.label, color))
        style = "stroke-width:1;opacity:.3" if line.faint else "stroke-width:1.8"
        for path in frame.paths(places):
            if " " in path:
                style_of_path = f"fill:none;stroke:{color};{style}"
                shapes.append(f'<polyline points="{path}" style="{style_of_path}"/>')
            else:
                x, y = path.split(",")
                shapes.append(f'<circle cx="{x}" cy="{y}" r="3" style="fill:{color}"/>')
    for (label, x), color in zip(marks, MORE_LINES, strict=False):
        at = frame.x(x)
        shapes.append(
            f'<line x1="{at}" x2="{at}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" '
            f'style="stroke:{color};stroke-dasharray:4 3"/>'
        )
        names.append((label, color))
    ends = [10**x for x in (min(xs), max(xs))] if logarithmic else [min(xs), max(xs)]
    return frame.svg(title, shapes, names, x_label, ends)


@dataclass(frozen=True)
class _Frame:
    """The range of the numbers of a chart, and their places in the image."""

    left: float
    right: float
    low: float
    high: float

    def x(self, value: float) -> float:
        width = _WIDTH - _LEFT - 8
        share = 0.5 if self.right == self.left else (value - self.left) / (self.right - self.left)
        return round(_LEFT + width * share, 1)

    def y(self, value: float) -> float:
        height = _HEIGHT - _BOTTOM - _TOP
        share = 0.5 if self.high == self.low else (value - self.low) / (self.high - self.low)
        return round(_HEIGHT - _BOTTOM - height * share, 1)

    def paths(self, places: Sequence[tuple[float, float]]) -> Iterable[str]:
        """Yield the points of each part of a curve between gaps."""
        every = max(1, -(-len(places) // MOST_POINTS))
        part: list[str] = []
        for x, y in [*places[: len(places) - 1 : every], *places[-1:], (0.0, math.nan)]:
            if math.isfinite(x) and math.isfinite(y):
                shown = min(max(y, self.low), self.high)  # of a faint curve
                part.append(f"{self.x(x)},{self.y(shown)}")
            elif part:
                yield " ".join(part)
                part = []

    def svg(
        self,
        title: str,
        shapes: Sequence[str],
        names: Sequence[tuple[str, str]],
        x_label: str,
        ends: Sequence[float],
    ) -> str:
        """Return the image: shapes, axes with the smallest and the largest number, a legend."""
        base = _HEIGHT - _BOTTOM
        legend = "".join(f'<tspan style="fill:{c}" dx="8">{text(n, 40)}</tspan>' for n, c in names)
        return (
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
            f'aria-label="{text(title, 80)}" style="font:11px sans-serif;fill:currentColor">'
            f'<text x="{_LEFT}" y="13"><tspan style="font-weight:bold">{text(title, 40)}</tspan>'
            f"{legend}</text>"
            f'<path d="M{_LEFT} {_TOP}V{base}H{_WIDTH - 8}" '
            'style="fill:none;stroke:currentColor;opacity:.4"/>'
            f'<text x="{_LEFT - 6}" y="{_TOP + 6}" text-anchor="end">{self.high:.4g}</text>'
            f'<text x="{_LEFT - 6}" y="{base}" text-anchor="end">{self.low:.4g}</text>'
            f'<text x="{_LEFT}" y="{base + 14}">{ends[0]:,.4g}</text>'
            f'<text x="{(_LEFT + _WIDTH) // 2}" y="{base + 14}" text-anchor="middle">'
            f"{text(x_label, 40)}</text>"
            f'<text x="{_WIDTH - 8}" y="{base + 14}" text-anchor="end">{ends[1]:,.4g}</text>'
            f"{''.join(shapes)}</svg>"
        )
