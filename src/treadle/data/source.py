"""What the loop asks of data: batches of one epoch after another, from any position."""

from typing import Protocol, runtime_checkable

from ..backends.window import Window
from ..hook import LoopView


class Reader(Protocol):
    """One epoch being read."""

    def take(self, most: int) -> Window | None:
        """Return the next batches, at most `most` and all of equal form; None at the epoch's end.

        A window may hold fewer than `most` although more batches follow, and the arrays of a window
        are its own: whoever takes it may change them.
        """
        ...

    def put_back(self, window: Window) -> None:
        """Take back a window that was not trained on: the next `take` begins with it.

        What is put back must be what was taken last.
        """
        ...

    def close(self) -> None:
        """Let go of threads and files."""
        ...


@runtime_checkable
class Source(Protocol):
    """Batches of one epoch after another."""

    @property
    def length(self) -> int | None:
        """Batches in an epoch, or None where that is unknown or endless."""
        ...

    @property
    def endless(self) -> bool:
        """Whether an epoch is known never to end."""
        ...

    @property
    def batch_examples(self) -> int | None:
        """Examples in a full batch, or None where that is unknown."""
        ...

    @property
    def inexact(self) -> str | None:
        """Why a run cannot be resumed exactly, as a clause; None where it can."""
        ...

    @property
    def closed(self) -> bool:
        """Whether batches depend on the state of the run: then none is read before its turn."""
        ...

    def read(
        self,
        epoch: int,
        start: int = 0,
        *,
        seed: int = 0,
        loop: LoopView | None = None,
        ordered: bool = False,
    ) -> Reader:
        """Read an epoch from its batch number `start` on.

        Args:
            epoch: The epoch's number, from 0; orders derive from it and from `seed`.
            start: Batches of this epoch to pass over.
            seed: The run's seed; a source's own seed wins.
            loop: What is running; only sources that depend on its state look at it.
            ordered: Give the items as they are stored, where this source is what shuffles them:
                predictions come out in the order of the data.
        """
        ...
