"""A call of the loop that trains: how far it goes, its clock, and what ends it before its time."""

import time

from ..core.progress import Progress
from ..core.signals import Asked


class Call:
    """One call that trains, from its beginning to its end.

    Args:
        begun: Where the run stood when the call began, perhaps in another process.
        now: Where it stands.
        epochs: How many it is to do, if that is known.
        steps: The same of steps.
        deadline: The seconds that the run may have taken, or None.

    Attributes:
        epochs: The epochs of the run at its end, or None.
        steps: The steps of the run at its end, or None.
        reason: Why it was asked to stop, or None.
        ended_by: The reason, where it ends the call for good: another process does not go on.
        unfinished: It was asked to end before its epochs or steps were done, and is to go on when
            the same script runs again.
        asked: What signals have asked for.
    """

    def __init__(
        self,
        begun: Progress,
        now: Progress,
        epochs: int | None = None,
        steps: int | None = None,
        deadline: float | None = None,
    ) -> None:
        self.epochs = None if epochs is None else begun.epoch + epochs
        self.steps = None if steps is None else begun.step + steps
        self.reason: str | None = None
        self.ended_by: str | None = None
        self.unfinished = False
        self.asked = Asked()
        self._started, self._seconds_before = time.monotonic(), now.seconds
        self._deadline = deadline

    def timed(self, progress: Progress) -> Progress:
        """Return progress with the seconds that the run has taken so far."""
        return progress.after_seconds(self._seconds_before + time.monotonic() - self._started)

    def stop(self, why: str | None) -> None:
        """End the call for good, for a reason."""
        self.reason = self.ended_by = why

    def heed_signals(self) -> None:
        """Ask the call to end where a signal has asked for it, and to go on another time."""
        if self.asked.signal is not None and not self.unfinished:
            self.reason, self.unfinished = f"{self.asked.signal.name} asked it to", True

    def is_over(self, progress: Progress) -> bool:
        """Say whether the call has come to its end."""
        self.heed_signals()
        late = self._deadline is not None and progress.seconds >= self._deadline
        if late and self.reason is None:
            if self._has_more(progress):
                self.reason, self.unfinished = "its time was up", True
            else:
                self.stop("its time was up")
        return self.reason is not None or (self.steps is not None and progress.step >= self.steps)

    def _has_more(self, progress: Progress) -> bool:
        """Say whether epochs or steps of this call are left to do."""
        return (self.epochs is not None and progress.epoch < self.epochs) or (
            self.steps is not None and progress.step < self.steps
        )
