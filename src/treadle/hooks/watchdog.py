"""A look at a run that hangs: in a source, in a step, in a hook."""

import faulthandler
import sys
from time import monotonic

from ..core.hook import Hook, LoopView
from ..core.logs import Record, StepLogs
from ..core.triggers import Span
from ..errors import ConfigurationError

SECONDS_BETWEEN = 1.0  # each sets a timer anew, which costs some 50 µs


class Watchdog(Hook):
    """Shows where every thread stands when no step and no record has come for a while.

    The stacks go to the standard error, by Python's `faulthandler`, which also works where the
    interpreter is held by a call that never returns.

    Args:
        after: For how long nothing may come: longer than a validation, and than compiling takes.
        leave: End the process then, with exit code 1: what restarts it goes on from the last
            checkpoint.

    Raises:
        ConfigurationError: `after` is no time.

    Example:
        >>> import treadle
        >>> watchdog = treadle.hooks.Watchdog(after="10 min")
    """

    def __init__(self, after: str = "10 min", leave: bool = False) -> None:
        span = Span.parse(after)
        if span.of != "seconds":
            raise ConfigurationError(f"Watchdog(after={after!r}) must be a time, as '10 min'")
        self._seconds, self._leave = span.amount, leave
        self._set = 0.0

    def start(self, loop: LoopView) -> None:
        """Begin to watch."""
        self._wind(force=True)

    def steps(self, loop: LoopView, logs: StepLogs) -> None:
        """Begin anew."""
        self._wind()

    def record(self, loop: LoopView, record: Record) -> None:
        """Begin anew."""
        self._wind()

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Watch no longer."""
        faulthandler.cancel_dump_traceback_later()

    def _wind(self, force: bool = False) -> None:
        now = monotonic()
        if force or now - self._set >= min(SECONDS_BETWEEN, self._seconds / 4):
            self._set = now
            # The process's own standard error: a file that a test puts in its place has no number.
            faulthandler.dump_traceback_later(
                self._seconds, repeat=not self._leave, file=sys.__stderr__ or 2, exit=self._leave
            )
