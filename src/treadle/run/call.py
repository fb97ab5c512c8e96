"""The state of one call of the loop that trains: planned end, clock and reason for stopping."""

import signal
import time
from typing import Any, Literal

from ..core.progress import Progress
from ..core.signals import ShutdownRequest
from .validation import Validation

Kind = Literal["fit", "epochs", "steps", "step"]


class Call:
    """One call of the loop that trains, such as `fit`.

    `loop.steps` and `loop.step` in the body of `loop.epochs` belong to that call.

    Args:
        kind: The method of the loop.
        begun: The progress when the call began, perhaps in another process.
        now: The current progress.
        epochs: The number of epochs in the call, or None.
        steps: The number of steps in the call, or None.
        deadline: The maximum total training time of the run in seconds, or None.
        validation: The validation sets, or None.
        agreement: What several processes agree on: the time, and signals; None in one process.

    Attributes:
        running: Whether the call has begun and not yet ended.
        epoch_ended: Whether the newest epoch has ended, and not only the steps of it.
        has_opened: Whether a source was opened since the body of `loop.epochs` began.
        sources_to_skip: How many sources of this body an earlier process has finished.
        steps_per_epoch: The number of batches in an epoch of `fit`, or None if unknown.
        was_complete: Whether the call had nothing to do, because an earlier process completed it.
        epochs: The number of epochs of the run at the end of the call, or None.
        steps: The number of steps of the run at the end of the call, or None.
        reason: The reason for stopping early, or None.
        ended_by: The reason, if it ends the call permanently: another process does not resume it.
        unfinished: Whether the call was interrupted before its planned end, and resumes when the
            same script runs again.
        request: Shutdown requests received as signals.
    """

    def __init__(
        self,
        kind: Kind,
        begun: Progress,
        now: Progress,
        epochs: int | None = None,
        steps: int | None = None,
        deadline: float | None = None,
        validation: Validation | None = None,
        agreement: Any = None,
    ) -> None:
        self.kind: Kind = kind
        self.validation = validation
        self.running = self.epoch_ended = self.was_complete = self.has_opened = False
        self.sources_to_skip = 0
        self.steps_per_epoch: int | None = None
        self.epochs = None if epochs is None else begun.epoch + epochs
        self.steps = None if steps is None else begun.step + steps
        self.reason: str | None = None
        self.ended_by: str | None = None
        self.unfinished = False
        self.request = ShutdownRequest()
        self._agreement, self._clock = agreement, time.monotonic
        if agreement is not None:
            agreement.signal, self._clock = None, agreement.clock
        self._started, self._seconds_before = self._clock(), now.seconds
        self._deadline = deadline

    @property
    def has_epochs(self) -> bool:
        """Whether the call ends its epochs itself; for `loop.steps` alone, each call is one."""
        return self.kind in ("fit", "epochs")

    def timed(self, progress: Progress) -> Progress:
        """Return progress with the current total training time of the run."""
        return progress.after_seconds(self._seconds_before + self._clock() - self._started)

    def stop(self, why: str | None) -> None:
        """Stop the call permanently, for a reason: it is not resumed."""
        self.reason = self.ended_by = why

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that requests a shutdown: of several processes, one that all know of."""
        return self.request.signal if self._agreement is None else self._agreement.signal

    def heed_signals(self) -> None:
        """Interrupt the call if a signal has requested a shutdown; it can be resumed."""
        received = self.signal
        if received is not None and not self.unfinished:
            self.reason, self.unfinished = f"received {received.name}", True

    def is_over(self, progress: Progress) -> bool:
        """Return whether the call has ended, by its steps, its deadline or a stop request."""
        self.heed_signals()
        late = self._deadline is not None and progress.seconds >= self._deadline
        if late and self.reason is None:
            more = self.epochs is not None and progress.epoch < self.epochs
            if more or (self.steps is not None and progress.step < self.steps):
                self.reason, self.unfinished = "time limit reached", True
            else:
                self.stop("time limit reached")
        return self.reason is not None or (self.steps is not None and progress.step >= self.steps)
