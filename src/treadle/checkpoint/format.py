"""A checkpoint as files, and how they are written so that they are there completely or not at all.

    step-000000000012/manifest.json      all but the arrays; of each array its file, entry, shape,
                                         dtype and CRC-32; of each file its size and SHA-256
    step-000000000012/manifest.sha256    of manifest.json, as `sha256sum` writes it
    step-000000000012/arrays.npz         variables, and the arrays that hooks and sources keep
    fixed/<its SHA-256>.npz              variables that no step changes, shared by all checkpoints

Where the same step is saved again, its folder is called step-000000000012-1, then -2: the higher
one counts, and the lower one is removed only when the higher one is on the disk.
"""

import hashlib
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..core.progress import Progress
from ..errors import CheckpointError
from .arrays import Array, Npz, Piece, name_of
from .files import Files
from .structure import encode, to_json

# The version of what is described above. What writes another one reads this one too.
FORMAT = 1

MANIFEST, DIGEST, ARRAYS, FIXED = "manifest.json", "manifest.sha256", "arrays.npz", "fixed"
PARTIAL = ".partial-"
SECTIONS = ("loop", "source", "hooks", "about")
LONGEST_ENTRY = 200
_PIECE = 1 << 20

_FOLDER = re.compile(r"step-([0-9]{12,18})(?:-([1-9][0-9]{0,8}))?")


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """All that a run is at the end of a window.

    `loop`, `source`, `hooks` and `about` are lists and dicts (by str) of None, bool, int, float,
    str and NumPy arrays of numbers. Tuples come back as lists, NumPy scalars as Python's.

    Attributes:
        progress: Where the run stands.
        state: Every variable by path, and the random states.
        fixed: The paths of those that no step changes: they are stored once for all checkpoints.
        loop: What the loop keeps for itself.
        source: The source's position, where the numbers in `progress` do not say it.
        hooks: What each hook's `state()` returned.
        about: What the run is and what it runs on; and `score`, by which the best is kept.

    Example:
        >>> import numpy as np
        >>> checkpoint = Checkpoint(Progress(step=12), {"model/bias": np.zeros(2)})
    """

    progress: Progress
    state: Mapping[str, Array]
    fixed: frozenset[str] = frozenset()
    loop: Mapping[str, Any] = field(default_factory=dict[str, Any])
    source: Mapping[str, Any] | None = None
    hooks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Name(NamedTuple):
    """What the name of a checkpoint's folder says; in the order of which is newer.

    Attributes:
        step: The step that was saved.
        again: How often it had been saved before.
    """

    step: int
    again: int = 0

    @classmethod
    def parse(cls, name: str) -> "Name | None":
        """Return what a name says; None for the name of something else.

        Example:
            >>> Name.parse("step-000000000012-1")
            Name(step=12, again=1)
        """
        match = _FOLDER.fullmatch(name)
        found = match and cls(int(match[1]), int(match[2] or 0))
        return found if found and str(found) == name else None

    def __str__(self) -> str:
        return f"step-{self.step:012d}" + (f"-{self.again}" if self.again else "")


def partial(name: str) -> str:
    """Return a name that says that something is not complete: on its way in, or out."""
    return f"{PARTIAL}{name}-{secrets.token_hex(4)}"


