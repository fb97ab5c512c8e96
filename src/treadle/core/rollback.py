"""The exception that asks the loop to roll back to a checkpoint."""

from ..errors import NonFiniteError
from .progress import Progress


class RolledBack(NonFiniteError):
    """A call of the loop goes back to a checkpoint, and on from there; users never see it.

    Args:
        why: What was not finite.
        passed: Where the run stood before the batch that is to be passed over; None where the step
            that did it is still to be found.
    """

    def __init__(self, why: str, passed: Progress | None = None) -> None:
        super().__init__(why)
        self.passed = passed
