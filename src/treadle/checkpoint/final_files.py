"""The files that a run writes at its end, which `run.json` lists with their size and SHA-256.

`run.json` also holds its own SHA-256, the identifier of the run, and the SHA-256 of the newest
checkpoint's manifest; `recovery.recorded_run` compares these. So a file that was damaged, or that
belongs to another run, is never used.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..core.directory import CHECKPOINTS, RUN, STATE
from ..core.folder import FILE, Folder
from ..core.run_file import RunFile, progress_of
from ..errors import CheckpointError, DirectoryError, StateError
from .arrays import read_arrays
from .digest import digest_of, digest_of_file
from .manager import Checkpoints
from .tensor_file import pieces

SLOT = "/model_variables_moving_average/"  # between the optimizer's and the weight's path


def list_files(folder: Folder, names: Iterable[str]) -> dict[str, dict[str, Any] | None]:
    """Return the size and the SHA-256 of each file; None for those that do not exist."""
    found: dict[str, dict[str, Any] | None] = dict.fromkeys(names)
    for name in found:
        if folder.kind(name) == FILE:
            with folder.opened(name) as (file, _):
                found[name] = digest_of_file(file)
    return found


def listed(directory: Path, record: RunFile, name: str) -> dict[str, Any] | None:
    """Return what the record of a finished run says of a file; None if the run did not write it.

    Raises:
        DirectoryError: If the record lists no files.
    """
    if "files" not in record:
        raise DirectoryError(
            f"{directory / RUN} does not list {name} with its SHA-256, since an earlier version of "
            "Treadle wrote it: the file cannot be verified. Train again with fresh=True (--fresh), "
            f"or read the newest checkpoint, treadle.load_run({str(directory)!r}).variables(step)"
        )
    return record["files"].get(name)


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

    Args:
        directory: The run directory.
        record: The record of the run.

    Returns:
        The arrays by path, empty if the run wrote no such file; and a sentence if they come from a
        checkpoint, else "".

    Raises:
        DirectoryError: If the file is not the one that the run wrote, and no checkpoint holds the
            same values.
    """
    expected = listed(directory, record, STATE)
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
