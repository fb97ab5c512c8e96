"""A lock on a run directory: two processes must not train into one."""

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
except ImportError:  # Windows has none: there, nothing is locked
    fcntl = None

HOLDER = ".lock"


class Lock:
    """The right to write to a run directory, for one process at a time.

    What is locked is the open directory itself (flock), so the lock dies with the process. A file
    in it only says who holds it. A forked process, as a worker that loads data, has no part in it.

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
        """Take the lock; taking it twice does nothing.

        Raises:
            DirectoryError: Another process has it, or another loop in this one.
        """
        if self._open is not None or fcntl is None:
            return
        opened = os.open(self._directory, os.O_RDONLY)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(opened)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return  # a file system that locks no directories
            raise DirectoryError(
                f"{self._directory} is being trained into by {self._told()}: wait for it, end it, "
                "or choose another directory"
            ) from error
        self._open = opened
        _held.add(self)
        with suppress(OSError):  # it only informs: a full disk is told where something is saved
            self._holder.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))

    def release(self) -> None:
        """Let go of it, if it is held."""
        opened, self._open = self._open, None
        _held.discard(self)
        if opened is not None and fcntl is not None:
            with suppress(OSError):
                self._holder.unlink()
            # Closing alone would not do where another process has the same open directory.
            fcntl.flock(opened, fcntl.LOCK_UN)
            os.close(opened)

    def forget(self) -> None:
        """Have no part in it any more, in a forked process: it stays with the one that took it."""
        opened, self._open = self._open, None
        if opened is not None:
            os.close(opened)

    def __del__(self) -> None:
        """Let go of it with a loop that was left in the midst of its steps."""
        if self._open is not None:
            self.release()

    def _told(self) -> str:
        try:
            told: Any = json.loads(self._holder.read_text())
            pid, host = int(told["pid"]), str(told["host"])
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
