"""Messages between the processes of a run: an exchange of values, and who has failed.

Every process is connected to process 0, over TCP. Values are JSON, and short: arrays go through the
framework's own collective operations. A connection that closes shows at once that a process has
ended, even if it was killed, so that the others do not wait for it in an operation that would never
return (JAX waits for minutes).
"""

import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final

from ..core.processes import free_port as free_port
from ..core.terminal import clean
from ..errors import ConfigurationError, ProcessError

_LENGTH: Final = struct.Struct("!I")
MOST_BYTES: Final = 64 << 20
"""The longest message."""
FIRST_BYTES: Final = 1 << 16
FIRST_SECONDS: Final = 5.0
"""The size of a first message and the time for it: it may be that of any program."""
WAIT_SECONDS: Final = 300.0
"""How long processes wait at the start until all others have started."""
GRACE_SECONDS: Final = 10.0
"""How long a process may go on after another one has failed; it may be in a collective operation
that never returns."""
MESSAGE_SECONDS: Final = 0.5
WARN_SECONDS: Final = 30.0
MOST_SECONDS: Final = 600.0
"""How long a process waits for another one in an exchange; a warning comes before."""
_EQUAL_CALLS: Final = "all processes must make the same calls of the loop, and stop it together"
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 4))


class Channel:
    """A group of processes that are connected to process 0.

    It is a `core.processes.ProcessGroup`.

    Args:
        rank: The number of this process.
        size: The number of processes.
        links: The connections: to all others by rank in process 0, to process 0 in others.
        leave: Ends this process if it goes on for `GRACE_SECONDS` after another one has failed.

    Attributes:
        rank: The number of this process.
        size: The number of processes.
        local_rank: The number of this process among those of its machine, from 0.
        local_size: The number of processes on this machine.
        failed: Whether this or another process has failed, so that all end.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        links: Mapping[int, socket.socket],
        leave: Callable[[str], None] | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self._links, self._leave = dict(links), leave or _leave
        self._received: dict[int, SimpleQueue[Any]] = {other: SimpleQueue() for other in links}
        self._count, self._closing = 0, False
        self._failure: str | None = None
        self.failed = self._alone = False
        self._timer: threading.Timer | None = None  # which ends this process
        self._state, self._lock = threading.Lock(), threading.Lock()
        self._reported: dict[str, dict[int, Any]] = {}
        self._report_came = threading.Condition()
        for other in links:
            threading.Thread(target=self._listen, args=(other,), daemon=True).start()
        hosts = self.exchange(socket.gethostname(), "joining")
        mine = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        self.local_rank, self.local_size = mine.index(rank), len(mine)

    def exchange(self, value: Any, at: str) -> list[Any]:
        """Return the values of all processes by rank; all must call this at the same point.

        Args:
            value: A value of JSON types.
            at: What this process is doing, for messages; the same in all processes.

        Raises:
            ProcessError: Another process has failed, has ended, or does something else.
        """
        self._count += 1
        mine = {"kind": "value", "number": self._count, "at": at}
        if self.rank:
            self._send(0, {**mine, "value": value})
            return self._next(0, at)["value"]
        found = [value, *(self._next(other, at)["value"] for other in sorted(self._links))]
        for other in self._links:
            self._send(other, {**mine, "value": found})
        return found

    def report(self, value: Any, about: str) -> None:
        """Send a value to process 0, which collects it with `reports`; from any thread."""
        self._send(0, {"kind": "report", "rank": self.rank, "about": about, "value": value})

    def reports(self, about: str) -> list[Any]:
        """Wait in process 0 for the values that all others report, by rank; in any thread.

        Raises:
            ProcessError: Another process has failed, or has not reported after `MOST_SECONDS`.
        """
        end = time.monotonic() + MOST_SECONDS
        with self._report_came:
            found = self._reported.setdefault(about, {})
            while len(found) < self.size - 1:
                self._report_came.wait(timeout=1.0)
                missing = sorted(set(self._links) - set(found))
                if missing and self._failure is not None:
                    raise ProcessError(self._failure)
                if missing and time.monotonic() > end:
                    raise ProcessError(
                        f"process 0 has waited {MOST_SECONDS:.0f} s for process {missing[0]}, "
                        f"about {about}"
                    )
            del self._reported[about]
        return [found[rank] for rank in sorted(found)]

    def fail(self, error: BaseException) -> None:
        """Say to the other processes that this one has failed, so that they end too.

        Raises:
            ProcessError: Another process has failed. Then an operation that communicates with it
                raises an error too, perhaps before its message has arrived.
        """
        if self.failed and self._failure is None:
            return  # the others know
        end = time.monotonic() + MESSAGE_SECONDS
        while self._failure is None and time.monotonic() < end:
            time.sleep(0.02)
        if self._failure is not None:
            raise ProcessError(self._failure) from error
        self.failed = True
        self._tell(self.rank, f"process {self.rank} failed: {type(error).__name__}: {error}")

    def abandon(self, error: BaseException) -> None:
        """Leave the group because of an error; this process may then continue without it."""
        with suppress(ProcessError):
            self.fail(error)
        with self._state:
            self._alone = True
            if self._timer is not None:  # the others may have ended already
                self._timer.cancel()
        self.close()

    def close(self) -> None:
        """Say to the other processes that this one ends as planned, and close the connections."""
        self._closing = True
        for other, link in self._links.items():
            with suppress(ProcessError):
                self._send(other, {"kind": "left", "rank": self.rank})
            with suppress(OSError):
                link.shutdown(socket.SHUT_WR)

    def _send(self, other: int, message: Mapping[str, Any]) -> None:
        data = json.dumps(message).encode()
        try:
            with self._lock:
                self._links[other].sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise self._error(other) from error

    def _next(self, other: int, at: str) -> Any:
        """Return the next message of a process, which must belong to this exchange."""
        began, warned = time.monotonic(), False
        while True:
            try:
                message = self._received[other].get(timeout=1.0)
            except Empty:
                if self._failure is not None:
                    raise ProcessError(self._failure) from None
                waited = time.monotonic() - began
                text = f"process {self.rank} has waited {waited:.0f} s for process {other}, at {at}"
                if waited > MOST_SECONDS:
                    error = ProcessError(f"{text}: {_EQUAL_CALLS}")
                    self.fail(error)
                    raise error from None
                if waited > WARN_SECONDS and not warned:
                    warned = True
                    print(f"treadle: {text}", file=sys.stderr, flush=True)
                continue
            if message is None:
                raise self._error(other)
            if (message["number"], message["at"]) != (self._count, at):
                error = ProcessError(
                    f"process {other} is at {message['at']}, and process {self.rank} at {at}: "
                    f"{_EQUAL_CALLS}"
                )
                self.fail(error)
                raise error
            return message

    def _error(self, other: int) -> ProcessError:
        if self._failure is None:  # the thread that listens may not have noticed yet
            self._received[other].put(None)
            time.sleep(0.1)
        return ProcessError(self._failure or _ended(other))

    def _listen(self, other: int) -> None:
        """Receive the messages of a process until its connection closes."""
        link, left = self._links[other], False
        while True:
            try:
                message = receive(link)
            except (OSError, ValueError, EOFError):
                break
            kind = message.get("kind")
            if kind == "failed":
                self._failed(message["rank"], message["why"])
            elif kind == "left":
                left = True
                break
            elif kind == "report":
                with self._report_came:
                    self._reported.setdefault(message["about"], {})[other] = message["value"]
                    self._report_came.notify_all()
            else:
                self._received[other].put(message)
        if not left and not self._closing:
            self._failed(other, _ended(other))
        elif self._failure is None and not self._closing and not self.failed:
            self._failure = (
                f"process {other} has ended its script, but process {self.rank} still trains: "
                f"{_EQUAL_CALLS}"
            )
        self._received[other].put(None)

    def _failed(self, rank: int, why: str) -> None:
        """Note a failure, pass it on, and end this process if it does not end by itself."""
        with self._state:
            if self._failure is not None or self._alone:
                return
            self.failed = True
            self._failure = (
                f"{clean(why, limit=500)}. This process ends too; start all processes again, and "
                "the run resumes from its newest checkpoint"
            )
            self._timer = threading.Timer(GRACE_SECONDS, lambda: self._leave(self._failure or ""))
            self._timer.daemon = True
            self._timer.start()
        if self.rank in (0, rank):
            self._tell(rank, why)

    def _tell(self, rank: int, why: str) -> None:
        """Tell the connected processes that a process has failed."""
        for other in self._links:
            if other != rank:
                with suppress(ProcessError):
                    self._send(other, {"kind": "failed", "rank": rank, "why": why})


def _ended(rank: int) -> str:
    return f"process {rank} has ended without a message; it may have been killed"


def _leave(why: str) -> None:
    """End this process, whatever it waits for. Checkpoints are complete at any time."""
    print(f"treadle: {why}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def receive(
    link: socket.socket, most: int = MOST_BYTES, end: float | None = None
) -> dict[str, Any]:
    """Return the next message.

    Args:
        link: The connection.
        most: The most bytes of a message.
        end: The time of the monotonic clock at which to give up, or None.

    Raises:
        EOFError: The connection was closed.
        ValueError: The message is not valid.
        OSError: The connection failed, or the time is over.
    """
    (length,) = _LENGTH.unpack(_exactly(link, _LENGTH.size, end))
    if length > most:
        raise ValueError(f"a message has {length:,} bytes; at most {most:,} are expected")
    try:
        message = json.loads(_exactly(link, length, end))
    except RecursionError as error:
        raise ValueError("a message is nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError(f"a message is {message!r:.80}; expected a dict")
    return message


def send(link: socket.socket, message: Mapping[str, Any]) -> None:
    """Send a message."""
    data = json.dumps(message).encode()
    link.sendall(_LENGTH.pack(len(data)) + data)


def _exactly(link: socket.socket, count: int, end: float | None) -> bytes:
    parts: list[bytes] = []
    while count:
        if end is not None:
            link.settimeout(max(0.01, end - time.monotonic()))
        part = link.recv(min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def listen(host: str, port: int, size: int, wait: float = WAIT_SECONDS) -> "dict[int, Any]":
    """Accept the connections of all other processes in process 0.

    Args:
        host: The address of this machine that others use, for messages.
        port: The port.
        size: The number of processes.
        wait: The seconds to wait.

    Returns:
        Each process's connection and first message, by rank.

    Raises:
        ConfigurationError: The port is in use, or a process does not connect in time.
    """
    try:
        # Processes of one machine need no port that other machines can reach.
        address = host if host in ("127.0.0.1", "localhost") else ""
        server = socket.create_server((address, port), backlog=size, reuse_port=False)
    except OSError as error:
        raise ConfigurationError(
            f"process 0 cannot listen on port {port}: {error.strerror}. End the program that uses "
            "it, or choose another port in all processes with the environment variable TREADLE_PORT"
        ) from error
    found: dict[int, tuple[socket.socket, dict[str, Any]]] = {}
    end = time.monotonic() + wait
    with server:
        while len(found) < size - 1:
            server.settimeout(max(0.01, end - time.monotonic()))
            try:
                link, _ = server.accept()
            except TimeoutError as error:
                missing = sorted(set(range(1, size)) - set(found))
                raise ConfigurationError(
                    f"process 0 waited {wait:.0f} s on {host}, port {port}, for "
                    f"{'processes' if len(missing) > 1 else 'process'} "
                    f"{', '.join(map(str, missing))} of {size}: check that all were started, and "
                    "reach this address"
                ) from error
            try:
                # Not only ours: any program may connect.
                first = receive(link, FIRST_BYTES, time.monotonic() + FIRST_SECONDS)
            except (OSError, ValueError, EOFError):
                link.close()
                continue
            rank = first.get("rank")
            new = isinstance(rank, int) and 0 < rank < size and rank not in found
            if new and first.get("token") == _token():
                found[rank] = _prepared(link), first  # type: ignore[reportArgumentType]
            else:
                link.close()
    return found


def connect(host: str, port: int, first: Mapping[str, Any], wait: float = WAIT_SECONDS) -> Any:
    """Connect to process 0, and send the first message.

    Raises:
        ConfigurationError: Process 0 cannot be reached in time.
    """
    end = time.monotonic() + wait
    while True:
        try:
            link = socket.create_connection((host, port), timeout=10)
            send(link, {**first, "token": _token()})
            return _prepared(link)
        except OSError as error:
            if time.monotonic() > end:
                raise ConfigurationError(
                    f"process {first['rank']} cannot reach process 0 at {host}, port {port}, for "
                    f"{wait:.0f} s: {error.strerror or error}. Check the address, and that "
                    "process 0 was started and is allowed to listen there"
                ) from error
            time.sleep(0.1)


def answer(link: socket.socket, host: str, port: int) -> dict[str, Any]:
    """Return the answer of process 0 to the first message.

    Raises:
        ConfigurationError: Process 0 has closed the connection.
    """
    try:
        return receive(link)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigurationError(
            f"process 0 at {host}, port {port}, closed the connection: it has ended (see its "
            "output), or it belongs to other processes. Start all processes with the same number "
            "of them; for two runs at a time, set TREADLE_PORT to another port in each"
        ) from error


def _token() -> str:
    """Return what processes of one launch have in common, so that no other one joins by mistake."""
    return os.environ.get("TREADLE_TOKEN", "")


def _prepared(link: socket.socket) -> socket.socket:
    """Return a connection that sends at once, and notices a machine that is lost."""
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return link
