"""The `treadle certify` command: tests whether a task resumes exactly with its own data."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.terminal import clean
from . import environment, output
from .certifying_workers import Comparison, compare
from .commands import command
from .options import Deterministic, TaskOptions, option

if TYPE_CHECKING:  # importing it imports NumPy and Keras
    from ..testing.certify.certificate import Certificate
    from ..testing.certify.drill import Subject

INEXACT = 1


@dataclass(frozen=True, kw_only=True)
class Certify(TaskOptions):
    """Options of `treadle certify`."""

    steps: Annotated[
        int | None,
        option(
            "Steps before the checkpoint; the same number of steps follows it. Default: 8, or "
            "one and a half epochs if an epoch has at most 24 batches.",
            "K",
            min=1,
        ),
    ] = None
    deterministic: Deterministic = False
    workers: Annotated[
        int | None,
        option(
            "Compare training in N processes with training in one instead, over 16 steps or those "
            "of --steps.",
            "N",
            min=2,
        ),
    ] = None


@command(
    "Exit codes: 0 exact, 1 something is not exact or was not checked, 2 wrong usage, "
    "configuration, backend, data or directory, 130 interrupted."
)
def certify(options: Certify) -> None:
    """Verify that a task resumes bit for bit with its own data.

    One process trains straight through 2K steps. Another saves a checkpoint at step K and is
    killed, and a third resumes from there. Every batch, logged value, variable and random state is
    compared; so are many steps in one call with single steps, and compiled steps with eager ones.
    On a GPU this needs --deterministic: without it, equal runs differ in rounding.

    With --workers N, training in N processes is compared with training in one instead: logged
    values and variables after K steps must be equal within rounding.

    Examples:
      treadle certify digits
      treadle certify my_task.py --steps 20 --backend torch
      treadle certify my_task.py --workers 2
    """
    recipe = options.recipe()
    recipe.settings(options.set_ or [])  # reject invalid settings before a process starts
    found = (
        _resumed(options, recipe.source, recipe.name)
        if options.workers is None
        else _in_processes(options, recipe.source, recipe.name, options.workers)
    )
    if options.json:
        output.print_json(found.facts())
    else:
        for line in found.lines():
            output.print_line(clean(line))
    if not found.exact:
        raise typer.Exit(INEXACT)


def _resumed(options: Certify, source: str, name: str) -> "Certificate":
    """Compare an uninterrupted training with one that is resumed."""
    from ..testing.certify.certificate import Maker
    from ..testing.certify.certificate import certify as examine

    folder = options.data_dir
    arguments = {**asdict(options), "task": source, "data_dir": str(folder) if folder else None}
    with environment.showing("training in three processes", options.json, at_once=True):
        return examine(Maker(f"{__name__}:make", arguments, name), options.steps)


def _in_processes(options: Certify, source: str, name: str, workers: int) -> Comparison:
    """Compare training in several processes with training in one."""
    words = [text for setting in options.set_ or [] for text in ("--set", setting)]
    for option_name in ("backend", "precision", "seed", "data_dir"):
        value = getattr(options, option_name)
        if value is not None:
            words += [f"--{option_name.replace('_', '-')}", str(value)]
    words += ["--deterministic"] if options.deterministic else []
    doing = f"training in one process, and in {workers}"
    with environment.showing(doing, options.json, at_once=True):
        return compare(source, name, words, options.steps, workers)


def make(**arguments: Any) -> "Subject":
    """Make a task and its data, as `treadle run` does, in a process of the certificate.

    Args:
        **arguments: The fields of `Certify`, in JSON's types.

    Raises:
        TreadleError: As for `treadle run`, or the task has no data.
    """
    if arguments["data_dir"] is not None:
        arguments["data_dir"] = Path(arguments["data_dir"])
    options = Certify(**arguments)
    first = options.made(True, options.deterministic)
    import keras  # late: the backend must be chosen before Keras is imported

    from ..testing.certify.drill import Subject

    def again() -> Any:
        """Make the task again, from the same initial state as the first one."""
        # The task's file may call setup again, which is rejected while layers exist.
        keras.backend.clear_session()
        return options.made(True, options.deterministic).task

    data = first.datasets()
    return Subject(first.task, data.train, again, data.validation, tuple(first.hooks()))
