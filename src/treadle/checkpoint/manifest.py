"""Reading and validating the manifest of a checkpoint.

A manifest may be corrupted or malicious. Names in it are never used as paths, and the sizes in it
are compared with those of its files.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from math import inf, prod
from typing import Any, cast

from ..core.folder import Folder
from ..core.progress import Progress
from ..core.split_arrays import Grid
from ..errors import CheckpointError
from .arrays import SUFFIX, DType, dtype_named
from .format import DIGEST, FORMAT, MANIFEST, SECTIONS, digest_line, entry_of, nested_entry
from .parts import PARTS, is_part, part_entry, part_file
from .structure import MOST_BYTES, decode, parse_json

_SHA256 = re.compile("[0-9a-f]{64}")


class UnknownFormatError(CheckpointError):
    """The checkpoint is valid, but this version of Treadle does not support its format."""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array as a manifest declares it.

    Attributes:
        file: The file that holds it: `arrays`, `fixed`, or that of a part.
        entry: The name of the array in its file.
        shape: The shape.
        dtype: The dtype.
    """

    file: str
    entry: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StoredSplit:
    """An array as a manifest declares it that several processes wrote.

    Attributes:
        grid: How it is cut into parts.
        dtype: The dtype.
        parts: The parts by number.
        crc32: The checksum of each part.
    """

    grid: Grid
    dtype: DType
    parts: Sequence[StoredArray]
    crc32: Sequence[int]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of arrays as a manifest declares it."""

    name: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The parsed manifest of a checkpoint.

    Attributes:
        progress: The progress of the run.
        sections: The encoded sections `loop`, `source`, `hooks` and `about`, without their arrays.
        files: The files by name: `arrays`, `fixed` if there is one, and those of parts.
        state: The variables by path.
        nested: The arrays of the sections.
    """

    progress: Progress
    sections: dict[str, Any]
    files: dict[str, StoredFile]
    state: dict[str, StoredArray | StoredSplit]
    nested: list[StoredArray]

    @property
    def arrays(self) -> list[StoredArray]:
        """All arrays in the files, of which some are parts of variables."""
        found: list[StoredArray] = []
        for array in self.state.values():
            found += array.parts if isinstance(array, StoredSplit) else [array]
        return [*found, *self.nested]

    @property
    def fixed(self) -> str | None:
        """The name of the file shared with other checkpoints, or None if there is none."""
        return self.files["fixed"].name if "fixed" in self.files else None

    @property
    def score(self) -> float | None:
        """The score that ranks checkpoints; None if it is missing or not a finite number."""
        score = self.sections["about"].get("score")
        return score if isinstance(score, (int, float)) and -inf < score < inf else None


def read_manifest(folder: Folder, name: str) -> Manifest:
    """Read and validate the manifest of a checkpoint, without its arrays.

    Args:
        folder: The folder with all checkpoints of a run.
        name: The name of the checkpoint.

    Raises:
        CheckpointError: If the manifest is damaged or of another format.
    """
    path = folder.path / name / MANIFEST
    if not folder.is_folder(name):
        raise CheckpointError(f"{path.parent} is not a folder, so it holds no checkpoint")
    with folder.subfolder(name) as files:
        data = files.read(MANIFEST, MOST_BYTES)
        digest = files.read(DIGEST, 200)
    if digest != digest_line(data):
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one in {DIGEST}")
    try:
        record = _dict(parse_json(data), "it")
        version = record.get("format")
        if type(version) is not int or version != FORMAT:
            raise UnknownFormatError(
                f"{path} is of format {ascii(version)[:40]}, and this version of Treadle reads "
                f"format {FORMAT}: use the version that wrote it"
            )
        return _manifest(record)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is not a checkpoint's: {error}") from error


def _manifest(record: dict[str, Any]) -> Manifest:
    sections = {name: record.get(name) for name in SECTIONS}
    check_sections(sections)
    stored: dict[str, StoredFile] = {}
    for name, file in _dict(record.get("files"), "files").items():
        sha256 = _sha256(_dict(file, name).get("sha256"), f"the SHA-256 of {name}")
        size = _count(file.get("size"), f"the size of {name}")
        stored[name] = StoredFile(f"{sha256 if name == 'fixed' else name}{SUFFIX}", sha256, size)
    others = {name for name in stored if not is_part(name)}
    if "arrays" not in others or not others <= {"arrays", "fixed"}:
        raise ValueError(f"its files are {shown(', '.join(stored))}")
    state = _dict(record.get("state"), "state")
    nested = _list(record.get("nested"), "nested")
    return Manifest(
        _progress(_dict(record.get("progress"), "progress")),
        sections,
        stored,
        {path: _variable(path, array, stored) for path, array in state.items()},
        [_array(array, stored, nested_entry(i)) for i, array in enumerate(nested)],
    )


