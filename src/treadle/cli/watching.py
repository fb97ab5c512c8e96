"""The commands `runs` and `log`, which only read run directories."""

import json as json_format
import re
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import sleep
from typing import Any

import typer

from ..core.directory import LOG, flattened
from ..core.lock import is_in_use
from ..core.terminal import clean
from ..errors import ConfigurationError, DirectoryError
from ..report import states
from ..report.states import RunStatus, recorded_run
from . import output
from .commands import command
from .options import PRINTED, argument, flag, json_flag, option, run_directory

INTERVAL = 0.5  # seconds between two reads of a log
_WIDEST = 1000  # columns, if the output is not a terminal


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Options of `treadle runs`."""

    root: Path = argument(metavar="[FOLDER]", help="A folder with runs.", default=Path("runs"))
    sort: str = option(
        "Sort by directory, state, started, step, a setting or a value; -NAME reverses.",
        "NAME",
        PRINTED,
        default_shown=True,
        default="directory",
    )
    json: bool = json_flag()


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """Options of `treadle log`."""

    directory: Path = run_directory()
    last: int = option("Lines to begin with.", "N", PRINTED, default_shown=True, min=0, default=20)
    follow: bool = flag("Print new lines until the run ends.", PRINTED, "--follow", "-f")
    json: bool = flag("Print one JSON object a line.", PRINTED)


@command()
def runs(options: Runs) -> None:
    """List the runs in a folder: settings that differ, state and best values.

    A run is running, finished, interrupted or failed. Settings that are equal in all runs are left
    out; --json has all of them. The folders are only read, and no file in them is executed.

    Examples:
      treadle runs
      treadle runs runs/digits-tune --sort val_loss
    """
    if not options.root.is_dir():
        raise DirectoryError(f"there is no folder {options.root}: name one that holds runs")
    found = _sorted(
        [states.state_of(path) for path in states.run_directories(options.root)], options.sort
    )
    if options.json:
        output.print_json({"runs": [_facts(run) for run in found]})
    elif found:
        _print(found)
    else:
        output.note(f"{options.root} holds no runs")


@command()
def log(options: LogOptions) -> None:
    """Print the last lines of a run's log, also while it trains.

    The folder is only read, and no file in it is executed.

    Examples:
      treadle log runs/mine
      treadle log runs/mine --follow
    """
    directory = options.directory
    recorded_run(directory)  # reports a folder without a run
    from ..hooks.log_tail import LogTail  # late: it imports NumPy

    tail = LogTail(directory / LOG, options.last)
    while True:
        # In this order, so that the last lines of a run that just ended are printed.
        running = options.follow and is_in_use(directory)
        for line in tail.lines():
            _print_line(line, options.json)
        if not running:
            break
        sys.stdout.flush()
        sleep(INTERVAL)
    if options.follow:
        run = states.state_of(directory)
        output.note(f"{run.state}{f': {run.reason}' if run.reason else ''}")


def _print_line(line: dict[str, Any], json: bool) -> None:
    from ..core.logs import line as formatted  # late: it imports NumPy
    from ..core.logs import values_of

    if json:
        typer.echo(json_format.dumps(output.plain(line), allow_nan=False))
        return
    values = formatted({clean(name, 100): value for name, value in values_of(line).items()})
    kind = clean(line.get("kind", "step"), 100)
    head = f"{kind} {line['epoch']}  step {line['step']:,}" if kind == "epoch" else ""
    head = head or (f"step {line['step']:,}" + (f"  {kind}" if kind != "step" else ""))
    output.print_line(f"{head}  {values}".rstrip())


def _sorted(found: list[RunStatus], by: str) -> list[RunStatus]:
    """Sort runs by a column, a setting or a value. Runs without it follow the others.

    Raises:
        ConfigurationError: If no run has it.
    """
    name = by.removeprefix("-")
    keys = [_key(run, name) for run in found]
    if found and all(key is None for key in keys):
        names = {n for run in found for n in (*flattened(run.settings), *run.last)}
        known = ", ".join(("directory, state, started, step", *sorted(names)))
        raise ConfigurationError(f"--sort {by}: no run has {name!r}. Choose one of {known}")
    having = [(key, i) for i, key in enumerate(keys) if key is not None]
    having.sort(key=lambda pair: pair[0], reverse=by != name)
    without = [run for run, key in zip(found, keys, strict=True) if key is None]
    return [found[i] for _, i in having] + without


def _key(run: RunStatus, name: str) -> tuple[bool, Any] | None:
    """Return what a run is sorted by: numbers before texts."""
    if name in ("directory", "state", "started", "step"):
        value = getattr(run, name)
    elif name in run.best:
        value = run.best[name][0]
    else:
        value = {**flattened(run.settings), **run.last}.get(name)
    if value is None or value != value:  # NaN
        return None
    is_number = isinstance(value, (int, float))
    return (False, value) if is_number else (True, str(value))


def _facts(run: RunStatus) -> dict[str, Any]:
    best = {name: {"value": v, "epoch": epoch} for name, (v, epoch) in run.best.items()}
    return {**vars(run), "directory": str(run.directory), "best": best}


def _print(found: list[RunStatus]) -> None:
    from rich.console import Console  # late: importing it takes a tenth of a second
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("run", "state", "step", "epoch", "started", "settings", "best"):
        right = column in ("step", "epoch")
        table.add_column(
            column,
            justify="right" if right else "left",
            overflow="fold",
            no_wrap=column == "started",
        )
    differing = states.differing_settings(found)
    if len(found) == 1:  # nothing to compare: those of layers and optimizers are left out
        differing = {name for name in differing if "." not in name and name != "holds_eval_step"}
    else:  # facts about layers and optimizers that only some runs have would fill the table
        readable = [set(flattened(run.settings)) for run in found if run.state != "unreadable"]
        all_have = set[str].intersection(*readable) if readable else set()
        differing = {
            name
            for name in differing
            if name in all_have or re.fullmatch(r"[^.]+|\D+\.class", name)
        }
    for run in found:
        settings = "  ".join(
            f"{name}={output.shown(value)}"
            for name, value in flattened(run.settings).items()
            if name in differing and (value is not None or len(found) > 1)
        )
        cells = (
            clean(run.directory),
            run.state,
            f"{run.step:,}",
            str(run.epoch),
            _age(run.started),
            clean(settings, 300),
            clean(_best(run), 300),
        )
        table.add_row(*map(Text, cells))
    width = None if sys.stdout.isatty() else _WIDEST
    Console(highlight=False, width=width).print(table)
    for run in found:
        if run.state in ("unreadable", "failed"):
            output.note(clean(f"{run.directory} {run.state}: {run.reason}", 500))


def _age(started: str) -> str:
    """Return how long ago a run started; empty if that is unknown."""
    try:
        begun = datetime.fromisoformat(started)
    except ValueError:
        return ""
    begun = begun if begun.tzinfo else begun.replace(tzinfo=UTC)
    seconds = max(0, int((datetime.now(UTC) - begun).total_seconds()))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"


def _best(run: RunStatus) -> str:
    """Format the best values: those of the validation, if there is one."""
    from ..core.logs import short

    names = [name for name in run.best if name.startswith("val_")] or list(run.best)
    return "  ".join(f"{n} {short(run.best[n][0])} in epoch {run.best[n][1]}" for n in names)
