"""The processes that train one task together, as everything outside `distribute` sees them.

All of them run the same script with the same data and the same seed, so they take the same
decisions. What may differ between them (clocks, signals, files) is agreed on by an exchange of
short messages. One of them, the chief, writes files and shows progress.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class ProcessGroup:
    """A process that trains alone; the group of several is `distribute.channel.Channel`.

    Attributes:
        rank: The number of this process, from 0. Process 0 is the chief.
        size: The number of processes.
        local_rank: The number of this process among those of its machine, from 0.
        local_size: The number of processes on this machine.
        failed: Whether this or another process has failed, so that all end.
        launcher: What started this process, by the name that people know; empty if unknown.
        in_thread: Whether the launcher runs code in threads, and ends processes without signals.
    """

    launcher, in_thread = "", False
    rank, size, local_rank, local_size, failed = 0, 1, 0, 1, False

    def exchange(self, value: Any, at: str) -> list[Any]:
        """Return the values of all processes by rank; all must call this at the same point.

        Args:
            value: A value of JSON types.
            at: What this process is doing, for messages; the same in all processes.

        Raises:
            ProcessError: Another process has failed, has ended, or does something else.
        """
        return [value]

    def exchange_arrays(self, arrays: Sequence[Any], at: str) -> list[list[Any]]:
        """Return NumPy arrays of all processes by rank; see `exchange`.

        Process 0 receives and sends all of them, as text: what a step sums goes through the
        framework.
        """
        return [list(arrays)]

    def on_chief(self, function: Callable[[], T], at: str) -> T:
        """Return what a function returns in the chief; all must call this at the same point.

        The function may read and write files. If it raises an error of Treadle, all processes do.

        Args:
            function: A function that returns a value of JSON types.
            at: What the processes are doing, for messages.
        """
        return function()

    def require_equal(self, what: str, value: Any) -> None:
        """Check that all processes have the same value; all must call this at the same point.

        Args:
            what: What the value is, for messages.
            value: A value of JSON types.

        Raises:
            ProcessError: A process has another value. It is raised in all processes.
        """

    def slowest(self, seconds: float, at: str) -> float:
        """Return the longest of the times that processes took; see `exchange`."""
        return seconds

    def report(self, value: Any, about: str) -> None:
        """Send a value to process 0, which collects it with `reports`; from any thread.

        Args:
            value: A value of JSON types.
            about: What the value is about; unique in the run.
        """

    def reports(self, about: str) -> list[Any]:
        """Wait in process 0 for the values that all others report, by rank; in any thread.

        Raises:
            ProcessError: Another process has failed, or does not report.
        """
        return []

    def fail(self, error: BaseException) -> None:
        """Say to the other processes that this one has failed, so that they end too.

        Raises:
            ProcessError: Another process has failed, of which the error is a consequence.
        """

    def agreement(self) -> Any:
        """Return what lets a run agree on time and signals: `distribute.group.WindowAgreement`.

        None if this process trains alone: it uses its own clock and signals.
        """
        return None

    def divided(self, predictions: Any, caller: Callable[[Any], Any], known: Any) -> Any:
        """Return an object that joins the predictions of all processes, or the given one.

        Predictions are divided among the processes only if that changes nothing.

        Args:
            predictions: What joins the predictions of one process, see `run.predictions`.
            caller: Returns the compiled function for batches like the given one.
            known: For each form of batch, what was found out about dividing it.
        """
        return predictions

    def completed(self, window: Any) -> Any:
        """Return a window with the rows of all processes; all must call this at the same point."""
        return window


_group = ProcessGroup()


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
