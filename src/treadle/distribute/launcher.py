"""Starting one command as several processes of this machine that train together."""

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Final

from ..core.process_settings import cores
from .environment import JOINED_VARIABLE, free_port

GRACE_SECONDS: Final = 3.0
"""How long the other processes may run after one has failed: they report it, and end."""
OUTPUT_SECONDS: Final = 10.0
"""How long to wait for the rest of an output once its process has ended; a child may keep it."""
_FORWARDED: Final = (signal.SIGTERM, signal.SIGINT)
_LIBRARIES: Final = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")


def launch(command: Sequence[str], workers: int, restarts: int = 0) -> int:
    """Run a command as several processes, and return the exit code of the group.

    Each process gets the environment variables that torchrun sets, from which `treadle.setup`
    knows its place. If one fails, all are ended, and started again as often as allowed: a run with
    a directory then resumes from its newest checkpoint. The output of process 0 is passed on as it
    is, that of the others line by line with their number.

    Args:
        command: The command and its arguments.
        workers: The number of processes.
        restarts: How often all are started again after a failure.

    Example:
        >>> launch([sys.executable, "-c", "import os; assert os.environ['WORLD_SIZE'] == '2'"], 2)
        0
    """
    for attempt in range(restarts + 1):
        group = _Group(command, workers)
        code = group.wait()
        if code == 0 or group.asked_to_end or attempt == restarts:
            return code
        left = restarts - attempt
        print(
            f"treadle launch: all {workers} processes start again "
            f"({left - 1} restart{'' if left == 2 else 's'} left)",
            file=sys.stderr,
        )
    return 1


class _Group:
    """The processes of one attempt.

    Args:
        command: The command and its arguments.
        workers: The number of processes.

    Attributes:
        asked_to_end: Whether a signal asked this process to end.
    """

    def __init__(self, command: Sequence[str], workers: int) -> None:
        self.asked_to_end = False
        self._processes: list[subprocess.Popen[bytes]] = []  # the handler may need it at once
        self._readers: list[threading.Thread] = []
        self._before = {
            number: signal.signal(number, self._forward)
            for number in _FORWARDED
            if threading.current_thread() is threading.main_thread()
        }
        shared = {
            "WORLD_SIZE": str(workers),
            "LOCAL_WORLD_SIZE": str(workers),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "TREADLE_PORT": str(free_port()),
            "TREADLE_LAUNCHED": "1",
            "TREADLE_TOKEN": secrets.token_hex(16),
        }
        # Each library would start a thread for each core, unless the user has set its number.
        threads = dict.fromkeys(_LIBRARIES, str(max(1, cores() // workers)))
        outer = {name: value for name, value in os.environ.items() if name != JOINED_VARIABLE}
        for rank in range(workers):
            self._start(command, rank, {**threads, **outer, **shared})
        if self.asked_to_end:  # while they started: nothing is to be saved yet
            self._end_all()

    def _start(self, command: Sequence[str], rank: int, variables: Mapping[str, str]) -> None:
        output = None if rank == 0 else subprocess.PIPE
        process = subprocess.Popen(
            command,
            env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=None if rank == 0 else subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        self._processes.append(process)
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if source is not None:
                reader = threading.Thread(target=_pass_on, args=(source, target, rank), daemon=True)
                reader.start()
                self._readers.append(reader)

    def wait(self) -> int:
        """Wait until all processes have ended; return 0, or the exit code of the first failure."""
        code, failed_at = 0, 0.0
        try:
            while True:
                found = [process.poll() for process in self._processes]
                failed = [(rank, number) for rank, number in enumerate(found) if number]
                if failed and not failed_at:
                    returned, failed_at = failed[0][1], time.monotonic()
                    code = returned if returned > 0 else 128 - returned  # as shells report it
                    if not self.asked_to_end:
                        print(f"treadle launch: {_described(*failed[0])}", file=sys.stderr)
                if None not in found:
                    break
                if failed_at and time.monotonic() - failed_at > GRACE_SECONDS:
                    self._end_all(self.asked_to_end)
                time.sleep(0.05)
        finally:
            self._end_all()
            for number, handler in self._before.items():
                signal.signal(number, handler)
        for reader in self._readers:
            reader.join(timeout=OUTPUT_SECONDS)
        return code

    def _end_all(self, gently: bool = False) -> None:
        """End the processes that still run, unless they save a checkpoint after a signal."""
        if gently:
            return
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()

    def _forward(self, number: int, frame: object) -> None:
        """Pass a signal on: the processes save a checkpoint and end. A second one ends them."""
        if self.asked_to_end:
            self._end_all()
            return
        self.asked_to_end = True
        for process in self._processes:
            # A terminal sends SIGINT to all of its processes itself.
            if process.poll() is None and (number != signal.SIGINT or not sys.stdin.isatty()):
                with suppress(ProcessLookupError):
                    process.send_signal(number)


def _pass_on(source: IO[bytes], target: IO[str], rank: int) -> None:
    with source:
        for line in source:
            target.write(f"[{rank}] {line.decode(errors='replace')}")
            target.flush()


def _described(rank: int, returned: int) -> str:
    how = f"exit code {returned}" if returned > 0 else f"signal {signal.Signals(-returned).name}"
    return f"process {rank} ended with {how}, so all are ended"
