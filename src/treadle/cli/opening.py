"""Open a recorded run: its record, its task if it is trusted, and its trained state.

A directory may come from another person. So a command runs the script, and reads the data folder,
that the directory names only if the user started the run with them, or says so.
"""

import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import trust
from ..core.directory import RUN, RunFile, why_unfinished
from ..core.options import Options
from ..core.process_settings import choose_backend
from ..core.tracebacks import in_one_line
from ..errors import BackendError, ConfigurationError, DataError, DirectoryError, TreadleError
from ..recipes import Recipe, resolve
from ..report.states import recorded_run
from . import environment, output
from .options import RunOptions

if TYPE_CHECKING:  # importing it imports NumPy and Keras
    from ..recipes._loading import Made

NAME_TASK = "name it with --task FILE.py:TASK, whose file makes the data too (datasets), or "
"""Begins what to do with a run of a script."""


def opened(
    directory: Path, otherwise: str, backend: str | None = None, task: str | None = None
) -> tuple[RunFile, str]:
    """Return the record of a run whose task can be made again, and choose the run's backend.

    The record is that of the newest checkpoint if `run.json` is lost, which a sentence then says.

    The backend is chosen here because modules that read a run may import Keras.

    Args:
        directory: The run directory.
        otherwise: What to do with a run of a script without `task`; the end of the error message.
        backend: Another backend to choose than the run's.
        task: The task of a run of a script, which does not say where its task is; as
            `--task FILE.py:TASK`.

    Raises:
        DirectoryError: If the directory holds no run, or one of a script whose task is not given.
        BackendError: If the run's backend is not installed.
    """
    record, recovered = recorded_run(directory)
    configuration = record["configuration"]
    if "recipe" not in configuration:
        if task is None:
            raise DirectoryError(
                f"{directory} holds a run that a script started, and does not say where its task "
                f"is: {otherwise}"
            )
        # Its settings are all plain attributes of the task: those that its file lets choose remain.
        chosen = {parameter.name for parameter in resolve(task).parameters or ()}
        settings = {n: x for n, x in configuration["settings"].items() if n in chosen}
        options = record.get("options", {})
        how = {name: options.get(name, "auto") for name in ("execution", "compiler")}
        record["configuration"] = {**configuration, **how, "recipe": task, "settings": settings}
    if backend is not None:
        choose_backend(backend)
        return record, recovered
    try:
        choose_backend(configuration["backend"])
    except BackendError as error:
        raise BackendError(
            f"{directory} holds a run on {configuration['backend']}: {error}"
        ) from error
    return record, recovered


def made_again(
    options: RunOptions,
    configuration: Mapping[str, Any],
    backend: str | None = None,
    devices: int | None = None,
) -> "Made":
    """Make the task of a run with its recorded configuration; imports Keras.

    Args:
        options: The options of the command.
        configuration: The configuration of the run.
        backend: Another backend than that of the run.
        devices: The number of devices.

    Raises:
        DirectoryError: If the task cannot be made with the recorded settings, or as `recipe_of`.
    """
    setup = environment.Setup(
        backend=backend or configuration["backend"],
        precision=configuration["precision"],
        seed=configuration["seed"],
        data_dir=data_dir_of(options, configuration),
        deterministic=configuration.get("deterministic", False),
        devices=devices,
        quiet=options.json,
    )
    recipe, settings = recipe_of(options, configuration), configuration["settings"]
    try:
        return environment.make_task(recipe, settings, setup)
    except TreadleError:
        raise
    except Exception as error:  # of the task: either it or the recorded settings have changed
        given = ", ".join(f"{name}={value!r}" for name, value in settings.items()) or "none"
        frames = traceback.extract_tb(error.__traceback__)
        place = next((x for x in frames[::-1] if x.filename == str(recipe.path)), frames[-1])
        raise DirectoryError(
            f"the task of {options.directory} cannot be made again with the settings in its "
            f"{RUN} ({given}): {in_one_line(error)} ({place.filename}, line {place.lineno}). "
            "Correct the task, name the one that the run had with --task FILE.py:Task, or start "
            "the run again"
        ) from error


