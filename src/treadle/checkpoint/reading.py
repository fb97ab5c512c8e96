"""Reading and validating checkpoints without running any code in them.

A file may be truncated, corrupted or malicious. Sizes are therefore checked first, and no array is
allocated that is larger than its file. Headers are compared with the expected bytes instead of
being parsed, and nothing is returned before all hashes have been verified.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..core.folder import Folder
from ..errors import CheckpointError
from .dtypes import Array
from .format import FIXED, MANIFEST, Checkpoint
from .format_1 import read_archive
from .manifest import StoredArray, StoredFile, check_sections, read_manifest
from .structure import decode
from .tensor_file import header, in_file_order, read_numbers


def read(folder: Folder, name: str) -> Checkpoint:
    """Read and validate a checkpoint.

    Args:
        folder: The folder with all checkpoints of a run, which may have been moved.
        name: The name of the checkpoint, as returned by `write`.

    Raises:
        CheckpointError: If the checkpoint is damaged, inconsistent or of another format. The
            message contains the file and the reason.

    Example:
        >>> from treadle.checkpoint import Checkpoint, write
        >>> from treadle.core.progress import Progress
        >>> with Folder.open("runs/2/checkpoints", create=True) as folder:
        ...     name = write(folder, Checkpoint(Progress(step=8), {}, hooks={"seen": {"count": 3}}))
        ...     found = read(folder, name)
        >>> found.progress.step, found.hooks
        (8, {'seen': {'count': 3}})
    """
    manifest = read_manifest(folder, name)
    every = [*manifest.state.values(), *manifest.nested]
    found: dict[str, Array] = {}
    read_file = read_archive if manifest.format == 1 else _read_tensors
    for part, stored in manifest.files.items():
        arrays = [array for array in every if array.file == part]
        with (
            folder.subfolder(name if part == "arrays" else FIXED) as place,
            place.opened(stored.name) as (file, size),
        ):
            path = place.path / stored.name
            if size != stored.size:
                raise CheckpointError(
                    f"{path} is damaged: it has {size:,} bytes, and its manifest says "
                    f"{stored.size:,}"
                )
            found |= read_file(path, file, stored, arrays)
    nested = [found[array.entry] for array in manifest.nested]
    try:
        sections = {name: decode(part, nested) for name, part in manifest.sections.items()}
        check_sections(sections)
    except ValueError as error:
        path = folder.path / name / MANIFEST
        raise CheckpointError(f"{path} is not a checkpoint's: {error}") from error
    return Checkpoint(
        manifest.progress,
        {path: found[array.entry] for path, array in manifest.state.items()},
        frozenset(path for path, array in manifest.state.items() if array.file == "fixed"),
        **sections,
        path=folder.path / name,
    )


def _read_tensors(
    path: Path, file: BinaryIO, stored: StoredFile, arrays: Sequence[StoredArray]
) -> dict[str, Array]:
    """Read the arrays of one file, by entry; the arguments are those of `read_archive`.

    The library is not used: it would open the file again by its name, after the checks. Reading
    here also takes one pass, in which the file is hashed.
    """
    ordered = in_file_order(arrays, lambda array: array.dtype)
    start = header((array.entry, array.shape, array.dtype) for array in ordered)
    contents = len(start) + sum(array.nbytes for array in arrays)
    if contents != stored.size:
        raise CheckpointError(
            f"{path} does not hold what its manifest says: {stored.size:,} bytes for "
            f"{len(arrays)} arrays of {contents:,}"
        )
    digest = hashlib.sha256()
    try:
        found = read_numbers(file, (len(start),), np.dtype(np.uint8), digest.update)
        read = {a.entry: read_numbers(file, a.shape, a.dtype, digest.update) for a in ordered}
    except (EOFError, ValueError) as error:
        raise CheckpointError(f"{path} does not hold what its manifest says: {error}") from error
    if digest.hexdigest() != stored.sha256:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one in its manifest")
    if found.tobytes() != start:
        raise CheckpointError(
            f"{path} does not hold what its manifest says: its header describes other arrays"
        )
    return read
