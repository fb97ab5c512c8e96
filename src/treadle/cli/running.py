"""Implementation of `run` and `resume` with the public API."""

import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import treadle

from ..core.directory import RUN, LostRecordError, read_run
from ..core.options import Options, backend_name, precision_name, run_seed
from ..core.processes import is_chief, on_chief
from ..core.run_file import RunFile
from ..core.triggers import Span
from ..core.user_code import changed_code, code_of
from ..errors import (
    ConfigurationError,
    DirectoryError,
)
from ..recipes import Recipe, make
from ..report.records import has_checkpoint, recorded_run
from ..run.setup import overriding
from . import advice, environment, output, trusting
from .opening import opened, options_of
from .preflight import keep, preflight
from .trusting import Given

RUNS = Path("runs")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of `treadle run`; see `treadle run --help`."""

    recipe: Recipe
    settings: Mapping[str, Any]
    epochs: int | None
    steps: int | None
    until: str | None
    backend: str | None
    precision: str | None
    seed: int | None
    devices: int | None
    options: Options
    directory: Path | None
    data_dir: Path | None
    fresh: bool
    quiet: bool
    override: bool | tuple[str, ...] = False
    weights_from: Path | None = None
    deterministic: bool = False
    preflight: bool = False


def train(request: Request) -> output.RunOutcome:
    """Train a task; imports Keras after the arguments have been checked.

    Raises:
        TreadleError: If an argument is invalid, or training failed.
    """
    if request.until is not None and Span.parse(request.until).of != "seconds":
        raise ConfigurationError(
            f"--until takes a time, as '30 min', not {request.until!r}: for counts there are "
            "--epochs and --steps"
        )
    earlier = _earlier(request)
    recorded = None
    if earlier is not None and not os.environ.get("KERAS_BACKEND"):
        recorded = earlier["configuration"].get("backend")
    environment.prepare(
        request.backend or recorded,
        request.recipe.backend,
        request.data_dir,
        request.seed,
        request.precision,
        request.quiet,
        request.deterministic,
        request.devices,
    )
    request = replace(request, quiet=request.quiet or not is_chief())
    with (
        environment.showing("making the task", request.quiet),
        overriding(request.seed, request.precision, request.backend, request.devices),
    ):
        made = make(request.recipe, request.settings)
    given = {"epochs": request.epochs, "steps": request.steps, "until": request.until}
    lasts: dict[str, Any] = {k: v for k, v in given.items() if v is not None} or made.lasts
    if not lasts:
        raise ConfigurationError(
            f"{request.recipe.name} does not define how long it trains: add --epochs, --steps or "
            "--until, or give the class an attribute, as `epochs = 10`"
        )
    if not request.quiet and (description := made.describe()):
        output.print_line(description)
    examined = request.preflight and earlier is None
    report = preflight(made, lasts, request.quiet) if examined else None
    with _directory(request.directory, request.recipe.name) as directory:
        if earlier is None and not request.quiet and request.precision is None:
            suggestion = advice.on_precision(made.task)
            if suggestion:
                output.note(suggestion)
        loop = treadle.Loop(
            made.task,
            directory,
            hooks=made.hooks(),
            options=request.options,
            configuration=_configuration(request, lasts),
            fresh=request.fresh,
            override=request.override,
            console=not request.quiet,
        )
        if is_chief():
            trusting.remember(directory, request.recipe, request.data_dir)
        if report is not None:
            keep(report, directory)
        with loop:
            with environment.showing("reading the data", request.quiet):
                data = made.datasets()
            if request.weights_from is not None and _restores_nothing(directory, earlier):
                loop.prepare(data.train)  # some models are built by their first batch only
                treadle.warm_start(made.task, request.weights_from)
            with output.interrupts(reported=not request.quiet):
                history = loop.fit(data.train, data.validation, **lasts)
    if loop.progress.step == 0:
        raise ConfigurationError(
            f"the run in {directory} ended before its first step, so nothing was trained: "
            f"{loop.reason}. Give it a longer time (--until), or let no hook stop it at the start"
        )
    facts = read_run(directory)
    changed = changed_code(facts.get("code", {}), code_of(made.task))
    before = loop.reason == "it was finished before"
    return output.RunOutcome(
        directory, before, loop.unfinished, request.quiet, changed, facts, history
    )


ENDS = ("epochs", "steps")
LASTS = (*ENDS, "until")


def resume(
    directory: Path,
    lasts: Mapping[str, Any],
    given: Given,
    quiet: bool,
    devices: int | None = None,
) -> output.RunOutcome:
    """Resume a run that was started by `treadle run`, with its recorded configuration.

    Args:
        directory: The run directory.
        lasts: New total duration by name (epochs, steps, until); None values keep the recorded one.
        given: Its task or data folder if they moved, and whether the recorded ones are trusted.
        quiet: Show no progress.
        devices: The number of devices; None uses as many as the command that started the run.

    Raises:
        TreadleError: If the run was started without `treadle run`, its script is not trusted, or
            for any reason that `train` raises.
    """
    # The loop reports a lost record, and writes it again.
    record, _ = opened(directory, "run the script again, which resumes the run")
    configuration = record["configuration"]
    begun = configuration.get("weights_from")
    if begun and _restores_nothing(directory, record):
        raise DirectoryError(
            f"the run in {directory} began with the weights of {begun}, and has no checkpoint to "
            "resume from. A folder that a run directory names is not read: start the run again "
            f"with treadle run … --weights-from {begun} --directory {directory}"
        )
    changes = {name: value for name, value in lasts.items() if value is not None}
    # The end that the user gives replaces the recorded one, which may be of the other kind.
    ends = ENDS if any(name in changes for name in ENDS) else ()
    kept = {name: None if name in ends else configuration.get(name) for name in LASTS}
    how_long = kept | changes
    recipe = trusting.recipe_of(directory, configuration, given)
    others = {"data_dir": given.data_dir, "recipe": given.task}
    replaced = (*changes, *ends, *(name for name, value in others.items() if value is not None))
    return train(
        Request(
            recipe=recipe,
            settings=configuration["settings"],
            **how_long,
            backend=configuration["backend"],
            precision=configuration["precision"],
            seed=configuration["seed"],
            devices=devices or configuration.get("devices"),
            options=options_of(configuration),
            directory=directory,
            data_dir=trusting.data_dir_of(directory, configuration, given),
            fresh=False,
            quiet=quiet,
            override=replaced or False,
            weights_from=Path(begun) if begun else None,
            deterministic=configuration.get("deterministic", False),
            preflight=False,
        )
    )


def _earlier(request: Request) -> RunFile | None:
    """Return the record of the run that a request resumes; None for a new run."""
    directory = request.directory
    if request.fresh or directory is None or not directory.is_dir():
        return None
    try:
        return recorded_run(directory)[0]
    except LostRecordError as lost:
        if not lost.missing:
            raise
        return None


def _restores_nothing(directory: Path, record: RunFile | None) -> bool:
    """Return whether a run begins with its initial weights: it is new, or has no checkpoint.

    A run that was killed before its first step has a checkpoint of step 0, but no `run.json`; it
    starts again.
    """
    if record is None:
        return True
    least = 0 if (directory / RUN).exists() else 1
    return not record.get("finished") and not has_checkpoint(directory, least)


def _configuration(request: Request, lasts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a run, which is recorded and compared when it is resumed."""
    return {
        "recipe": request.recipe.source,
        "settings": dict(request.settings),
        **lasts,
        # The values in effect when the task was made, set by options or by the task's file.
        "seed": run_seed(),
        "backend": backend_name(),
        "precision": precision_name(),
        "execution": request.options.execution,
        **({"devices": count} if (count := request.devices) is not None else {}),
        **({"compiler": compiler} if (compiler := request.options.compiler) != "auto" else {}),
        "data_dir": str(request.data_dir.absolute()) if request.data_dir else None,
        **({"weights_from": str(begun.absolute())} if (begun := request.weights_from) else {}),
    }


@contextmanager
def _directory(given: Path | None, name: str) -> Generator[Path]:
    """Yield the given run directory, or a new one, which is removed if no run starts in it."""
    if given is not None:
        yield given
        return
    made = not RUNS.exists()
    directory = Path(on_chief(lambda: str(_new_directory(name)), "making a directory"))
    try:
        yield directory
    finally:
        if is_chief() and not (directory / RUN).exists():
            shutil.rmtree(directory, ignore_errors=True)
            if made:
                with suppress(OSError):  # it is not empty
                    RUNS.rmdir()


def _new_directory(name: str) -> Path:
    """Make the next free directory for a run of a task.

    Raises:
        DirectoryError: If it cannot be made.
    """
    number = 1
    while True:
        directory = RUNS / f"{name}-{number}"
        try:
            directory.mkdir(parents=True)
            return directory
        except FileExistsError:
            number += 1
        except OSError as error:
            raise DirectoryError(
                f"cannot make the run directory {directory}: {error.strerror or error}. Name "
                "another with --directory"
            ) from error
