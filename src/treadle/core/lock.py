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

try:
    import fcntl
except ImportError:  # not available on Windows, where directories are not locked
    fcntl = None

HOLDER = ".lock"


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
        self._directory, self._holder = directory, directory / HOLDER
        self._open: int | None = None

    def acquire(self) -> None:
        """Acquire the lock. Does nothing if it is already held.

        Raises:
            DirectoryError: Another process, or another loop of this process, holds the lock.
        """
        if self._open is not None or fcntl is None:
            return
        opened = os.open(self._directory, os.O_RDONLY)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(opened)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return  # the file system does not support locks
            raise DirectoryError(
                f"{self._directory} is being trained into by {self._owner()}: wait for it, end it, "
                "or choose another directory"
            ) from error
        self._open = opened
        _held.add(self)
        with suppress(OSError):  # only informative: a full disk is reported when saving fails
            self._holder.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))

    def release(self) -> None:
        """Release the lock if it is held."""
        opened, self._open = self._open, None
        _held.discard(self)
        if opened is not None and fcntl is not None:
            with suppress(OSError):
                self._holder.unlink()
            # Closing is not enough if a forked process shares the open directory.
            fcntl.flock(opened, fcntl.LOCK_UN)
            os.close(opened)

    def forget(self) -> None:
        """Close the directory in a forked process without releasing the parent's lock."""
        opened, self._open = self._open, None
        if opened is not None:
            os.close(opened)

    def __del__(self) -> None:
        """Release the lock when a loop is garbage collected before its training ended."""
        if self._open is not None:
            self.release()

    def _owner(self) -> str:
        try:
            owner: Any = json.loads(self._holder.read_text())
            pid, host = int(owner["pid"]), str(owner["host"])
        except (OSError, ValueError, KeyError, TypeError):
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
