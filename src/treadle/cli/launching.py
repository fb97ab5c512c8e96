"""The command `launch`."""

import sys
from dataclasses import dataclass
from typing import Final

import typer

from ..distribute.launcher import launch as launch_processes
from ..errors import ConfigurationError
from .commands import command
from .options import argument, option

EPILOG = (
    "Exit codes: that of the first process that fails, 128 plus the number of the signal that "
    "ended it, or 0."
)

ALONE: Final = {"replay": "", "certify": ", or call treadle certify with --workers"}
"""Commands that are refused, each with what to do instead, as a clause."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Options of `treadle launch`."""

    workers: int = option("The number of processes.", None, None, "--workers", min=1, required=True)
    restarts: int = option(
        "Start all again after a failure, so many times.", default_shown=True, min=0, default=0
    )
    words: list[str] | None = argument(
        metavar="-- COMMAND", help="A command of treadle, or a Python file.", default=None
    )


@command(EPILOG, passes_on=True)
def launch(options: Launch) -> None:
    """Train in several processes of this machine: run a command, or a script, in each of them.

    After --, give a command of treadle, or a Python file with its arguments. If one process fails,
    all are ended. With --restarts, all start again, and a run with a directory resumes from its
    newest checkpoint.

    Examples:
      treadle launch --workers 2 -- run digits --backend jax
      treadle launch --workers 4 --restarts 3 -- my_script.py --epochs 10
    """
    words = options.words
    if not words:
        raise ConfigurationError(
            "there is nothing to launch: give a command of treadle or a Python file after --, "
            "such as treadle launch --workers 2 -- run digits"
        )
    if words[0] in ALONE:
        raise ConfigurationError(
            f"treadle {words[0]} runs in one process, not in {options.workers}: leave out treadle "
            f"launch{ALONE[words[0]]}"
        )
    start = [sys.executable] if words[0].endswith(".py") else [sys.executable, "-m", "treadle"]
    raise typer.Exit(launch_processes([*start, *words], options.workers, options.restarts))
