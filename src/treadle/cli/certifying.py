"""The `treadle certify` command: tests whether a task resumes exactly with its own data."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .. import recipes
from ..core.terminal import clean
from ..run.setup import overriding, setup
from . import environment, output
from .certifying_workers import Comparison, compare
from .commands import app, refuse_extra
from .help import Command
from .output import reporting_errors
from .parameters import (
    Backend,
    DataDir,
    Deterministic,
    Json,
    Precision,
    Seed,
    Settings,
    StepsBefore,
    TaskName,
    Workers,
)

if TYPE_CHECKING:  # importing it imports NumPy and Keras
    from ..testing.certify.certificate import Certificate
    from ..testing.certify.drill import Subject

INEXACT = 1


@app.command(
    cls=Command,
    epilog="Exit codes: 0 exact, 1 something is not exact or was not checked, 2 wrong usage, "
    "configuration, backend, data or directory, 130 interrupted.",
    context_settings={"allow_extra_args": True},
)
def certify(
    context: typer.Context,
    task: TaskName,
    set_: Settings = None,
    steps: StepsBefore = None,
    backend: Backend = None,
    precision: Precision = None,
    seed: Seed = None,
    data_dir: DataDir = None,
    deterministic: Deterministic = False,
    workers: Workers = None,
    json: Json = False,
) -> None:
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
    with reporting_errors():
        refuse_extra(context.args)
        recipe = recipes.resolve(task)
        recipe.settings(set_ or [])  # reject invalid settings before a process starts
        arguments: dict[str, Any] = {
            "task": recipe.source,
            "given": set_ or [],
            "backend": backend,
            "precision": precision,
            "seed": seed,
            "data_dir": str(data_dir) if data_dir else None,
            "deterministic": deterministic,
        }
        found = (
            _resumed(arguments, recipe.name, steps, json)
            if workers is None
            else _in_processes(arguments, recipe.name, steps, workers, json)
        )
        if json:
            output.print_json(found.facts())
        else:
            for line in found.lines():
                output.print_line(clean(line))
        if not found.exact:
            raise typer.Exit(INEXACT)


def _resumed(
    arguments: Mapping[str, Any], name: str, steps: int | None, quiet: bool
) -> "Certificate":
    """Compare an uninterrupted training with one that is resumed."""
    from ..testing.certify.certificate import Maker
    from ..testing.certify.certificate import certify as examine

    with environment.showing("training in three processes", quiet, at_once=True):
        return examine(Maker(f"{__name__}:make", dict(arguments), name), steps)


def _in_processes(
    arguments: Mapping[str, Any], name: str, steps: int | None, workers: int, quiet: bool
) -> Comparison:
    """Compare training in several processes with training in one."""
    options = [text for setting in arguments["given"] for text in ("--set", setting)]
    for option in ("backend", "precision", "seed", "data_dir"):
        if arguments[option] is not None:
            options += [f"--{option.replace('_', '-')}", str(arguments[option])]
    options += ["--deterministic"] if arguments["deterministic"] else []
    with environment.showing(f"training in one process, and in {workers}", quiet, at_once=True):
        return compare(arguments["task"], name, options, steps, workers)


def make(
    task: str,
    given: list[str],
    backend: str | None,
    precision: str | None,
    seed: int | None,
    data_dir: str | None,
    deterministic: bool = False,
) -> "Subject":
    """Make a task and its data, as `treadle run` does, in a process of the certificate.

    Raises:
        TreadleError: As for `treadle run`, or the task has no data.
    """
    recipe = recipes.resolve(task)
    settings = recipe.settings(given)
    environment.prepare(
        backend,
        recipe.backend,
        Path(data_dir) if data_dir else None,
        seed,
        precision,
        quiet=True,
        deterministic=deterministic,
    )
    import keras  # late: the backend must be chosen before Keras is imported

    from ..testing.certify.drill import Subject

    def made() -> Any:
        with overriding(seed, precision, backend):
            return recipes.make(recipe, settings)

    def again() -> Any:
        """Make the task again, from the same initial state as the first one."""
        # The task's file may call setup again, which is rejected while layers exist.
        keras.backend.clear_session()
        setup(seed=seed or 0, precision=precision)
        return made().task

    first = made()
    data = first.datasets()
    return Subject(first.task, data.train, again, data.validation, tuple(first.hooks()))
