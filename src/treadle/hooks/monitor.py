"""One value of the records, and the best that it has been: what stops a run, or slows it down."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from ..core.logs import Record
from ..errors import ConfigurationError, did_you_mean

SMALLER_IS_BETTER = re.compile(r"(loss|error|mae|mse)$", re.IGNORECASE)
LARGER_IS_BETTER = re.compile(r"accuracy|auc|f1|precision|recall", re.IGNORECASE)


class Monitor:
    """Looks for a value in the records of epochs and validations, once at each step.

    NaN is never an improvement.

    Args:
        owner: The hook's name, for messages.
        name: The name of the value.
        direction: `"min"` or `"max"`: what is better; None where it follows from the name.
        min_delta: By how much a better value must be better.
        logged: Look also at the numbers that hooks log.

    Attributes:
        name: The name of the value.
        best: The best one so far, or None.
        best_step: When that was.
        waited: How many records in a row were no improvement.

    Raises:
        ConfigurationError: The direction is not known or does not follow from the name.
    """

    def __init__(
        self,
        owner: str,
        name: str,
        direction: Literal["min", "max"] | None,
        min_delta: float,
        logged: bool = False,
    ) -> None:
        self._owner, self.name, self._min_delta = owner, name, min_delta
        self._logged = logged
        self._sign = 1.0 if direction_of(name, direction) == "min" else -1.0
        self.begin()

    def begin(self) -> None:
        """Forget what was seen."""
        self.best: float | None = None
        self.best_step = self._last_step = -1
        self.waited = 0

    @property
    def seen(self) -> bool:
        """Whether a record has held the value."""
        return self._last_step >= 0

    def improved(self, record: Record) -> bool | None:
        """Say whether a record holds a better value than all before; None where it says nothing.

        Raises:
            ConfigurationError: It is the first that could hold the value, and does not.
        """
        if record.kind not in ("epoch", "validation"):
            number = isinstance(record.values.get(self.name), (int, float))
            if not (self._logged and number):
                return None
        if self.name not in record.values:
            self._refuse_unknown(record)
            return None
        step = record.progress.step
        if step == self._last_step:  # an epoch repeats what a validation at its end has told
            return None
        self._last_step = step
        value = float(record.values[self.name])
        if not self._is_better(value):
            self.waited += 1
            return False
        self.best, self.best_step, self.waited = value, step, 0
        return True

    def why(self) -> str:
        """Say for how long nothing was better than what."""
        times = "once" if self.waited == 1 else f"{self.waited} times in a row"
        if self.best is None:
            return f"{self.name} was NaN {times}"
        return (
            f"{self.name} was not better {times} than {self.best:.6g}, its best, of step "
            f"{self.best_step}"
        )

    def state(self) -> dict[str, Any]:
        """Return what must survive a restart."""
        return {
            "best": self.best,
            "best_step": self.best_step,
            "last_step": self._last_step,
            "waited": self.waited,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned."""
        self.best, self.waited = state["best"], state["waited"]
        self.best_step, self._last_step = state["best_step"], state["last_step"]

    def _is_better(self, value: float) -> bool:
        if value != value:
            return False
        if self.best is None:
            return True
        return self._sign * value < self._sign * self.best - self._min_delta

    def _refuse_unknown(self, record: Record) -> None:
        """Raise, unless the name may still come: one of a validation that is not due yet."""
        validated = record.kind == "validation" or any(n.startswith("val_") for n in record.values)
        if not self.seen and (validated or not self.name.startswith("val_")):
            raise ConfigurationError(
                f"{self._owner} cannot find {self.name!r}.{did_you_mean(self.name, record.values)}"
            )


def direction_of(monitor: str, direction: str | None) -> Literal["min", "max"]:
    """Return what is better, `"min"` or `"max"`, as it was said or follows from a name.

    Raises:
        ConfigurationError: It is something else, or was not said and does not follow.

    Example:
        >>> direction_of("val_accuracy", None)
        'max'
    """
    if direction == "min" or direction == "max":
        return direction
    if direction is not None:
        raise ConfigurationError(
            f"unknown direction {direction!r}.{did_you_mean(direction, ('min', 'max'))}"
        )
    if SMALLER_IS_BETTER.search(monitor):
        return "min"
    if LARGER_IS_BETTER.search(monitor):
        return "max"
    raise ConfigurationError(
        f"whether a smaller or a larger {monitor!r} is better does not follow from its name: state "
        "it, as direction='min' or direction='max'"
    )
