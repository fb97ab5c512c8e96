"""Decide whether a command may run the script, and read the data folder, that a run names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core import trust
from ..errors import ConfigurationError, DataError, DirectoryError
from ..recipes import Recipe, resolve
from . import output
from .options import RunOptions


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
