"""Tracking the best value of a monitored metric, for early stopping and learning rate reduction."""

import re
import warnings
from collections.abc import Collection, Mapping
from typing import Any, Literal

from ..core import schema
from ..core.hook import LoopView
from ..core.logs import Record
from ..errors import ConfigurationError, TreadleWarning, did_you_mean

SMALLER_IS_BETTER = re.compile(r"(loss|error|mae|mse)$", re.IGNORECASE)
LARGER_IS_BETTER = re.compile(r"accuracy|auc|f1|precision|recall|(^|_)acc($|_)", re.IGNORECASE)
_step = schema.whole(-1)
_check = schema.complete(
    {
        "best": schema.optional(schema.number),
        "best_step": _step,
        "last_step": _step,
        "waited": schema.whole(),
    }
)


class Monitor:
    """Tracks a value in the records of epochs and validations, once per step.

    NaN never counts as an improvement.

    Args:
        owner: The name of the hook, for messages.
        name: The name of the monitored value.
        direction: `"min"` or `"max"`: whether smaller or larger is better; None to infer it from
            the name.
        min_delta: The minimum change that counts as an improvement.
        logged: Also read the numbers that hooks log.

    Attributes:
        name: The name of the monitored value.
        best: The best value so far, or None.
        best_step: The step of the best value.
        waited: The number of consecutive records without improvement.

    Raises:
        ConfigurationError: If the direction is unknown or cannot be inferred from the name.
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
        """Reset the best value and the counters."""
        self.best: float | None = None
        self.best_step = self._last_step = -1
        self.waited = 0

    @property
    def identity(self) -> str:
        """The monitored name and the direction, which tell apart the hooks that monitor values."""
        return f"{self.name} {'min' if self._sign > 0 else 'max'}"

    @property
    def seen(self) -> bool:
        """Whether any record has contained the value."""
        return self._last_step >= 0

    def improved(self, record: Record) -> bool | None:
        """Return whether a record improves on the best value; None if it has no new value.

        Raises:
            ConfigurationError: If this is the first record that should contain the value, and it
                does not.
        """
        if record.kind not in ("epoch", "validation"):
            number = isinstance(record.values.get(self.name), (int, float))
            if not (self._logged and number):
                return None
        if self.name not in record.values:
            self._reject_unknown(record)
            return None
        step = record.progress.step
        if step == self._last_step:  # an epoch record repeats the values of its validation
            return None
        self._last_step = step
        value = float(record.values[self.name])
        is_better = (
            self.best is None or self._sign * value < self._sign * self.best - self._min_delta
        )
        if value != value or not is_better:
            self.waited += 1
            return False
        self.best, self.best_step, self.waited = value, step, 0
        return True

    def why(self) -> str:
        """Describe the lack of improvement, for the reason of a stop."""
        records = "the last record" if self.waited == 1 else f"the last {self.waited} records"
        if self.best is None:
            return f"{self.name} was NaN in {records}"
        return (
            f"{self.name} did not improve in {records}: its best is {self.best:.6g}, at step "
            f"{self.best_step}"
        )

    def state(self) -> dict[str, Any]:
        """Return the state to save in checkpoints."""
        return {
            "best": self.best,
            "best_step": self.best_step,
            "last_step": self._last_step,
            "waited": self.waited,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state`."""
        _check(state, "")
        self.best, self.waited = state["best"], state["waited"]
        self.best_step, self._last_step = state["best_step"], state["last_step"]

    def _reject_unknown(self, record: Record) -> None:
        """Raise, unless the name belongs to a validation that has not run yet."""
        validated = record.kind == "validation" or any(n.startswith("val_") for n in record.values)
        if not self.seen and (validated or not self.name.startswith("val_")):
            raise ConfigurationError(
                f"{self._owner} cannot find {self.name!r}.{did_you_mean(self.name, record.values)}"
            )


def check_names(owner: str, name: str, loop: LoopView, names: Collection[str]) -> None:
    """Check before the first step that records will contain a monitored value.

    Parts of a metric, and metrics that no step has updated yet, may be recorded later.

    Args:
        owner: The name of the hook, for messages.
        name: The name of the monitored value.
        loop: The loop.
        names: The names of the values that records will contain.

    Raises:
        ConfigurationError: If they will not. A missing validation set is only a warning, since a
            later call may have one.
    """
    later = any(name == metric or name.endswith(f"_{metric}") for metric in loop.state.metrics)
    validates = any(known.startswith("val_") for known in names)
    if name.startswith("val_") and name not in names and not validates:
        warnings.warn(
            f"{owner} finds no {name} in this call of fit, which has no validation set: write "
            f"loop.fit(train, validation=source), or monitor another value. Known: "
            f"{', '.join(names)}",
            TreadleWarning,
            stacklevel=2,
        )
        return
    if name not in names and not later and not name.startswith(tuple(f"{n}_" for n in names)):
        raise ConfigurationError(f"{owner} cannot find {name!r}.{did_you_mean(name, names)}")


def direction_of(monitor: str, direction: str | None) -> Literal["min", "max"]:
    """Return `"min"` or `"max"`: the given direction, or the one inferred from the name.

    Raises:
        ConfigurationError: If the direction is unknown, or is None and cannot be inferred, or if
            the monitored value is not given by its name.

    Example:
        >>> direction_of("val_accuracy", None)
        'max'
    """
    if not isinstance(monitor, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(
            f"monitor is the name of a recorded value, such as 'val_loss', not a "
            f"{type(monitor).__name__}"
        )
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
        f"cannot infer from the name {monitor!r} whether smaller or larger is better: pass "
        "direction='min' or direction='max', or correct the name"
    )
