"""Open a recorded run: its record, its task, made again, and its trained state."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.backend_choice import choose_backend
from ..core.directory import why_unfinished
from ..core.options import Options
from ..core.run_file import RunFile
from ..errors import BackendError, DirectoryError
from ..report.records import recorded_run
from . import environment, output
from .options import RunOptions
from .trusting import data_dir_of, recipe_of

if TYPE_CHECKING:  # importing it imports NumPy and Keras
    from ..recipes._loading import Made


def opened(directory: Path, otherwise: str, backend: str | None = None) -> tuple[RunFile, str]:
    """Return the record of a run that a command started, and choose the run's backend.

    The record is that of the newest checkpoint if `run.json` is lost, which a sentence then says.

    The backend is chosen here because modules that read a run may import Keras.

    Args:
        directory: The run directory.
        otherwise: What to do with a run of a script; the end of the error message.
        backend: Another backend to choose than the run's.

    Raises:
        DirectoryError: If the directory holds no run, or a run of a script.
        BackendError: If the run's backend is not installed.
    """
    record, recovered = recorded_run(directory)
    configuration = record["configuration"]
    if "recipe" not in configuration:
        raise DirectoryError(
            f"{directory} holds a run of a script, whose task cannot be made again here: "
            f"{otherwise}"
        )
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
    """
    recipe = recipe_of(options, configuration)
    return environment.make_task(
        recipe,
        configuration["settings"],
        backend=backend or configuration["backend"],
        precision=configuration["precision"],
        seed=configuration["seed"],
        data_dir=data_dir_of(options, configuration),
        quiet=options.json,
        deterministic=configuration.get("deterministic", False),
        devices=devices,
    )


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
