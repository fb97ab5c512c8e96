"""The lock on a run directory, and what becomes of it where a process forks."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from tests.waiting import WATCHDOG
from treadle.core import folder_operations as operations
from treadle.core.lock import HOLDER, Lock
from treadle.errors import DirectoryError

FORKING = """
import os, sys, time
from pathlib import Path
from treadle.core.lock import Lock

lock = Lock(Path(sys.argv[1]))
lock.acquire()
if not os.fork():
    del lock  # as what ends a worker may do
    print(os.getpid(), flush=True)
time.sleep(1000)
"""


def locked(directory):
    """Say whether a lock is held, as another loop would find out."""
    lock = Lock(directory)
    try:
        lock.acquire()
    except DirectoryError:
        return True
    lock.release()
    return False


def test_the_lock_has_one_holder_at_a_time(tmp_path):
    lock = Lock(tmp_path)
    lock.acquire()
    lock.acquire()
    with pytest.raises(DirectoryError, match="is being trained into by another loop of this proce"):
        Lock(tmp_path).acquire()
    lock.release()
    assert list(tmp_path.iterdir()) == [] and not locked(tmp_path)


def test_a_forked_process_does_not_hold_the_lock(tmp_path):
    """Workers that load data outlive a run that is killed, and must not hold its directory."""
    command = [sys.executable, "-c", FORKING, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        child = int(holder.stdout.readline())
        try:
            with pytest.raises(
                DirectoryError,
                match=re.escape(f"by process {holder.pid} on {socket.gethostname()}: wait for it"),
            ):
                Lock(tmp_path).acquire()
            holder.kill()
            holder.wait(WATCHDOG)
            assert not locked(tmp_path)
        finally:
            holder.kill()
            os.kill(child, signal.SIGKILL)


def test_the_lock_is_released_although_a_child_inherited_the_directory(tmp_path):
    lock = Lock(tmp_path)
    lock.acquire()
    other = os.dup(
        lock._open.descriptor
    )  # as a process that was forked without Python's knowledge has it
    lock.release()
    assert not locked(tmp_path)
    os.close(other)


def test_a_full_disk_is_no_reason_not_to_begin(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    lock = Lock(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(operations, "append", full)
        lock.acquire()
    with pytest.raises(DirectoryError, match="is being trained into by another process: wait"):
        Lock(tmp_path).acquire()
    lock.release()
    assert not locked(tmp_path) and not (tmp_path / HOLDER).exists()
