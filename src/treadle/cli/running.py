"""The commands `run` and `resume`."""

import json
import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

import treadle

from ..core import process_settings
from ..core.directory import DOCTOR, RUN, LostRecordError, RunFile, read_run
from ..core.folder import Folder
from ..core.options import Options
from ..core.processes import is_chief, process_group
from ..core.triggers import Span
from ..core.user_code import changed_code, code_of
from ..errors import ConfigurationError, DirectoryError
from ..recipes import Recipe
from ..report.states import has_checkpoint, recorded_run
from . import advice, environment, opening, output
from .commands import EPILOG, command
from .options import (
    HOW,
    HOW_LONG,
    WHERE,
    RunOptions,
    TaskOptions,
    deterministic_flag,
    devices_option,
    epochs_option,
    flag,
    no_compile_cache_flag,
    option,
    quiet_flag,
    steps_option,
)

if TYPE_CHECKING:  # importing them imports NumPy and Keras
    from ..core.history import History
    from ..recipes._loading import Made

RUNS = Path("runs")
ENDS = ("epochs", "steps")
LASTS = (*ENDS, "until")


@dataclass(frozen=True, kw_only=True)
class RunArguments(TaskOptions):
    """Options of `treadle run`."""

    epochs: int | None = epochs_option()
    steps: int | None = steps_option()
    until: str | None = option(
        "Time limit, as '30 min'. The first of these limits that is reached ends the run.",
        "TIME",
        HOW_LONG,
    )
    devices: int | None = devices_option()
    window: int | None = option(
        "Maximum number of steps in one compiled call; does not change results.", "N", HOW, min=1
    )
    eager: bool = flag("Run steps uncompiled, for debugging (slow).", HOW)
    compiler: Literal["auto", "inductor", "cuda-graph", "captured"] = option(
        "How captured steps run on PyTorch: 'captured', 'inductor' (PyTorch's compiler), or "
        "'cuda-graph' (the same, replayed as a CUDA graph).",
        panel=HOW,
        default_shown=True,
        default="auto",
    )
    deterministic: bool = deterministic_flag()
    no_compile_cache: bool = no_compile_cache_flag()
    preflight: bool = flag(
        "Inspect a step first, as treadle doctor does, and train only if no mistake is certain. "
        "The sheet is kept in doctor.json in the run directory.",
        HOW,
    )
    directory: Path | None = option(
        "Folder for the files of the run; other files in it are kept. Default: runs/NAME-1, "
        "runs/NAME-2, ….",
        "FOLDER",
        WHERE,
    )
    fresh: bool = flag("Remove the run in the directory, and start from scratch.", WHERE)
    override: bool = flag("Resume a run even if its configuration differs.", WHERE)
    weights_from: Path | None = option(
        "Initialize the weights from this other run.", "FOLDER", WHERE
    )
    quiet: bool = quiet_flag()


@dataclass(frozen=True, kw_only=True)
class ResumeOptions(RunOptions):
    """Options of `treadle resume`."""

    epochs: int | None = option(
        "Passes over the data in total, including those already done. Replaces a recorded "
        "--epochs and --steps.",
        "N",
        HOW_LONG,
        min=1,
    )
    steps: int | None = option(
        "Steps in total, including those already done. Replaces a recorded --steps and --epochs.",
        "N",
        HOW_LONG,
        min=1,
    )
    until: str | None = option("Time limit, counted from now.", "TIME", HOW_LONG)
    devices: int | None = devices_option()
    no_compile_cache: bool = no_compile_cache_flag()
    quiet: bool = quiet_flag()


@command(EPILOG)
def run(options: RunArguments) -> None:
    """Train a task.

    If --directory holds a run of the same configuration, that run is resumed; a finished run is
    left as it is. A run of another configuration is refused.

    Examples:
      treadle run digits --epochs 3 --set units=128
      treadle run my_task.py:MyTask --backend jax --directory runs/mine
      treadle run digits --help    (also lists the settings of digits)
    """
    recipe = options.recipe()
    _train(options, recipe, recipe.settings(options.set_ or []), options.override)


