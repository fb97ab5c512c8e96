"""Stopping where a value no longer improves."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from ..errors import ConfigurationError, did_you_mean
from ..hook import Hook, LoopView
from ..logs import Record

SMALLER_IS_BETTER = re.compile(r"(loss|error|mae|mse)$", re.IGNORECASE)
LARGER_IS_BETTER = re.compile(r"accuracy|auc|f1|precision|recall", re.IGNORECASE)


class EarlyStopping(Hook):
    """Ends training when a value has not improved for a while, and puts the best weights back.

    The value is looked for in the records of epochs and validations, once at each step. NaN is
    never an improvement. The best state, of all variables, is put back whenever training ends:
    also when it ran to its end, when something else stopped it, and after an exception or Ctrl-C.

    The best state is part of checkpoints, which it makes twice as large: a run that goes on in
    another process can still put it back.

    Args:
        monitor: The name of the value.
        direction: `"min"` or `"max"`: what is better. To be stated unless the name ends with loss,
            error, mae or mse, or contains accuracy, auc, f1, precision or recall.
        patience: After how many records in a row without an improvement training ends.
        min_delta: By how much a better value must be better.
        restore_best: Put the best state back.

    Raises:
        ConfigurationError: The direction is not known or does not follow from the name; patience or
            min_delta is negative. At the first record of a validation: nothing has this name.

    Example:
        >>> import treadle
        >>> stopping = treadle.hooks.EarlyStopping("val_accuracy", patience=3)
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        direction: Literal["min", "max"] | None = None,
        patience: int = 5,
        min_delta: float = 0.0,
        restore_best: bool = True,
    ) -> None:
        if patience < 0 or min_delta < 0:
            raise ConfigurationError(
                f"EarlyStopping needs patience and min_delta of at least 0, not {patience!r} and "
                f"{min_delta!r}"
            )
        self._monitor, self._patience, self._min_delta = monitor, patience, min_delta
        self._sign = 1.0 if direction_of(monitor, direction) == "min" else -1.0
        self._restore_best = restore_best
        self._resumed = False
        self._begin()

    def start(self, loop: LoopView) -> None:
        """Begin anew, unless this run goes on where another process left it."""
        if not self._resumed:
            self._begin()
        self._resumed = False

    def record(self, loop: LoopView, record: Record) -> None:
        """Compare the monitored value with the best one."""
        if record.kind not in ("epoch", "validation"):
            return
        if self._monitor not in record.values:
            self._refuse_unknown(record)
            return
        step = record.progress.step
        if step == self._last_step:  # an epoch repeats what a validation at its end has told
            return
        self._last_step = step
        value = float(record.values[self._monitor])
        if self._improved(value):
            self._best, self._best_step, self._waited = value, step, 0
            if self._restore_best:
                self._snapshot, self._arrays = loop.snapshot(), None
            return
        self._waited += 1
        if self._waited >= self._patience:
            loop.stop(self._why())

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Put the best state back, however training ended."""
        snapshot, self._snapshot = self._snapshot, None  # it may be all of a device's memory
        self._arrays = None
        if snapshot is not None:
            loop.restore(snapshot)
        elif self._last_step < 0 and loop.history.records and error is None:
            loop.log(
                {
                    "warning": f"EarlyStopping never saw {self._monitor}: pass a validation source "
                    "to fit, or monitor a value that epochs have"
                }
            )

    def state(self) -> dict[str, Any]:
        """Return the best value, the count, and the best state as NumPy arrays."""
        if self._snapshot is not None and self._arrays is None:
            self._arrays = _read_only(_as_arrays(self._snapshot))
        return {
            "best": self._best,
            "best_step": self._best_step,
            "last_step": self._last_step,
            "waited": self._waited,
            "arrays": self._arrays,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned."""
        self._best = state["best"]
        self._best_step, self._last_step = state["best_step"], state["last_step"]
        self._waited, self._resumed = state["waited"], True
        self._snapshot = state["arrays"]
        self._arrays = state["arrays"] and _read_only(state["arrays"])

    def _begin(self) -> None:
        self._best: float | None = None
        self._best_step = self._last_step = -1
        self._waited = 0
        self._snapshot: Any = None
        self._arrays: dict[str, Any] | None = None  # the same for checkpoints, made when needed

    def _improved(self, value: float) -> bool:
        if value != value:
            return False
        if self._best is None:
            return True
        return self._sign * value < self._sign * self._best - self._min_delta

    def _why(self) -> str:
        times = "once" if self._waited == 1 else f"{self._waited} times in a row"
        if self._best is None:
            return f"{self._monitor} was NaN {times}"
        return (
            f"{self._monitor} was not better {times} than {self._best:.6g}, its best, of step "
            f"{self._best_step}"
        )

    def _refuse_unknown(self, record: Record) -> None:
        """Raise, unless the name may still come: one of a validation that is not due yet."""
        validated = record.kind == "validation" or any(n.startswith("val_") for n in record.values)
        if self._last_step < 0 and (validated or not self._monitor.startswith("val_")):
            raise ConfigurationError(
                f"EarlyStopping cannot find {self._monitor!r}."
                f"{did_you_mean(self._monitor, record.values)}"
            )


def _as_arrays(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    from ..backends.base import active  # late: it imports Keras

    return {path: active().to_numpy(value) for path, value in snapshot.items()}


def _read_only(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return views that cannot be written to, which a checkpoint need not copy."""
    views = {path: array.view() for path, array in arrays.items()}
    for view in views.values():
        view.flags.writeable = False
    return views


def direction_of(monitor: str, direction: str | None) -> Literal["min", "max"]:
    """Return what is better, `"min"` or `"max"`, as it was said or follows from a name.

    Raises:
        ConfigurationError: It is something else, or was not said and does not follow.
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
