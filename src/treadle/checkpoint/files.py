"""The file system operations of checkpoints, and their errors."""

import errno
import os
import shutil
import stat
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from ..errors import CheckpointError
from .tensor_file import Piece

T = TypeVar("T")

_FULL = (errno.ENOSPC, errno.EDQUOT)
# Some network file systems cannot sync folders.
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP)


class Files:
    """The file system operations that checkpoints use.

    Every operation calls `perform`, which tests override to count, record, delay or fail
    operations.

    Raises:
        CheckpointError: If an operation fails, with the operation, the path and the reason. Every
            method can raise it.

    Example:
        >>> files = Files()
        >>> files.write(Path("note"), [b"one ", b"two"], size=7)
        >>> files.read(Path("note"), limit=100)
        b'one two'
    """

    def perform(self, operation: Callable[..., T], *arguments: Any) -> T:
        """Perform one file system operation: `operation(*arguments)`."""
        return operation(*arguments)

    def make_folder(self, path: Path) -> None:
        """Create a folder and its missing parents, and sync them to disk."""
        if not path.parent.exists():
            self.make_folder(path.parent)
        with self._reporting("make the folder", path), suppress(FileExistsError):
            self.perform(os.mkdir, path)
        self.sync_folder(path.parent)

    def make_new_folder(self, path: Path) -> None:
        """Create a folder that does not exist, in an existing folder."""
        with self._reporting("make the folder", path):
            self.perform(os.mkdir, path)

    def write(self, path: Path, pieces: Iterable[Piece], size: int) -> None:
        """Write a new file and sync it to disk.

        Args:
            path: The path, where no file exists.
            pieces: The content.
            size: The approximate size in bytes, for the error message if the disk is full.
        """
        with self._reporting("write", path, size), self.perform(create, path) as file:
            for piece in pieces:
                self.perform(append, file, piece)
            self.perform(sync, file)

    def sync_folder(self, path: Path) -> None:
        """Sync the names in a folder to disk."""
        with self._reporting("sync the folder", path):
            self.perform(sync_folder, path)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or a folder. An existing file may only be replaced by a file."""
        with self._reporting("rename", old):
            self.perform(os.replace, old, new)

    def remove_file(self, path: Path) -> None:
        """Remove a file or a link, if it exists."""
        with self._reporting("remove", path), suppress(FileNotFoundError):
            self.perform(os.unlink, path)

    def remove_folder(self, path: Path) -> None:
        """Remove a folder and its content, if it exists. Links are not followed."""
        for name in self.names(path):
            if self.is_folder(path / name):
                self.remove_folder(path / name)
            else:
                self.remove_file(path / name)
        with self._reporting("remove the folder", path), suppress(FileNotFoundError):
            self.perform(os.rmdir, path)

    def names(self, path: Path) -> list[str]:
        """Return the sorted names in a folder; empty if it does not exist."""
        with self._reporting("list the folder", path), suppress(FileNotFoundError):
            return sorted(self.perform(os.listdir, path))
        return []

    def is_folder(self, path: Path) -> bool:
        """Return whether a path is a folder, and not a link to one."""
        with self._reporting("inspect", path), suppress(FileNotFoundError):
            return stat.S_ISDIR(self.perform(os.lstat, path).st_mode)
        return False

    @contextmanager
    def opened(self, path: Path) -> Generator[tuple[BinaryIO, int]]:
        """Open a file for reading; yield the file and its size. Links and devices are rejected."""
        with self._reporting("read", path), self.perform(open_file, path) as file:
            yield file, os.fstat(file.fileno()).st_size

    def read(self, path: Path, limit: int) -> bytes:
        """Return the content of a file, which must not exceed `limit` bytes."""
        with self.opened(path) as (file, size):
            if size > limit:
                raise CheckpointError(f"{path} has {size:,} bytes; at most {limit:,} are expected")
            return self.perform(read_file, file, limit)

    def size(self, path: Path) -> int | None:
        """Return the size of a file, or None if there is no regular file."""
        with self._reporting("inspect", path), suppress(FileNotFoundError):
            found = self.perform(os.lstat, path)
            return found.st_size if stat.S_ISREG(found.st_mode) else None
        return None

    def free(self, path: Path) -> int:
        """Return the number of free bytes on the disk of a folder."""
        with self._reporting("inspect the disk of", path):
            return self.perform(shutil.disk_usage, path).free

    @contextmanager
    def _reporting(self, doing: str, path: Path, size: int = 0) -> Generator[None]:
        """Convert an `OSError` to a `CheckpointError` with the operation and the path."""
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
        """Return the number of free bytes on the disk of a file as text, for messages."""
        try:
            return f"{self.free(path.parent):,}"
        except CheckpointError:
            return "an unknown number"


def create(path: Path) -> BinaryIO:
    """Open a new file for unbuffered writing."""
    return path.open("xb", buffering=0)  # type: ignore[return-value]


def append(file: BinaryIO, piece: Piece) -> None:
    """Write a complete piece; a single unbuffered write may write only a part of it."""
    left = memoryview(piece)
    while left.nbytes:
        left = left[file.write(left) :]


def sync(file: BinaryIO) -> None:
    """Sync the content of a file to disk."""
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to disk, if the file system supports it."""
    if os.name == "nt":  # folders cannot be opened on Windows
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
    """Open a regular file for reading; reject links, and do not block on pipes or devices."""
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
    """Return the content of a file, up to `limit` bytes."""
    return file.read(limit)
