"""Reading and validating the manifest of a checkpoint.

A manifest may be corrupted or malicious. Names in it are never used as paths, and the sizes in it
are compared with those of its files.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, prod
from typing import Any, cast

from ..core import schema
from ..core.directory import PROGRESS, RunFile, progress_of
from ..core.folder import Folder
from ..core.progress import Progress
from ..core.schema import shown
from ..core.split_arrays import Grid
from ..errors import CheckpointError
from .arrays import SUFFIX, DType, dtype_named
from .format import DIGEST, FORMAT, MANIFEST, SECTIONS, digest_line, entry_of, nested_entry
from .parts import PARTS, is_part, part_entry, part_file
from .structure import MOST_BYTES, parse_json


def _sha256(value: Any, name: str) -> None:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
        raise ValueError(f"{name} is {shown(value)}; expected a SHA-256")


def _part(value: Any, name: str) -> None:
    schema.listed(schema.whole())(value, name)
    if len(value) != 2:
        raise ValueError(f"{name} has {len(value)} numbers; expected a process and a CRC-32")


def _variable_record(value: Any, name: str) -> None:
    _array_record(value, name)
    if value["file"] == PARTS:
        _split_record(value, name)


_object = schema.mapping(schema.anything)
check_sections = schema.complete(
    {**dict.fromkeys(SECTIONS, _object), "source": schema.optional(_object)}
)
_array_record = schema.complete(
    {"file": schema.text, "shape": schema.listed(schema.whole()), "dtype": schema.text}
)
_split_record = schema.complete(
    {"starts": schema.listed(schema.listed(schema.whole())), "parts": schema.listed(_part)}
)
_manifest_record = schema.complete(
    {
        "progress": PROGRESS,
        "files": schema.mapping(schema.complete({"sha256": _sha256, "size": schema.whole()})),
        "state": schema.mapping(_variable_record),
        "nested": schema.listed(_array_record),
    }
)


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
        record = parse_json(data)
        _object(record, "")
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
    check_sections(record, "")
    _manifest_record(record, "")
    stored: dict[str, StoredFile] = {}
    for name, file in record["files"].items():
        sha256 = file["sha256"]
        stored[name] = StoredFile(
            f"{sha256 if name == 'fixed' else name}{SUFFIX}", sha256, file["size"]
        )
    others = {name for name in stored if not is_part(name)}
    if "arrays" not in others or not others <= {"arrays", "fixed"}:
        raise ValueError(f"its files are {shown(', '.join(stored))}")
    return Manifest(
        progress_of(cast(RunFile, record)),
        {name: record[name] for name in SECTIONS},
        stored,
        {path: _variable(path, array, stored) for path, array in record["state"].items()},
        [_array(array, stored, nested_entry(i)) for i, array in enumerate(record["nested"])],
    )


def _variable(
    path: str, record: Mapping[str, Any], stored: Mapping[str, StoredFile]
) -> StoredArray | StoredSplit:
    if record["file"] != PARTS:
        return _array(record, stored, entry_of(path))
    shape, starts = tuple(record["shape"]), tuple(map(tuple, record["starts"]))
    if len(starts) != len(shape) or not all(map(_are_starts, starts, shape)):
        raise ValueError(f"{shown(path)} of shape {shown(shape)} is cut at {shown(starts)}")
    grid, parts = Grid(shape, starts), record["parts"]
    if len(parts) != grid.parts:
        raise ValueError(f"{shown(path)} has {len(parts)} parts, but is cut into {grid.parts}")
    found: list[StoredArray] = []
    for number, ((process, _), place) in enumerate(zip(parts, grid.regions(), strict=True)):
        shape_of_part = [s.stop - s.start for s in place]
        described = {**record, "file": part_file(process), "shape": shape_of_part}
        found.append(_array(described, stored, part_entry(path, number)))
    dtype = found[0].dtype
    # Parts without elements fit into any file; no array can have such a shape.
    if prod(n or 1 for n in shape) * dtype.itemsize >= 1 << 63:
        raise ValueError(f"{shown(path)} has the shape {shown(shape)}")
    return StoredSplit(grid, dtype, found, [crc32 for _, crc32 in parts])


def _are_starts(starts: tuple[int, ...], size: int) -> bool:
    """Return whether parts of an axis may begin at these places."""
    rising = all(a < b for a, b in pairwise(starts))
    return starts[:1] == (0,) and rising and (len(starts) == 1 or starts[-1] < size)


def _array(record: Mapping[str, Any], stored: Mapping[str, StoredFile], entry: str) -> StoredArray:
    file, shape = record["file"], tuple(record["shape"])
    if file not in stored:
        raise ValueError(f"the file of {entry} is {shown(file)}")
    array = StoredArray(file, entry, shape, dtype_named(record["dtype"]))
    if len(shape) > 64 or array.nbytes > stored[file].size:
        raise ValueError(
            f"{entry} of shape {shown(shape)} and dtype {array.dtype} does not fit into its file "
            f"of {stored[file].size:,} bytes"
        )
    return array
