"""The files of a checkpoint, and how they are written atomically.

    step-000000000012/manifest.json       everything except arrays; for each array its file, shape
                                          and dtype; for each file its size and SHA-256
    step-000000000012/manifest.sha256     checksum of manifest.json, in the format of `sha256sum`
    step-000000000012/arrays.safetensors  variables, and the arrays of hooks and sources
    fixed/<its SHA-256>.safetensors       variables that no step changes, shared by all checkpoints

In these files, a variable is called `state/<its path>`, and the arrays of hooks and sources are
called `nested/0`, `nested/1` and so on. If several processes write parts of arrays, their files are
next to `arrays.safetensors`; see `parts.py`.

If a step is saved again, its folder is step-000000000012-1, then -2. The highest number is valid,
and the previous folder is removed only when the new one is on disk. A checkpoint that equals the
previous one of its step is not kept, so that interruptions do not change the names.
"""

import hashlib
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..core.folder import Folder, partial
from ..core.progress import Progress
from ..core.split_arrays import OwnParts
from ..errors import CheckpointError
from .arrays import SUFFIX, Array, Digest, digest_of, digest_of_file, pieces
from .parts import check_parts, described, described_parts, received_reports, write_own_parts
from .structure import MOST_BYTES, encode, parse_json, to_json

FORMAT = 1

MANIFEST, DIGEST, FIXED = "manifest.json", "manifest.sha256", "fixed"
SECTIONS = ("loop", "source", "hooks", "about")

_FOLDER = re.compile(r"step-([0-9]{12,18})(?:-([1-9][0-9]{0,8}))?")


@dataclass(frozen=True, slots=True, eq=False)
class SavedState:
    """The complete state of a run at the end of a window.

    `loop`, `source`, `hooks` and `about` are lists and dicts (with str keys) of None, bool, int,
    float, str and NumPy arrays of numbers. Tuples are read back as lists, and NumPy scalars as
    Python scalars.

    Attributes:
        progress: The progress of the run.
        state: Every variable by path, with those of seed generators: arrays, or `OwnParts` of an
            array that several processes hold together, which is read as an array or as
            `StoredParts`. The states of the global generators are in `loop`.
        fixed: The paths of variables that no step changes. They are stored once for all
            checkpoints.
        loop: Internal state of the loop.
        source: The position of the source, if `progress` does not determine it.
        hooks: The state of each hook, as returned by `state()`.
        about: The description of the run and its environment; and `score`, which ranks checkpoints.
        path: The folder that it was read from.

    Example:
        >>> import numpy as np
        >>> checkpoint = SavedState(Progress(step=12), {"model/bias": np.zeros(2)})
    """

    progress: Progress
    state: Mapping[str, Any]
    fixed: frozenset[str] = frozenset()
    loop: Mapping[str, Any] = field(default_factory=dict[str, Any])
    source: Mapping[str, Any] | None = None
    hooks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    path: Path = field(default_factory=Path, compare=False)

    def damaged(self, why: str) -> CheckpointError:
        """Return the error that a value in the manifest cannot be used."""
        return CheckpointError(
            f"{self.path / MANIFEST} is damaged, or of another version: {why}. Move the folder of "
            "this checkpoint away to use the one before"
        )

    @contextmanager
    def reading(self, what: str) -> Generator[None]:
        """Convert the errors of reading a value of the manifest to one that names the file."""
        try:
            yield
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            why = f"{type(error).__name__}: {error}"[:200]  # it may quote the file
            raise self.damaged(f"{what} cannot be restored ({why})") from error


class Name(NamedTuple):
    """The parsed name of a checkpoint folder; ordered from older to newer.

    Attributes:
        step: The saved step.
        again: How many times this step had been saved before.
    """

    step: int
    again: int = 0

    @classmethod
    def parse(cls, name: str) -> "Name | None":
        """Parse the name of a checkpoint folder; return None for other names.

        Example:
            >>> Name.parse("step-000000000012-1")
            Name(step=12, again=1)
        """
        match = _FOLDER.fullmatch(name)
        found = match and cls(int(match[1]), int(match[2] or 0))
        return found if found and str(found) == name else None

    def __str__(self) -> str:
        return f"step-{self.step:012d}" + (f"-{self.again}" if self.again else "")


def temporary_name(step: int) -> str:
    """Return a new name for the folder into which a checkpoint of a step is written."""
    return partial(str(Name(step)))


