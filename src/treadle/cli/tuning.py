"""The `treadle tune` command: hyperparameter search for a task."""

import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import typer

import treadle

from ..core.terminal import Waiting
from ..errors import TreadleWarning
from ..tuning import Trial, Tuned
from ..tuning.space import chosen, read
from . import environment, output
from .commands import command
from .options import HOW, WHERE, TaskOptions, epochs_option, flag, option, quiet_flag, steps_option

PASSED_ON = (
    *("trials", "monitor", "direction", "directory", "workers", "fresh"),
    *("epochs", "steps", "precision", "seed"),
)
"""Options that are arguments of `treadle.tune`, with the same names."""

SHOWN = 10
"""Maximum number of trials in the table; the others are only counted."""


@dataclass(frozen=True, kw_only=True)
class Tune(TaskOptions):
    """Options of `treadle tune`."""

    trials: int = option(
        "Total number of trials, including earlier calls.",
        "N",
        default_shown=True,
        min=1,
        default=20,
    )
    search: list[str] | None = option(
        "Search space of a setting, added to or replacing those in the task's signature: "
        "'units=64..512 log', 'units=64..512 step 64', 'activation=relu,gelu'. May be "
        "repeated.",
        "'NAME=LOW..HIGH'",
    )
    monitor: str = option(
        "The logged value to optimize.", "NAME", default_shown=True, default="val_loss"
    )
    direction: str | None = option(
        "Whether to minimize or maximize it; default: derived from its name.", "min|max"
    )
    no_pruning: bool = flag("Do not end bad trials early.", None)
    epochs: int | None = epochs_option()
    steps: int | None = steps_option()
    workers: int = option(
        "Number of trials to run in parallel, each in its own process.",
        "P",
        HOW,
        default_shown=True,
        min=1,
        default=1,
    )
    directory: Path | None = option(
        "Folder for the database and the run directories; default: runs/NAME-tune.", "FOLDER", WHERE
    )
    fresh: bool = flag("Remove an earlier search in this directory.", WHERE)
    quiet: bool = quiet_flag()


@command(
    "Exit codes: 0 done or finished before, 1 no trial completed, 2 wrong usage, "
    "configuration, backend, data or directory, 130 interrupted, 143 terminated; after 130 and "
    "143, the same command resumes the search."
)
def tune(options: Tune) -> None:
    """Search a task's hyperparameters.

    The search space is defined in the task's signature, with treadle.Range and treadle.Choice, or
    with --search. Run the same command again to resume an interrupted search; it ends when there
    are N trials in total.

    Examples:
      treadle tune digits --trials 20
      treadle tune my_task.py --search 'units=64..512 log' --workers 2
    """
    recipe, folder = options.recipe(), options.data_dir
    fixed, parameters = recipe.given(options.set_ or []), recipe.parameters or ()
    spaces = read(options.search or [], parameters, recipe.name)
    spaces = chosen(parameters, spaces, fixed, recipe.name)
    folder = environment.checked_folder(folder) if folder is not None else None
    backend = environment.choose(options.backend, recipe.backend)
    quiet = options.quiet or options.json
    if not quiet:
        searching = "; ".join(f"{name} {part}" for name, part in spaces.items())
        output.print_line(f"searching {searching}")
    ended = 0

    def report(trial: Trial) -> None:
        nonlocal ended
        ended += 1
        if not quiet:
            waiting.print(_line(trial, options.monitor))

    def progress() -> str:
        trying = f", {options.workers} at a time" if options.workers > 1 else ""
        return f"{ended} of up to {options.trials} trials ended in this call{trying}"

    with Waiting(progress, quiet=quiet, at_once=False) as waiting, warnings.catch_warnings():
        warnings.simplefilter("ignore", TreadleWarning)  # printed below
        found = treadle.tune(
            options.task,
            search=spaces,
            fixed=fixed,
            backend=backend,
            data_dir=folder,
            pruning=not options.no_pruning,
            **{name: getattr(options, name) for name in PASSED_ON},
            on_trial_end=report,
        )
    if found.changed:
        output.note(f"warning: {found.changed}")
    if options.json:
        output.print_json(found.facts())
    else:
        _print(found)
    if found.best is None:
        raise typer.Exit(output.TRAINING)


def _line(trial: Trial, monitor: str) -> str:
    """Return one trial as a line; the number is written as in the name of its directory."""
    values = " ".join(f"{name}={output.shown(value)}" for name, value in trial.parameters.items())
    return f"trial {trial.number:04}  {_result(trial, monitor)}  {values}"


def _result(trial: Trial, monitor: str) -> str:
    if trial.ended == "complete":
        return f"{monitor} {output.shown(trial.value)}"
    if trial.ended == "failed":
        return f"failed: {trial.error}"
    return f"{trial.ended} after {trial.reports}"


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
        for name in (found.monitor, "step", *found.best.parameters, "seconds"):
            table.add_column(name, justify="right")
        for trial in found.ranked[:SHOWN]:
            seconds = f"{trial.seconds:.1f}" if trial.seconds is not None else ""
            step = "" if trial.step is None else trial.step
            values = map(output.shown, (trial.value, step, *trial.parameters.values()))
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
