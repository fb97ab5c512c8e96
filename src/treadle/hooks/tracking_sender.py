"""A thread that sends what a run logs to a tracking server.

It sends what a hook puts into a bounded queue. If the server cannot be reached, the thread tries
again, with longer and longer pauses; training goes on.

A run directory holds a small file with the tracked run's id and the last step that was sent. What
the tracker itself says that it received counts more: it may have lost what a killed process sent. A
resumed run repeats the steps after its checkpoint with the same values: those that were received
are not sent again, so that each step appears once.
"""

import json
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from ..core.folder import Folder
from ..core.images import Image

MOST_VALUES: Final = 200_000  # in the queue; each takes about 100 bytes
FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 30.0
MOST_AT_ONCE: Final = 500  # values in a call of the client
MOST_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class Sent:
    """The last step and the number of records that a tracker has received.

    Attributes:
        step: The last step.
        records: The number of records of the history.
    """

    step: int = 0
    records: int = 0


@dataclass(frozen=True)
class Values:
    """Values to send, of one step or one record.

    Attributes:
        step: The step.
        seconds: The time, in seconds since 1970.
        numbers: Name to number.
        sent: What the tracker has received once these values have arrived.
        images: Name to image.
        texts: Name to text.
    """

    step: int
    seconds: float
    numbers: Mapping[str, float]
    sent: Sent
    images: Mapping[str, Image]
    texts: Mapping[str, str]

    @property
    def size(self) -> int:
        """The number of values."""
        return len(self.numbers) + len(self.images) + len(self.texts)


