"""Reading and writing files in one open directory, safely and durably.

A directory may be shared, damaged or malicious. All operations are therefore relative to its file
descriptor, never follow links, never block on pipes or devices, and accept only regular files.
Written files survive a power loss: their content is synced to disk before they get their name.
"""

import errno
import os
import re
import secrets
import stat
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

from ..errors import DirectoryError, TreadleError
from . import folder_operations as operations
from .claims import Claim, Identity, identity_of
from .folder_operations import Piece

T = TypeVar("T")

PARTIAL = ".partial-"
_TEMPORARY = re.compile(rf"{re.escape(PARTIAL)}(.+)-[0-9a-f]{{8}}", re.DOTALL)
_LEVELS = 30  # of nested folders that are open at once during a removal
_FULL = (errno.ENOSPC, errno.EDQUOT)
# What the system reports for links, folders, pipes, devices and hard links in the place of a file.
_MISPLACED = (errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO, errno.EINVAL, errno.EMLINK)
_KINDS = (
    (stat.S_ISREG, "a file"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)
FILE, FOLDER, LINK = "a file", "a folder", "a symbolic link"
_REMOVED, _REPLACED = "was removed", "was replaced by something else"


class FileSystem:
    """Performs the operations of folders. Tests override it to count, record or fail operations."""

    def perform(self, operation: Callable[..., T], *arguments: Any) -> T:
        """Perform one file system operation: `operation(*arguments)`."""
        return operation(*arguments)


class Folder:
    """An open directory. Links in the path itself are followed; links inside are not.

    Args:
        path: The path, for messages.
        descriptor: The descriptor of the open directory, which this object closes. None if the
            platform has no such descriptors.
        error: The class of the exceptions that methods raise, with the path and the reason.
        system: Performs the file system operations.

    Raises:
        TreadleError: Every method raises an exception of class `error` if an operation fails.

    Example:
        >>> with Folder.open("runs/1", create=True) as folder:
        ...     folder.write("note", [b"one ", b"two"])
        ...     folder.read("note", limit=100)
        b'one two'
    """

    def __init__(
        self, path: Path, descriptor: int | None, error: type[TreadleError], system: FileSystem
    ) -> None:
        self.path, self.descriptor = path, descriptor
        self._error, self._system = error, system
        self._close = None
        if descriptor is not None:
            self._close = weakref.finalize(self, os.close, descriptor)
            self._close.atexit = False  # objects that still use it may end later

    @classmethod
    def open(
        cls,
        path: str | Path,
        create: bool = False,
        error: type[TreadleError] = DirectoryError,
        system: FileSystem | None = None,
    ) -> "Folder":
        """Open a directory.

        Args:
            path: The directory.
            create: Create the directory and its missing parents durably.
            error: The class of the exceptions of this folder.
            system: Performs the operations; by default `FileSystem()`.

        Raises:
            DirectoryError: A run of this process trains into the directory, and the path leads to
                another one now, or to none.
        """
        path, system = Path(path), system or FileSystem()
        claim = Claim.of(path)
        if create and claim is None and path.parent != path and not path.is_dir():
            with cls.open(path.parent, True, error, system) as parent:
                if not path.is_dir():  # as for a/.. when there is no a
                    return parent.subfolder(path.name, create=True, follow=True)
        try:
            folder = cls(path, system.perform(operations.open_path, path), error, system)
        except OSError as failure:
            if claim is not None:
                claim.check(path)
            raise error(
                f"cannot open the folder {path}: {failure.strerror or failure}"
            ) from failure
        if claim is not None:
            claim.check(path if folder.descriptor is None else folder.descriptor)
        return folder

    @property
    def identity(self) -> Identity:
        """The device and the inode of the directory, which another one in its place lacks."""
        return identity_of(self.path if self.descriptor is None else self.descriptor)

    def close(self) -> None:
        """Close the directory, which must not be used afterwards."""
        if self._close is not None:
            self._close()
            self.descriptor = -1  # the system gives the number to the next file

    def __repr__(self) -> str:
        return f"Folder({str(self.path)!r})"

    def __enter__(self) -> "Folder":
        """Return the folder, which the `with` statement closes."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the directory."""
        self.close()

    def subfolder(self, name: str, create: bool = False, follow: bool = False) -> "Folder":
        """Open a folder in this folder.

        Args:
            name: The name of the folder.
            create: Create the folder durably if it does not exist.
            follow: Whether the folder may be a symbolic link.
        """
        if create:
            with self._reporting("make the folder", name), suppress(FileExistsError):
                self._system.perform(operations.make_folder, self, name)
            self.sync()
        opened = self._do(
            "open the folder", name, operations.open_subfolder, name, follow, expected=FOLDER
        )
        return Folder(self.path / name, opened, self._error, self._system)

    def make_folder(self, name: str) -> None:
        """Create a folder that does not exist, without syncing its name to disk."""
        self._do("make the folder", name, operations.make_folder, name)

    def names(self) -> list[str]:
        """Return the sorted names of the files and folders in this folder."""
        return sorted(self._do("list the folder", "", operations.list_names))

    def kind(self, name: str) -> str | None:
        """Return `"a file"`, `"a folder"`, `"a symbolic link"` …; None if there is nothing."""
        found = self._status(name)
        return None if found is None else _kind_of(found.st_mode)

    def is_folder(self, name: str) -> bool:
        """Return whether there is a folder, and not a link to one."""
        return self.kind(name) == FOLDER

    def size(self, name: str) -> int | None:
        """Return the size of a file; None if there is no regular file."""
        found = self._status(name)
        return found.st_size if found is not None and stat.S_ISREG(found.st_mode) else None

    @contextmanager
    def opened(self, name: str) -> Generator[tuple[BinaryIO, int]]:
        """Open a file for reading; yield the file and its size."""
        with (
            self._reporting("read", name, expected=FILE),
            self._system.perform(operations.open_file, self, name) as file,
        ):
            yield file, os.fstat(file.fileno()).st_size

    def read(self, name: str, limit: int) -> bytes:
        """Return the content of a file, which must not exceed `limit` bytes."""
        with self.opened(name) as (file, size):
            if size <= limit:
                # A growing file is read no further than the limit.
                return self._system.perform(operations.read_file, file, limit)
        path = self.path / name
        raise self._error(f"{path} has {size:,} bytes; at most {limit:,} are expected")

    def create(self, name: str, pieces: Iterable[Piece], size: int = 0, sync: bool = True) -> None:
        """Write a file that does not exist. Its name is not synced to disk.

        Args:
            name: The name of the file.
            pieces: The content.
            size: The approximate size in bytes, for the error message if the disk is full.
            sync: Sync the content to disk.
        """
        with self._reporting("write", name, size):
            self._create(name, pieces, sync)

    def _create(self, name: str, pieces: Iterable[Piece], sync: bool) -> None:
        with self._system.perform(operations.create_file, self, name) as file:
            for piece in pieces:
                self._system.perform(operations.append, file, piece)
            if sync:
                self._system.perform(operations.sync_file, file)

    def write(self, name: str, pieces: Iterable[Piece], size: int = 0, sync: bool = True) -> None:
        """Write a file, or replace one, so that a crash leaves the old or the new file.

        A link is replaced, and the file that it points to is unchanged.

        Args:
            name: The name of the file.
            pieces: The content.
            size: The approximate size in bytes, for the error message if the disk is full.
            sync: Sync the file and its name to disk.
        """
        temporary = partial(name)
        with self._reporting("write", name, size, expected=FILE):
            try:
                self._create(temporary, pieces, sync)
                self._system.perform(operations.replace, self, temporary, name)
            except Exception:
                with suppress(OSError):
                    self._system.perform(operations.unlink, self, temporary)
                raise
        if sync:
            self.sync()

    def write_with(self, name: str, save: Callable[[Path], object]) -> None:
        """Write a file, as `write` does, with a function that needs a path.

        Args:
            name: The name of the file.
            save: Writes a file to the path that it is called with, in a new temporary folder.
        """
        temporary = partial(name)
        self.make_folder(temporary)
        try:
            with self.subfolder(temporary) as folder, self._reporting("write", name, expected=FILE):
                save(folder.path / name)
                with self._system.perform(operations.open_file, folder, name) as file:
                    self._system.perform(operations.sync_file, file)
                self._system.perform(operations.replace, folder, name, name, self)
        finally:
            self.remove_folder(temporary)
        self.sync()

    def append_to(self, name: str) -> BinaryIO:
        """Open a file for unbuffered writing at its end; create it durably if there is none.

        Write to it with `append`, so that partial writes are completed, and sync it with `flush`.
        """
        with self._reporting("write", name, expected=FILE):
            created = self.kind(name) is None
            file = self._system.perform(operations.open_to_append, self, name)
        if created:
            self.sync()
        return file

    def append(self, file: BinaryIO, piece: Piece) -> None:
        """Write a complete piece to a file opened by `append_to`.

        Raises:
            TreadleError: The file is not in its place any more, or another process wrote to it.
        """
        try:  # not `_reporting`, which takes eight times as long: logs call this in each window
            if (fault := _fault_of(file)) is not None:
                self._report_lost(file, fault)
            self._system.perform(operations.append, file, piece)
        except OSError as error:
            raise self._failure(error, "write", Path(file.name).name, len(piece)) from error

    def _report_lost(self, file: BinaryIO, fault: str) -> NoReturn:
        """Raise an error about a file that is not in its place any more, and save its content."""
        path = Path(file.name)
        if claim := Claim.of(self.path):
            claim.check(self.path)
        what = f"{path} {fault} while the run was writing to it"
        how = "put it back as it was"
        if fault in (_REMOVED, _REPLACED):
            with suppress(TreadleError):
                name = path.name if self.kind(path.name) is None else f"{path.name}.saved"
                self.create(name, _content(file))
                self.sync()
                how = f"put {self.path / name} in its place, which holds all that the run wrote"
                if name == path.name:
                    what, how = f"{what}, and is there again with all that the run wrote", ""
        how = f"To resume, {how}, and" if how else "To resume,"
        raise self._error(f"{what}. {how} run the script again")

    def truncate(self, file: BinaryIO, size: int) -> None:
        """Shorten a file opened by `append_to`."""
        with self._reporting("shorten", Path(file.name).name):
            self._system.perform(operations.truncate, file, size)

    def flush(self, file: BinaryIO) -> None:
        """Sync the content of a file opened by `append_to` to disk."""
        with self._reporting("write", Path(file.name).name):
            self._system.perform(operations.sync_file, file)

    def flush_file(self, name: str) -> None:
        """Sync the content of a file that was written without `sync` to disk."""
        with (
            self._reporting("write", name),
            self._system.perform(operations.open_file, self, name) as file,
        ):
            self._system.perform(operations.sync_file, file)

    def version(self, name: str) -> tuple[int, int] | None:
        """Return the inode and modification time of a file, which change when it is written."""
        found = self._status(name)
        return None if found is None else (found.st_ino, found.st_mtime_ns)

    def rename(self, old: str, new: str) -> None:
        """Rename a file or a folder. An existing file may only be replaced by a file."""
        self._do("rename", old, operations.replace, old, new)

    def remove_file(self, name: str) -> None:
        """Remove a file or a link, if there is one."""
        with self._reporting("remove", name), suppress(FileNotFoundError):
            self._system.perform(operations.unlink, self, name)

    def remove_folder(self, name: str) -> None:
        """Remove a folder and its content, if there is one. A link itself is removed.

        Folders more than `_LEVELS` levels deep are first moved into this one, which limits how many
        are open at once. They get the names of incomplete saves, which the next process removes if
        this one crashes.
        """
        waiting = [name]
        while waiting:
            waiting += self._remove(waiting.pop(), self, written_as(name) or name, _LEVELS)

    def _remove(self, name: str, top: "Folder", kind: str, levels: int) -> list[str]:
        """Remove a folder down to some levels; move deeper ones up, and return their names."""
        if not self.is_folder(name):
            self.remove_file(name)
            return []
        if not levels:
            moved = partial(kind)
            self._do("move", name, operations.replace, name, moved, top)
            return [moved]
        found: list[str] = []
        with self.subfolder(name) as folder:
            for part in folder.names():
                found += folder._remove(part, top, kind, levels - 1)
        self.remove_empty_folder(name)
        return found

    def remove_empty_folder(self, name: str) -> None:
        """Remove a folder, which must be empty."""
        with self._reporting("remove the folder", name), suppress(FileNotFoundError):
            self._system.perform(operations.remove_empty, self, name)

    def sync(self) -> None:
        """Sync the names in this folder to disk."""
        self._do("sync the folder", "", operations.sync_folder)

    def free(self) -> int:
        """Return the number of free bytes on the disk of this folder."""
        return self._do("inspect the disk of", "", operations.free_bytes)

    def _status(self, name: str) -> os.stat_result | None:
        with self._reporting("inspect", name), suppress(FileNotFoundError):
            return self._system.perform(operations.inspect, self, name)
        return None

    def _do(
        self,
        doing: str,
        name: str,
        operation: Callable[..., T],
        *arguments: Any,
        expected: str = "",
    ) -> T:
        """Perform an operation on this folder, and report what fails."""
        with self._reporting(doing, name, expected=expected):
            return self._system.perform(operation, self, *arguments)

    @contextmanager
    def _reporting(
        self, doing: str, name: str = "", size: int = 0, expected: str = ""
    ) -> Generator[None]:
        """Convert an `OSError` to an exception with the operation, the path and the reason."""
        try:
            yield
        except OSError as error:
            raise self._failure(error, doing, name, size, expected) from error

    def _failure(
        self, error: OSError, doing: str, name: str, size: int = 0, expected: str = ""
    ) -> TreadleError:
        why = self._full(size) if error.errno in _FULL and size else ""
        if expected and error.errno in _MISPLACED:
            why = why or self._misplaced(name, expected)
        why = why or error.strerror or str(error)
        return self._error(f"cannot {doing} {self.path / name}: {why}")

    def _full(self, size: int) -> str:
        try:
            free = f"{self.free():,}"
        except TreadleError:
            free = "an unknown number"
        return f"the disk is full: it needs about {size:,} bytes, {free} are free"

    def _misplaced(self, name: str, expected: str) -> str:
        """Return the reason if there is something of another kind than expected; else empty."""
        try:
            found = self._system.perform(operations.inspect, self, name)
        except OSError:
            return ""
        kind = _kind_of(found.st_mode)
        if kind == LINK:
            return f"it is {kind}, which is not followed. Put {expected} itself in its place"
        if kind != expected:
            return f"it is {kind}, and not {expected}. Move it away"
        if kind == FILE and found.st_nlink > 1:
            return (
                f"it has {found.st_nlink} hard links, so writing would also change another file. "
                "Replace it by a copy"
            )
        return ""


def partial(name: str) -> str:
    """Return a temporary name for a file or folder that is being written or removed."""
    return f"{PARTIAL}{name}-{secrets.token_hex(4)}"


def written_as(temporary: str) -> str:
    """Return the name of the file that a temporary file was to become; "" for other names.

    Example:
        >>> written_as(".partial-run.json-0123abcd")
        'run.json'
    """
    match = _TEMPORARY.fullmatch(temporary)
    return match[1] if match else ""


def _kind_of(mode: int) -> str:
    return next((kind for is_kind, kind in _KINDS if is_kind(mode)), "a device")


def _fault_of(file: BinaryIO) -> str | None:
    """Return what happened to a file that is being written, if it is not as it was left."""
    found = os.fstat(file.fileno())
    try:
        there = os.stat(file.name, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return _REMOVED
    except OSError:  # a network may fail for a moment: the write itself reports it, if it lasts
        return None
    if (there.st_ino, there.st_dev) != (found.st_ino, found.st_dev):
        return _REPLACED
    size = file.tell()
    return None if found.st_size == size else f"had {size:,} bytes and has {found.st_size:,}"


def _content(file: BinaryIO) -> Iterator[bytes]:
    """Yield the content of a file opened by `append_to`, also of one that was removed."""
    file.seek(0)
    while piece := file.read(1 << 20):
        yield piece
