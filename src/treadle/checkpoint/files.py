"""All that checkpoints do to the file system, and what goes wrong there."""

import errno
import os
import shutil
import stat
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from ..errors import CheckpointError
from .arrays import Piece

T = TypeVar("T")

_FULL = (errno.ENOSPC, errno.EDQUOT)
# Where a file system cannot do this for folders: those of some networks.
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP)


class Files:
    """The file system, as checkpoints use it.

    Every operation passes through `perform`: a test overrides this one method to count operations,
    to let one fail, to record them, or to slow them down.

    Raises:
        CheckpointError: By every method: what could not be done, with which path, and why.

    Example:
        >>> files = Files()
        >>> files.write(Path("note"), [b"one ", b"two"], size=7)
        >>> files.read(Path("note"), limit=100)
        b'one two'
    """

    def perform(self, operation: Callable[..., T], *arguments: Any) -> T:
        """Do one thing to the file system: `operation(*arguments)`."""
        return operation(*arguments)

    def make_folder(self, path: Path) -> None:
        """Make a folder and those above it that are missing; they are there for good."""
        if not path.parent.exists():
            self.make_folder(path.parent)
        with self._telling("make the folder", path), suppress(FileExistsError):
            self.perform(os.mkdir, path)
        self.sync_folder(path.parent)

    def make_new_folder(self, path: Path) -> None:
        """Make a folder that is not there, in one that is."""
        with self._telling("make the folder", path):
            self.perform(os.mkdir, path)

    def write(self, path: Path, pieces: Iterable[Piece], size: int) -> None:
        """Write a new file; what it holds is on the disk when this returns.

        Args:
            path: A file that is not there.
            pieces: What it is to hold.
            size: How many bytes that is about, for the message of a full disk.
        """
        with self._telling("write", path, size), self.perform(create, path) as file:
            for piece in pieces:
                self.perform(append, file, piece)
            self.perform(sync, file)

    def sync_folder(self, path: Path) -> None:
        """Let the names in a folder be on the disk when this returns."""
        with self._telling("sync the folder", path):
            self.perform(sync_folder, path)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or a folder another name, which nothing has but a file in place of a file."""
        with self._telling("rename", old):
            self.perform(os.replace, old, new)

    def remove_file(self, path: Path) -> None:
        """Remove a file or a link, unless it is gone."""
        with self._telling("remove", path), suppress(FileNotFoundError):
            self.perform(os.unlink, path)

    def remove_folder(self, path: Path) -> None:
        """Remove a folder with all that lies in it, unless it is gone; links are not followed."""
        for name in self.names(path):
            if self.is_folder(path / name):
                self.remove_folder(path / name)
            else:
                self.remove_file(path / name)
        with self._telling("remove the folder", path), suppress(FileNotFoundError):
            self.perform(os.rmdir, path)

    def names(self, path: Path) -> list[str]:
        """Return the names in a folder, in order; none where it is not there."""
        with self._telling("list the folder", path), suppress(FileNotFoundError):
            return sorted(self.perform(os.listdir, path))
        return []

    def is_folder(self, path: Path) -> bool:
        """Say whether this is a folder; a link to one is none."""
        with self._telling("look at", path), suppress(FileNotFoundError):
            return stat.S_ISDIR(self.perform(os.lstat, path).st_mode)
        return False

    @contextmanager
    def opened(self, path: Path) -> Generator[tuple[BinaryIO, int]]:
        """Open a file for reading; gives it and its size. Links and devices are refused."""
        with self._telling("read", path), self.perform(open_file, path) as file:
            yield file, os.fstat(file.fileno()).st_size

    def read(self, path: Path, limit: int) -> bytes:
        """Return what a file holds, which must not be more than `limit` bytes."""
        with self.opened(path) as (file, size):
            if size > limit:
                raise CheckpointError(f"{path} has {size:,} bytes; at most {limit:,} are expected")
            return self.perform(read_file, file, limit)

    def size(self, path: Path) -> int | None:
        """Return the size of a file; None where there is no file."""
        with self._telling("look at", path), suppress(FileNotFoundError):
            found = self.perform(os.lstat, path)
            return found.st_size if stat.S_ISREG(found.st_mode) else None
        return None

    def free(self, path: Path) -> int:
        """Return how many bytes are free on the disk of a folder."""
        with self._telling("look at the disk of", path):
            return self.perform(shutil.disk_usage, path).free

    @contextmanager
    def _telling(self, doing: str, path: Path, size: int = 0) -> Generator[None]:
        """Turn what the system says into a message with the path."""
        try:
            yield
        except OSError as error:
            if error.errno in _FULL and size:
                why = (
                    f"the disk is full: it needs about {size:,} bytes, {self._free(path)} are free"
                )
            elif error.errno == errno.ELOOP:
                why = "it is a symbolic link, which a checkpoint never holds"
            else:
                why = error.strerror or str(error)
            raise CheckpointError(f"cannot {doing} {path}: {why}") from error

    def _free(self, path: Path) -> str:
        try:
            return f"{self.free(path.parent):,}"
        except CheckpointError:
            return "an unknown number"


def create(path: Path) -> BinaryIO:
    """Open a file that is not there; nothing is held back from the system."""
    return path.open("xb", buffering=0)  # type: ignore[return-value]


def append(file: BinaryIO, piece: Piece) -> None:
    """Write all of a piece."""
    left = memoryview(piece)
    while left.nbytes:
        left = left[file.write(left) :]


def sync(file: BinaryIO) -> None:
    """Let what was written be on the disk."""
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Let the names in a folder be on the disk, where the system can."""
    if os.name == "nt":  # folders cannot be opened there
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(folder)


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading: no link is followed, and no pipe or device is waited for."""
    file = open(path, "rb", opener=_open_strictly)  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file")
    return file


def _open_strictly(path: str, flags: int) -> int:
    for flag in ("O_NOFOLLOW", "O_NONBLOCK"):  # some systems lack them
        flags |= getattr(os, flag, 0)
    return os.open(path, flags)


def read_file(file: BinaryIO, limit: int) -> bytes:
    """Return what a file holds, up to so many bytes."""
    return file.read(limit)
