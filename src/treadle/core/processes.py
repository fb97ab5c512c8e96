"""The processes that train one task together, each on its own devices.

All of them run the same script with the same data and the same seed, so they take the same
decisions. What may differ between them (clocks, signals, files) is agreed on by an exchange of
short messages. One of them, the chief, writes files and shows progress.
"""

import socket
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from .. import errors
from ..errors import ProcessError, TreadleError

T = TypeVar("T")


class ProcessGroup(Protocol):
    """The processes of a run.

    Attributes:
        rank: The number of this process, from 0. Process 0 is the chief.
        size: The number of processes.
        local_rank: The number of this process among those of its machine, from 0.
        local_size: The number of processes on this machine.
    """

    @property
    def rank(self) -> int:
        """The number of this process."""
        ...

    @property
    def size(self) -> int:
        """The number of processes."""
        ...

    @property
    def local_rank(self) -> int:
        """The number of this process on its machine."""
        ...

    @property
    def local_size(self) -> int:
        """The number of processes on its machine."""
        ...

    def exchange(self, value: Any, at: str) -> list[Any]:
        """Return the values of all processes by rank; all must call this at the same point.

        Args:
            value: A value of JSON types.
            at: What this process is doing, for messages; the same in all processes.

        Raises:
            ProcessError: Another process has failed, has ended, or does something else.
        """
        ...

    def report(self, value: Any, about: str) -> None:
        """Send a value to process 0, which collects it with `reports`; from any thread.

        Args:
            value: A value of JSON types.
            about: What the value is about; unique in the run.
        """
        ...

    def reports(self, about: str) -> list[Any]:
        """Wait in process 0 for the values that all others report, by rank; in any thread.

        Raises:
            ProcessError: Another process has failed, or does not report.
        """
        ...

    @property
    def failed(self) -> bool:
        """Whether this or another process has failed, so that all end."""
        ...

    def fail(self, error: BaseException) -> None:
        """Say to the other processes that this one has failed, so that they end too.

        Raises:
            ProcessError: Another process has failed, of which the error is a consequence.
        """
        ...


class SingleProcess:
    """A process that trains alone."""

    rank, size, local_rank, local_size, failed = 0, 1, 0, 1, False

    def exchange(self, value: Any, at: str) -> list[Any]:
        """Return the value in a list."""
        return [value]

    def report(self, value: Any, about: str) -> None:
        """Do nothing: process 0 itself does not report."""

    def reports(self, about: str) -> list[Any]:
        """Return an empty list: there are no other processes."""
        return []

    def fail(self, error: BaseException) -> None:
        """Do nothing: there are no other processes."""


_group: ProcessGroup = SingleProcess()


def process_group() -> ProcessGroup:
    """Return the group of this process, which has one member unless `join` was called."""
    return _group


def join(group: ProcessGroup) -> None:
    """Make this process a member of a group."""
    global _group
    _group = group
    agree_on_time()


def is_chief() -> bool:
    """Return whether this process writes files and shows progress.

    Example:
        >>> is_chief()
        True
    """
    return _group.rank == 0


def own_rows(examples: int, rank: int | None = None, size: int | None = None) -> tuple[int, int]:
    """Return the first row of a batch that a process computes, and their number.

    Each process computes consecutive rows: the first ones may have one more than others.

    Args:
        examples: The number of rows of the whole batch.
        rank: The process; by default this one.
        size: The number of processes.

    Example:
        >>> [own_rows(5, rank, 3) for rank in range(3)]
        [(0, 2), (2, 2), (4, 1)]
    """
    rank, size = _group.rank if rank is None else rank, size or _group.size
    each, more = divmod(examples, size)
    return rank * each + min(rank, more), each + (rank < more)


def on_chief(function: Callable[[], T], at: str) -> T:
    """Return what a function returns in the chief; all processes must call this at the same point.

    The function may read and write files. If it raises an error of Treadle, all processes do.

    Args:
        function: A function that returns a value of JSON types.
        at: What the processes are doing, for messages.

    Example:
        >>> on_chief(lambda: 3, "counting")
        3
    """
    if _group.size == 1:
        return function()
    if not is_chief():
        kind, result = _group.exchange(None, at)[0]
        if kind:
            raise getattr(errors, kind)(result)
        return result
    try:
        result = function()
    except TreadleError as error:
        _group.exchange([_public_name(error), str(error)], at)
        raise
    _group.exchange(["", result], at)
    return result


def _public_name(error: TreadleError) -> str:
    """Return the name of the class of an error, or of its base class, in `treadle.errors`."""
    return next(kind.__name__ for kind in type(error).__mro__ if hasattr(errors, kind.__name__))


def slowest(seconds: float, at: str) -> float:
    """Return the largest of the times that processes took; all must call this at the same point.

    Args:
        seconds: The seconds that this process took.
        at: What the processes are doing, for messages.

    Example:
        >>> slowest(0.25, "measuring")
        0.25
    """
    return seconds if _group.size == 1 else max(_group.exchange(seconds, at))


def require_equal(what: str, value: T) -> T:
    """Check that all processes have the same value; all must call this at the same point.

    Args:
        what: What the value is, for messages.
        value: A value of JSON types.

    Returns:
        The value.

    Raises:
        ProcessError: A process has another value. It is raised in all processes.
    """
    if _group.size == 1:
        return value
    found = _group.exchange(value, f"comparing the {what}")
    for rank, other in enumerate(found):
        if other != found[0]:
            raise ProcessError(
                f"the {what} of process {rank} and of process 0 differ: "
                f"{'; '.join(_differences(other, found[0], rank))}. All processes must run the "
                "same script with the same data and settings"
            )
    return value


def _differences(theirs: Any, chiefs: Any, rank: int, path: str = "") -> list[str]:
    """Describe where a value differs from that of the chief."""
    if isinstance(theirs, dict) and isinstance(chiefs, dict):
        found: list[str] = []
        for key in dict.fromkeys([*theirs, *chiefs]):  # type: ignore[misc]
            one, other = theirs.get(key), chiefs.get(key)  # type: ignore[misc]
            if one != other:
                found += _differences(one, other, rank, f"{path}.{key}" if path else str(key))
        return found
    name = f"{path} " if path else ""
    return [f"{name}is {theirs!r:.200} in process {rank}, and {chiefs!r:.200} in process 0"]


_time = 0.0  # of the chief, when the processes last agreed on it


def clock() -> float:
    """Return the time in seconds, which is the same in all processes.

    In several processes, it is that of the chief when they last agreed on it, so that all of them
    take the same decisions.
    """
    return time.monotonic() if _group.size == 1 else _time


def agree_on_time(values: list[float] | None = None) -> None:
    """Set the clock of all processes.

    Args:
        values: The times of all processes, by rank; by default they are exchanged.
    """
    global _time
    _time = (values or _group.exchange(time.monotonic(), "reading the clock"))[0]


def free_port() -> int:
    """Return a port that no program uses now."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]
