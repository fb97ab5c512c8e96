"""What the loop asks of data: batches of one epoch after another, from any position."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast, runtime_checkable

from ..backends.window import Window
from ..core.hook import LoopView

Position = Mapping[str, Any]
"""What beside (epoch, batch) says where a reader stands: JSON's types and NumPy arrays."""


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

    def position(self, ahead: int = 0) -> Position | None:
        """Return what beside (epoch, batch) is needed to go on from here, in another process too.

        Also after the end of the epoch and after `close`: the next epoch may begin with it. A
        reader without this method needs nothing.

        Args:
            ahead: How many of the batches taken last count as not taken: they were read ahead.

        Returns:
            What `Source.read` takes back, which nobody changes any more; None where nothing is
            needed.

        Raises:
            DataError: A state holds what no checkpoint can hold.
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
        position: Position | None = None,
    ) -> Reader:
        """Read an epoch from its batch number `start` on.

        Args:
            epoch: The epoch's number, from 0; orders derive from it and from `seed`.
            start: Batches of this epoch to pass over.
            seed: The run's seed; a source's own seed wins.
            loop: What is running; only sources that depend on its state look at it.
            ordered: Give the items as they are stored, where this source is what shuffles them:
                predictions come out in the order of the data.
            position: What a reader returned as its position at this batch, or at the end of the
                epoch before; passed only where it is not None.
        """
        ...


def read_from(
    source: Source,
    epoch: int,
    start: int,
    position: Position | None,
    *,
    seed: int,
    loop: LoopView | None,
    ordered: bool = False,
) -> Reader:
    """Read a source whose class may know nothing of positions."""
    more: dict[str, Any] = {} if position is None else {"position": position}
    return source.read(epoch, start, seed=seed, loop=loop, ordered=ordered, **more)


def position_of(reader: Reader, ahead: int = 0) -> Position | None:
    """Return the position of a reader whose class may know nothing of positions."""
    ask = cast("Callable[[int], Position | None] | None", getattr(reader, "position", None))
    return ask(ahead) if callable(ask) else None
