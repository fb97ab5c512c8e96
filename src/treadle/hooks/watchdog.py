"""The `Watchdog` hook, which reports where a run hangs: in a source, a step or a hook."""

import faulthandler
import sys
from time import monotonic

from ..core.hook import Hook, LoopView
from ..core.logs import Record, StepLogs
from ..core.triggers import Span
from ..errors import ConfigurationError

SECONDS_BETWEEN = 1.0  # between resets of the timer, each of which takes about 50 µs


class Watchdog(Hook):
    """Prints the stack of every thread when no step or record has finished for a while.

    Python's `faulthandler` prints the stacks to standard error. It also works if a call that never
    returns holds the GIL.

    Args:
        after: The time without a step or record after which stacks are printed. It must be longer
            than a validation and than compiling.
        leave: Also exit the process with code 1, so that a supervisor can restart it and it resumes
            from the last checkpoint.

    Raises:
        ConfigurationError: If `after` is not a time.

    Example:
        >>> import treadle
        >>> watchdog = treadle.hooks.Watchdog(after="10 min")
    """

    chief_only = True

    def __init__(self, after: str = "10 min", leave: bool = False) -> None:
        span = Span.parse(after)
        if span.of != "seconds":
            raise ConfigurationError(f"Watchdog(after={after!r}) must be a time, as '10 min'")
        self._seconds, self._leave = span.amount, leave
        self._set = 0.0

    def start(self, loop: LoopView) -> None:
        """Start the timer."""
        self._reset(force=True)

    def steps(self, loop: LoopView, logs: StepLogs) -> None:
        """Reset the timer."""
        self._reset()

    def record(self, loop: LoopView, record: Record) -> None:
        """Reset the timer."""
        self._reset()

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Cancel the timer."""
        faulthandler.cancel_dump_traceback_later()

    def _reset(self, force: bool = False) -> None:
        now = monotonic()
        if force or now - self._set >= min(SECONDS_BETWEEN, self._seconds / 4):
            self._set = now
            # Not `sys.stderr`: a replacement of it, as in tests, may have no file descriptor.
            faulthandler.dump_traceback_later(
                self._seconds, repeat=not self._leave, file=sys.__stderr__ or 2, exit=self._leave
            )
