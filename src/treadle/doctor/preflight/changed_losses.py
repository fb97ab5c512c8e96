"""Losses of steps that differ from the last one in one thing, for the checks of signs."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..numbers import Array, as_floats
from .intervening import Change, changed_outputs, constant, losses_of, noise_like
from .recording import GRADIENTS, OBJECTIVE, Event
from .trials import Trial, Trials

CODE: Final = "L-sign"


@dataclass(frozen=True)
class Losses:
    """The losses of steps that differ from the last one in one thing.

    Attributes:
        trials: The trials.
    """

    trials: Trials

    @property
    def count(self) -> int:
        """The number of losses of a step."""
        last = self.trials.last
        return len(last.of(GRADIENTS)) or len(losses_of(last))

    def of(self, batch: Any = None, changes: Any = None, variables: Any = None) -> Array:
        """Return the losses of a changed step; NaN if it failed or has other losses."""
        batch = self.trials.last.batch if batch is None else batch
        with changed_outputs(changes or {}):
            trial = self.trials.attempt(CODE, batch, variables)
        found = [] if trial is None else losses_of(trial)
        return np.array(found) if len(found) == self.count else np.full(self.count, np.nan)


def line_of(trial: Trial, number: int) -> str:
    """Return the line of the user's code that differentiates a loss."""
    events = trial.of(OBJECTIVE)
    return events[number].info.line if number < len(events) else ""


def scaled_output(event: Event, scale: float, name: str) -> Change:
    """Return a change to a multiple of an output, which noise keeps from being zero."""
    value = as_floats(event[name]) + 0.1 * noise_like(event[name])

    def change(key: str, tensor: Any) -> Any:
        return constant((scale * value).astype("float32"), tensor) if key == name else tensor

    return change
