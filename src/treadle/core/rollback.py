"""The internal exception that makes the loop roll back to a checkpoint."""

from ..errors import NonFiniteError
from .progress import Progress


class RolledBack(NonFiniteError):
    """Makes the loop roll back to a checkpoint and continue from there. Users never see it.

    Args:
        why: What was not finite.
        passed: The progress before the batch that must be skipped; None if the step that caused
            the non-finite value is not known yet.
    """

    def __init__(self, why: str, passed: Progress | None = None) -> None:
        super().__init__(why)
        self.passed = passed
