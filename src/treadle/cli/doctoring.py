"""The `treadle doctor` command: searches a task for mistakes that training would not report."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import treadle

from .. import recipes
from ..core.terminal import clean
from ..run.setup import overriding
from . import environment, output
from .commands import app, refuse_extra
from .help import Command
from .output import reporting_errors
from .parameters import Backend, DataDir, Json, Precision, Seed, Settings, TaskName

if TYPE_CHECKING:  # importing it imports NumPy and Keras
    from ..doctor import Report

FOUND = 1
FEW_OPTIMIZATIONS = "JAX_DISABLE_MOST_OPTIMIZATIONS"

Planned = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Steps of the run that schedules are compared with, if the task's own number of "
        "epochs is not used.",
        show_default=False,
    ),
]


@app.command(
    cls=Command,
    epilog="Exit codes: 0 no error found, 1 errors found, 2 wrong usage, configuration, backend, "
    "data or directory, 130 interrupted.",
    context_settings={"allow_extra_args": True},
)
def doctor(
    context: typer.Context,
    task: TaskName,
    set_: Settings = None,
    steps: Planned = None,
    backend: Backend = None,
    precision: Precision = None,
    seed: Seed = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Search a task for mistakes that training would not report.

    A few training steps run uncompiled and are recorded, and one of them is repeated with changed
    batches. Nothing is trained or saved. A task silences findings by their codes:
    doctor_ignore = ["D-imbalance"].

    Examples:
      treadle doctor digits
      treadle doctor my_task.py:MyTask --set units=128 --backend torch --json
    """
    with reporting_errors():
        refuse_extra(context.args)
        recipe = recipes.resolve(task)
        settings = recipe.settings(set_ or [])
        with output.kept_free(json):
            report = _examined(recipe, settings, steps, backend, precision, seed, data_dir, json)
        if json:
            output.print_json(report.facts())
        else:
            for line in report.lines():
                output.print_line(clean(line))
        if report.errors:
            raise typer.Exit(FOUND)


def _examined(
    recipe: recipes.Recipe,
    settings: dict[str, object],
    steps: int | None,
    backend: str | None,
    precision: str | None,
    seed: int | None,
    data_dir: Path | None,
    quiet: bool,
) -> "Report":
    """Make the task and examine it."""
    with _compiling_fast():
        environment.prepare(backend, recipe.backend, data_dir, seed, precision, quiet)
    with environment.showing("making the task", quiet), overriding(seed, precision, backend):
        made = recipes.make(recipe, settings)
        data = made.datasets()
    lasts = made.lasts
    if steps is None:
        steps = lasts.get("steps")
    with environment.showing("running and changing single steps", quiet):
        return treadle.doctor.examine(made.task, data, steps=steps)


@contextmanager
def _compiling_fast() -> Generator[None]:
    """Make JAX, if it is imported here, compile with few optimizations.

    It compiles each operation of an uncompiled step alone, which takes most of the time.
    """
    given = os.environ.get(FEW_OPTIMIZATIONS)
    os.environ.setdefault(FEW_OPTIMIZATIONS, "1")
    try:
        yield
    finally:
        if given is None:
            del os.environ[FEW_OPTIMIZATIONS]