class Draft:
    """A snapshot of a checkpoint, arranged into files and ready to be written during training.

    The states of hooks and sources may change afterwards: they are encoded, and their arrays are
    copied unless they are read-only. The arrays of `checkpoint.state` are not copied.

    Attributes:
        step: The step of the checkpoint.
        changing: The arrays that are saved in each checkpoint, with their names in the file.
        size: The size of these arrays in bytes.
        fixed: The arrays that no step changes.
        split: The arrays that several processes hold together.
        temporary: The name of the folder into which all processes write, until it is renamed; None
            if this process writes alone.
        files: The size and hash of each written file, for the manifest.
        reported: Whether all other processes have reported that they wrote their parts or failed.

    Args:
        checkpoint: The checkpoint. The arrays of its state must not change until it is written.
        temporary: The name on which the processes agreed.

    Raises:
        CheckpointError: If the checkpoint contains values that cannot be stored.

    Example:
        >>> import numpy as np
        >>> Draft(SavedState(Progress(step=12), {"model/bias": np.zeros(2)})).size
        16
    """

    def __init__(self, checkpoint: SavedState, temporary: str | None = None) -> None:
        nested: list[Array] = []
        self.step, self.temporary = checkpoint.progress.step, temporary
        self.reported = False
        self.split = split_arrays(checkpoint)
        self._record: dict[str, Any] = {
            "format": FORMAT,
            "progress": encode(asdict(checkpoint.progress), "progress", nested),
        }
        for section in SECTIONS:
            self._record[section] = encode(getattr(checkpoint, section), section, nested)
        nested = [array.copy() if array.flags.writeable else array for array in nested]
        unknown = checkpoint.fixed - checkpoint.state.keys()
        if unknown:
            raise CheckpointError(f"fixed has paths that the state lacks: {', '.join(unknown)}")
        self.changing: list[tuple[str, Array]] = []
        self.fixed: list[tuple[str, Array]] = []
        state: dict[str, Any] = {}
        for path, array in checkpoint.state.items():
            if path in self.split:
                state[path] = None  # its place in the order; see `describe_parts`
                continue
            shared = path in checkpoint.fixed
            file = "fixed" if shared else "arrays"
            state[path] = described(path, array.dtype, array.shape, file)
            (self.fixed if shared else self.changing).append((entry_of(path), array))
        self.changing += [(nested_entry(i), array) for i, array in enumerate(nested)]
        self.size = sum(array.nbytes for _, array in self.changing)
        self.files: dict[str, dict[str, Any]] = {}
        self._record["files"] = self.files
        self._record["state"] = self._state = state
        self._record["nested"] = [described("", x.dtype, x.shape, "arrays") for x in nested]

    def describe_parts(self, own: Mapping[str, Any], place: Folder) -> None:
        """Wait until all other processes have written their parts, and add them to the manifest.

        Args:
            own: The report of this process.
            place: The folder of the checkpoint.

        Raises:
            CheckpointError: A process has not written its parts, or into another folder.
        """
        reports = [own, *received_reports(self.temporary or "")]
        self.reported = True
        state, files = described_parts(self.split, reports)
        check_parts(files, place)
        self._state |= state
        self.files |= files

    def manifest(self) -> bytes:
        """Return the manifest; call this after the arrays are written."""
        return to_json(self._record, MANIFEST)


def split_arrays(checkpoint: SavedState) -> dict[str, OwnParts]:
    """Return the arrays of a checkpoint that several processes hold together."""
    return {path: x for path, x in checkpoint.state.items() if isinstance(x, OwnParts)}


