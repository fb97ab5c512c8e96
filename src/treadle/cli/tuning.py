"""The `treadle tune` command: hyperparameter search for a task."""

import warnings
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

import treadle

from ..core.terminal import Waiting
from ..errors import TreadleWarning
from ..recipes import resolve
from ..tuning import Trial, Tuned
from ..tuning.space import chosen, read
from . import environment, output
from .commands import app, refuse_extra
from .help import Command
from .output import reporting_errors
from .parameters import (
    HOW,
    WHERE,
    Backend,
    DataDir,
    Epochs,
    Json,
    Precision,
    Quiet,
    Seed,
    Settings,
    Steps,
    TaskName,
)

SHOWN = 10
"""Maximum number of trials in the table; the others are only counted."""


@app.command(
    cls=Command,
    epilog="Exit codes: 0 done or finished before, 1 no trial completed, 2 wrong usage, "
    "configuration, backend, data or directory, 130 interrupted, 143 terminated; after 130 and "
    "143, the same command resumes the search.",
    context_settings={"allow_extra_args": True},
)
def tune(
    context: typer.Context,
    task: TaskName,
    trials: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Total number of trials, including earlier calls."),
    ] = 20,
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'NAME=LOW..HIGH'",
            help="Search space of a setting, added to or replacing those in the task's signature: "
            "'units=64..512 log', 'units=64..512 step 64', 'activation=relu,gelu'. May be "
            "repeated.",
            show_default=False,
        ),
    ] = None,
    set_: Settings = None,
    monitor: Annotated[
        str, typer.Option(metavar="NAME", help="The logged value to optimize.")
    ] = "val_loss",
    direction: Annotated[
        str | None,
        typer.Option(
            metavar="min|max",
            help="Whether to minimize or maximize it; default: derived from its name.",
            show_default=False,
        ),
    ] = None,
    no_pruning: Annotated[
        bool, typer.Option("--no-pruning", help="Do not end bad trials early.")
    ] = False,
    epochs: Epochs = None,
    steps: Steps = None,
    workers: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="P",
            help="Number of trials to run in parallel, each in its own process.",
            rich_help_panel=HOW,
        ),
    ] = 1,
    backend: Backend = None,
    precision: Precision = None,
    seed: Seed = None,
    directory: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder for the database and the run directories; default: runs/NAME-tune.",
            show_default=False,
            rich_help_panel=WHERE,
        ),
    ] = None,
    data_dir: DataDir = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Remove an earlier search in this directory.", rich_help_panel=WHERE
        ),
    ] = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Search a task's hyperparameters.

    The search space is defined in the task's signature, with treadle.Range and treadle.Choice, or
    with --search. Run the same command again to resume an interrupted search; it ends when there
    are N trials in total.

    Examples:
      treadle tune digits --trials 20
      treadle tune my_task.py --search 'units=64..512 log' --workers 2
    """
    with reporting_errors():
        refuse_extra(context.args)
        recipe = resolve(task)
        fixed, parameters = recipe.given(set_ or []), recipe.parameters or ()
        spaces = chosen(parameters, read(search or [], parameters, recipe.name), fixed, recipe.name)
        folder = environment.checked_folder(data_dir) if data_dir is not None else None
        name = environment.choose(backend, recipe.backend)
        silent = quiet or json
        if not silent:
            output.print_line(
                f"searching {'; '.join(f'{key} {part}' for key, part in spaces.items())}"
            )
        ended = 0

        def report(trial: Trial) -> None:
            nonlocal ended
            ended += 1
            if not silent:
                waiting.print(_line(trial, monitor))

        def progress() -> str:
            trying = f", {workers} at a time" if workers > 1 else ""
            return f"{ended} of up to {trials} trials ended in this call{trying}"

        with Waiting(progress, quiet=silent, at_once=False) as waiting, warnings.catch_warnings():
            warnings.simplefilter("ignore", TreadleWarning)  # printed below
            found = treadle.tune(
                task,
                trials=trials,
                search=spaces,
                fixed=fixed,
                epochs=epochs,
                steps=steps,
                monitor=monitor,
                direction=direction,
                directory=directory,
                workers=workers,
                backend=name,
                precision=precision,
                seed=seed,
                data_dir=folder,
                pruning=not no_pruning,
                fresh=fresh,
                on_trial_end=report,
            )
        if found.changed:
            output.note(f"warning: {found.changed}")
        if json:
            output.print_json(found.facts())
        else:
            _print(found)
        if found.best is None:
            raise typer.Exit(output.TRAINING)


def _line(trial: Trial, monitor: str) -> str:
    """Return one trial as a line; the number is written as in the name of its directory."""
    values = " ".join(f"{name}={_short(value)}" for name, value in trial.parameters.items())
    return f"trial {trial.number:04}  {_result(trial, monitor)}  {values}"


def _result(trial: Trial, monitor: str) -> str:
    if trial.ended == "complete":
        return f"{monitor} {_short(trial.value)}"
    if trial.ended == "failed":
        return f"failed: {trial.error}"
    return f"{trial.ended} after {trial.reports}"


def _short(value: object) -> str:
    from ..core.values import short  # late: it imports NumPy

    return short(value) if isinstance(value, float) else str(value)


def _print(found: Tuned) -> None:
    """Print a table of the best trials, counts of the others, and how to rerun the best trial."""
    from rich.console import Console  # late: importing it takes a tenth of a second
    from rich.table import Table

    if found.before:
        count = len(found.trials)
        output.print_line(f"{found.directory} holds {count} trials already; nothing was done")
    if found.exhausted:
        output.print_line("every combination was tried")
    if found.best is not None:
        table = Table(box=None, header_style="bold", pad_edge=False)
        table.add_column("trial", justify="right")
        for name in (found.monitor, *found.best.parameters, "seconds"):
            table.add_column(name, justify="right")
        for trial in found.ranked[:SHOWN]:
            seconds = f"{trial.seconds:.1f}" if trial.seconds is not None else ""
            values = map(_short, (trial.value, *trial.parameters.values()))
            table.add_row(f"{trial.number:04}", *values, seconds)
        Console(highlight=False).print(table)
    others = len(found.ranked[SHOWN:])
    ended = Counter(trial.ended for trial in found.trials if trial.ended != "complete")
    counted = {"complete": others, **ended} if others else dict(ended)
    if counted:
        output.print_line(
            f"not shown: {', '.join(f'{count} {how}' for how, count in counted.items())}"
        )
    if found.command is not None:
        output.print_line(f"runs and database: {found.directory}")
        output.print_line(f"rerun the best: {found.command}")
    else:
        output.note("no trial completed")
