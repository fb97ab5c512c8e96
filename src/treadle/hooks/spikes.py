"""The hook `LossSpikes`, which reports steps whose loss is far above that of the steps before."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any, Final

import numpy as np

from ..core import schema
from ..core.hook import Hook, LoopView
from ..core.logs import UNDONE, Array, StepLogs, short
from ..errors import ConfigurationError, did_you_mean
from .nonfinite import replay_instruction

COMPARED: Final = 256  # the steps before, of which median, spread and maximum are taken
LEAST: Final = 64  # steps before the first comparison
# The limit is computed once in so many steps, and not in each: a median takes as long as a small
# step. Blocks begin at fixed steps, so that results do not depend on the size of windows.
BLOCK: Final = 64
# Losses are heavy-tailed: a batch with one hard example can be far above the median. So a spike is
# also far above the largest loss of the steps before.
DEVIATIONS: Final = 10.0
RANGES: Final = 6.0
SCALE: Final = 1.4826  # from the median absolute deviation to a standard deviation
FOLLOWING: Final = 16  # steps after a spike that belong to it
MOST_REPORTED: Final = 10


class LossSpikes(Hook):
    """Reports loss spikes, with the step and the command that replays it.

    A value is a spike if it exceeds the median of up to 256 steps before it by 10 standard
    deviations (estimated from the median absolute deviation), and by 6 times the distance of their
    largest value from the median. The first 64 steps of a run, values that are not finite, and
    steps that were undone do not count. A spike that lasts several steps is one spike. At most ten
    are reported in a run.

    Args:
        monitor: The name of the value that steps return.

    Attributes:
        found: The steps of all spikes, in order.

    Raises:
        ConfigurationError: If steps return no value of this name.

    Example:
        >>> import treadle
        >>> spikes = treadle.hooks.LossSpikes("loss")
    """

    def __init__(self, monitor: str = "loss") -> None:
        self._monitor = self.identity = monitor
        self._resumed = False
        self._begin()

    def start(self, loop: LoopView) -> None:
        """Forget the values of an earlier run, unless this one is resumed."""
        if not self._resumed and loop.progress.step == 0:
            self._begin()
        self._resumed = False

    def steps(self, loop: LoopView, logs: StepLogs) -> None:
        """Compare the values of a window with the limit."""
        if self._monitor not in logs.values:
            known = ", ".join(logs.values) or "nothing"
            raise ConfigurationError(
                f"LossSpikes monitors {self._monitor!r}, and the step returns {known}."
                f"{did_you_mean(self._monitor, list(logs.values))}"
            )
        values = np.asarray(logs.values[self._monitor], np.float64)
        counted = np.isfinite(values)
        if UNDONE in logs.values:
            counted &= logs.values[UNDONE] == 0
        begin = 0
        while begin < logs.steps:
            first = logs.first_step + begin  # the block ends after a multiple of its length
            end = min(logs.steps, begin + BLOCK - (first - 1) % BLOCK)
            if (first - 1) % BLOCK == 0:
                self._set_limit()
            self._compare(loop, logs, values[begin:end], counted[begin:end], first)
            begin = end

    def state(self) -> dict[str, Any]:
        """Return the values of the steps before, the limit and the spikes."""
        return {
            "before": self._before.copy(),
            "limit": self._limit,
            "median": self._median,
            "largest": self._largest,
            "found": list(self.found),
            "last": self._last,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state`."""
        schema.listed(schema.whole())(state["found"], "found")
        schema.whole()(state["last"], "last")
        self._before = np.array(state["before"], np.float64)
        self._limit, self._median = float(state["limit"]), float(state["median"])
        self._largest, self.found = float(state["largest"]), list(state["found"])
        self._last, self._resumed = state["last"], True

    def _begin(self) -> None:
        self._before: Array = np.zeros(0)
        self._limit, self._median, self._largest = inf, 0.0, 0.0
        self.found: list[int] = []
        self._last = 0  # the last step above the limit

    def _set_limit(self) -> None:
        """Compute the limit from the values of the steps before."""
        before = self._before
        if len(before) < LEAST:
            return
        self._median, self._largest = float(np.median(before)), float(before.max())
        deviation = SCALE * float(np.median(np.abs(before - self._median)))
        excess = max(DEVIATIONS * deviation, RANGES * (self._largest - self._median))
        # Equal values have no spread: what floats cannot tell apart is no spike either.
        self._limit = self._median + max(excess, 1e-3 * abs(self._median), 1e-12)

    def _compare(
        self, loop: LoopView, logs: StepLogs, values: Array, counted: Array, first: int
    ) -> None:
        """Report the spikes of one block, and keep its values for the next ones."""
        high = counted & (values > self._limit)
        for offset in np.flatnonzero(high).tolist():
            step = first + offset
            is_new = not self._last or step > self._last + FOLLOWING
            self._last = step
            if is_new:
                self.found.append(step)
                if len(self.found) <= MOST_REPORTED:
                    self._report(loop, logs, step, float(values[offset]))
        # Later values of a spike count, so that a loss that stays high is the new level.
        spikes = np.isin(np.arange(first, first + len(values)), self.found)
        self._before = np.concatenate([self._before, values[counted & ~spikes]])[-COMPARED:]

    def _report(self, loop: LoopView, logs: StepLogs, step: int, value: float) -> None:
        after = logs.progress
        at = replace(after, step=step, batch=after.batch - (after.step - step))
        more = ". Further spikes are not reported" if len(self.found) == MOST_REPORTED else ""
        loop.log(
            {
                "warning": f"{self._monitor} rose to {short(value)} at {at}: the median of the "
                f"{len(self._before)} steps before was {short(self._median)}, and their largest "
                f"value {short(self._largest)}{replay_instruction(loop, step)}{more}"
            }
        )
