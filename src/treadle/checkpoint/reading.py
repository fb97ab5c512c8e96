"""Reading and validating checkpoints without running any code in them.

A file may be truncated, corrupted or malicious. Sizes are therefore checked before hashes, hashes
before contents, and no array is allocated that is larger than its file. Headers are compared with
the expected bytes instead of being parsed, and names in files are never used as paths.
"""

import hashlib
import re
import struct
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import inf, prod
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np

from ..core.progress import Progress
from ..errors import CheckpointError
from .arrays import Array, DType, dtype_named, npy_header
from .files import Files
from .format import (
    ARRAYS,
    DIGEST,
    FIXED,
    FORMAT,
    LONGEST_ENTRY,
    MANIFEST,
    SECTIONS,
    Checkpoint,
    digest_line,
    is_entry,
)
from .structure import MOST_BYTES, decode, parse_json

_PIECE = 1 << 20
_SHA256 = re.compile("[0-9a-f]{64}")
# Upper bounds for the bytes that an archive needs for each entry in addition to its content, and
# for its end. They prevent an archive with far more entries than the manifest lists.
_PER_ENTRY, _PER_ARCHIVE = 200 + 2 * LONGEST_ENTRY, 200


class UnknownFormatError(CheckpointError):
    """The checkpoint is valid, but this version of Treadle does not support its format."""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array as a manifest declares it."""

    file: str
    entry: str
    shape: tuple[int, ...]
    dtype: DType
    crc32: int

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of arrays as a manifest declares it."""

    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The parsed manifest of a checkpoint.

    Attributes:
        progress: The progress of the run.
        sections: The encoded sections `loop`, `source`, `hooks` and `about`, without their arrays.
        files: The files by name: `arrays`, and `fixed` if there is one.
        state: The variables by path.
        nested: The arrays of the sections.
    """

    progress: Progress
    sections: dict[str, Any]
    files: dict[str, StoredFile]
    state: dict[str, StoredArray]
    nested: list[StoredArray]

    @property
    def fixed(self) -> str | None:
        """The name of the file shared with other checkpoints, or None if there is none."""
        return f"{self.files['fixed'].sha256}.npz" if "fixed" in self.files else None

    @property
    def score(self) -> float | None:
        """The score that ranks checkpoints; None if it is missing or not a finite number."""
        score = self.sections["about"].get("score")
        return score if isinstance(score, (int, float)) and -inf < score < inf else None


def read(folder: Path, files: Files) -> Checkpoint:
    """Read and validate a checkpoint.

    Args:
        folder: The folder of the checkpoint, as returned by `write`. The run directory may have
            been moved since.
        files: The file system.

    Raises:
        CheckpointError: If the checkpoint is damaged, inconsistent or of another format. The
            message contains the file and the reason.
    """
    manifest = read_manifest(folder, files)
    every = [*manifest.state.values(), *manifest.nested]
    found: dict[str, Array] = {}
    for name, stored in manifest.files.items():
        path = (
            folder / ARRAYS if name == "arrays" else folder.parent / FIXED / f"{stored.sha256}.npz"
        )
        found |= _read_arrays(path, stored, [array for array in every if array.file == name], files)
    nested = [found[array.entry] for array in manifest.nested]
    try:
        sections = {name: decode(part, nested) for name, part in manifest.sections.items()}
        _check_sections(sections)
    except ValueError as error:
        raise CheckpointError(f"{folder / MANIFEST} is not a checkpoint's: {error}") from error
    return Checkpoint(
        manifest.progress,
        {path: found[array.entry] for path, array in manifest.state.items()},
        frozenset(path for path, array in manifest.state.items() if array.file == "fixed"),
        **sections,
    )


def read_manifest(folder: Path, files: Files) -> Manifest:
    """Read and validate the manifest of a checkpoint, without its arrays.

    Raises:
        CheckpointError: If the manifest is damaged or of another format.
    """
    path = folder / MANIFEST
    if not files.is_folder(folder):
        raise CheckpointError(f"{folder} is not a folder, so it holds no checkpoint")
    data = files.read(path, MOST_BYTES)
    if files.read(folder / DIGEST, 200) != digest_line(data):
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one in {DIGEST}")
    try:
        record = _dict(parse_json(data), "it")
        version = record.get("format")
        if version != FORMAT:
            raise UnknownFormatError(
                f"{path} is of format {ascii(version)[:40]}, and this version of Treadle reads "
                f"format {FORMAT}: use the version that wrote it"
            )
        return _manifest(record)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is not a checkpoint's: {error}") from error


def _manifest(record: dict[str, Any]) -> Manifest:
    sections = {name: record.get(name) for name in SECTIONS}
    _check_sections(sections)
    stored = {
        name: StoredFile(
            _matching(_dict(file, name).get("sha256"), _SHA256, f"the SHA-256 of {name}"),
            _count(file.get("size"), f"the size of {name}"),
        )
        for name, file in _dict(record.get("files"), "files").items()
    }
    if "arrays" not in stored or not stored.keys() <= {"arrays", "fixed"}:
        raise ValueError(f"its files are {_shown(', '.join(stored))}")
    state = _dict(record.get("state"), "state")
    nested = _list(record.get("nested"), "nested")
    manifest = Manifest(
        _progress(_dict(record.get("progress"), "progress")),
        sections,
        stored,
        {path: _array(array, stored) for path, array in state.items()},
        [_array(array, stored) for array in nested],
    )
    _check_unique(array.entry for array in (*manifest.state.values(), *manifest.nested))
    return manifest


def _check_sections(sections: Mapping[str, Any]) -> None:
    for name, part in sections.items():
        if not (part is None and name == "source"):
            _dict(part, name)


def _array(value: Any, stored: Mapping[str, StoredFile]) -> StoredArray:
    record = _dict(value, "an array")
    entry, file = record.get("entry"), record.get("file")
    if not isinstance(entry, str) or not is_entry(entry):
        raise ValueError(f"an entry is called {_shown(entry)}, which is not a valid name")
    if not isinstance(file, str) or file not in stored:
        raise ValueError(f"the file of {entry} is {_shown(file)}")
    shape = tuple(_count(n, f"the shape of {entry}") for n in _list(record.get("shape"), "a shape"))
    dtype = record.get("dtype")
    if not isinstance(dtype, str):
        raise ValueError(f"the dtype of {entry} is {_shown(dtype)}")
    array = StoredArray(
        file, entry, shape, dtype_named(dtype), _count(record.get("crc32"), "a CRC-32")
    )
    if len(shape) > 64 or array.nbytes > stored[file].size:
        raise ValueError(
            f"{entry} of shape {_shown(shape)} and dtype {array.dtype} does not fit into its file "
            f"of {stored[file].size:,} bytes"
        )
    return array


def _progress(record: dict[str, Any]) -> Progress:
    record = decode(record, [])
    known = {field.name: type(field.default) for field in fields(Progress)}
    for name, value in record.items():
        kinds = (int, float) if known.get(name) is float else (known.get(name),)
        if type(value) not in kinds or value < 0:
            raise ValueError(f"its progress has an invalid {_shown(name)}: {_shown(value)}")
    return Progress(**record)


def _read_arrays(
    path: Path, stored: StoredFile, arrays: Sequence[StoredArray], files: Files
) -> dict[str, Array]:
    """Read the arrays of one file, by entry."""
    with files.opened(path) as (file, size):
        if size != stored.size:
            raise CheckpointError(
                f"{path} is damaged: it has {size:,} bytes, and its manifest says {stored.size:,}"
            )
        contents = sum(len(npy_header(a.shape, a.dtype)) + a.nbytes for a in arrays)
        if not contents <= size <= contents + len(arrays) * _PER_ENTRY + _PER_ARCHIVE:
            raise CheckpointError(
                f"{path} does not hold what its manifest says: {size:,} bytes for {len(arrays)} "
                f"arrays of {contents:,}"
            )
        if _sha256(file) != stored.sha256:
            raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one in its manifest")
        try:
            with zipfile.ZipFile(file) as archive:
                infos = _infos(archive, arrays)
                return {a.entry: _read_array(archive, infos[a.entry], a) for a in arrays}
        # All exceptions that zipfile can raise for a corrupt or malicious file.
        except (
            zipfile.BadZipFile,
            EOFError,
            ValueError,
            RuntimeError,
            OverflowError,
            struct.error,
        ) as error:
            raise CheckpointError(
                f"{path} does not hold what its manifest says: {error}"
            ) from error


def _infos(archive: zipfile.ZipFile, arrays: Sequence[StoredArray]) -> dict[str, zipfile.ZipInfo]:
    """Return the archive entry of each array; raise if entries are missing or unexpected."""
    infos = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
    _check_unique(info.filename for info in archive.infolist())
    expected = {array.entry: array for array in arrays}
    for entry in (*infos, *expected):
        if entry not in expected:
            raise ValueError(f"it holds {_shown(infos[entry].filename)} as well")
        if entry not in infos or infos[entry].filename != f"{entry}.npy":
            raise ValueError(f"it does not hold {_shown(entry)}")
    for entry, array in expected.items():
        info, size = infos[entry], len(npy_header(array.shape, array.dtype)) + array.nbytes
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise ValueError(f"{entry} is compressed or encrypted")
        if info.file_size != size or info.compress_size != size or array.crc32 != info.CRC:
            raise ValueError(f"{entry} has another size or CRC-32")
    return infos


def _read_array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, array: StoredArray) -> Array:
    header = npy_header(array.shape, array.dtype)
    with archive.open(info) as entry:
        if entry.read(len(header)) != header:
            raise ValueError(
                f"{array.entry} is not an array of {array.dtype} and shape {array.shape}"
            )
        numbers = np.empty(array.nbytes, np.uint8)
        _fill(entry, numbers.data)  # reading to the end verifies the CRC-32
    return numbers.view(array.dtype).reshape(array.shape)


def _fill(entry: IO[bytes], numbers: memoryview) -> None:
    while numbers.nbytes:
        piece = entry.read(min(_PIECE, numbers.nbytes))
        if not piece:
            raise EOFError("an entry ends too early")
        numbers[: len(piece)] = piece
        numbers = numbers[len(piece) :]


def _sha256(file: BinaryIO) -> str:
    digest, piece = hashlib.sha256(), bytearray(_PIECE)
    while read := file.readinto(piece):  # type: ignore[attr-defined]
        digest.update(memoryview(piece)[:read])
    return digest.hexdigest()


def _check_unique(entries: Iterable[str]) -> None:
    for entry, times in Counter(entries).items():
        if times > 1:
            raise ValueError(f"it names the entry {_shown(entry)} twice")


def _dict(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not an object")
    return cast(dict[str, Any], value)


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what} is not a list")
    return cast(list[Any], value)


def _count(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{what} is {_shown(value)}")
    return value


def _matching(value: Any, pattern: re.Pattern[str], what: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{what} is {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    """Format a value for a message: shortened, and without terminal control characters."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
