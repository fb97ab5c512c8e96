"""The name, length and resume limitation of an iterable, and iterators of several batches."""

from abc import ABC, abstractmethod
from typing import Any


class StackingIterator(ABC):
    """An iterator of batches that can also return several of them at once, stacked."""

    def __iter__(self) -> "StackingIterator":
        return self

    @abstractmethod
    def __next__(self) -> Any:
        """Return the next batch."""

    @abstractmethod
    def stacked(self, most: int, seconds: float) -> tuple[Any, int]:
        """Return the next batches of equal shapes and dtypes, stacked, and their number.

        An error is deferred to the next call if there are batches before it.

        Args:
            most: The maximum number of batches.
            seconds: The time after which no further batch is drawn; it returns one at least.

        Raises:
            StopIteration: If there are no more batches.
        """

    @abstractmethod
    def close(self) -> None:
        """Release threads and files."""


def type_name(data: Any) -> str:
    """Return the name of an object's class, with its module."""
    kind: type = type(data)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def length_of(iterable: Any) -> int | None:
    """Return the number of batches of an iterable, or None if it has no length."""
    try:
        return len(iterable)
    except TypeError:  # raised also by a DataLoader of an iterable data set
        return None


def forward_only(what: str) -> str:
    """Return the reason why a source that can only be iterated may not be resumed exactly."""
    return (
        f"{what} cannot seek: a resumed run draws and discards the batches before its position, "
        f"which is exact only if they come in the same order again"
    )
