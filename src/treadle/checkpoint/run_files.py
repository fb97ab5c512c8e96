"""The record, the final files and the variables of a run, read from its directory and verified.

`run.json` lists the files that a run writes at its end, with their size and SHA-256. It also holds
its own SHA-256, the identifier of the run, and the SHA-256 of the newest checkpoint's manifest. So
a file that was damaged, or that belongs to another run, is never used.
"""

import hashlib
import warnings
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from ..core import schema
from ..core.directory import (
    CHECKPOINTS,
    OF_THE_END,
    RESUMED,
    RUN,
    STATE,
    LostRecordError,
    RunFile,
    UnknownRecordError,
    check_record,
    progress_of,
    read_run,
    why_unfinished,
)
from ..core.folder import FILE, Folder
from ..core.schema import shown
from ..errors import CheckpointError, DirectoryError, StateError, TreadleWarning
from .arrays import digest_of, digest_of_file, pieces, read_arrays
from .format import DIGEST, MANIFEST
from .manager import Checkpoints
from .manifest import UnknownFormatError, read_manifest
from .retention import names_in
from .structure import decode

SLOT = "/model_variables_moving_average/"  # between the optimizer's and the weight's path


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
            mine, theirs = record["id"], manifest.sections["about"].get("id")
            if mine != theirs:
                raise DirectoryError(
                    f"{directory / RUN} is of another run than checkpoint {name}: expected the id "
                    f"{shown(theirs)}, but found {shown(mine)}. Restore the files of one run"
                )
            newer = manifest.progress.step > progress_of(record).step
            if record.get("finished") and newer:
                facts = {key: record[key] for key in record if key not in OF_THE_END}
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
            except UnknownRecordError as error:
                path = folder.path / name / MANIFEST
                raise CheckpointError(f"{path} holds a record of a run: {error}") from error
            except (CheckpointError, ValueError):
                continue
    return None


def _copy_in(folder: Folder, name: str) -> RunFile:
    """Return the checked copy of the record in the manifest of a checkpoint.

    Raises:
        CheckpointError: If the manifest is damaged.
        ValueError: If it holds no valid copy, such as one that was too long.
    """
    about = read_manifest(folder, name).sections["about"]
    found: Any = decode(about.get("run"), [])
    check_record(found)
    schema.text(about.get("id"), "the id of the run")
    copy = {key: found[key] for key in RESUMED if key in found}
    return cast(RunFile, {**copy, "id": about["id"]})


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


def list_files(folder: Folder, names: Iterable[str]) -> dict[str, dict[str, Any] | None]:
    """Return the size and the SHA-256 of each file; None for those that do not exist."""
    found: dict[str, dict[str, Any] | None] = dict.fromkeys(names)
    for name in found:
        if folder.kind(name) == FILE:
            with folder.opened(name) as (file, _):
                found[name] = digest_of_file(file)
    return found


def fault_of(folder: Folder, name: str, expected: Mapping[str, Any]) -> str:
    """Return what differs between a file and what `run.json` lists, as a clause; "" if nothing."""
    kind = folder.kind(name)
    if kind == FILE:
        with folder.opened(name) as (file, size):
            # A file of another size is not read: it may be huge.
            digest = digest_of_file(file) if size == expected["size"] else None
        if digest == expected:
            return ""
        found = f"{size:,} bytes" if digest is None else _shown(digest)
    else:
        found = kind or "no file"
    return f"{folder.path / name}: expected {_shown(expected)}, as {RUN} lists, but found {found}"


def _shown(digest: Mapping[str, Any]) -> str:
    return f"{digest['size']:,} bytes with the SHA-256 {str(digest['sha256'])[:12]}…"


def final_state(directory: Path, record: RunFile) -> tuple[Mapping[str, Any], str]:
    """Return the variables at the end of a finished run.

    If the file is not the one that the run wrote, the checkpoint of the same step is used, provided
    that it holds the same values.

    Returns:
        The arrays by path, empty if the run wrote no such file; and a sentence if they come from a
        checkpoint, else "".

    Raises:
        DirectoryError: If the file is not the one that the run wrote, and no checkpoint holds the
            same values.
    """
    expected = record.get("files", {}).get(STATE)
    if expected is None:
        return {}, ""
    failure: StateError | None = None
    with Folder.open(directory) as folder:
        if folder.size(STATE) == expected["size"]:
            digest = hashlib.sha256()
            try:
                arrays = read_arrays(directory / STATE, digest.update)
                if digest.hexdigest() == expected["sha256"]:
                    return arrays, ""
            except StateError as error:
                failure = error
        fault = fault_of(folder, STATE, expected)
    if not fault:  # it does not fit into memory
        raise DirectoryError(str(failure)) from failure
    state, name = _same_values(directory, progress_of(record).step, expected)
    if not state:
        raise DirectoryError(
            f"{fault}; {name}. Restore a copy of the file, or read a checkpoint, "
            f"treadle.load_run({str(directory)!r}).variables(step)"
        )
    return state, f"{fault}. The values are those of checkpoint {name}, which are the same"


