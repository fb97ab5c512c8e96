"""The parts of arrays that several processes hold together, in a checkpoint.

    step-000000000012/part-00001.safetensors  the parts that process 1 writes

Every process writes its parts into the folder of the checkpoint, under its temporary name, and
reports their checksums. Process 0 waits for all reports, writes the manifest, and renames the
folder. No process holds a whole array. In a file, a part is called `part/<its number>/<its path>`.
"""

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..core.folder import Folder
from ..core.processes import process_group
from ..core.split_arrays import Array, OwnParts
from ..errors import CheckpointError
from .arrays import SUFFIX, Digest, name_of, pieces

PARTS = "parts"  # in place of the file of an array
MOST_PARTS = 90_000
"""The most parts of a checkpoint. Each takes up to four of the values of a manifest, whose number
is limited, since reading them takes memory."""
PART_FILE = re.compile("part-[0-9]{5,8}")


def check_count(split: Mapping[str, OwnParts]) -> None:
    """Check that a manifest can list the parts of all arrays.

    Raises:
        CheckpointError: There are too many.
    """
    parts = {path: array.grid.parts for path, array in split.items()}
    if sum(parts.values()) > MOST_PARTS:
        most = max(parts, key=lambda path: parts[path])
        raise CheckpointError(
            f"{len(parts):,} variables are cut into {sum(parts.values()):,} parts, {most} alone "
            f"into {parts[most]:,}; a checkpoint holds at most {MOST_PARTS:,}. In the LayoutMap, "
            "leave small variables whole, and split others along one axis of the mesh"
        )


def part_file(rank: int) -> str:
    """Return the name in the manifest of the file that a process writes."""
    return f"part-{rank:05d}"


def part_entry(path: str, number: int) -> str:
    """Return the name of a part in its file."""
    return f"part/{number}/{path}"


def write_own_parts(files: Folder, split: Mapping[str, OwnParts]) -> dict[str, Any]:
    """Write the parts of this process into the folder of a checkpoint, durably.

    Returns:
        The report to process 0: the size and hash of the file, if there is one, and the CRC-32 of
        each part in the order of paths and numbers.
    """
    own = [
        (part_entry(path, number), array.own[number])
        for path, array in split.items()
        for number in sorted(array.own)
    ]
    report: dict[str, Any] = {"file": None, "crc32": [_crc32(array) for _, array in own]}
    if own:
        digest = Digest()
        size = sum(array.nbytes for _, array in own)
        name = f"{part_file(process_group().rank)}{SUFFIX}"
        files.create(name, digest.update_from(pieces(own)), size)
        files.sync()
        report["file"] = digest.result()
    return report


def send_report(report: Mapping[str, Any], temporary: str) -> None:
    """Send the report about this process's parts of a checkpoint to process 0."""
    process_group().report(report, f"the parts of {temporary}")


def received_reports(temporary: str) -> list[Any]:
    """Wait in process 0 until all others have reported about their parts of a checkpoint."""
    return process_group().reports(f"the parts of {temporary}")


def raise_faults(fault: str | None, at: str) -> None:
    """Raise the first fault that a process has found; all must call this at the same point.

    Raises:
        CheckpointError: A process has found one.
    """
    for theirs in process_group().exchange(fault, at):
        if theirs is not None:
            raise CheckpointError(theirs)


def described(path: str, dtype: Any, shape: Sequence[int], file: str) -> dict[str, Any]:
    """Return the record of an array in the manifest.

    Raises:
        CheckpointError: Its dtype is not one of numbers.
    """
    name = name_of(dtype)
    if name is None:
        raise CheckpointError(
            f"{path} of dtype {dtype} cannot be in a checkpoint: only arrays of numbers can"
        )
    return {"file": file, "shape": list(shape), "dtype": name}


def described_parts(
    split: Mapping[str, OwnParts], reports: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the records of arrays and files in the manifest, from the reports by rank.

    Raises:
        CheckpointError: A process has not written its parts.
    """
    for rank, report in enumerate(reports):
        if "fault" in report:
            raise CheckpointError(f"process {rank} did not write its parts: {report['fault']}")
    sums = [iter(report["crc32"]) for report in reports]
    state: dict[str, Any] = {}
    for path, array in split.items():
        state[path] = {
            **described(path, array.dtype, array.grid.shape, PARTS),
            "starts": [list(starts) for starts in array.grid.starts],
            "parts": [[owner, next(sums[owner])] for owner in array.owners],
        }
    files = {part_file(rank): r["file"] for rank, r in enumerate(reports) if r["file"]}
    return state, files


def check_parts(files: Mapping[str, Any], place: Folder) -> None:
    """Check that the folder of a checkpoint has the files that processes report.

    Raises:
        CheckpointError: A file is missing, or has another size.
    """
    for part, file in files.items():
        if place.size(f"{part}{SUFFIX}") != file["size"]:
            raise CheckpointError(
                f"process {int(part.removeprefix('part-'))} wrote {part}{SUFFIX}, but process 0 "
                f"does not find it in {place.path}: all processes need the same run directory, on "
                "a disk that they share"
            )


def _crc32(array: Array) -> int:
    return zlib.crc32(np.asarray(array, order="C").reshape(-1).view(np.uint8).data)


def is_part(name: str) -> bool:
    """Return whether the name of a file in a manifest is that of parts."""
    return PART_FILE.fullmatch(name) is not None


def mine(names: Iterable[str]) -> set[str]:
    """Return the files of parts that this process verifies, of all that a checkpoint has."""
    group = process_group()
    return set(sorted(names)[group.rank :: group.size])
