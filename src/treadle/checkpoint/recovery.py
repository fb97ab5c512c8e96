"""Reading the record of a run from its newest checkpoint, if `run.json` is lost."""

import os
from pathlib import Path
from typing import Any, cast

from ..core import run_file
from ..core.directory import CHECKPOINTS, RUN, LostRecordError, read_run
from ..core.folder import Folder
from ..core.run_file import RunFile
from ..errors import CheckpointError
from .format import MANIFEST, Name
from .manifest import UnknownFormatError, read_manifest
from .structure import decode


def recorded_run(directory: Path) -> tuple[RunFile, str]:
    """Return the record of a run: from `run.json`, or else from its newest checkpoint.

    A copy in a checkpoint is checked in the same way as `run.json`. It does not say whether the run
    finished. Nothing is written.

    Returns:
        The record, and a sentence if it comes from a checkpoint, else "".

    Raises:
        LostRecordError: If `run.json` is missing or damaged, and no checkpoint holds a valid copy.
        DirectoryError: If `run.json` cannot be read for another reason.
        CheckpointError: If `run.json` is lost, and a newer version of Treadle wrote the newest
            checkpoint.
    """
    try:
        return read_run(directory), ""
    except LostRecordError as lost:
        found = _newest_copy(directory)
        if found is None:
            raise
        record, name = found
        note = f"{directory / RUN} {lost.fault}: the record of the run is that of checkpoint {name}"
        return record, note


def _newest_copy(directory: Path) -> tuple[RunFile, str] | None:
    """Return the newest valid copy of the record, and the name of its checkpoint."""
    if not os.path.lexists(directory / CHECKPOINTS):
        return None
    try:
        folder = _checkpoints(directory)
    except CheckpointError:  # there is something else in its place
        return None
    with folder:
        for name in sorted((n for n in map(Name.parse, folder.names()) if n), reverse=True):
            try:
                return _copy_in(folder, str(name)), str(name)
            except UnknownFormatError:
                raise  # an older copy would discard what a newer Treadle recorded
            except run_file.UnknownFormatError as error:
                path = folder.path / str(name) / MANIFEST
                raise CheckpointError(f"{path} holds a record of a run: {error}") from error
            except (CheckpointError, ValueError):
                continue
    return None


def _copy_in(folder: Folder, name: str) -> RunFile:
    """Return the checked copy of the record in the manifest of a checkpoint.

    Raises:
        CheckpointError: If the manifest is damaged.
        ValueError: If it holds no valid copy, as that of an earlier version.
    """
    about = read_manifest(folder, name).sections["about"]
    found: Any = decode(about.get("run"), [])
    run_file.check(found)
    return cast(RunFile, {key: found[key] for key in run_file.RESUMED if key in found})


def _checkpoints(directory: Path) -> Folder:
    with Folder.open(directory, error=CheckpointError) as opened:
        return opened.subfolder(CHECKPOINTS)
