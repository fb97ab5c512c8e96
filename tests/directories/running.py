"""Run a command in a fork of this process, with limits of time and memory."""

import faulthandler
import os
import resource
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .tiny_task import DIES

# These only tell what hangs from what a slow or busy machine takes: a command takes about a second.
SECONDS = 60.0  # of processor time, or without any
LONGEST = 600.0
MEMORY = 600 << 20  # by which a command may grow
ADDRESSES = 1 << 30
STACKS = "stacks"  # of a command that takes long


@dataclass(frozen=True)
class Outcome:
    """What came of a command.

    Attributes:
        code: The exit code, or minus the number of a signal.
        stdout: What it printed.
        stderr: What it printed to standard error.
        hung: Whether it took too long, and was ended.
        memory: The bytes by which its memory grew.
        seconds: How long it took.
    """

    code: int
    stdout: str
    stderr: str
    hung: bool
    memory: int
    seconds: float


def run(place: Any, arguments: list[str], dies: str = "") -> Outcome:
    """Run `treadle ARGUMENTS` in a fork, whose modules are imported already."""
    outputs = [place.root / "stdout", place.root / "stderr"]
    started = time.monotonic()
    sys.stdout.flush()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, str(_resident("self")).encode())
        _child(place, arguments, dies, outputs)
    before = int(os.read(reading, 99))
    os.close(reading)
    os.close(writing)
    hung = not _waited(pid)
    if hung:
        texts = (place.root / STACKS).read_text().splitlines()
        print("".join(f"  : {line}\n" for line in texts[:12]), end="")
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    texts = [path.read_text(errors="surrogateescape") for path in outputs]
    return Outcome(
        code=os.waitstatus_to_exitcode(status),
        stdout=texts[0],
        stderr=texts[1],
        hung=hung,
        memory=max(0, usage.ru_maxrss * 1024 - before),
        seconds=time.monotonic() - started,
    )


def _child(place: Any, arguments: list[str], dies: str, outputs: list[Path]) -> None:
    code = 70
    try:
        os.setsid()
        os.chdir(place.root)
        for number, path in enumerate(outputs, 1):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, number)
            os.close(file)
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.environ["XDG_STATE_HOME"] = str(place.mine)
        os.environ.pop(DIES, None)
        if dies in ("killed", "failed"):
            os.environ[DIES] = dies
        most = _size("self") + 3 * ADDRESSES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (ADDRESSES, ADDRESSES))
        faulthandler.dump_traceback_later(SECONDS - 0.5, file=(place.root / STACKS).open("w"))
        from treadle.cli import app

        app(arguments, prog_name="treadle")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
    except BaseException:
        traceback.print_exc()
        code = 71
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _waited(pid: int) -> bool:
    """Wait for a process; return False if it has to be ended.

    A process that waits for a processor is given more time than one that waits for something else.
    Time in which this process was stopped does not count.
    """
    descriptor = os.pidfd_open(pid)
    try:
        used, idle, waited, before = -1.0, 0.0, 0.0, time.monotonic()
        while used <= SECONDS and idle <= SECONDS and waited <= LONGEST:
            if os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return True
            time.sleep(0.005 if waited < 1 else 0.05)
            now, last = time.monotonic(), used
            passed, before = min(now - before, 0.2), now
            used = _processor_seconds(pid)
            waited, idle = waited + passed, 0.0 if used > last else idle + passed
        return False
    finally:
        os.close(descriptor)


def _processor_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident(pid: str) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _size(pid: str) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
