"""A request to read an epoch, with the first batch that its iterator must draw."""

from dataclasses import dataclass, fields
from typing import Any

from ..checkpoint.structure import from_snapshot
from ..errors import DataError
from .source import ReadRequest


@dataclass(frozen=True, slots=True)
class Reading(ReadRequest):
    """A request with the first batch to draw.

    Attributes:
        first: The number of the first batch to draw; batches from `first` to `start` are discarded.
    """

    first: int = 0

    @classmethod
    def of(cls, request: ReadRequest, seeks: bool = False) -> "Reading":
        """Create a `Reading`, and validate its position.

        Args:
            request: The request.
            seeks: Whether the source can start at any batch. A position of this epoch contains its
                own first batch.

        Raises:
            DataError: If the position is of a later batch than `start`.
        """
        epoch, start, position = request.epoch, request.start, request.position
        first = start if seeks else 0
        if position is not None and position["epoch"] == epoch:
            first = position["batch"]
            if first > start and not position.get("ended"):
                raise DataError(
                    f"the source's position is of batch {first} of epoch {epoch + 1}, but only "
                    f"{start} were trained on: it belongs to a later step of the run"
                )
        return cls(**{f.name: getattr(request, f.name) for f in fields(ReadRequest)}, first=first)

    def state(self) -> Any:
        """Return the state within this epoch from which to continue, or None."""
        at = self.position
        return from_snapshot(at["state"]) if at is not None and at["epoch"] == self.epoch else None

    def ended(self) -> bool:
        """Return whether the iterator of this epoch was already exhausted."""
        at = self.position
        return at is not None and at["epoch"] == self.epoch and bool(at.get("ended"))

    def before(self) -> Any:
        """Return the state at the end of an earlier epoch, or None."""
        at = self.position
        if at is None or at["epoch"] == self.epoch:
            return None
        return from_snapshot(at.get("after", at["state"]))