class Client(Protocol):
    """The connection to a tracker; one thread calls all methods but `received`. They may raise.

    Attributes:
        keeps_last_step: Whether the tracker joins what belongs to a step, and stores it when a
            later step comes. What it has received up to a step is complete then, but a process
            that is killed loses what was sent of the last step.
    """

    keeps_last_step: bool

    def received(self, run: str, sent: Sent) -> Sent:
        """Return what has at least arrived of what was sent, without connecting.

        Args:
            run: The id of the tracked run.
            sent: What was sent.
        """
        ...

    def open(self, run: str | None, settings: Mapping[str, Any]) -> tuple[str, Sent | None]:
        """Create a tracked run, or continue one.

        Args:
            run: The id of the run to continue, or None.
            settings: The settings of the run, by dotted names.

        Returns:
            The id, and what the tracker says that it has received, or None if it does not say.
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


class Store:
    """The id of the tracked run and what was sent, in a file if there is a run directory."""

    def __init__(self, directory: Path | None, name: str) -> None:
        self.directory, self._name = directory, name
        self._kept: tuple[str | None, Sent] = None, Sent()

    def read(self) -> tuple[str | None, Sent]:
        """Return the id of the tracked run, or None, and what was sent."""
        if self.directory is None or not (self.directory / self._name).exists():
            return self._kept if self.directory is None else (None, Sent())
        with Folder.open(self.directory) as folder:
            data = folder.read(self._name, MOST_BYTES)
        try:
            found = json.loads(data)
            return str(found["run"]), Sent(int(found["step"]), int(found["records"]))
        except (ValueError, TypeError, KeyError):  # damaged: a new tracked run
            return None, Sent()

    def write(self, run: str, sent: Sent) -> None:
        """Keep the id of the tracked run and what was sent."""
        self._kept = run, sent
        if self.directory is not None:
            content = json.dumps({"run": run, "step": sent.step, "records": sent.records})
            with Folder.open(self.directory) as folder:
                folder.write(self._name, [content.encode()], sync=False)


class Sender:
    """A thread that sends values from a bounded queue.

    Args:
        client: The client.
        store: The file with the id of the tracked run.
        settings: The settings of the run.

    Attributes:
        received: What has at least arrived when training starts.
    """

    def __init__(self, client: Client, store: Store, settings: Mapping[str, Any]) -> None:
        self._client, self._store, self._settings = client, store, settings
        self._changed = threading.Condition()
        self._queue: deque[tuple[Values, bool]] = deque()
        self._size, self._busy, self._closing = 0, False, False
        self._run, sent = store.read()
        self.received = sent if self._run is None else client.received(self._run, sent)
        self._sent = self._stored = self.received
        self._complete = self.received.step if client.keeps_last_step else 0
        self._held: list[Values] = []  # of the last step, if the client keeps it
        self._is_open, self._fault = False, ""
        self._lost: list[int] = []  # the first and the last step that did not fit, and their number
        self._end: tuple[Path | None, Sequence[str], str] | None = None
        self._done = threading.Event()
        threading.Thread(target=self._work, name="treadle-tracker", daemon=True).start()

    def put(self, values: Sequence[Values], is_record: bool = False) -> None:
        """Add values; those that do not fit are counted as lost."""
        with self._changed:
            for value in values:
                if self._size + value.size > MOST_VALUES:
                    first, _, count = self._lost or (value.step, value.step, 0)
                    self._lost = [first, value.step, count + 1]
                    continue
                self._size += value.size
                self._queue.append((value, is_record))
            self._changed.notify_all()

    def drain(self, seconds: float) -> None:
        """Wait until everything is sent, but no longer than this."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._queue and not self._busy, seconds)

    def unsent(self) -> str:
        """Describe what was not sent; empty if everything was."""
        with self._changed:
            steps = [value.step for value, _ in self._queue]
            count = len(steps) + (self._lost[2] if self._lost else 0)
            steps += self._lost[:2]
            fault = f" ({self._fault})" if self._fault else ""
        if not count:
            return ""
        why = f"the tracker could not be reached{fault}" if fault else "the tracker was too slow"
        return (
            f"{count:,} steps and records of steps {min(steps):,} to {max(steps):,} were not sent, "
            f"because {why}. They are in the history and in log.jsonl"
        )

    def finish(
        self, directory: Path | None, files: Sequence[str], status: str, seconds: float
    ) -> str:
        """Upload files and end the tracked run; return what failed, or an empty string."""
        with self._changed:
            self._end = directory, files, status
            self._queue.clear()
            self._changed.notify_all()
        if self._done.wait(seconds):
            return self._fault and f"the end of the run could not be sent: {self._fault}"
        return f"the end of the run was not sent within {seconds:g} s"

    def _work(self) -> None:
        """Send until the end; all errors of the client are kept for the message."""
        pause = FIRST_PAUSE
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._queue or self._end is not None or self._closing
                )
                end = self._end
                if end is None and not self._queue and self._is_open:
                    self._changed.wait(0.1)
                    continue
            try:
                self._open()
                self._send()
                if end is not None:
                    self._finish(*end)
                self._fault, pause = "", FIRST_PAUSE
            except Exception as error:  # of the network, the server or the client's package
                self._fault = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"[:300]
                if end is not None:
                    break
                with self._changed:
                    self._busy = False
                    self._changed.wait_for(lambda: self._end is not None, pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            if end is not None:
                break
        self._done.set()

    def _open(self) -> None:
        if not self._is_open:
            run, known = self._client.open(self._run, self._settings)
            self._run = run
            if known is not None:
                self._sent = self._stored = known
                self._complete = known.step if self._client.keeps_last_step else 0
            self._store.write(run, self._sent)
            self._is_open = True

    def _send(self) -> None:
        """Send what is in the queue; values leave it when they have arrived."""
        while True:
            with self._changed:
                chosen: list[tuple[Values, bool]] = []
                size = 0
                for entry in self._queue:
                    size += entry[0].size
                    if chosen and size > MOST_AT_ONCE:
                        break
                    chosen.append(entry)
                self._busy = bool(chosen)
                if not chosen:
                    self._changed.notify_all()
                    return
            new = [value for value, is_record in chosen if self._is_new(value, is_record)]
            if new:
                self._client.send(new)
                self._sent = newest([self._sent, *(value.sent for value in new)])
                last = new[-1].step if self._client.keeps_last_step else None
                # What was sent before for this step has arrived as well, once a later step came.
                arrived = [x.sent for x in [*self._held, *new] if x.step != last]
                self._held = [x for x in [*self._held, *new] if x.step == last]
                if arrived:
                    self._stored = newest([self._stored, *arrived])
                    self._store.write(str(self._run), self._stored)
            with self._changed:
                for entry in chosen:
                    if self._queue and self._queue[0] is entry:
                        self._queue.popleft()
                        self._size -= entry[0].size
                self._busy = False
                self._changed.notify_all()

    def _is_new(self, value: Values, is_record: bool) -> bool:
        if is_record:
            return value.sent.records > self._sent.records and value.step > self._complete
        return value.step > self._sent.step

    def _finish(self, directory: Path | None, files: Sequence[str], status: str) -> None:
        if directory is not None and files:
            self._client.upload(directory, files)
        self._client.close(status)
        self._store.write(str(self._run), self._sent)


def newest(sent: Sequence[Sent]) -> Sent:
    """Return the largest step, and the largest number of records.

    Example:
        >>> newest([Sent(step=3), Sent(records=2)])
        Sent(step=3, records=2)
    """
    return Sent(max(x.step for x in sent), max(x.records for x in sent))
