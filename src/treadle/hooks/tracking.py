"""The base class of hooks that send a run to a tracking server, without waiting for it.

The history holds all that a run logs. After each window, an idle thread receives what is new in
it. If the server cannot be reached, the thread tries again later, and training continues. What was
not sent at the end is reported.

Everything is sent at least once. A small file in the run directory holds the id of the tracked run
and the last step that was sent. A resumed run sends the steps after its checkpoint again, with the
same values.
"""

import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import merge
from itertools import accumulate, islice, takewhile
from operator import itemgetter
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, Protocol

from ..core import schema
from ..core.directory import RUN, flattened, read_run
from ..core.folder import Folder
from ..core.history import History
from ..core.hook import DetailedHook, LoopView
from ..core.identity import identity
from ..core.images import Image
from ..core.logs import Record, StepLogs, plain
from ..errors import ConfigurationError, TreadleWarning, require_package

LEFT_OUT: Final = ("checkpoints", "wandb")  # and hidden files
FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 30.0
MOST_STEPS: Final = 20_000  # and records, that the thread gets at once
MOST_AT_ONCE: Final = 500  # values in a call of the client
MOST_BYTES: Final = 1 << 16
_tracked = schema.record(
    {"run": schema.text, "step": schema.whole(), "closed": schema.flag}, required=("run", "step")
)


@dataclass(frozen=True)
class Values:
    """Values to send, of one step or one record.

    Attributes:
        step: The step.
        seconds: The time, in seconds since 1970.
        numbers: Name to number.
        images: Name to image.
        texts: Name to text.
    """

    step: int
    seconds: float
    numbers: Mapping[str, float]
    images: Mapping[str, Image]
    texts: Mapping[str, str]

    @classmethod
    def of_record(cls, record: Record, seconds: float) -> "Values":
        """Return the values of a record."""
        numbers: dict[str, float] = {}
        images: dict[str, Image] = {}
        texts: dict[str, str] = {}
        for name, value in record.values.items():
            number = None if isinstance(value, Image) else plain(value)
            if isinstance(value, Image):
                images[name] = value
            elif isinstance(number, str):
                texts[name] = number
            elif number is not None:
                # Steps have values of the same names, of which a record holds the means.
                mean = record.kind != "log" and not name.startswith("val_")
                numbers[f"epoch/{name}" if mean else name] = float(number)
        return cls(record.progress.step, seconds, numbers, images, texts)

    @property
    def size(self) -> int:
        """The number of values."""
        return len(self.numbers) + len(self.images) + len(self.texts)


class Client(Protocol):
    """The connection to a tracker; one thread calls all methods, which may raise.

    Attributes:
        unsure: How many of the last steps may be lost if the process is killed after `send`.
    """

    unsure: int

    def open(self, run: str | None, settings: Mapping[str, Any]) -> str:
        """Create a tracked run, or continue one, and return its id.

        Args:
            run: The id of the run to continue, or None.
            settings: The settings of the run, by dotted names.
        """
        ...

    def send(self, values: Sequence[Values]) -> None:
        """Send values, in order."""
        ...

    def upload(self, directory: Path, files: Sequence[str]) -> None:
        """Upload files of the run directory, by their paths in it."""
        ...

    def close(self, status: str) -> None:
        """End the tracked run; the status is `"finished"`, `"interrupted"` or `"failed"`."""
        ...


