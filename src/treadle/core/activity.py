"""Finding out whether a process trains in a run directory, without changing it."""

import json
import os
import socket
from pathlib import Path

from ..errors import DirectoryError
from .folder import Folder
from .lock import HOLDER

try:
    import fcntl
except ImportError:  # not available on Windows, where directories are not locked
    fcntl = None

_LONGEST = 1000  # bytes of the file that names the holder


def is_in_use(directory: Path) -> bool:
    """Return whether a process trains in a run directory.

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
    try:
        found = json.loads(folder.read(HOLDER, _LONGEST))
        host, pid = found["host"], found["pid"]
        if host != socket.gethostname() or type(pid) is not int or not 0 < pid < 1 << 31:
            return False
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (DirectoryError, OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return False
