"""The protocols of data sources and their readers."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast, runtime_checkable

from ..backends.window import Window
from ..core.hook import LoopView

Position = Mapping[str, Any]
"""The state of a reader in addition to (epoch, batch): JSON types and NumPy arrays."""


class Reader(Protocol):
    """Reads one epoch."""

    def take(self, most: int) -> Window | None:
        """Return up to `most` batches with equal shapes and dtypes; None at the end of the epoch.

        A window may have fewer than `most` batches although more follow. The caller may modify the
        arrays of a window.
        """
        ...

    def put_back(self, window: Window) -> None:
        """Put back a window that was not trained on; the next `take` returns it first.

        Only the batches taken last can be put back.
        """
        ...

    def position(self, ahead: int = 0) -> Position | None:
        """Return the state needed, in addition to (epoch, batch), to continue in another process.

        This also works at the end of the epoch and after `close`, since the next epoch may need the
        position. A reader without this method needs no position.

        Args:
            ahead: The number of batches taken last that were only prefetched and count as not
                taken.

        Returns:
            The `position` argument for `Source.read`, which must not be modified; None if (epoch,
            batch) is sufficient.

        Raises:
            DataError: If a state contains values that cannot be stored in checkpoints.
        """
        ...

    def close(self) -> None:
        """Release threads and files."""
        ...


@runtime_checkable
class Source(Protocol):
    """A source of batches, read epoch by epoch, from any position."""

    @property
    def length(self) -> int | None:
        """The number of batches in an epoch; None if unknown or endless."""
        ...

    @property
    def endless(self) -> bool:
        """Whether an epoch is known never to end."""
        ...

    @property
    def batch_examples(self) -> int | None:
        """The number of examples in a full batch; None if unknown."""
        ...

    @property
    def inexact(self) -> str | None:
        """The reason why the source cannot be resumed exactly, as a clause; None if it can."""
        ...

    @property
    def closed(self) -> bool:
        """Whether batches depend on the state of the run, so that they cannot be prefetched."""
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
        """Read an epoch, starting at batch `start`.

        Args:
            epoch: The number of the epoch, from 0; the order depends on it and on `seed`.
            start: The number of batches to skip.
            seed: The seed of the run, used if the source has no seed.
            loop: The running loop, for sources that depend on its state.
            ordered: Return examples in stored order, if this source shuffles them. Predictions then
                have the order of the data.
            position: The position that a reader returned at this batch or at the end of the
                previous epoch. It is passed only if it is not None.
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
    """Read a source whose `read` method may lack the `position` argument."""
    more: dict[str, Any] = {} if position is None else {"position": position}
    return source.read(epoch, start, seed=seed, loop=loop, ordered=ordered, **more)


def position_of(reader: Reader, ahead: int = 0) -> Position | None:
    """Return the position of a reader, or None if it has no `position` method."""
    ask = cast("Callable[[int], Position | None] | None", getattr(reader, "position", None))
    return ask(ahead) if callable(ask) else None