@command(EPILOG)
def resume(options: ResumeOptions) -> None:
    """Resume an interrupted run. Does nothing if the run is already finished.

    Use --epochs or --steps to extend the run; a finished run can be extended too.

    A recipe is executed at once; a script, only if you started the run with it in this directory,
    or with --trust or --task.

    Examples:
      treadle resume runs/mine
      treadle resume runs/mine --epochs 20
    """
    directory = options.directory
    # The loop reports a lost record, and writes it again.
    record, _ = opening.opened(directory, "run the script again, which resumes the run")
    configuration = record["configuration"]
    begun = configuration.get("weights_from")
    if begun and _restores_nothing(directory, record):
        raise DirectoryError(
            f"the run in {directory} began with the weights of {begun}, and has no checkpoint to "
            "resume from. A folder that a run directory names is not read: start the run again "
            f"with treadle run … --weights-from {begun} --directory {directory}"
        )
    changes = {n: value for n in LASTS if (value := getattr(options, n)) is not None}
    # The end that the user gives replaces the recorded one, which may be of the other kind.
    ends = ENDS if any(name in changes for name in ENDS) else ()
    kept = {name: None if name in ends else configuration.get(name) for name in LASTS}
    recipe = opening.recipe_of(options, configuration)
    others = {"data_dir": options.data_dir, "recipe": options.task}
    replaced = (*changes, *ends, *(name for name, value in others.items() if value is not None))
    asked = RunArguments(
        task=recipe.source,
        **kept | changes,
        **{name: configuration[name] for name in ("backend", "precision", "seed")},
        devices=options.devices or configuration.get("devices"),
        eager=configuration["execution"] == "eager",
        compiler=configuration.get("compiler", "auto"),
        deterministic=configuration.get("deterministic", False),
        no_compile_cache=options.no_compile_cache,
        directory=directory,
        data_dir=opening.data_dir_of(options, configuration),
        weights_from=Path(begun) if begun else None,
        quiet=options.quiet,
        json=options.json,
    )
    settings = configuration["settings"]
    _train(asked, recipe, settings, replaced or False)


def _train(
    options: RunArguments,
    recipe: Recipe,
    settings: Mapping[str, Any],
    override: bool | tuple[str, ...],
) -> None:
    """Train a task and print the outcome; Keras is imported after the options have been checked.

    Raises:
        TreadleError: If an option is invalid, or training failed.
    """
    if options.no_compile_cache:
        process_settings.keep_compiled(on=False)
    if options.until is not None and Span.parse(options.until).of != "seconds":
        raise ConfigurationError(
            f"--until takes a time, as '30 min', not {options.until!r}: for counts there are "
            "--epochs and --steps"
        )
    options = replace(options, quiet=options.quiet or options.json)
    with output.kept_free(options.json):
        earlier = _earlier(options)
        backend = options.backend
        if backend is None and earlier is not None and not os.environ.get("KERAS_BACKEND"):
            backend = earlier["configuration"].get("backend")
        setup = environment.Setup.of(options, backend=backend)
        made = environment.make_task(recipe, settings, setup)
        options = replace(options, quiet=options.quiet or not is_chief())
        lasts = _lasts(options, made, recipe.name)
        if not options.quiet and (description := made.describe()):
            output.print_line(description)
        examined = options.preflight and earlier is None
        report = _preflight(made, lasts, options.quiet) if examined else None
        with _directory(options.directory, recipe.name) as directory:
            suggests = earlier is None and not options.quiet and options.precision is None
            if suggests and (suggestion := advice.on_precision(made.task)):
                output.note(suggestion)
            execution = "eager" if options.eager else "auto"
            loop = treadle.Loop(
                made.task,
                directory,
                hooks=made.hooks(),
                options=Options(execution, options.window, compiler=options.compiler),
                configuration=_configuration(options, recipe, settings, lasts),
                fresh=options.fresh,
                override=override,
                console=not options.quiet,
            )
            if is_chief():
                opening.remember(directory, recipe, options.data_dir)
            if report is not None:
                with Folder.open(directory) as folder:  # where `treadle report` finds it
                    folder.write(DOCTOR, [report], len(report))
            with loop:
                history = _fitted(loop, made, directory, options, earlier, lasts)
        _require_steps(loop, directory)
        changed = changed_code(read_run(directory).get("code", {}), code_of(made.task))
    if is_chief():
        output.print_outcome(directory, loop, history, changed, options.quiet, options.json)
    if loop.view.unfinished:
        raise typer.Exit(output.UNFINISHED)


