"""Samples of the learning rates of a run, for its record."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from ..core import schema
from ..core.directory import learning_rates as check

MOST_SAMPLES = 256
# A schedule of the user's may count its calls or draw random numbers, so it is not called.
_OWNERS = ("keras", "treadle")

_state = schema.record(
    {"spacing": schema.whole(1), "seen": schema.whole()},
    required=("spacing", "seen", "steps", "rates"),
)


class LearningRates:
    """Samples the learning rate of each optimizer at epochs and validations.

    If there are many, samples are thinned out evenly. Which ones are kept follows from their number
    alone, so that equal runs have equal records.

    Args:
        recorded: The samples that the record of the run holds already, as `facts` returns them. A
            finished run that is extended restores no other state.

    Example:
        >>> rates = LearningRates()
        >>> rates.add(10, {"optimizer": 0.5})
        >>> rates.facts()
        {'steps': [10], 'rates': {'optimizer': [0.5]}}
    """

    def __init__(self, recorded: Mapping[str, Any] | None = None) -> None:
        recorded = recorded or {}
        self._steps: list[int] = list(recorded.get("steps", ()))
        self._rates: dict[str, list[float | None]] = {
            path: list(values) for path, values in recorded.get("rates", {}).items()
        }
        self._spacing, self._seen = 1, len(self._steps)

    @property
    def due(self) -> bool:
        """Whether the next values are kept."""
        return self._seen % self._spacing == 0

    def add(self, step: int, rates: Mapping[str, float]) -> None:
        """Add the values at a step, unless they are left out or the step has some already."""
        if self._steps and self._steps[-1] >= step:
            return
        due, self._seen = self.due, self._seen + 1
        if not due or not rates:
            return
        for path in rates:
            self._rates.setdefault(path, [None] * len(self._steps))
        self._steps.append(step)
        for path, values in self._rates.items():
            rate = rates.get(path)
            values.append(rate if rate is not None and isfinite(rate) else None)
        if len(self._steps) > MOST_SAMPLES:
            self._spacing *= 2
            self._steps = self._steps[::2]
            self._rates = {path: values[::2] for path, values in self._rates.items()}

    def facts(self) -> dict[str, Any]:
        """Return the steps, and the rates by the path of the optimizer; empty without samples."""
        rates = {path: [*values] for path, values in self._rates.items()}
        return {"steps": [*self._steps], "rates": rates} if self._steps else {}

    def state(self) -> dict[str, Any]:
        """Return the samples, to be saved in a checkpoint."""
        if not self._seen:
            return {}
        counts = {"spacing": self._spacing, "seen": self._seen}
        return {**counts, "steps": [], "rates": {}, **self.facts()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned.

        Raises:
            ValueError: If it is damaged.
        """
        _state(dict(state), "learning_rates")
        check(dict(state), "learning_rates")
        self._spacing, self._seen = state["spacing"], state["seen"]
        self._steps = list(state["steps"])
        self._rates = {path: list(values) for path, values in state["rates"].items()}


def current_rates(optimizers: Mapping[str, Any]) -> dict[str, float]:
    """Return the learning rate of each optimizer, but for schedules written by the user."""
    from ..backends.base import active  # late: it imports Keras
    from ..schedules import learning_rate_of, optimizers_of

    if not optimizers:
        return {}
    found: dict[str, float] = {}
    for path, optimizer in optimizers_of(optimizers).items():
        rate = learning_rate_of(optimizer)
        if not callable(rate) or type(rate).__module__.startswith(_OWNERS):
            found[path] = float(active().to_numpy(optimizer.learning_rate))
    return found
