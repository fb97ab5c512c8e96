"""The `treadle doctor` command, and the option `--preflight` of `treadle run`.

Both inspect single steps of a task; the option stops a run for mistakes that are certain.
"""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import typer

import treadle

from ..core.terminal import clean
from ..distribute import single_process_only
from ..errors import ConfigurationError
from . import environment, output
from .commands import command
from .options import PRINTED, TaskOptions, argument, flag, option

if TYPE_CHECKING:  # importing them imports NumPy and Keras
    from ..doctor import Sheet
    from ..recipes._loading import Made

FOUND = 1
FOR_SINGLE_STEPS = {
    # JAX compiles each operation of an uncompiled step alone, which takes most of the time.
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    # PyTorch's threads wait actively for the next operation. If other programs use the cores, too,
    # they keep one another from them, and a step takes four times as long.
    "OMP_WAIT_POLICY": "passive",
}
"""Environment variables that a framework reads when it is imported; results stay the same."""


@dataclass(frozen=True, kw_only=True)
class Doctor(TaskOptions):
    """Options of `treadle doctor`."""

    other: str | None = argument(
        default=None,
        metavar="[OTHER]",
        help="Another version of the task: print what its sheet shows differently.",
        show_default=False,
    )
    steps: int | None = option(
        "Length of the run, in steps, that schedules are compared with; default: the task's own.",
        "N",
        min=1,
    )
    how: bool = flag("Add how each fact was measured.", PRINTED)
    all_: bool = flag("Show every layer and variable of a large model.", PRINTED)


@command(
    "Exit codes: 0 no certain mistake found, 1 mistakes found, 2 wrong usage, configuration, "
    "backend, data or directory, 130 interrupted."
)
def doctor(options: Doctor) -> None:
    """Show what a step of a task does, and the mistakes in it that are certain.

    A few steps run uncompiled and are recorded, and one of them is repeated with changed batches
    and weights. Nothing is trained or saved. Lines that begin with ! are unusual, not wrong. A
    task silences certain mistakes by their codes: doctor_ignore = ["R-constant-seed"].

    Examples:
      treadle doctor digits
      treadle doctor my_task.py:MyTask --set units=128 --backend torch --json
      treadle doctor before.py:MyTask after.py:MyTask
    """
    quiet, other = options.json, None
    with output.kept_free(quiet):
        sheet = _inspected(options)
        if options.other is not None:
            import keras  # late: it imports a framework

            keras.backend.clear_session()  # the second task is made with the same seed
            other = _inspected(replace(options, task=options.other))
    if other is not None:
        _print_differences(sheet, other, quiet)
        return
    if quiet:
        output.print_json(sheet.facts())
    else:
        for line in sheet.text(options.how, options.all_).splitlines():
            output.print_line(clean(line))
    if sheet.findings:
        raise typer.Exit(FOUND)


def _inspected(options: Doctor) -> "Sheet":
    """Make a task, and return its sheet."""
    with _fast_single_steps():
        made = options.made(options.json)
        data = made.datasets()
        steps = made.lasts.get("steps") if options.steps is None else options.steps
        with environment.showing("running and changing single steps", options.json):
            return treadle.doctor.inspect(made.task, data, steps=steps)


def _print_differences(sheet: "Sheet", other: "Sheet", quiet: bool) -> None:
    found = sheet.diff(other)
    if quiet:
        sheets = [sheet.facts(), other.facts()]
        lines = [asdict(difference) for difference in found]
        schema = sheets[0]["schema"]
        output.print_json({"schema": schema, "differences": lines, "sheets": sheets})
        return
    for difference in found:
        output.print_line(clean(str(difference)))
    if not found:
        output.print_line("both sheets show the same")


@contextmanager
def _fast_single_steps() -> Generator[None]:
    """Make a framework, if it is imported here, fast in steps that run a few times, uncompiled."""
    added = {name: x for name, x in FOR_SINGLE_STEPS.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def preflight(made: "Made", lasts: Mapping[str, Any], quiet: bool) -> "Sheet":
    """Inspect a task, and print the certain mistakes that are found.

    Args:
        made: The task. Its data are made a second time: what is read here is read again later.
        lasts: How long the run lasts, by name.
        quiet: Print nothing but mistakes.

    Raises:
        ConfigurationError: There are mistakes, or several processes train.
    """
    single_process_only(
        "--preflight inspects a task in one process: run treadle doctor with the same task and "
        "settings before, and leave the option out here"
    )
    with environment.showing("looking for mistakes", quiet):
        data = made.datasets()
        length = treadle.data.as_source(data.train).length
        epochs = lasts.get("epochs")
        planned = epochs * length if epochs and length else None
        steps = lasts.get("steps") or planned
        sheet = treadle.doctor.inspect(made.task, data, steps=steps)
    for finding in sheet.findings:
        for line in finding.lines():
            output.print_line(clean(line))
    if not quiet:
        output.print_line(clean(sheet.summary))
    if sheet.findings:
        codes = ", ".join(sorted({repr(finding.code) for finding in sheet.findings}))
        raise ConfigurationError(
            f"{sheet.task} was not trained, because of mistakes that are listed above. Correct "
            f"them, or, where one is intended, add its code to the task: doctor_ignore = [{codes}]"
        )
    return sheet
