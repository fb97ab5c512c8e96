"""The lock on a run directory: no two processes train into it, and others see that one does."""

import errno
import json
import os
import socket
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import DirectoryError
from .folder import Folder
from .terminal import clean

try:
    import fcntl
except ImportError:  # not available on Windows, where directories are not locked
    fcntl = None

HOLDER = ".lock"
_LONGEST = 1000  # bytes of its content


class Lock:
    """An exclusive lock on a run directory, held by one process at a time.

    The directory itself is locked (by flock), so the lock is released when the process ends. A file
    in it records the process that holds the lock, for messages only. A forked process, such as a
    data loading worker, does not hold the lock.

    Example:
        >>> lock = Lock(Path("."))
        >>> lock.acquire()
        >>> lock.release()
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: Folder | None = None

    def acquire(self) -> None:
        """Acquire the lock. Does nothing if it is already held.

        Raises:
            DirectoryError: Another process, or another loop of this process, holds the lock.
        """
        if self._open is not None or fcntl is None:
            return
        opened = Folder.open(self._directory)
        assert opened.descriptor is not None  # platforms without descriptors have no fcntl
        try:
            fcntl.flock(opened.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            with opened:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    return  # the file system does not support locks
                raise DirectoryError(
                    f"{self._directory} is being trained into by {_owner(opened)}: wait for it, "
                    "end it, or choose another directory"
                ) from error
        self._open = opened
        _held.add(self)
        holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
        with suppress(DirectoryError):  # only informative: a full disk is reported by saving
            opened.write(HOLDER, [holder.encode()], sync=False)

    def release(self) -> None:
        """Release the lock if it is held."""
        opened, self._open = self._open, None
        _held.discard(self)
        if opened is not None and opened.descriptor is not None and fcntl is not None:
            with suppress(DirectoryError):
                opened.remove_file(HOLDER)
            # Closing is not enough if a forked process shares the open directory.
            fcntl.flock(opened.descriptor, fcntl.LOCK_UN)
            opened.close()

    def forget(self) -> None:
        """Close the directory in a forked process without releasing the parent's lock."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()

    def __del__(self) -> None:
        """Release the lock when a loop is garbage collected before its training ended."""
        if self._open is not None:
            self.release()


def is_in_use(directory: Path) -> bool:
    """Return whether a process trains in a run directory, without changing it.

    The lock itself is only tried if the file that names its holder exists, and does not name a
    process of this machine that ended: a run that starts at the same time would be rejected.
    """
    with Folder.open(directory) as folder:
        if folder.kind(HOLDER) is None or _has_ended(folder):
            return False
        if fcntl is None or folder.descriptor is None:
            return True
        try:
            fcntl.flock(folder.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.flock(folder.descriptor, fcntl.LOCK_UN)
        return False


def _has_ended(folder: Folder) -> bool:
    """Return whether the process that locked a directory ran on this machine, and has ended."""
    holder = _holder(folder)
    if holder is None or holder[1] != socket.gethostname():
        return False
    try:
        os.kill(holder[0], 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _owner(folder: Folder) -> str:
    holder = _holder(folder)
    if holder is None:
        return "another process"
    pid, host = holder
    if pid == os.getpid() and host == socket.gethostname():
        return "another loop of this process"
    return f"process {pid} on {clean(host, limit=80)}"


def _holder(folder: Folder) -> tuple[int, str] | None:
    """Return the process that locked a directory, and its machine; None if that is unknown."""
    try:
        found: Any = json.loads(folder.read(HOLDER, limit=_LONGEST))
        pid, host = found["pid"], found["host"]
    except (DirectoryError, ValueError, KeyError, TypeError, RecursionError):
        return None
    is_valid = type(pid) is int and 0 < pid < 1 << 31 and isinstance(host, str)
    return (pid, host) if is_valid else None


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()
    _held.clear()


if fcntl is not None:
    os.register_at_fork(after_in_child=_forget_all)
