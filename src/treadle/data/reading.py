"""From where an epoch is read: its number, the first batch, and the source's own position."""

from dataclasses import dataclass
from typing import Any

from ..core.hook import LoopView
from ..errors import DataError
from .source import Position
from .states import decoded


@dataclass(frozen=True, slots=True)
class Reading:
    """From where an epoch is read, and for whom.

    Attributes:
        epoch: The epoch's number, from 0.
        start: Batches of this epoch to pass over.
        seed: The source's own seed, or else the run's.
        loop: What is running, or None outside a loop.
        first: The number of the batch that is drawn first; those from there to the start are
            discarded.
        position: What a reader said to stand at this start, or at the end of the epoch before.
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
        """Return from where to read.

        Args:
            epoch: The epoch's number, from 0.
            start: Batches of this epoch to pass over.
            seed: The source's own seed, or else the run's.
            loop: What is running, or None outside a loop.
            position: What a reader returned, or None.
            seeks: Whether the source can begin anywhere; a position says itself from where.

        Raises:
            DataError: The position is not one at this start.
        """
        first = start if seeks else 0
        if position is not None and position["epoch"] == epoch:
            first = position["batch"]
            if first > start and not position.get("ended"):
                raise DataError(
                    f"the source's position is of batch {first} of epoch {epoch + 1}, but only "
                    f"{start} were trained on: it belongs to another place of the run"
                )
        return cls(epoch, start, seed, loop, first, position)

    def state(self) -> Any:
        """Return the state that this epoch goes on with, or None."""
        at = self.position
        return decoded(at["state"]) if at is not None and at["epoch"] == self.epoch else None

    def ended(self) -> bool:
        """Say whether this epoch had ended already, and not only given its last batch."""
        at = self.position
        return at is not None and at["epoch"] == self.epoch and bool(at.get("ended"))

    def before(self) -> Any:
        """Return the state that an earlier epoch ended with, or None."""
        at = self.position
        if at is None or at["epoch"] == self.epoch:
            return None
        return decoded(at.get("after", at["state"]))
