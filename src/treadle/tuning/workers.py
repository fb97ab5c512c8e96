"""The processes that try settings: begun, listened to, replaced."""

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from ..core.cores import cores
from ..core.signals import noted
from .orders import OUTPUT, Order, Outcome
from .results import Trial
from .study import Study

PROGRAM = ("-m", "treadle.tuning.worker")
RENEWED = 20
"""Trials that one process makes. On TensorFlow each leaves some 200 memory mappings behind, of at
most 65,530; a new process costs 2 to 5 seconds."""
PATIENCE = 30.0
"""Seconds for a process that is asked to end: it saves a checkpoint."""


class Worker:
    """A process that tries one order after another.

    Args:
        environment: Variables that it has beside those of this process.
        order: The first order.
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
                start_new_session=True,  # Ctrl-C is for the process that was started
            )
        self._made = 0
        self.send([entry for entry in sys.path if entry])
        self.begin(order)

    @property
    def output(self) -> IO[str]:
        """What it says, a line at a time."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def spent(self) -> bool:
        """Whether it has made as many trials as it may."""
        return self._made >= RENEWED

    @property
    def gone(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def begin(self, order: Order) -> None:
        """Let it try an order."""
        self.order, self._made = order, self._made + 1
        self.send(asdict(order))

    def send(self, what: Any) -> None:
        """Write a line to it; one that is gone is noticed elsewhere."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()

    def terminate(self) -> None:
        """Let its run save, and end."""
        if not self.gone:
            self._process.terminate()
        self.send(None)  # it may be waiting for an answer

    def end(self, patience: float = 0.0) -> int:
        """End it, if it has not ended by then; returns its exit code.

        Args:
            patience: Seconds to wait for it.
        """
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        self._process.kill()
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        return self._process.wait()


def run(
    study: Study,
    workers: int,
    environment: Mapping[str, str],
    told: Callable[[Trial], None],
) -> None:
    """Try all that a study hands out, in processes of their own.

    A process that dies is replaced once for each trial, and the run goes on where it was; a trial
    whose process dies again has failed.

    Args:
        study: What hands out trials.
        workers: Processes at the same time.
        environment: Variables that they have beside those of this process.
        told: Called with each trial that has ended.

    Raises:
        TreadleError: As `Study.end` does.
        KeyboardInterrupt, Terminated: A signal came; trials that run were saved, and go on when the
            search does.
    """
    died: dict[int, str] = {}
    listening: dict[Worker, None] = {}
    with noted() as asked, selectors.DefaultSelector() as selector:

        def take(worker: Worker | None, order: Order | None) -> None:
            """Give an order to a process, or to a new one; without an order it may go."""
            if worker is not None and (order is None or worker.spent):
                drop(worker)
                worker = None
            if order is None:
                return
            if worker is not None:
                worker.begin(order)
                return
            new = Worker({**_share(workers), **environment}, order)
            listening[new] = None
            selector.register(new.output, selectors.EVENT_READ, new)

        def drop(worker: Worker, patience: float = 0.0) -> int:
            selector.unregister(worker.output)
            del listening[worker]
            return worker.end(patience)

        def ended(worker: Worker | None, order: Order, outcome: Outcome) -> None:
            told(study.end(order.number, outcome))
            take(worker, study.next())

        def lost(worker: Worker) -> None:
            order, code = worker.order, drop(worker)
            how = _ending(code)
            if study.over(order.number):  # it died before it could take this answer
                ended(None, order, Outcome("pruned"))
            elif order.number in died:
                assert order.directory is not None
                error = f"its process {died[order.number]}, and another one {how}"
                ended(
                    None, order, Outcome("failed", error=f"{error}; see {order.directory}/{OUTPUT}")
                )
            else:
                died[order.number] = how
                take(None, order)

        try:
            for _ in range(workers):
                take(None, study.next())
            while listening:
                ready = {key.data for key, _ in selector.select(0.5)}
                if asked.signal is not None:
                    raise asked.error()
                for worker in list(listening):
                    # Something that it has begun may keep its output open when it is gone.
                    line = worker.output.readline() if worker in ready else ""
                    if line:
                        said = json.loads(line)
                        if "report" in said:
                            at, value = said["report"]
                            worker.send(study.report(worker.order.number, at, value))
                        else:
                            ended(worker, worker.order, Outcome(**said["outcome"]))
                    elif worker in ready or worker.gone:
                        lost(worker)
        finally:
            interrupted = list(listening)
            for worker in interrupted:
                worker.terminate()
            for worker in interrupted:
                drop(worker, PATIENCE)


def _share(workers: int) -> dict[str, str]:
    """Return how many threads a process of several may have: its share of the cores.

    PyTorch's, which are OpenMP's, wait for one another on busy cores: two processes with a thread
    for every core are many times slower than one after the other.
    """
    if workers == 1 or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, cores() // workers))}


def _ending(code: int) -> str:
    """Say how a process ended."""
    if code >= 0:
        return f"ended with code {code}"
    killed = signal.Signals(-code).name
    why = ", as it is where memory runs out" if killed == "SIGKILL" else ""
    return f"was killed by {killed}{why}"