def _same_values(
    directory: Path, step: int, expected: Mapping[str, Any]
) -> tuple[Mapping[str, Any], str]:
    """Return the values of the checkpoint of a step, if a file of them has the expected hash.

    Returns:
        The values, and the name of the checkpoint; or nothing, and the reason.
    """
    try:
        found = Checkpoints(directory / CHECKPOINTS).before(step)
    except CheckpointError:
        found = None
    if found is None or found.progress.step != step:
        return {}, f"there is no valid checkpoint of step {step}"
    with found.reading("loop.averages"):
        averages = averaged(found.state, found.loop.get("averages", {}))
    for state in (found.state, averages):
        if digest_of(pieces(state.items())) == expected:
            return state, found.path.name
    return {}, (
        f"the values in {found.path} are others, since training ended with averaged or earlier "
        "weights"
    )


def averaged(arrays: Mapping[str, Any], begun: Mapping[str, int]) -> dict[str, Any]:
    """Return the variables of a run's last checkpoint with averages in place of weights.

    This is what `Averages.finish` does to the variables when training ends.

    Args:
        arrays: All variables by path.
        begun: `Averages.begun` of the checkpoint.

    Example:
        >>> arrays = {"w": 3.0, "sgd/iterations": 5, f"sgd{SLOT}w": 2.0}
        >>> averaged(arrays, {"sgd": 0})["w"], averaged(arrays, {"sgd": 5})["w"]
        (2.0, 3.0)
    """
    found = dict(arrays)
    for path, average in arrays.items():
        optimizer, slot, weight = path.partition(SLOT)
        updates = int(arrays.get(f"{optimizer}/iterations", 0)) if slot else 0
        if updates and updates != begun.get(optimizer) and weight in arrays:
            found[weight] = average
    return found


def learned(directory: Path) -> tuple[Mapping[str, Any], int | None]:
    """Return the variables of a run, from its end or its newest checkpoint.

    Warns about damaged checkpoints, which are skipped, and about a damaged final state.

    Returns:
        The arrays by path, and the step of the checkpoint; the step is None if they are those at
        the end of the run.

    Raises:
        DirectoryError: If the directory holds no run, a run without a checkpoint, or a damaged
            final state that no checkpoint holds.
        CheckpointError: If none of its checkpoints can be read.
    """
    record, _ = recorded_run(directory)
    if record.get("finished"):
        state, note = final_state(directory, record)
        if note:
            warnings.warn(note, TreadleWarning, stacklevel=3)
        if state:
            return state, None
    checkpoints = Checkpoints(directory / CHECKPOINTS)
    found = checkpoints.latest()
    for name, reason in checkpoints.rejected:
        warnings.warn(f"skipped checkpoint {name}: {reason}", TreadleWarning, stacklevel=3)
    if found is None:
        raise DirectoryError(
            f"{directory} holds a run that did not finish{why_unfinished(record)}, and has no "
            "checkpoint"
        )
    return found.state, found.progress.step


def learned_at(directory: Path, step: int) -> Mapping[str, Any]:
    """Return the variables of a run after a step, from the checkpoint of that step.

    Raises:
        DirectoryError: If there is no checkpoint of this step; the message lists the steps.
        CheckpointError: If the checkpoint is damaged.
    """
    checkpoints = Checkpoints(directory / CHECKPOINTS)
    steps = checkpoints.steps()
    if step not in steps:
        listed = ", ".join(str(other) for other in steps) or "none"
        raise DirectoryError(
            f"{directory} has no checkpoint of step {step}. There are: {listed}. Choose one of "
            "these steps"
        )
    found = checkpoints.before(step)
    if found is None or found.progress.step != step:
        reasons = "; ".join(reason for _, reason in checkpoints.rejected)
        raise CheckpointError(
            f"the checkpoint of step {step} in {directory} cannot be read: {reasons}. Choose "
            "another step"
        )
    return found.state