class Tracker(DetailedHook):
    """Base class: sends what a run logs with a client in a thread.

    Args:
        package: The package that the client needs, which is also the name of the extra.
        upload: Whether to upload the files of the run directory at the end, without checkpoints.
        wait: How many seconds to wait at the end of training for what is not sent yet.

    Raises:
        ConfigurationError: If the package is not installed, or `wait` is negative.
    """

    chief_only = True

    def __init__(self, package: str, upload: bool, wait: float) -> None:
        self._kind, self._file = type(self).__name__, f"{package}.json"
        require_package(package, f"the hook {self._kind} needs the package {package}, which")
        if wait < 0:
            raise ConfigurationError(f"{self._kind} needs wait >= 0 seconds, not {wait!r}")
        self._upload, self._wait = upload, wait
        self._sender: _Sender | None = None
        self._store = _Store(None, self._file)

    def client(self, directory: Path | None) -> Client:
        """Return a client, which does not connect before `open`."""
        raise NotImplementedError

    def start(self, loop: LoopView) -> None:
        """Start the thread; the run in the directory, if there is one, is continued."""
        if self._sender is not None:
            return
        # Without a directory, a later call of `fit` continues the tracked run.
        if self._store.directory != loop.directory or loop.progress.step == 0:
            self._store = _Store(loop.directory, self._file)
        client = self.client(loop.directory)
        self._sender = _Sender(client, self._store, recorded_settings(loop), loop)
        self._sender.send(loop.history)

    def steps(self, loop: LoopView, logs: StepLogs) -> None:
        """Send the values of the steps, and what could not be sent before."""
        if self._sender is not None:
            self._sender.send(loop.history)

    def record(self, loop: LoopView, record: Record) -> None:
        """Send the values of the record, and what could not be sent before."""
        if self._sender is not None:
            self._sender.send(loop.history)

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Wait for what is not sent yet, up to the limit, and log what remains."""
        if self._sender is None:
            return
        message = self._sender.send_rest(loop.history, self._wait)
        if message:
            loop.log({"warning": f"{self._kind}: {message}"})

    def after_end(self, loop: LoopView, error: BaseException | None) -> None:
        """Upload the files, which other hooks have written now, and end the tracked run."""
        sender, self._sender = self._sender, None
        if sender is None:
            return
        status = "interrupted" if loop.unfinished else "finished"
        if error is not None:
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        directory = self._store.directory if self._upload else None
        fault = sender.finish(directory, status, self._wait)
        if fault:
            warnings.warn(f"{self._kind}: {fault}", TreadleWarning, stacklevel=2)


class _Store:
    """The id of the tracked run and the last step that was sent, in a file of the run directory."""

    def __init__(self, directory: Path | None, name: str) -> None:
        self.directory, self._name = directory, name
        self.run: str | None = None
        self.step, self.is_closed = 0, False
        if directory is None or not (directory / name).exists():
            return
        with Folder.open(directory) as folder:
            data = folder.read(name, MOST_BYTES)
        try:
            found = schema.parse(data, MOST_BYTES)
            _tracked(found, "")
        except ValueError:  # damaged: a new tracked run
            return
        self.run, self.step = found["run"], found["step"]
        self.is_closed = found.get("closed", False)

    def write(self, run: str, step: int, closed: bool = False) -> None:
        """Write the id of the tracked run, the last step that was sent, and whether it ended."""
        self.run, self.step, self.is_closed = run, step, closed
        if self.directory is not None:
            content = json.dumps({"run": run, "step": step, "closed": closed}).encode()
            with Folder.open(self.directory) as folder:
                folder.write(self._name, [content], sync=False)


class _Sender:
    """Sends the history of a run with a client, in a thread that does one job after another."""

    def __init__(
        self, client: Client, store: _Store, settings: Mapping[str, Any], loop: LoopView
    ) -> None:
        self._client, self._store, self._settings = client, store, settings
        unsure = 0 if store.run is None or store.is_closed else client.unsure
        sent = max(0, store.step - unsure)
        self._step = min(sent, loop.progress.step)
        # The records of the last step may not have been sent with it.
        self._records = sum(x.progress.step < self._step for x in loop.history.records)
        self._is_open, self._fault = False, ""
        self._retry, self._pause = 0.0, FIRST_PAUSE
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        threading.Thread(target=self._work, name="treadle-tracker", daemon=True).start()

    def send(self, history: History) -> None:
        """Start to send new values, if the thread is idle."""
        if self._idle.is_set() and time.monotonic() >= self._retry:
            values = list(islice(self._new(history), MOST_STEPS))
            if values or not self._is_open:
                self._start(partial(self._deliver, values))

    def send_rest(self, history: History, seconds: float) -> str:
        """Send for up to some seconds, and describe what was not sent; empty if nothing is left."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._idle.wait(left):
                if next(self._new(history), None) is None:
                    return ""
                time.sleep(max(0.0, min(self._retry - time.monotonic(), left)))
                self.send(history)
        steps = [values.step for values, _ in self._new(history)]
        if not steps:  # sent meanwhile
            return ""
        why = f"the tracker could not be reached ({self._fault})" if self._fault else ""
        return (
            f"{len(steps):,} steps and records of steps {steps[0]:,} to {steps[-1]:,} were not "
            f"sent, because {why or 'the tracker was too slow'}. They are in the history and in "
            "log.jsonl"
        )

    def finish(self, directory: Path | None, status: str, seconds: float) -> str:
        """Upload files and end the tracked run; return what failed, or an empty string."""
        late = f"the end of the run was not sent within {seconds:g} s"
        if not self._idle.is_set():
            return late
        files = _files(directory) if directory is not None else []

        def close() -> None:
            self._open()
            if directory is not None and files:
                self._client.upload(directory, files)
            self._client.close(status)
            self._store.write(str(self._store.run), self._step, closed=True)

        self._start(close)
        self._jobs.put(None)
        if not self._idle.wait(seconds):
            return late
        return self._fault and f"the end of the run could not be sent: {self._fault}"

    def _new(self, history: History) -> Iterator[tuple[Values, int]]:
        """Yield values that were not sent, by step, each with the number of records up to it."""
        now, count = time.time(), self._records
        rows = ((step, 0, numbers) for step, numbers in history.rows(self._step))
        records = ((x.progress.step, 1, x) for x in history.records[count:])
        for step, is_record, found in merge(rows, records, key=itemgetter(0, 1)):
            count += is_record
            if isinstance(found, Record):
                yield Values.of_record(found, now), count
            else:
                yield Values(step, now, found, {}, {}), count

    def _start(self, job: Callable[[], None]) -> None:
        self._idle.clear()
        self._jobs.put(job)

    def _work(self) -> None:
        """Do jobs until the end; the error of the last one is kept for the message."""
        for job in iter(self._jobs.get, None):
            try:
                job()
                self._fault, self._pause = "", FIRST_PAUSE
            except Exception as error:  # of the network, the server or the client's package
                first, *_ = [*str(error).strip().splitlines(), ""]
                self._fault = f"{type(error).__name__}: {first}"[:300]
                self._retry = time.monotonic() + self._pause
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._idle.set()

    def _open(self) -> None:
        if not self._is_open:
            run = self._client.open(self._store.run, self._settings)
            self._store.write(run, self._step)
            self._is_open = True

    def _deliver(self, values: Sequence[tuple[Values, int]]) -> None:
        self._open()
        left = list(values)
        while left:
            sizes = accumulate(value.size for value, _ in left)
            count = max(1, sum(1 for _ in takewhile(MOST_AT_ONCE.__ge__, sizes)))
            self._client.send([value for value, _ in left[:count] if value.size])
            last, self._records = left[count - 1]
            self._step = last.step
            self._store.write(str(self._store.run), last.step)
            del left[:count]


def recorded_settings(loop: LoopView) -> dict[str, Any]:
    """Return the settings of a run by dotted names, as numbers and texts."""
    recorded = loop.directory is not None and (loop.directory / RUN).exists()
    facts = read_run(loop.directory) if recorded and loop.directory else {}
    settings = flattened(facts.get("configuration") or identity(loop.task))
    plain = (bool, int, float, str)
    return {name: x if isinstance(x, plain) else str(x) for name, x in settings.items()}


def _files(directory: Path) -> list[str]:
    """Return the regular files in a run directory, without checkpoints, hidden files and links."""
    found: list[str] = []
    for where, folders, names in os.walk(directory):
        folders[:] = sorted(x for x in folders if x not in LEFT_OUT and not x.startswith("."))
        for name in sorted(names):
            path = Path(where) / name
            if not name.startswith(".") and path.is_file() and not path.is_symlink():
                found.append(str(path.relative_to(directory)))
    return found
