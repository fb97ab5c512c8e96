"""Console output, error reporting and exit codes of the commands."""

import json
import math
import shutil
import sys
import textwrap
import traceback
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer

from ..core.directory import read_run
from ..core.terminal import printable
from ..errors import (
    BackendError,
    ConfigurationError,
    DataError,
    DirectoryError,
    Terminated,
    TreadleError,
)
from ..recipes import Recipe
from ..report.states import best_values

if TYPE_CHECKING:  # importing them imports NumPy and Keras
    from ..core.history import History
    from ..loop import Loop

TRAINING, USAGE, UNFINISHED, INTERRUPTED = 1, 2, 3, 130
ABOUT_USAGE = (ConfigurationError, BackendError, DataError, DirectoryError)


@contextmanager
def reporting_errors() -> Generator[None]:
    """Print errors raised inside the block, and exit with the matching exit code."""
    try:
        yield
    except TreadleError as error:
        typer.secho(fitted(f"error: {error}", sys.stderr), fg=typer.colors.RED, err=True)
        for text in getattr(error, "__notes__", ()):
            typer.secho(fitted(f"  {text}", sys.stderr), dim=True, err=True)
        raise typer.Exit(USAGE if isinstance(error, ABOUT_USAGE) else TRAINING) from error
    except KeyboardInterrupt as error:
        typer.secho("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from error
    except Terminated as error:
        raise typer.Exit(Terminated.CODE) from error
    except (typer.Exit, BrokenPipeError):
        raise
    except Exception as error:  # raised by the task's code: print its traceback and notes
        traceback.print_exception(error)
        raise typer.Exit(TRAINING) from error


def print_line(text: str) -> None:
    """Print a text to standard output."""
    typer.echo(fitted(text, sys.stdout))


def note(text: str) -> None:
    """Print a note to standard error, separate from the results."""
    typer.secho(fitted(text, sys.stderr), dim=True, err=True)


def fitted(text: str, stream: TextIO) -> str:
    """Return a text as it is printed: cleaned, and wrapped if the stream is a terminal."""
    return printable(text, shutil.get_terminal_size().columns if stream.isatty() else None)


def shown(value: object) -> str:
    """Return a setting or a result as a short text; of a local function, the name alone."""
    from ..core.logs import short  # late: it imports NumPy

    return short(value) if isinstance(value, float) else str(value).rpartition("<locals>.")[2]


def kept_free(wanted: bool) -> AbstractContextManager[Any]:
    """Redirect what tasks print to standard error, so that standard output holds only JSON.

    Args:
        wanted: Whether to redirect; False does nothing.
    """
    return redirect_stdout(sys.stderr) if wanted else nullcontext()


def print_recipes(recipes: Mapping[str, Recipe]) -> None:
    """Print the name, the description and the settings of every recipe."""
    indent = max(map(len, recipes)) + 2
    columns = min(shutil.get_terminal_size().columns, 120) - indent
    for name, recipe in recipes.items():
        first, *rest = textwrap.wrap(recipe.description, columns) or [""]
        typer.echo(typer.style(name.ljust(indent), bold=True) + first)
        settings = " ".join(map(str, recipe.parameters or ()))
        for line in rest:
            typer.echo(" " * indent + line)
        for line in textwrap.wrap(settings, columns):
            typer.secho(" " * indent + line, dim=True)
    typer.echo("\nRun one with: treadle run NAME --set SETTING=VALUE")


def print_outcome(
    directory: Path, loop: "Loop", history: "History", changed: str, quiet: bool, as_json: bool
) -> None:
    """Print the last and best values of a run, and the names of its files.

    Args:
        directory: The run directory.
        loop: The loop that trained.
        history: All logged values.
        changed: A sentence on what changed in the task's code since the run, or an empty text.
        quiet: Whether no progress was shown.
        as_json: Whether to print one JSON object and nothing else.
    """
    from ..core.logs import short  # late: it imports NumPy

    before = loop.reason == "it was finished before"
    if loop.view.unfinished:
        note(f"time limit reached: resume with treadle resume {directory}")
    if before and quiet and changed:
        note(f"warning: {changed}")
    files = sorted(path.name for path in directory.iterdir() if path.is_file())
    last, epochs = history.last, [each for each in history.records if each.kind == "epoch"]
    best = best_values({each.progress.epoch + 1: each.values for each in epochs})
    if as_json:
        facts = read_run(directory)
        print_json(
            {
                "directory": str(directory),
                "files": files,
                "finished_before": before,
                "unfinished": loop.view.unfinished,
                **{name: facts.get(name) for name in ("backend", "plan", "reason", "progress")},
                "last": last,
                "best": {name: {"value": v, "epoch": epoch} for name, (v, epoch) in best.items()},
            }
        )
        return
    if before and quiet:
        print_line(f"the run in {directory} is already finished; nothing was done")
    width = max(map(len, last), default=0)
    for name, value in last.items():
        line = f"{name.ljust(width)}  {short(value)}"
        if name in best and best[name][0] != value:
            line += f"  (best {short(best[name][0])} in epoch {best[name][1]})"
        print_line(line)
    print_line(f"{directory}: {', '.join(files)}")


def print_json(value: Any) -> None:
    """Print one value as JSON."""
    typer.echo(json.dumps(plain(value), indent=2, allow_nan=False))


def plain(value: Any) -> Any:
    """Return a value in JSON's types; NaN and infinity become null, since JSON has neither."""
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
