"""Worker processes of a search: start them, read their reports, replace those that die."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

from ..core.process_settings import cores
from ..core.signals import handled_signals
from .orders import OUTPUT, Order, Outcome
from .results import Trial
from .study import Study

PROGRAM = ("-m", "treadle.tuning.worker")
RENEWED = 20
"""Trials that one process runs before it is replaced. On TensorFlow each trial leaks some 200
memory mappings, of the 65,530 that a process may have; a new process costs 2 to 5 seconds."""
PATIENCE = 30.0
"""Seconds that a terminated process has to save a checkpoint and exit."""
EXIT_PATIENCE = 5.0
"""Seconds that a process has to exit once its output has ended."""


class Worker:
    """A process that runs one trial after another.

    Args:
        environment: Environment variables in addition to those of this process.
        order: The order of the first trial.
    """

    def __init__(self, environment: Mapping[str, str], order: Order) -> None:
        assert order.directory is not None
        folder = Path(order.directory)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / OUTPUT).open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C reaches the main process only
            )
        self._made = 0
        self.send([entry for entry in sys.path if entry])
        self.begin(order)

    @property
    def output(self) -> IO[str]:
        """The process's output: reports and outcomes, one JSON value per line."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def spent(self) -> bool:
        """Whether the process has run its maximum number of trials."""
        return self._made >= RENEWED

    @property
    def gone(self) -> bool:
        """Whether the process has exited."""
        return self._process.poll() is not None

    def begin(self, order: Order) -> None:
        """Start the trial of an order."""
        self.order, self._made = order, self._made + 1
        self.send(asdict(order))

    def send(self, what: Any) -> None:
        """Write a line to the process; `Workers` detects a process that has exited."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()

    def terminate(self) -> None:
        """Ask the process to save its trial and exit."""
        if not self.gone:
            self._process.terminate()
        self.send(None)  # it may be waiting for an answer

    def end(self, patience: float = 0.0) -> int:
        """Wait for the process to exit, kill it if it does not, and return its exit code.

        Args:
            patience: Seconds to wait before it is killed.
        """
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        self._process.kill()
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        return self._process.wait()


Lane = Generator[Worker, Any, None]
"""Trials that run one after another: yields the process that it waits for, and gets its message."""


class Workers:
    """Worker processes that run all trials of a study.

    If a process dies, a new one resumes its trial from the last checkpoint. If that one dies in the
    same trial too, the trial has failed.

    Args:
        study: The study that hands out trials.
        count: Number of parallel processes.
        environment: Environment variables of the processes, in addition to those of this process.
        on_trial_end: Callback that receives each trial when it has ended.
    """

    def __init__(
        self,
        study: Study,
        count: int,
        environment: Mapping[str, str],
        on_trial_end: Callable[[Trial], None],
    ) -> None:
        self._study, self._count, self._on_trial_end = study, count, on_trial_end
        self._environment = {**_share(count), **environment}
        self._running: dict[Lane, Worker] = {}

    def run(self) -> None:
        """Run the trials.

        Raises:
            TreadleError: As for `Study.end`.
            KeyboardInterrupt, Terminated: If a signal was received. The running trials are saved,
                and resume with the search.
        """
        with handled_signals() as request:
            try:
                for _ in range(self._count):
                    self._advance(self._lane(), None)
                while self._running:
                    ready = wait([worker.output.fileno() for worker in self._running.values()], 0.5)
                    if request.signal is not None:
                        raise request.error()
                    for lane, worker in list(self._running.items()):
                        # A child process of the worker may keep its output open after it has
                        # exited, so the end of the output alone does not detect that.
                        is_ready = worker.output.fileno() in ready
                        line = worker.output.readline() if is_ready else ""
                        if is_ready or worker.gone:
                            self._advance(lane, json.loads(line) if line else None)
            finally:
                for worker in self._running.values():
                    worker.terminate()
                for worker in self._running.values():
                    worker.end(PATIENCE)

    def _advance(self, lane: Lane, message: Any) -> None:
        """Continue a lane with the message that it waits for, up to the next one."""
        try:
            self._running[lane] = lane.send(message)
        except StopIteration:
            self._running.pop(lane, None)

    def _lane(self) -> Lane:
        """Run trials one after another; yield the process whose next message is needed."""
        worker: Worker | None = None
        while (order := self._study.next()) is not None:
            number, outcome, died = order.number, None, ""
            while outcome is None:
                if worker is not None and worker.spent:
                    worker.end()
                    worker = None
                if worker is None:
                    worker = Worker(self._environment, order)
                else:
                    worker.begin(order)
                while (message := (yield worker)) is not None and "report" in message:
                    worker.send(self._study.report(number, *message["report"]))
                if message is not None:
                    outcome = Outcome(**message["outcome"])
                    continue
                # Its output ends before the process does: killed now, it would have another code.
                how, worker = _ending(worker.end(EXIT_PATIENCE)), None
                if self._study.over(number):  # it died before it received the answer to end
                    outcome = Outcome("pruned")
                elif died:
                    error = f"its process {died}, and the one that replaced it {how}"
                    output = f"{order.directory}/{OUTPUT}"
                    outcome = Outcome("failed", error=f"{error}; see {output}")
                died = how
            self._on_trial_end(self._study.end(number, outcome))
        if worker is not None:
            worker.end()


def _share(workers: int) -> dict[str, str]:
    """Return environment variables that limit each worker to its share of the CPU cores.

    OpenMP threads, which PyTorch uses, wait for one another on busy cores: two parallel processes
    with one thread per core each are many times slower than the same two in sequence.
    """
    if workers == 1 or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, cores() // workers))}


def _ending(code: int) -> str:
    """Describe how a process ended, from its exit code."""
    if code >= 0:
        return f"ended with code {code}"
    killed = signal.Signals(-code).name
    why = " (possibly out of memory)" if killed == "SIGKILL" else ""
    return f"was killed by {killed}{why}"
