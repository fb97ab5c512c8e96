"""A step that was visited, as tables for people."""

import io
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ..hooks.values import short
from .findings import Replay, layer_of
from .numbers import Numbers
from .origin import short_list

WIDTH = 120
BAD = "bold red"


def text_of(found: Replay) -> str:
    """Return the tables as plain text."""
    file = io.StringIO()
    console = Console(file=file, width=WIDTH, no_color=True)
    for part in parts(found):
        console.print(part)
    return file.getvalue().rstrip("\n")


def show(found: Replay) -> None:
    """Print the tables, in colour where there is a terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for part in parts(found):
        console.print(part)


def parts(found: Replay) -> Iterator[RenderableType]:
    """Yield what there is to show, in order."""
    if found.found_by:
        yield _plain(found.found_by)
    yield _plain(
        f"step {found.step} (epoch {found.epoch}, batch {found.batch_number}) of "
        f"{found.directory}, from the checkpoint of step {found.checkpoint}, on {found.backend}"
    )
    yield _plain(str(found.agreement), "" if not found.agreement.difference else BAD)
    values = "  ".join(f"{name} {short(value)}" for name, value in found.values.items())
    yield _plain(f"compiled: {values}" if values else "compiled: it returned nothing")
    yield _plain(f"eagerly: {_distance(found)}")
    for note in found.notes:
        yield _plain(f"note: {note}")
    tables = [_batch(found), _layers(found) if found.layers else None, _variables(found)]
    for table in tables:
        if table is not None:
            yield _plain("")
            yield table
    yield _plain("")
    yield _plain(found.origin, "" if found.origin.startswith("all") else BAD)


def _distance(found: Replay) -> str:
    if found.eager_distance == 0:
        return "the same bits"
    where = found.eager_where
    if found.eager_distance == float("inf"):
        return f"{where} differs: it holds NaN or infinity in one of both only, or was zero"
    return f"equal within {found.eager_distance:.1e}, which is the difference of {where}"


def _batch(found: Replay) -> Table:
    table = _table("batch", "shape", "dtype", "min", "max", "mean", "not finite", "rows")
    for x in found.batch:
        ranges = (_number(x.least), _number(x.most), _number(x.mean))
        _row(table, x.not_finite, x.path, _shape(x), x.dtype, *ranges, _bad(x), short_list(x.rows))
    if found.rows is not None:
        table.caption = f"rows of the data set: {short_list(found.rows)}"
        table.caption_justify = "left"
    return table


def _layers(found: Replay) -> Table:
    table = _table("layer", "class", "shape", "activation", "not finite", "rows")
    for x in found.layers:
        kind, norm = found.kinds.get(layer_of(x.path), ""), _norm(x)
        rows = short_list(x.rows)
        _row(table, x.not_finite, x.path, kind, _shape(x), norm, _bad(x), rows)
    return table


def _variables(found: Replay) -> Table:
    table = _table("variable", "shape", "value", "gradient", "update", "not finite")
    for v in found.variables:
        three = {"value": v.value, "gradient": v.gradient, "update": v.update}
        norms = [_norm(x) if x is not None else "" for x in three.values()]
        bad = [f"{name} {x.not_finite}" for name, x in three.items() if x and x.not_finite]
        _row(table, len(bad), v.path, _shape(v.value), *norms, ", ".join(bad))
    return table


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, overflow="fold")
    for column in columns:
        left = column in ("class", "shape", "dtype", "rows") or (
            column == "not finite" and first == "variable"
        )
        table.add_column(column, justify="left" if left else "right", overflow="fold")
    return table


def _row(table: Table, bad: int, *cells: str) -> None:
    table.add_row(*map(Text, cells), style=BAD if bad else "")


def _plain(text: str, style: str = "") -> Text:
    return Text(text, style=style)


def _shape(x: Numbers) -> str:
    return "×".join(map(str, x.shape)) or "scalar"


def _bad(x: Numbers) -> str:
    return str(x.not_finite) if x.not_finite else ""


def _norm(x: Numbers) -> str:
    """Write a norm; of what holds no finite number there is none."""
    return short(x.norm, fixed=True) if x.least is not None else "–"


def _number(value: float | None) -> str:
    return "" if value is None else short(value, fixed=True)
