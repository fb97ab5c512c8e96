"""The `treadle doctor` command: searches a task for mistakes that training would not report."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import typer

import treadle

from ..core.terminal import clean
from . import environment, output
from .commands import command
from .options import TaskOptions, option

FOUND = 1
FEW_OPTIMIZATIONS = "JAX_DISABLE_MOST_OPTIMIZATIONS"


@dataclass(frozen=True, kw_only=True)
class Doctor(TaskOptions):
    """Options of `treadle doctor`."""

    steps: Annotated[
        int | None,
        option(
            "Steps of the run that schedules are compared with, if the task's own number of epochs "
            "is not used.",
            "N",
            min=1,
        ),
    ] = None


@command(
    "Exit codes: 0 no error found, 1 errors found, 2 wrong usage, configuration, backend, "
    "data or directory, 130 interrupted."
)
def doctor(options: Doctor) -> None:
    """Search a task for mistakes that training would not report.

    A few training steps run uncompiled and are recorded, and one of them is repeated with changed
    batches. Nothing is trained or saved. A task silences findings by their codes:
    doctor_ignore = ["D-imbalance"].

    Examples:
      treadle doctor digits
      treadle doctor my_task.py:MyTask --set units=128 --backend torch --json
    """
    quiet, steps = options.json, options.steps
    with output.kept_free(quiet):
        with _compiling_fast():
            made = options.made(quiet)
        data = made.datasets()
        steps = made.lasts.get("steps") if steps is None else steps
        with environment.showing("running and changing single steps", quiet):
            report = treadle.doctor.examine(made.task, data, steps=steps)
    if quiet:
        output.print_json(report.facts())
    else:
        for line in report.lines():
            output.print_line(clean(line))
    if report.errors:
        raise typer.Exit(FOUND)


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
