"""The command `launch`."""

import sys
from typing import Annotated, Final

import typer

from ..distribute.launcher import launch as launch_processes
from ..errors import ConfigurationError
from .commands import app
from .help import Command
from .output import reporting_errors

EPILOG = (
    "Exit codes: that of the first process that fails, 128 plus the number of the signal that "
    "ended it, or 0."
)

ALONE: Final = {"replay": "", "certify": ", or call treadle certify with --workers"}
"""Commands that are refused, each with what to do instead, as a clause."""


@app.command(
    cls=Command,
    epilog=EPILOG,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def launch(
    context: typer.Context,
    workers: Annotated[int, typer.Option("--workers", help="The number of processes.", min=1)],
    restarts: Annotated[
        int,
        typer.Option("--restarts", help="Start all again after a failure, so many times.", min=0),
    ] = 0,
) -> None:
    """Train in several processes of this machine: run a command, or a script, in each of them.

    After --, give a command of treadle, or a Python file with its arguments. If one process fails,
    all are ended. With --restarts, all start again, and a run with a directory resumes from its
    newest checkpoint.

    Examples:
      treadle launch --workers 2 -- run digits --backend jax
      treadle launch --workers 4 --restarts 3 -- my_script.py --epochs 10
    """
    with reporting_errors():
        if not context.args:
            raise ConfigurationError(
                "there is nothing to launch: give a command of treadle or a Python file after --, "
                "such as treadle launch --workers 2 -- run digits"
            )
        first = context.args[0]
        if first in ALONE:
            raise ConfigurationError(
                f"treadle {first} runs in one process, not in {workers}: leave out treadle launch"
                f"{ALONE[first]}"
            )
        start = [sys.executable] if first.endswith(".py") else [sys.executable, "-m", "treadle"]
        raise typer.Exit(launch_processes([*start, *context.args], workers, restarts))