class Draft:
    """A checkpoint as it is now, sorted into files: to be written while the run goes on.

    What hooks and sources returned may change from here on: it is encoded, and its arrays are
    copied, unless they are read-only. The arrays of the state are not copied.

    Attributes:
        step: Its step.
        changing: The arrays of its own file.
        size: How many bytes these have.
        fixed: Those that no step changes, if any.
        files: What the manifest is to say of each file, once that is written.

    Args:
        checkpoint: The arrays of its state must not change until it is written.

    Raises:
        CheckpointError: It holds what cannot be stored.

    Example:
        >>> Draft(Checkpoint(Progress(step=12), {"model/bias": np.zeros(2)})).size
        16
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        nested: list[Array] = []
        self.step = checkpoint.progress.step
        self._record: dict[str, Any] = {
            "format": FORMAT,
            "progress": encode(asdict(checkpoint.progress), "progress", nested),
        }
        for section in SECTIONS:
            self._record[section] = encode(getattr(checkpoint, section), section, nested)
        nested = [array.copy() if array.flags.writeable else array for array in nested]
        unknown = checkpoint.fixed - checkpoint.state.keys()
        if unknown:
            raise CheckpointError(f"fixed names what is not in the state: {', '.join(unknown)}")
        self._state: dict[str, dict[str, Any]] = {}
        contents: dict[str, list[tuple[str, Array]]] = {"arrays": [], "fixed": []}
        for number, (path, array) in enumerate(checkpoint.state.items()):
            # A path can hold what no archive should: it is made of the user's attributes and keys.
            entry = f"state/{path}" if is_entry(f"state/{path}") else f"unnamed/{number}"
            file = "fixed" if path in checkpoint.fixed else "arrays"
            self._state[path] = _described(path, array, file, entry)
            contents[file].append((entry, array))
        self._nested = [_described("", a, "arrays", f"nested/{i}") for i, a in enumerate(nested)]
        contents["arrays"] += [(f"nested/{i}", array) for i, array in enumerate(nested)]
        self.size = sum(array.nbytes for _, array in contents["arrays"])
        self.changing = Npz(contents["arrays"])
        self.fixed = Npz(contents["fixed"]) if contents["fixed"] else None
        self.files: dict[str, dict[str, Any]] = {}

    def manifest(self) -> bytes:
        """Return the manifest, once the arrays are written."""
        for found in (*self._state.values(), *self._nested):
            archive = self.fixed if found["file"] == "fixed" else self.changing
            assert archive is not None
            found["crc32"] = archive.checksums[found["entry"]]
        arrays = {"files": self.files, "state": self._state, "nested": self._nested}
        return to_json({**self._record, **arrays}, MANIFEST)


def write(
    folder: Path, checkpoint: Checkpoint | Draft, files: Files, whole: set[str] | None = None
) -> Path:
    """Write a checkpoint into the folder of a run's checkpoints.

    When this returns it is on the disk, as a whole. When it raises, nothing of it has a
    checkpoint's name, and what was there before is as it was.

    Args:
        folder: An existing folder.
        checkpoint: What is to be written; arrays of its state must not change meanwhile.
        files: The file system.
        whole: Names of shared files that were compared with their hashes already; gets those that
            are compared now. One that is damaged is written again.

    Returns:
        The new folder in it.

    Raises:
        CheckpointError: The file system refused, or it holds what cannot be stored.
    """
    draft = checkpoint if isinstance(checkpoint, Draft) else Draft(checkpoint)
    step = draft.step
    known = [
        name.again for name in map(Name.parse, files.names(folder)) if name and name.step == step
    ]
    target = folder / str(Name(step, max(known) + 1 if known else 0))
    new = folder / partial(target.name)
    try:
        if draft.fixed:
            draft.files["fixed"] = _write_fixed(
                folder, draft.fixed, files, set() if whole is None else whole
            )
        files.make_new_folder(new)
        digest = _Digest()
        files.write(new / ARRAYS, digest.passing(draft.changing.pieces()), draft.size)
        draft.files["arrays"] = digest.result()
        manifest = draft.manifest()
        files.write(new / MANIFEST, [manifest], len(manifest))
        line = digest_line(manifest)
        files.write(new / DIGEST, [line], len(line))
        files.sync_folder(new)
        files.rename(new, target)
    except CheckpointError:
        with suppress(CheckpointError):
            files.remove_folder(new)
        raise
    files.sync_folder(folder)
    return target


def digest_line(manifest: bytes) -> bytes:
    """Return what `manifest.sha256` holds."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


def is_entry(name: str) -> bool:
    """Say whether an entry of an archive may have this name: a path that stays below its folder."""
    return (
        len(name) <= LONGEST_ENTRY
        and name.isascii()
        and name.isprintable()
        and "\\" not in name
        and not any(part in ("", ".", "..") for part in name.split("/"))
    )


def _described(path: str, array: Array, file: str, entry: str) -> dict[str, Any]:
    dtype = name_of(array.dtype)
    if dtype is None:
        raise CheckpointError(
            f"{path} of dtype {array.dtype} cannot be in a checkpoint: only arrays of numbers can"
        )
    return {"file": file, "entry": entry, "shape": list(array.shape), "dtype": dtype}


def _write_fixed(folder: Path, archive: Npz, files: Files, whole: set[str]) -> dict[str, Any]:
    """Write the arrays that no step changes, unless they are there."""
    digest = _Digest()
    for _ in digest.passing(archive.pieces()):
        pass
    found = digest.result()
    place = folder / FIXED
    target = place / f"{found['sha256']}.npz"
    if not _is_there(target, found, files, whole):
        if not files.is_folder(place):
            files.make_new_folder(place)
            files.sync_folder(folder)
        new = place / partial(target.name)
        try:
            files.write(new, archive.pieces(), found["size"])
            files.rename(new, target)
        except CheckpointError:
            with suppress(CheckpointError):
                files.remove_file(new)
            raise
    # Also where it was there: a run that was killed may have left its name in memory only.
    files.sync_folder(place)
    return found


def _is_there(path: Path, expected: Mapping[str, Any], files: Files, whole: set[str]) -> bool:
    """Say whether a shared file is there; its contents are looked at once."""
    if files.size(path) != expected["size"]:
        return False
    if path.name not in whole:
        digest = _Digest()
        try:
            with files.opened(path) as (file, _):
                for _ in digest.passing(iter(lambda: file.read(_PIECE), b"")):
                    pass
        except CheckpointError:
            return False
        if digest.result() != expected:
            return False
        whole.add(path.name)
    return True


class _Digest:
    """Hashes what passes, so that nothing is read again."""

    def __init__(self) -> None:
        self._hash, self._size = hashlib.sha256(), 0

    def passing(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            self._hash.update(piece)
            self._size += len(piece)
            yield piece

    def result(self) -> dict[str, Any]:
        return {"sha256": self._hash.hexdigest(), "size": self._size}
