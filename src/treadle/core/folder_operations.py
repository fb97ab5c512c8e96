"""Single operations on files and folders, relative to the descriptor of an open folder.

`Folder` has them performed by a `FileSystem`, which tests replace, and converts the `OSError`s that
they raise.
"""

import errno
import os
import shutil
import stat
from pathlib import Path
from typing import Any, BinaryIO, Protocol

Piece = bytes | memoryview

# Without descriptors of folders (Windows), operations use paths.
_RELATIVE = os.open in os.supports_dir_fd and os.listdir in os.supports_fd
_STRICT = sum(getattr(os, flag, 0) for flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_BINARY"))
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP)  # some network file systems cannot sync folders


class Opened(Protocol):
    """An open folder.

    Attributes:
        path: Its path.
        descriptor: Its file descriptor; None where the system has none for folders.
    """

    path: Path
    descriptor: int | None


def open_path(path: Path) -> int | None:
    """Open a directory by its path."""
    if not _RELATIVE:
        os.listdir(path)  # the same errors
        return None
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)


def open_subfolder(folder: Opened, name: str, follow: bool) -> int | None:
    """Open a folder in a folder."""
    at = _at(folder, name)
    if folder.descriptor is None:
        if os.path.islink(at) and not follow:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        os.listdir(at)
        return None
    flags = os.O_RDONLY | os.O_DIRECTORY | (0 if follow else os.O_NOFOLLOW)
    return os.open(at, flags, dir_fd=folder.descriptor)


def make_folder(folder: Opened, name: str) -> None:
    """Create a folder."""
    os.mkdir(_at(folder, name), dir_fd=folder.descriptor)


def list_names(folder: Opened) -> list[str]:
    """Return the names in a folder."""
    return os.listdir(folder.path if folder.descriptor is None else folder.descriptor)


def inspect(folder: Opened, name: str) -> os.stat_result:
    """Return the status of a file, a folder or a link."""
    return os.stat(_at(folder, name), dir_fd=folder.descriptor, follow_symlinks=False)


def open_file(folder: Opened, name: str) -> BinaryIO:
    """Open a regular file for reading; never block on a pipe or a device."""
    return _regular(_open(folder, name, "rb"))


def open_to_append(folder: Opened, name: str) -> BinaryIO:
    """Open or create a regular file without other hard links for unbuffered writing at its end."""
    file = _regular(_open(folder, name, "a+b", buffering=0))
    if os.fstat(file.fileno()).st_nlink > 1:
        file.close()
        raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))
    return file


def create_file(folder: Opened, name: str) -> BinaryIO:
    """Open a new file for unbuffered writing."""
    return _open(folder, name, "xb", buffering=0)


def append(file: BinaryIO, piece: Piece) -> None:
    """Write a complete piece; a single unbuffered write may write only a part of it."""
    left = memoryview(piece)
    while left.nbytes:
        left = left[file.write(left) :]


def truncate(file: BinaryIO, size: int) -> None:
    """Shorten a file, and move to its new end, so that `file.tell()` is its size."""
    file.truncate(size)
    file.seek(size)


def read_file(file: BinaryIO, limit: int) -> bytes:
    """Return the content of a file, up to `limit` bytes."""
    return file.read(limit)


def sync_file(file: BinaryIO) -> None:
    """Sync the content of a file to disk."""
    os.fsync(file.fileno())


def sync_folder(folder: Opened) -> None:
    """Sync the names in a folder to disk, if the file system supports it."""
    try:
        if folder.descriptor is not None:
            os.fsync(folder.descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def replace(folder: Opened, old: str, new: str, to: Opened | None = None) -> None:
    """Rename a file or a folder; a file replaces an existing file or link."""
    to = to or folder
    source, target = _at(folder, old), _at(to, new)
    os.replace(source, target, src_dir_fd=folder.descriptor, dst_dir_fd=to.descriptor)


def unlink(folder: Opened, name: str) -> None:
    """Remove a file or a link."""
    os.unlink(_at(folder, name), dir_fd=folder.descriptor)


def remove_empty(folder: Opened, name: str) -> None:
    """Remove an empty folder."""
    os.rmdir(_at(folder, name), dir_fd=folder.descriptor)


def free_bytes(folder: Opened) -> int:
    """Return the number of free bytes on the disk of a folder."""
    return shutil.disk_usage(folder.path if folder.descriptor is None else folder.descriptor).free


def _at(folder: Opened, name: str) -> str:
    """Return what a name is to the system: relative to the descriptor of the folder, if any.

    Raises:
        OSError: If the name is not that of something directly in the folder.
    """
    if name in ("", ".", "..") or "/" in name or "\0" in name or os.sep in name:
        raise OSError(errno.EINVAL, f"{name!a} is not the name of a file")
    return str(folder.path / name) if folder.descriptor is None else name


def _open(folder: Opened, name: str, mode: str, **more: Any) -> Any:
    """Open a file as `open` does. The full path is only its name, for messages."""
    at = _at(folder, name)

    def opener(_: str, usual: int) -> int:
        return os.open(at, usual | _STRICT, 0o666, dir_fd=folder.descriptor)

    return open(folder.path / name, mode, opener=opener, **more)


def _regular(file: Any) -> BinaryIO:
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file")
    return file
