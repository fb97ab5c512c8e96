"""The processes that train one task together, each on its own devices.

All of them run the same script with the same data and the same seed, so they take the same
decisions. What may differ between them (clocks, signals, files) is agreed on by an exchange of
short messages. One of them, the chief, writes files and shows progress.
"""

from typing import Any, Protocol


class ProcessGroup(Protocol):
    """The processes of a run.

    Attributes:
        rank: The number of this process, from 0. Process 0 is the chief.
        size: The number of processes.
    """

    @property
    def rank(self) -> int:
        """The number of this process."""
        ...

    @property
    def size(self) -> int:
        """The number of processes."""
        ...

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all processes by rank; all must call this at the same point.

        Args:
            value: A value of JSON types.
        """
        ...


class SingleProcess:
    """A process that trains alone."""

    rank, size = 0, 1

    def exchange(self, value: Any) -> list[Any]:
        """Return the value in a list."""
        return [value]


_group: ProcessGroup = SingleProcess()


def process_group() -> ProcessGroup:
    """Return the group of this process, which has one member unless `join` was called."""
    return _group


def join(group: ProcessGroup) -> None:
    """Make this process a member of a group."""
    global _group
    _group = group


def is_chief() -> bool:
    """Return whether this process writes files and shows progress.

    Example:
        >>> is_chief()
        True
    """
    return _group.rank == 0


def of_chief(value: Any) -> Any:
    """Return the chief's value, of JSON types; all processes must call this at the same point."""
    return _group.exchange(value if is_chief() else None)[0] if _group.size > 1 else value