def check_sections(sections: Mapping[str, Any]) -> None:
    """Raise a `ValueError` if a section is not an object."""
    for name, part in sections.items():
        if not (part is None and name == "source"):
            _dict(part, name)


def _variable(path: str, value: Any, stored: Mapping[str, StoredFile]) -> StoredArray | StoredSplit:
    record = _dict(value, "an array")
    if record.get("file") != PARTS:
        return _array(value, stored, entry_of(path))
    sizes = _list(record.get("shape"), "a shape")
    shape = tuple(_count(n, f"the shape of {shown(path)}") for n in sizes)
    starts = tuple(tuple(_list(axis, "starts")) for axis in _list(record.get("starts"), "starts"))
    cut = len(starts) == len(shape) and all(map(_are_starts, starts, shape))
    if not cut:
        raise ValueError(f"{shown(path)} of shape {shown(shape)} is cut at {shown(starts)}")
    grid, parts = Grid(shape, starts), _list(record.get("parts"), "parts")
    if len(parts) != grid.parts:
        raise ValueError(f"{shown(path)} has {len(parts)} parts, but is cut into {grid.parts}")
    found: list[StoredArray] = []
    sums: list[int] = []
    for number, (part, place) in enumerate(zip(parts, grid.regions(), strict=True)):
        entry, numbers = part_entry(path, number), _list(part, "a part")
        if len(numbers) != 2:
            raise ValueError(f"the part {shown(entry)} is {shown(part)}")
        described = {
            "file": part_file(_count(numbers[0], "the process of a part")),
            "shape": [s.stop - s.start for s in place],
            "dtype": record.get("dtype"),
        }
        sums.append(_count(numbers[1], "a CRC-32"))
        found.append(_array(described, stored, entry))
    dtype = found[0].dtype
    # Parts without elements fit into any file; no array can have such a shape.
    if prod(n or 1 for n in shape) * dtype.itemsize >= 1 << 63:
        raise ValueError(f"{shown(path)} has the shape {shown(shape)}")
    return StoredSplit(grid, dtype, found, sums)


def _are_starts(starts: tuple[Any, ...], size: int) -> bool:
    """Return whether parts of an axis may begin at these places."""
    numbers = [_count(start, "the start of a part") for start in starts]
    rising = all(a < b for a, b in pairwise(numbers))
    return numbers[:1] == [0] and rising and (len(numbers) == 1 or numbers[-1] < size)


def _array(value: Any, stored: Mapping[str, StoredFile], entry: str) -> StoredArray:
    record = _dict(value, "an array")
    file = record.get("file")
    if not isinstance(file, str) or file not in stored:
        raise ValueError(f"the file of {entry} is {shown(file)}")
    shape = tuple(_count(n, f"the shape of {entry}") for n in _list(record.get("shape"), "a shape"))
    dtype = record.get("dtype")
    if not isinstance(dtype, str):
        raise ValueError(f"the dtype of {entry} is {shown(dtype)}")
    array = StoredArray(file, entry, shape, dtype_named(dtype))
    if len(shape) > 64 or array.nbytes > stored[file].size:
        raise ValueError(
            f"{entry} of shape {shown(shape)} and dtype {array.dtype} does not fit into its file "
            f"of {stored[file].size:,} bytes"
        )
    return array


def _progress(record: dict[str, Any]) -> Progress:
    record = decode(record, [])
    known = {field.name: type(field.default) for field in fields(Progress)}
    for name, value in record.items():
        kinds = (int, float) if known.get(name) is float else (known.get(name),)
        if type(value) not in kinds or value < 0:
            raise ValueError(f"its progress has an invalid {shown(name)}: {shown(value)}")
    return Progress(**record)


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
        raise ValueError(f"{what} is {shown(value)}")
    return value


def _sha256(value: Any, what: str) -> str:
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise ValueError(f"{what} is {shown(value)}")
    return value


def shown(value: Any) -> str:
    """Format a value for a message: shortened, and without terminal control characters."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
