"""Reading and validating checkpoints without running any code in them.

A file may be truncated, corrupted or malicious. Sizes are therefore checked first, and no array is
allocated that is larger than its file. Headers are compared with the expected bytes instead of
being parsed, and nothing is returned before all hashes have been verified.
"""

import hashlib
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..core.folder import Folder
from ..core.split_arrays import StoredParts
from ..errors import CheckpointError
from .arrays import Array, header, in_file_order, read_numbers
from .format import FIXED, MANIFEST, SavedState
from .manifest import Manifest, StoredArray, StoredFile, StoredSplit, check_sections, read_manifest
from .parts import is_part, mine
from .structure import decode


def read(folder: Folder, name: str, together: bool = False) -> SavedState:
    """Read and validate a checkpoint.

    Args:
        folder: The folder with all checkpoints of a run, which may have been moved.
        name: The name of the checkpoint, as returned by `write`.
        together: Whether all processes read it. Then each verifies some of the files with parts,
            and arrays in parts are `StoredParts`: each process reads those that it needs later.

    Raises:
        CheckpointError: If the checkpoint is damaged, inconsistent or of another format. The
            message contains the file and the reason.

    Example:
        >>> from treadle.checkpoint import SavedState, write
        >>> from treadle.core.progress import Progress
        >>> with Folder.open("runs/2/checkpoints", create=True) as folder:
        ...     name = write(folder, SavedState(Progress(step=8), {}, hooks={"seen": {"count": 3}}))
        ...     found = read(folder, name)
        >>> found.progress.step, found.hooks
        (8, {'seen': {'count': 3}})
    """
    manifest = read_manifest(folder, name)
    found = _read_files(folder, name, manifest, together)
    nested = [found[array.entry] for array in manifest.nested]
    try:
        sections = {name: decode(part, nested) for name, part in manifest.sections.items()}
        check_sections(sections, "")
    except ValueError as error:
        path = folder.path / name / MANIFEST
        raise CheckpointError(f"{path} is not a checkpoint's: {error}") from error
    state: dict[str, Any] = {}
    fixed: set[str] = set()
    parts = _PartReader(folder.path, name, manifest)
    for path, array in manifest.state.items():
        if isinstance(array, StoredArray):
            state[path] = found[array.entry]
            fixed |= {path} if array.file == "fixed" else set()
        elif together:
            state[path] = parts.array(array)
        else:
            state[path] = _joined(array, found)
    return SavedState(
        manifest.progress, state, frozenset(fixed), **sections, path=folder.path / name
    )


def _read_files(folder: Folder, name: str, manifest: Manifest, together: bool) -> dict[str, Array]:
    """Verify the files of a checkpoint, and return the arrays that this process needs at once."""
    found: dict[str, Array] = {}
    files_of_parts = {part for part in manifest.files if is_part(part)}
    left = files_of_parts - mine(files_of_parts) if together else set[str]()
    for part, stored in manifest.files.items():
        arrays = [array for array in manifest.arrays if array.file == part]
        with (
            folder.subfolder(FIXED if part == "fixed" else name) as place,
            place.opened(stored.name) as (file, size),
        ):
            path = place.path / stored.name
            if size != stored.size:
                raise CheckpointError(
                    f"{path} is damaged: it has {size:,} bytes, and its manifest says "
                    f"{stored.size:,}"
                )
            if part not in left:
                read = _read_tensors(path, file, stored, arrays)
                found |= {} if together and part in files_of_parts else read
    return found


def _joined(array: StoredSplit, found: dict[str, Array]) -> Array:
    """Return the array of which these are the parts, which are released."""
    whole = np.empty(array.grid.shape, array.dtype)
    for part, place in zip(array.parts, array.grid.regions(), strict=True):
        whole[place] = found.pop(part.entry)
    return whole


class _PartReader:
    """Reads parts of arrays from files that were verified, without reading the rest of these.

    Args:
        folder: The path of the folder with all checkpoints.
        name: The name of the checkpoint.
        manifest: The manifest of the checkpoint.
    """

    def __init__(self, folder: Path, name: str, manifest: Manifest) -> None:
        self._folder, self._name = folder, name
        self._files = {part: file.name for part, file in manifest.files.items() if is_part(part)}
        self._offsets: dict[str, int] = {}
        for file in self._files:
            arrays = [array for array in manifest.arrays if array.file == file]
            arrays = in_file_order(arrays, lambda array: array.dtype)
            offset = len(_header(arrays))
            for array in arrays:
                self._offsets[array.entry] = offset
                offset += array.nbytes

    def array(self, stored: StoredSplit) -> StoredParts:
        """Return an array, of which parts are read when they are needed."""
        return StoredParts(stored.grid, stored.dtype, lambda number: self._read(stored, number))

    def _read(self, stored: StoredSplit, number: int) -> Array:
        part, crc32 = stored.parts[number], 0

        def update(piece: memoryview) -> None:
            nonlocal crc32
            crc32 = zlib.crc32(piece, crc32)

        with (
            Folder.open(self._folder, error=CheckpointError) as folder,
            folder.subfolder(self._name) as place,
            place.opened(self._files[part.file]) as (file, _),
        ):
            file.seek(self._offsets[part.entry])
            try:
                found = read_numbers(file, part.shape, part.dtype, update)
            except EOFError:
                found = None
            if found is None or crc32 != stored.crc32[number]:
                raise CheckpointError(
                    f"{place.path / self._files[part.file]} has changed after it was verified: the "
                    f"CRC-32 of {part.entry} is not the one in the manifest. Start again, and the "
                    "run resumes from the checkpoint before"
                )
        return found


def _header(ordered: Sequence[StoredArray]) -> bytes:
    return header((array.entry, array.shape, array.dtype) for array in ordered)


def _read_tensors(
    path: Path, file: BinaryIO, stored: StoredFile, arrays: Sequence[StoredArray]
) -> dict[str, Array]:
    """Read the arrays of one file, by entry.

    The library is not used: it would open the file again by its name, after the checks. Reading
    here also takes one pass, in which the file is hashed.

    Args:
        path: The path of the file, for error messages.
        file: The file, which has the size in the manifest.
        stored: The file as the manifest declares it.
        arrays: Its arrays as the manifest declares them.

    Raises:
        CheckpointError: If the file is damaged, or does not hold what the manifest says.
    """
    ordered = in_file_order(arrays, lambda array: array.dtype)
    start = _header(ordered)
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