def write(
    folder: Folder,
    checkpoint: SavedState | Draft,
    whole: set[str] | None = None,
    saved: "Name | None" = None,
) -> str:
    """Write a checkpoint into the checkpoint folder of a run.

    When this returns, the complete checkpoint is on disk. When it raises, existing checkpoints are
    unchanged, and no new folder has the name of a checkpoint.

    Args:
        folder: The folder with all checkpoints of the run.
        checkpoint: The checkpoint; the arrays of its state must not change during the call.
        whole: The names of shared files whose hashes have been verified. Files verified by this
            call are added. A damaged shared file is written again.
        saved: A valid checkpoint of the same step. If several processes write, it is known only at
            the end whether the new one is equal; then it is removed again.

    Returns:
        The name of the new checkpoint, or of the equal one.

    Raises:
        CheckpointError: If a file operation fails, or the checkpoint contains values that cannot be
            stored.

    Example:
        >>> import numpy as np
        >>> with Folder.open("runs/1/checkpoints", create=True) as folder:
        ...     name = write(folder, SavedState(Progress(step=12), {"model/bias": np.zeros(2)}))
        >>> name
        'step-000000000012'
    """
    draft = checkpoint if isinstance(checkpoint, Draft) else Draft(checkpoint)
    step = draft.step
    known = [name.again for name in map(Name.parse, folder.names()) if name and name.step == step]
    target = str(Name(step, max(known) + 1 if known else 0))
    new = draft.temporary or partial(target)
    try:
        if draft.fixed:
            draft.files["fixed"] = _write_fixed(
                folder, draft.fixed, set() if whole is None else whole
            )
        together = draft.temporary is not None  # the others may have made the folder already
        if not together:
            folder.make_folder(new)
        with folder.subfolder(new, create=together) as files:
            _write_arrays(files, draft)
            if draft.split and saved is not None and is_written(folder, draft, saved):
                folder.remove_folder(new)
                return str(saved)
            _write_manifest(files, draft)
        folder.rename(new, target)
    except CheckpointError:
        with suppress(CheckpointError):
            folder.remove_folder(new)
        raise
    folder.sync()
    return target


def _write_arrays(files: Folder, draft: Draft) -> None:
    """Write the arrays that change, and this process's parts of those that several hold."""
    digest = Digest()
    numbers = digest.update_from(pieces(draft.changing))
    files.create(f"arrays{SUFFIX}", numbers, draft.size)
    draft.files["arrays"] = digest.result()
    if draft.split:
        draft.describe_parts(write_own_parts(files, draft.split), files)


def _write_manifest(files: Folder, draft: Draft) -> None:
    manifest = draft.manifest()
    files.create(MANIFEST, [manifest], len(manifest))
    line = digest_line(manifest)
    files.create(DIGEST, [line], len(line))
    files.sync()


def is_written(folder: Folder, draft: Draft, name: Name) -> bool:
    """Return whether a draft equals a valid checkpoint, except for times.

    This takes a pass over its arrays, if everything else is equal and it has not been written.
    """
    with folder.subfolder(str(name)) as place:
        written = _without_times(parse_json(place.read(MANIFEST, MOST_BYTES)))
    files: dict[str, Any] = written.pop("files")
    drafted = _without_times(parse_json(draft.manifest()))
    del drafted["files"]
    if written != drafted:
        return False
    if draft.files:
        return draft.files == files
    found = {"arrays": digest_of(pieces(draft.changing))}
    if draft.fixed:
        found["fixed"] = digest_of(pieces(draft.fixed))
    return found == files


def _without_times(record: dict[str, Any]) -> dict[str, Any]:
    """Remove the training time from the progress, and from the copies of it that loops save."""
    loop: dict[str, Any] = record["loop"]
    for part in (record["progress"], *loop.values()):
        if isinstance(part, dict):
            part.pop("seconds", None)  # pyright: ignore[reportUnknownMemberType]
    return record


def digest_line(manifest: bytes) -> bytes:
    """Return the content of `manifest.sha256`."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


def entry_of(path: str) -> str:
    """Return the name of a variable in its file."""
    return f"state/{path}"


def nested_entry(number: int) -> str:
    """Return the name of an array of hooks and sources in its file."""
    return f"nested/{number}"


def _write_fixed(
    folder: Folder, arrays: list[tuple[str, Array]], whole: set[str]
) -> dict[str, Any]:
    """Write the arrays that no step changes, unless the file exists; return its size and hash."""
    found = digest_of(pieces(arrays))
    target = f"{found['sha256']}{SUFFIX}"
    with folder.subfolder(FIXED, create=not folder.is_folder(FIXED)) as place:
        if not _is_valid_file(place, target, found, whole):
            place.write(target, pieces(arrays), found["size"])
        else:  # a killed run may have renamed it without syncing the folder
            place.sync()
    return found


def _is_valid_file(place: Folder, name: str, expected: Mapping[str, Any], whole: set[str]) -> bool:
    """Return whether a shared file exists and is valid; its content is verified only once."""
    if place.size(name) != expected["size"]:
        return False
    if name not in whole:
        try:
            with place.opened(name) as (file, _):
                found = digest_of_file(file)
        except CheckpointError:
            return False
        if found != expected:
            return False
        whole.add(name)
    return True
