"""The arguments for reading an epoch: its number, the first batch, and the source's position."""

from dataclasses import dataclass
from typing import Any

from ..core.hook import LoopView
from ..errors import DataError
from .source import Position
from .states import decoded


@dataclass(frozen=True, slots=True)
class Reading:
    """The starting point for reading an epoch.

    Attributes:
        epoch: The number of the epoch, from 0.
        start: The number of batches to skip.
        seed: The seed of the source, or else of the run.
        loop: The running loop, or None outside a loop.
        first: The number of the first batch to read; batches from `first` to `start` are discarded.
        position: The position that a reader returned at this start, or at the end of the previous
            epoch.
    """

    epoch: int
    start: int
    seed: int
    loop: LoopView | None
    first: int
    position: Position | None

    @classmethod
    def of(
        cls,
        epoch: int,
        start: int,
        seed: int,
        loop: LoopView | None,
        position: Position | None,
        seeks: bool = False,
    ) -> "Reading":
        """Create a `Reading`, and validate its position.

        Args:
            epoch: The number of the epoch, from 0.
            start: The number of batches to skip.
            seed: The seed of the source, or else of the run.
            loop: The running loop, or None outside a loop.
            position: The position that a reader returned, or None.
            seeks: Whether the source can start at any batch. A position of this epoch contains its
                own first batch.

        Raises:
            DataError: If the position is of a later batch than `start`.
        """
        first = start if seeks else 0
        if position is not None and position["epoch"] == epoch:
            first = position["batch"]
            if first > start and not position.get("ended"):
                raise DataError(
                    f"the source's position is of batch {first} of epoch {epoch + 1}, but only "
                    f"{start} were trained on: it belongs to a later step of the run"
                )
        return cls(epoch, start, seed, loop, first, position)

    def state(self) -> Any:
        """Return the state within this epoch from which to continue, or None."""
        at = self.position
        return decoded(at["state"]) if at is not None and at["epoch"] == self.epoch else None

    def ended(self) -> bool:
        """Return whether the iterator of this epoch was already exhausted."""
        at = self.position
        return at is not None and at["epoch"] == self.epoch and bool(at.get("ended"))

    def before(self) -> Any:
        """Return the state at the end of an earlier epoch, or None."""
        at = self.position
        if at is None or at["epoch"] == self.epoch:
            return None
        return decoded(at.get("after", at["state"]))
