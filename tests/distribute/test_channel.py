"""Groups of processes: the channel between them, and what they agree on."""

import json
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.waiting import WATCHDOG, until
from treadle.core import processes
from treadle.core.directory import LostRecordError
from treadle.core.progress import Progress
from treadle.distribute import channel as channels
from treadle.distribute import group as groups
from treadle.distribute.channel import (
    Channel,
    answer,
    connect,
    listen,
    receive,
    send,
)
from treadle.errors import ConfigurationError, DirectoryError, ProcessError
from treadle.run.call import Call


def in_threads(functions: list[Callable[[], Any]]) -> list[Any]:
    """Return the results, or exceptions, of functions that run at the same time."""
    results: list[Any] = [None] * len(functions)

    def run(i: int) -> None:
        try:
            results[i] = functions[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=WATCHDOG)
    assert not any(thread.is_alive() for thread in threads)
    return results


class Group:
    """Three channels in one process, and why any of them would have ended its process."""

    def __init__(self) -> None:
        self.ended: dict[int, str] = {}
        pairs = {1: socket.socketpair(), 2: socket.socketpair()}
        self.sockets = [s for pair in pairs.values() for s in pair]
        self.members = in_threads(
            [
                lambda: Channel(0, 3, {r: p[0] for r, p in pairs.items()}, self.leave(0)),
                lambda: Channel(1, 3, {0: pairs[1][1]}, self.leave(1)),
                lambda: Channel(2, 3, {0: pairs[2][1]}, self.leave(2)),
            ]
        )

    def leave(self, rank: int) -> Callable[[str], None]:
        return lambda why: self.ended.__setitem__(rank, why)

    def each(self, function: Callable[[Channel], Any]) -> list[Any]:
        return in_threads([lambda member=member: function(member) for member in self.members])

    def kill(self, rank: int) -> None:
        """Close the connection of a process as the system does when it is killed."""
        self.sockets[2 * rank - 1].shutdown(socket.SHUT_RDWR)
        self.sockets[2 * rank - 1].close()


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Generator[Group]:
    monkeypatch.setattr(channels, "GRACE_SECONDS", 0.3)
    group = Group()
    yield group
    for member in group.members:
        member.close()
    for link in group.sockets:
        with suppress(OSError):  # of a process that was killed
            link.shutdown(socket.SHUT_RDWR)
        link.close()


def test_all_processes_get_the_values_of_all_in_order(group: Group) -> None:
    for _ in range(3):
        assert group.each(lambda m: m.exchange([m.rank], "a test")) == [[[0], [1], [2]]] * 3


def test_a_process_that_leaves_with_an_error_may_go_on_alone(group: Group) -> None:
    """A script that catches the error of `treadle.setup` is not ended when the others are."""
    chief = group.members[0]
    group.kill(1)
    with pytest.raises(ProcessError, match="process 1 has ended without a message"):
        chief.exchange(0, "a test")
    chief.abandon(ValueError("planted"))
    group.kill(2)
    time.sleep(2 * channels.GRACE_SECONDS)
    assert 0 not in group.ended


