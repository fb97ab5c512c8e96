"""The base class of hooks that send a run to a tracking server, without waiting for it.

What the hook collects goes into the queue of a thread, see `tracking_sender`. What was not sent is
reported when training ends, and is in the log of the run.
"""

import importlib.util
import os
import time
import warnings
from pathlib import Path
from typing import Any, Final

from ..core.directory import RUN, read_run
from ..core.hook import DetailedHook, LoopView
from ..core.identity import identity
from ..core.images import Image
from ..core.logs import Record, StepLogs
from ..core.run_file import flattened
from ..core.values import plain
from ..errors import ConfigurationError, TreadleWarning
from .tracking_sender import Client, Sender, Sent, Store, Values

LEFT_OUT: Final = ("checkpoints", "wandb")  # and hidden files


class Tracker(DetailedHook):
    """Base class: collects what a run logs, and sends it with a client in a thread.

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
        if importlib.util.find_spec(package) is None:
            raise ConfigurationError(
                f"the hook {self._kind} needs the package {package}, which is not installed: "
                f"pip install 'treadle[{package}]'"
            )
        if wait < 0:
            raise ConfigurationError(f"{self._kind} needs wait >= 0 seconds, not {wait!r}")
        self._upload, self._wait = upload, wait
        self._sender: Sender | None = None
        self._store: Store | None = None
        self._directory: Path | None = None

    def client(self, directory: Path | None) -> Client:
        """Return a client, which does not connect before `open`."""
        raise NotImplementedError

    def start(self, loop: LoopView) -> None:
        """Start the thread; the run in the directory, if there is one, is continued."""
        self._directory = loop.directory
        if self._sender is None:
            if self._store is None or self._store.directory != loop.directory:
                self._store = Store(loop.directory, self._file)
            elif loop.directory is None and loop.progress.step == 0:
                self._store = Store(None, self._file)
            store = self._store
            self._sender = Sender(self.client(loop.directory), store, recorded_settings(loop))
            self._send_missing(loop, self._sender.received)

    def _send_missing(self, loop: LoopView, sent: Sent) -> None:
        """Put what a killed process logged and did not send into the queue, from the history."""
        assert self._sender is not None
        history, now = loop.history, time.time()
        first = history.first_step
        names = history.step_names if first is not None else []
        begin = max(first or 1, sent.step + 1)
        columns = [history.steps(name)[begin - (first or 1) :].tolist() for name in names]
        records = [
            (number, record)
            for number, record in enumerate(history.records, 1)
            if number > sent.records
        ]
        # In the order of the steps: some trackers refuse a step below the last one.
        for step, row in enumerate(zip(*columns, strict=True), begin):
            while records and records[0][1].progress.step < step:
                number, record = records.pop(0)
                self._put_record(record, number)
            values = dict(zip(names, row, strict=True))
            self._sender.put([Values(step, now, values, Sent(step, 0), {}, {})])
        for number, record in records:
            self._put_record(record, number)

    def steps(self, loop: LoopView, logs: StepLogs) -> None:
        """Put the values of every step into the queue."""
        if self._sender is not None:
            now = time.time()
            rows = logs.rows()
            self._sender.put([Values(n, now, values, Sent(n), {}, {}) for n, values in rows])

    def record(self, loop: LoopView, record: Record) -> None:
        """Put the values of a record into the queue."""
        self._put_record(record, len(loop.history.records))

    def _put_record(self, record: Record, count: int) -> None:
        """Put the values of a record into the queue.

        Args:
            record: The record.
            count: The number of records up to this one.
        """
        if self._sender is None:
            return
        parts: tuple[dict[str, Any], ...] = {}, {}, {}
        for name, value in record.values.items():
            number = None if isinstance(value, Image) else plain(value)
            if isinstance(value, Image):
                parts[1][name] = value
            elif isinstance(number, str):
                parts[2][name] = number
            elif number is not None:
                # Steps have values of the same names, of which a record holds the means.
                mean = record.kind != "log" and not name.startswith("val_")
                parts[0][f"epoch/{name}" if mean else name] = float(number)
        numbers, images, texts = parts
        if not (numbers or images or texts):
            return
        step = record.progress.step
        # The steps up to this one were put into the queue before, but not all of a later window.
        values = Values(step, time.time(), numbers, Sent(0, count), images, texts)
        self._sender.put([values], is_record=True)

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Wait for what is not sent yet, up to the limit, and log what remains."""
        if self._sender is None:
            return
        self._sender.drain(self._wait)
        message = self._sender.unsent()
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
        files = _files(self._directory) if self._upload and self._directory is not None else []
        fault = sender.finish(self._directory, files, status, self._wait)
        if fault:
            warnings.warn(f"{self._kind}: {fault}", TreadleWarning, stacklevel=2)


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