def state_of(directory: Path, doing: str) -> Mapping[str, Any]:
    """Return the final state of a run, or that of its newest checkpoint if it is unfinished.

    Args:
        directory: The run directory.
        doing: What is done with the state, for the note about an unfinished run.
    """
    from ..checkpoint.run_files import learned  # late: it imports NumPy

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state, step = learned(directory)
    for warning in caught:
        output.note(str(warning.message))
    if step is not None:
        record, recovered = recorded_run(directory)
        why = "" if recovered else f" holds a run that did not finish{why_unfinished(record)}"
        why = " holds no final weights" if record.get("finished") else why
        output.note(f"{directory}{why}: {doing} its weights after step {step}")
    return state


def options_of(configuration: Mapping[str, Any]) -> Options:
    """Return the execution options that a run was started with."""
    compiler = configuration.get("compiler", "auto")
    return Options(execution=configuration["execution"], compiler=compiler)


def recipe_of(options: RunOptions, configuration: Mapping[str, Any]) -> Recipe:
    """Return the task of a run: the given one, else the recorded one if its script is trusted.

    A recipe that comes with Treadle is always trusted. A script is not even parsed before it is
    trusted.

    Raises:
        ConfigurationError: If there is no such task as the given one.
        DirectoryError: If the recorded script is not trusted, or its task cannot be found.
    """
    directory = options.directory
    if options.task is not None:
        return resolve(options.task)
    source: str = configuration["recipe"]
    script = trust.script_of(source)
    if script is not None and script.exists():
        _check(directory, source, script, options.trust)
    try:
        recipe = resolve(source)
    except ConfigurationError as error:
        raise DirectoryError(
            f"the task of {directory} cannot be made again: {error}. If it has moved, name it with "
            "--task FILE.py:Task"
        ) from error
    if options.trust:
        remember(directory, recipe, configuration.get("data_dir"))
    return recipe


def data_dir_of(options: RunOptions, configuration: Mapping[str, Any]) -> Path | None:
    """Return the folder with a run's data sets: the given one, else the recorded one if trusted.

    Raises:
        DataError: If the recorded folder is not the one that the user started the run with, or no
            longer exists.
    """
    directory, recorded = options.directory, configuration.get("data_dir")
    if options.data_dir is not None or recorded is None:
        return options.data_dir
    known = trust.remembered(directory)
    if not options.trust and (known is None or known.data_dir != recorded):
        raise DataError(
            f"{directory} names the data folder {recorded}, and you did not start this run with "
            "it here: give its data with --data-dir FOLDER, or accept that folder with --trust"
        )
    if not Path(recorded).is_dir():
        raise DataError(
            f"the data folder of the run in {directory}, {recorded}, no longer exists: give its "
            "new location with --data-dir"
        )
    return Path(recorded)


def remember(directory: Path, recipe: Recipe, data_dir: str | Path | None) -> None:
    """Remember the script and the data folder of a run; print a note if that is impossible."""
    try:
        trust.remember(
            directory, recipe.source, None if data_dir is None else str(Path(data_dir).absolute())
        )
    except DirectoryError as error:
        output.note(
            f"warning: {error}. So `treadle resume {directory}` will not know that you started "
            "this run, and will ask for --trust"
        )


def _check(directory: Path, source: str, script: Path, trusted: bool) -> None:
    """Check that a script is trusted; print its path and hash if it is not the known one.

    Raises:
        DirectoryError: If it is not trusted, or is no regular file.
    """
    found = trust.digest(script)
    if found is None:
        raise DirectoryError(
            f"the task of {directory} cannot be made again: {script} is not a readable file. Name "
            "the task with --task FILE.py:Task"
        )
    known = trust.remembered(directory)
    if known is not None and known.recipe == source and known.sha256 == found:
        return
    shown = f"{script} (SHA-256 {found})"
    if trusted:
        output.note(f"trusted: the script {shown}")
        return
    if known is None or known.recipe != source:
        raise DirectoryError(
            f"{directory} holds a run of the script {shown}, and you did not start a run with it "
            "in this directory: the command would execute code that the directory chose. Inspect "
            "the script, then add --trust, or name the task yourself with --task FILE.py:Task"
        )
    if not trust.may_be_edited(script, directory):
        raise DirectoryError(
            f"the script {shown} changed since you started the run in {directory} (SHA-256 "
            f"{known.sha256}), and another person may have changed it: it belongs to another user "
            "or lies in the run directory. Inspect it, then add --trust"
        )
    output.note(f"the script {shown} changed since you started this run (SHA-256 {known.sha256})")