def test_arrays_of_any_size_are_exchanged_in_short_messages(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None, or more than one message holds; of any dtype; in any order of bytes."""
    monkeypatch.setattr(groups, "MOST_TOGETHER", 1 << 10)
    sent = [
        [],
        [np.arange(3000, dtype=">i4").reshape(2, -1), np.zeros((0, 3)), np.array(True)],
        [np.ones(5, ml_dtypes.bfloat16), np.arange(6.0).reshape(2, 3).T],
    ]

    for found in group.each(lambda m: m.exchange_arrays(sent[m.rank], "a test")):
        for theirs, expected in zip(found, sent, strict=True):
            assert [(x.shape, x.dtype.name) for x in theirs] == [
                (x.shape, x.dtype.name) for x in expected
            ]
            assert all((a == b).all() for a, b in zip(theirs, expected, strict=True))


def test_processes_of_one_machine_are_numbered(group: Group) -> None:
    assert [(m.local_rank, m.local_size) for m in group.members] == [(0, 3), (1, 3), (2, 3)]


def test_a_killed_process_ends_the_exchange_of_the_others(group: Group) -> None:
    others = [m for m in group.members if m.rank != 1]
    group.kill(1)
    found = in_threads([lambda m=m: m.exchange(0, "a window") for m in others])
    for error in found:
        assert isinstance(error, ProcessError)
        assert str(error) == (
            "process 1 has ended without a message; it may have been killed. This process ends "
            "too; start all processes again, and the run resumes from its newest checkpoint"
        )


def test_a_process_that_waits_elsewhere_is_ended_after_a_failure(group: Group) -> None:
    group.members[2].fail(ValueError("no such file"))
    until(lambda: len(group.ended) >= 2, "the end of both other processes")
    assert set(group.ended) == {0, 1}
    for why in group.ended.values():
        assert why.startswith("process 2 failed: ValueError: no such file. This process ends too")


def test_an_error_that_follows_from_another_process_is_explained(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "MESSAGE_SECONDS", WATCHDOG)  # until the message comes
    group.kill(1)
    with pytest.raises(ProcessError, match="process 1 has ended without a message") as raised:
        group.members[2].fail(RuntimeError("connection reset by peer"))
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_processes_that_do_different_things_are_named(group: Group) -> None:
    found = group.each(lambda m: m.exchange(0, "validating" if m.rank == 2 else "a window"))
    assert str(found[0]) == (
        "process 2 is at validating, and process 0 at a window: all processes must make the same "
        "calls of the loop, and stop it together"
    )
    assert all(isinstance(error, ProcessError) for error in found)


def test_a_process_that_ends_its_script_early_is_named(group: Group) -> None:
    group.members[1].close()
    found = in_threads([lambda: group.members[0].exchange(0, "a window")])
    assert str(found[0]) == (
        "process 1 has ended its script, but process 0 still trains: all processes must make the "
        "same calls of the loop, and stop it together"
    )


class Clock:
    """Stands for the clock and for a queue that stays empty: time passes where one waits."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, timeout: float) -> None:
        self.now += timeout


def test_a_process_that_waits_too_long_gives_up(
    group: Group, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(channels, "time", clock)
    monkeypatch.setattr(group.members[0]._arrived, "wait", clock.sleep)
    found = in_threads([lambda: group.members[0].exchange(0, "a window")])
    assert str(found[0]) == (
        "process 0 has waited 601 s for process 1, at a window: all processes must make the same "
        "calls of the loop, and stop it together"
    )
    assert capsys.readouterr().err == (
        "treadle: process 0 has waited 31 s for process 1, at a window\n"
    )


def test_an_invalid_message_counts_as_a_failure(group: Group) -> None:
    group.sockets[1].sendall(b"\xff\xff\xff\xff not a message")
    found = in_threads([lambda: group.members[0].exchange(0, "a window")])
    assert isinstance(found[0], ProcessError)


@pytest.fixture
def port() -> Generator[int]:
    """A port that no other program gets meanwhile; in this process, one may listen on it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield held.getsockname()[1]


def opened(port: int) -> socket.socket:
    """Connect to process 0 as any program may, as soon as it listens."""
    links = list[socket.socket]()

    def listens() -> bool:
        with suppress(ConnectionRefusedError):
            links.append(socket.create_connection(("127.0.0.1", port)))
        return bool(links)

    until(listens, "listening")
    return links[0]


def test_connecting(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setenv("TREADLE_TOKEN", "secret")
    monkeypatch.setattr(channels, "FIRST_SECONDS", WATCHDOG)

    def foreign() -> None:
        deep = b"[" * 60_000
        for first in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x00\x00\x00\x02[]",
            len(deep).to_bytes(4, "big") + deep,
        ):
            with opened(port) as link:
                link.sendall(first)
        for known in ({"rank": 1, "token": "guessed"}, {"rank": 1e400, "token": "secret"}):
            with opened(port) as link:
                send(link, known)

    def member() -> Any:
        foreign()
        link = connect("127.0.0.1", port, {"rank": 1}, WATCHDOG)
        answer = receive(link)
        link.close()
        return answer

    def chief() -> Any:
        found = listen("127.0.0.1", port, 2, WATCHDOG)
        send(found[1][0], {"address": "here"})
        found[1][0].close()
        return {rank: first for rank, (_, first) in found.items()}

    found = in_threads([chief, member])
    assert found[0] == {1: {"rank": 1, "token": "secret"}}
    assert found[1] == {"address": "here"}


def test_processes_that_do_not_start_are_named(port: int) -> None:
    with pytest.raises(ConfigurationError, match=r"for processes 1, 2 of 3: check that all were"):
        listen("127.0.0.1", port, 3, wait=0.2)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"cannot listen on port {port}: .* TREADLE_P"):
            listen("127.0.0.1", port, 2)


def test_a_chief_that_is_not_there_is_named(port: int) -> None:
    with pytest.raises(
        ConfigurationError, match=f"process 1 cannot reach process 0 at 127.0.0.1, port {port}"
    ):
        connect("127.0.0.1", port, {"rank": 1}, wait=0.2)


def test_a_program_that_sends_nothing_does_not_keep_others_waiting(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    is_done = threading.Event()

    def received(link: socket.socket, most: int, end: float) -> Any:
        """Receive; only the first program, which sends nothing, has little time."""
        monkeypatch.setattr(channels, "FIRST_SECONDS", WATCHDOG)
        return receive(link, most, end)

    monkeypatch.setattr(channels, "FIRST_SECONDS", 0.2)
    monkeypatch.setattr(channels, "receive", received)

    def chief() -> Any:
        found = listen("127.0.0.1", port, 2, WATCHDOG)
        found[1][0].close()
        is_done.set()
        return list(found)

    def others() -> None:
        with opened(port) as silent:
            silent.sendall(b"\x00")
            connect("127.0.0.1", port, {"rank": 1}).close()
            assert is_done.wait(WATCHDOG)

    assert in_threads([chief, others]) == [[1], None]


def test_a_chief_of_other_processes_is_named() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(ConfigurationError) as raised:
        answer(ours, "node1", 29501)
    assert str(raised.value) == (
        "process 0 at node1, port 29501, closed the connection: it has ended (see its output), or "
        "it belongs to other processes. Start all processes with the same number of them; for two "
        "runs at a time, set TREADLE_PORT to another port in each"
    )


def test_a_failure_is_told_once(group: Group) -> None:
    group.members[1].fail(ValueError("planted"))
    until(lambda: group.members[0].failed and group.members[2].failed, "the message of process 1")
    group.members[0].close()  # which follows from the failure
    until(lambda: 0 in group.members[1]._gone, "the end of the connection")
    group.members[1].fail(ValueError("planted"))
    with pytest.raises(ProcessError, match="process 1 failed: ValueError: planted"):
        group.members[2].exchange(0, "a window")


class Pair(groups.SeveralProcesses):
    """A group of two, of which the other member sends what the test says."""

    def __init__(self, rank: int, theirs: Any) -> None:
        self.rank, self.size, self._theirs = rank, 2, theirs

    def exchange(self, value: Any, at: str) -> list[Any]:
        value = json.loads(json.dumps(value))
        return [value, self._theirs] if self.rank == 0 else [self._theirs, value]


def test_what_the_chief_reads_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes.is_chief()
    pair = Pair(1, ["", {"step": 3}])
    assert pair.on_chief(pytest.fail, "reading") == {"step": 3}
    monkeypatch.setattr(processes, "_group", pair)
    assert not processes.is_chief()


def test_an_error_of_the_chief_is_one_of_all() -> None:
    def refuse() -> None:
        raise DirectoryError("no such place")

    for pair in (Pair(1, ["DirectoryError", "no such place"]), Pair(0, None)):
        with pytest.raises(DirectoryError, match="no such place"):
            pair.on_chief(refuse, "reading")


def test_errors_of_other_modules_are_sent_as_their_base_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise LostRecordError("run.json is damaged", "damaged")

    sent: list[Any] = []
    monkeypatch.setattr(Pair, "exchange", lambda _, value, at: sent.append(value))
    with pytest.raises(LostRecordError):
        Pair(0, None).on_chief(refuse, "reading")
    assert sent == [["DirectoryError", "run.json is damaged"]]


def test_the_slowest_process_counts() -> None:
    assert Pair(0, 2.0).slowest(0.5, "measuring") == 2.0


def test_slow_bodies_of_loops_do_not_delay_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    now, exchanged = [100.0], list[str]()
    monkeypatch.setattr(groups.time, "monotonic", lambda: now[0])
    pair = Pair(0, [100.0, 0.0001, 0.0, 15])
    both = pair.exchange
    monkeypatch.setattr(
        pair, "exchange", lambda value, at: (exchanged.append(at), both(value, at))[1]
    )
    for seconds, last in ((0.0002, 300), (0.1, 305)):  # from one step to the next
        agreed = pair.agreement()
        call = Call("steps", Progress(), Progress(), agreement=agreed)
        for step in range(1, last):
            now[0] += seconds
            agreed.after_window(step, 0.0001, 0.0, None)
        assert call.signal is not None and call.signal.name == "SIGTERM"
    at = "the window that ends at step"
    assert exchanged[:3] == [f"{at} 1", f"{at} 251", f"{at} 1"]
    assert exchanged[3:] == [f"{at} {step}" for step in range(2, 305)]


def test_different_values_are_named_by_process() -> None:
    pair = Pair(0, {"train": {"examples": 332, "length": 11}})
    with pytest.raises(ProcessError) as raised:
        pair.require_equal("data", {"train": {"examples": 333, "length": 11}})
    assert str(raised.value) == (
        "the data of process 1 and of process 0 differ: train.examples is 332 in process 1, and "
        "333 in process 0. All processes must run the same script with the same data and settings"
    )
    Pair(0, float("nan")).require_equal("setting", float("nan"))
    Pair(0, 3).require_equal("step", 3)


def test_one_process_agrees_with_itself() -> None:
    alone = processes.process_group()
    assert alone.size == 1
    assert alone.on_chief(lambda: 3, "counting") == 3
    assert alone.exchange(4, "a test") == [4]
    assert alone.slowest(0.5, "measuring") == 0.5
    alone.report(1, "parts")
    assert alone.reports("parts") == []


def test_process_0_collects_what_threads_of_others_report(group: Group) -> None:
    for member in group.members[:0:-1]:
        in_threads([lambda member=member: member.report([member.rank], "parts")])
    chief = group.members[0]
    group.members[1].report("later", "others")
    assert chief.reports("parts") == [[1], [2]]
    group.members[2].report("too", "others")
    assert chief.reports("others") == ["later", "too"]


def test_a_report_that_does_not_come(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MOST_SECONDS", 0.0)
    group.members[1].report(None, "parts")
    until(lambda: (1, "parts") in group.members[0]._inbox, "the report of process 1")
    with pytest.raises(
        ProcessError, match=r"^process 0 has waited \d+ s for process 2, about parts$"
    ):
        group.members[0].reports("parts")
    monkeypatch.setattr(channels, "MOST_SECONDS", WATCHDOG)
    group.kill(2)
    with pytest.raises(ProcessError, match=r"^process 2 has ended without a message"):
        group.members[0].reports("parts")
