"""A lock on a run directory, so that no two processes train into the same directory."""

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

    Args:
        directory: The run directory.

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


def _owner(folder: Folder) -> str:
    try:
        owner: Any = json.loads(folder.read(HOLDER, limit=_LONGEST))
        pid, host = int(owner["pid"]), clean(owner["host"], limit=80)
    except (DirectoryError, ValueError, KeyError, TypeError, RecursionError):
        return "another process"
    if pid == os.getpid() and host == socket.gethostname():
        return "another loop of this process"
    return f"process {pid} on {host}"


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()
    _held.clear()


if fcntl is not None:
    os.register_at_fork(after_in_child=_forget_all)
