"""The file system operations of `Folder`: strict, and relative to the descriptor of a folder."""

import errno
import os
import shutil
import stat
from pathlib import Path
from typing import Any, BinaryIO, Protocol

Piece = bytes | memoryview

# Some network file systems cannot sync folders.
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP)
# Without descriptors of folders (Windows), operations use paths.
_RELATIVE = os.open in os.supports_dir_fd and os.listdir in os.supports_fd
_STRICT = sum(getattr(os, flag, 0) for flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_BINARY"))


class OpenFolder(Protocol):
    """An open directory: a `Folder`."""

    @property
    def path(self) -> Path:
        """The path."""
        ...

    @property
    def descriptor(self) -> int | None:
        """The descriptor; None if the platform has none."""
        ...


def _at(folder: OpenFolder, name: str) -> tuple[str, int | None]:
    """Return a path and the descriptor that it is relative to.

    Raises:
        OSError: If the name is not that of something directly in the folder.
    """
    if name in ("", ".", "..") or "/" in name or "\0" in name or os.sep in name:
        raise OSError(errno.EINVAL, f"{name!a} is not the name of a file")
    if folder.descriptor is None:
        return str(folder.path / name), None
    return name, folder.descriptor


def _open(folder: OpenFolder, name: str, mode: str, flags: int, **more: Any) -> Any:
    """Open a file as `open` does. The full path is only its name, for messages."""
    at, descriptor = _at(folder, name)

    def opener(_: str, usual: int) -> int:
        return os.open(at, usual | flags | _STRICT, 0o666, dir_fd=descriptor)

    return open(folder.path / name, mode, opener=opener, **more)


def open_path(path: Path) -> int | None:
    """Open a directory by its path."""
    if not _RELATIVE:
        os.listdir(path)  # the same errors
        return None
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)


def open_subfolder(folder: OpenFolder, name: str, follow: bool) -> int | None:
    """Open a folder in a folder."""
    at, descriptor = _at(folder, name)
    if descriptor is None:
        if os.path.islink(at) and not follow:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        os.listdir(at)
        return None
    flags = os.O_RDONLY | os.O_DIRECTORY | (0 if follow else os.O_NOFOLLOW)
    return os.open(at, flags, dir_fd=descriptor)


def make_folder(folder: OpenFolder, name: str) -> None:
    """Create a folder."""
    at, descriptor = _at(folder, name)
    os.mkdir(at, dir_fd=descriptor)


def list_names(folder: OpenFolder) -> list[str]:
    """Return the names in a folder."""
    return os.listdir(folder.path if folder.descriptor is None else folder.descriptor)


def inspect(folder: OpenFolder, name: str) -> os.stat_result:
    """Return the status of a file, a folder or a link."""
    at, descriptor = _at(folder, name)
    return os.stat(at, dir_fd=descriptor, follow_symlinks=False)


def open_file(folder: OpenFolder, name: str) -> BinaryIO:
    """Open a regular file for reading; never block on a pipe or a device."""
    return _regular(_open(folder, name, "rb", 0))


def open_to_append(folder: OpenFolder, name: str) -> BinaryIO:
    """Open or create a regular file without other hard links for unbuffered writing at its end."""
    file = _regular(_open(folder, name, "ab", 0, buffering=0))
    if os.fstat(file.fileno()).st_nlink > 1:
        file.close()
        raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))
    return file


def _regular(file: Any) -> BinaryIO:
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file")
    return file


def create_file(folder: OpenFolder, name: str) -> BinaryIO:
    """Open a new file for unbuffered writing."""
    return _open(folder, name, "xb", 0, buffering=0)


def append(file: BinaryIO, piece: Piece) -> None:
    """Write a complete piece; a single unbuffered write may write only a part of it."""
    left = memoryview(piece)
    while left.nbytes:
        left = left[file.write(left) :]


def truncate(file: BinaryIO, size: int) -> None:
    """Shorten a file, and move to its new end, so that `file.tell()` is its size."""
    file.truncate(size)
    file.seek(size)


def sync_file(file: BinaryIO) -> None:
    """Sync the content of a file to disk."""
    os.fsync(file.fileno())


def sync_folder(folder: OpenFolder) -> None:
    """Sync the names in a folder to disk, if the file system supports it."""
    if folder.descriptor is None:
        return
    try:
        os.fsync(folder.descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def replace(folder: OpenFolder, old: str, new: str, to: OpenFolder | None = None) -> None:
    """Rename a file or a folder; a file replaces an existing file or link."""
    (at, source), (goal, target) = _at(folder, old), _at(to or folder, new)
    os.replace(at, goal, src_dir_fd=source, dst_dir_fd=target)


def unlink(folder: OpenFolder, name: str) -> None:
    """Remove a file or a link."""
    at, descriptor = _at(folder, name)
    os.unlink(at, dir_fd=descriptor)


def remove_empty(folder: OpenFolder, name: str) -> None:
    """Remove an empty folder."""
    at, descriptor = _at(folder, name)
    os.rmdir(at, dir_fd=descriptor)


def read_file(file: BinaryIO, limit: int) -> bytes:
    """Return the content of a file, up to `limit` bytes."""
    return file.read(limit)


def free_bytes(folder: OpenFolder) -> int:
    """Return the number of free bytes on the disk of a folder."""
    return shutil.disk_usage(folder.path if folder.descriptor is None else folder.descriptor).free
