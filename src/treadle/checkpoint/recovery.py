"""Reading the record of a run, and comparing it with its newest checkpoint."""

from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from ..core import run_file
from ..core.directory import CHECKPOINTS, RUN, LostRecordError, read_run
from ..core.folder import Folder
from ..core.run_file import RunFile
from ..errors import CheckpointError, DirectoryError
from .format import DIGEST, MANIFEST
from .manifest import UnknownFormatError, read_manifest, shown
from .retention import names_in
from .structure import decode


def recorded_run(directory: Path) -> tuple[RunFile, str]:
    """Return the record of a run: from `run.json`, or else from its newest checkpoint.

    A copy in a checkpoint is checked in the same way as `run.json`. It does not say whether the run
    finished. A record that is older than the newest checkpoint does not say so either. Nothing is
    written.

    Returns:
        The record, and a sentence if it comes from a checkpoint or is older, else "".

    Raises:
        LostRecordError: If `run.json` is missing or damaged, and no checkpoint holds a valid copy.
        DirectoryError: If `run.json` cannot be read for another reason, or is of another run than
            the checkpoints.
        CheckpointError: If `run.json` is lost, and a newer version of Treadle wrote the newest
            checkpoint.
    """
    try:
        return _compared(directory, read_run(directory))
    except LostRecordError as lost:
        found = _newest_copy(directory)
        if found is None:
            raise
        record, name = found
        note = f"{directory / RUN} {lost.fault}: the record of the run is that of checkpoint {name}"
        return record, note


def _compared(directory: Path, record: RunFile) -> tuple[RunFile, str]:
    """Return the content of `run.json` and "", or a sentence if it is older than a checkpoint.

    An older one does not say any more that the run finished.

    Raises:
        DirectoryError: If it is of another run than the newest valid checkpoint.
    """
    with _checkpoints(directory) as (folder, names):
        for name in names:
            try:
                if record.get("checkpoint") == hash_of_manifest(folder, name):
                    break
                manifest = read_manifest(folder, name)
            except UnknownFormatError:  # what reads the checkpoint reports it
                break
            except CheckpointError:
                continue
            mine, theirs = record.get("id"), manifest.sections["about"].get("id")
            if mine != theirs:
                raise DirectoryError(
                    f"{directory / RUN} is of another run than checkpoint {name}: expected the id "
                    f"{shown(theirs)}, but found {shown(mine)}. Restore the files of one run"
                )
            newer = manifest.progress.step > run_file.progress_of(record).step
            if "checkpoint" in record and newer:
                facts = {key: record[key] for key in record if key not in run_file.OF_THE_END}
                note = f"{directory / RUN} says that the run ended before checkpoint {name}"
                return cast(RunFile, facts), note
            break
    return record, ""


def hash_of_manifest(folder: Folder, name: str) -> str:
    """Return the SHA-256 of the manifest of a checkpoint, as the file next to it has it.

    Raises:
        CheckpointError: If there is no such file.
    """
    with folder.subfolder(name) as files:
        return files.read(DIGEST, 200)[:64].decode("ascii", "replace")


def newest_hash(directory: Path) -> str | None:
    """Return `hash_of_manifest` of the newest checkpoint; None if there is none."""
    with suppress(CheckpointError), _checkpoints(directory) as (folder, names):
        return hash_of_manifest(folder, names[0]) if names else None
    return None


def _newest_copy(directory: Path) -> tuple[RunFile, str] | None:
    """Return the newest valid copy of the record, and the name of its checkpoint."""
    with _checkpoints(directory) as (folder, names):
        for name in names:
            try:
                return _copy_in(folder, name), name
            except UnknownFormatError:
                raise  # an older copy would discard what a newer Treadle recorded
            except run_file.UnknownFormatError as error:
                path = folder.path / name / MANIFEST
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
    copy = {key: found[key] for key in run_file.RESUMED if key in found}
    return cast(RunFile, {**copy, "id": about["id"]} if "id" in about else copy)


@contextmanager
def _checkpoints(directory: Path) -> Generator[tuple[Folder, list[str]]]:
    """Open the folder of the checkpoints; yield it and their names, the newest first.

    If there is no such folder, or something else in its place, no names are yielded.
    """
    with Folder.open(directory, error=CheckpointError) as opened:
        if not opened.is_folder(CHECKPOINTS):
            yield opened, []
            return
        with opened.subfolder(CHECKPOINTS) as folder:
            yield folder, [str(name) for name in names_in(folder)[::-1]]