def _require_steps(loop: "treadle.Loop", directory: Path) -> None:
    if loop.progress.step == 0:
        raise ConfigurationError(
            f"the run in {directory} ended before its first step, so nothing was trained: "
            f"{loop.reason}. Give it a longer time (--until), or let no hook stop it at the start"
        )


def _preflight(made: "Made", lasts: Mapping[str, Any], quiet: bool) -> bytes:
    """Inspect the task, and return its sheet as JSON."""
    from .doctoring import preflight  # late, since `treadle --help` lists `doctor` after `run`

    facts = preflight(made, lasts, quiet).facts()
    return (json.dumps(facts, indent=1) + "\n").encode()


def _lasts(options: RunArguments, made: "Made", name: str) -> dict[str, Any]:
    """Return how long the run lasts: as the user says, or else as the task says.

    Raises:
        ConfigurationError: If neither does.
    """
    given = {name: value for name in LASTS if (value := getattr(options, name)) is not None}
    if not given and not made.lasts:
        raise ConfigurationError(
            f"{name} does not define how long it trains: add --epochs, --steps or --until, or give "
            "the class an attribute, as `epochs = 10`"
        )
    return given or made.lasts


def _fitted(
    loop: "treadle.Loop",
    made: "Made",
    directory: Path,
    options: RunArguments,
    earlier: RunFile | None,
    lasts: Mapping[str, Any],
) -> "History":
    """Read the data, initialize the weights if asked for, and train."""
    with environment.showing("reading the data", options.quiet):
        data = made.datasets()
    if options.weights_from is not None and _restores_nothing(directory, earlier):
        loop.prepare(data.train)  # some models are built by their first batch only
        treadle.warm_start(made.task, options.weights_from)
    try:
        return loop.fit(data.train, data.validation, **lasts)
    except KeyboardInterrupt as error:
        if options.quiet:
            raise
        raise typer.Exit(output.INTERRUPTED) from error  # the progress display has reported it


def _earlier(options: RunArguments) -> RunFile | None:
    """Return the record of the run that a command resumes; None for a new run."""
    directory = options.directory
    if options.fresh or directory is None or not directory.is_dir():
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


def _configuration(
    options: RunArguments, recipe: Recipe, settings: Mapping[str, Any], lasts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the configuration of a run, which is recorded and compared when it is resumed."""
    begun = options.weights_from
    optional = {
        "devices": options.devices,
        "compiler": options.compiler if options.compiler != "auto" else None,
        "weights_from": str(begun.absolute()) if begun else None,
    }
    data_dir = str(options.data_dir.absolute()) if options.data_dir else None
    execution = "eager" if options.eager else "auto"
    return {
        **recipe.configuration(settings, execution, data_dir),
        **lasts,
        **{name: value for name, value in optional.items() if value is not None},
    }


@contextmanager
def _directory(given: Path | None, name: str) -> Generator[Path]:
    """Yield the given run directory, or a new one, which is removed if no run starts in it."""
    if given is not None:
        yield given
        return
    made = not RUNS.exists()
    new = process_group().on_chief(lambda: str(_new_directory(name)), "making a directory")
    directory = Path(new)
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
