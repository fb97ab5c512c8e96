"""Ending a run whose values are no longer numbers."""

from typing import Any, Literal

import numpy as np

from ..data.leaves import flattened, named
from ..errors import ConfigurationError, NonFiniteError, did_you_mean
from ..hook import Hook, LoopView
from ..logs import StepLogs
from ..progress import Progress

ACTIONS = ("raise", "stop")
ROWS_NAMED = 5


class NonFinite(Hook):
    """Ends a run at the first step that returned NaN or infinity, and says where it came from.

    Looks at what the steps returned after each window, which costs no transfer. The weights are
    then those at the end of the window.

    Args:
        action: `"raise"` ends the run with an error; `"stop"` ends it as if it had been asked to
            stop.

    Raises:
        ConfigurationError: The action is not known.
        NonFiniteError: After a window with a value that is not finite.

    Example:
        >>> import treadle
        >>> guard = treadle.hooks.NonFinite(action="stop")
    """

    def __init__(self, action: Literal["raise", "stop"] = "raise") -> None:
        if action not in ACTIONS:
            raise ConfigurationError(f"unknown action {action!r}.{did_you_mean(action, ACTIONS)}")
        self._action = action

    def steps(self, loop: LoopView, logs: StepLogs) -> None:
        """Look at every value of the window."""
        # A sum is finite unless a term is not (or it overflows, which the second look finds out).
        for array in logs.values.values():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                message = _explained(loop, logs)
                if self._action == "raise":
                    raise NonFiniteError(message)
                loop.stop(message)
                return


def _explained(loop: LoopView, logs: StepLogs) -> str:
    bad = {name: ~np.isfinite(a) for name, a in logs.values.items() if a.dtype.kind == "f"}
    offset, name = min((int(flags.argmax()), name) for name, flags in bad.items() if flags.any())
    after = logs.progress
    step = logs.first_step + offset
    at = Progress(step, after.epoch, after.batch - (after.step - step))
    rows = _bad_inputs(loop.batch_at(step))
    if rows:
        why = (
            f"The batch held it already: {'; '.join(rows)}. Mend or leave out these rows (their "
            "numbers count within the batch)"
        )
    else:
        why = (
            "All inputs of this batch are finite, so it was the step. Lower the learning rate, or "
            "clip gradients (clipnorm=1.0 in the optimizer); "
            'treadle.Options(execution="eager") lets you look inside the step'
        )
    return f"{name} is {logs.values[name][offset]} at {at}. {why}"


def _bad_inputs(batch: Any) -> list[str]:
    """Return which rows of which leaves hold floats that are not finite."""
    found: list[str] = []
    for path, leaf in flattened(batch):
        # V: bfloat16 and the other narrow floats
        if leaf is None or np.asarray(leaf).dtype.kind not in "fVc":
            continue
        array = np.asarray(leaf)
        bad = ~np.isfinite(array)
        if not bad.any():
            continue
        rows = np.flatnonzero(bad.reshape(bad.shape[0], -1).any(axis=1)) if bad.ndim else []
        numbers = ", ".join(str(row) for row in rows[:ROWS_NAMED])
        more = f" and {len(rows) - ROWS_NAMED} more" if len(rows) > ROWS_NAMED else ""
        where = f", row{'s' if len(rows) > 1 else ''} {numbers}{more}" if len(rows) else ""
        found.append(f"{named(path)}{where}")
    return found
