"""The `EarlyStopping` hook, which stops training when a monitored value stops improving."""

from collections.abc import Mapping
from typing import Any, Literal

from ..core.hook import Hook, LoopView
from ..core.logs import Record
from ..errors import ConfigurationError
from .monitor import Monitor


class EarlyStopping(Hook):
    """Stops training when a monitored value stops improving, and restores the best state.

    The value is read from the records of epochs and validations, once per step. NaN never counts as
    an improvement. The best state of all variables is restored whenever training ends: also when it
    was completed, when another hook stopped it, and after an exception or Ctrl-C. Weights that an
    optimizer averages (`use_ema=True`) become the averages of the best step.

    Checkpoints include the best state, so that a resumed run can restore it. This doubles their
    size.

    Args:
        monitor: The name of the monitored value.
        direction: `"min"` or `"max"`: whether smaller or larger is better. Required unless the name
            ends with loss, error, mae or mse, or contains accuracy, auc, f1, precision or recall.
        patience: The number of consecutive records without improvement after which training stops.
        min_delta: The minimum change that counts as an improvement.
        restore_best: Whether to restore the best state when training ends.

    Raises:
        ConfigurationError: If the direction is unknown or cannot be inferred from the name, or if
            patience or min_delta is negative. At the first validation record: if no recorded value
            has this name.

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
        self._monitor = Monitor("EarlyStopping", monitor, direction, min_delta)
        self._patience, self._restore_best = patience, restore_best
        self._resumed = False
        self._begin()

    def start(self, loop: LoopView) -> None:
        """Reset the best value, unless this run is resumed from a checkpoint."""
        if not self._resumed:
            self._begin()
        self._resumed = False

    def record(self, loop: LoopView, record: Record) -> None:
        """Compare the monitored value with the best one, and stop if patience is exhausted."""
        improved = self._monitor.improved(record)
        if improved and self._restore_best:
            self._snapshot, self._arrays = loop.snapshot(), None
        elif improved is False and self._monitor.waited >= self._patience:
            loop.stop(self._monitor.why())

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Restore the best state."""
        snapshot, self._snapshot = self._snapshot, None  # frees device memory
        self._arrays = None
        if snapshot is not None:
            loop.restore(snapshot)
        elif not self._monitor.seen and loop.history.records and error is None:
            loop.log(
                {
                    "warning": f"EarlyStopping found no {self._monitor.name}: pass a validation "
                    "source to fit, or monitor a value that is recorded every epoch"
                }
            )

    def state(self) -> dict[str, Any]:
        """Return the best value, the counters, and the best state as NumPy arrays."""
        if self._snapshot is not None and self._arrays is None:
            self._arrays = _read_only(_as_arrays(self._snapshot))
        return {**self._monitor.state(), "arrays": self._arrays}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state`."""
        self._monitor.restore(state)
        self._resumed = True
        self._snapshot = state["arrays"]
        self._arrays = state["arrays"] and _read_only(state["arrays"])

    def _begin(self) -> None:
        self._monitor.begin()
        self._snapshot: Any = None
        self._arrays: dict[str, Any] | None = None  # the snapshot as arrays, cached for checkpoints


def _as_arrays(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    from ..backends.base import active  # late: it imports Keras

    return {path: active().to_numpy(value) for path, value in snapshot.items()}


def _read_only(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return read-only views, which checkpoints do not copy."""
    views = {path: array.view() for path, array in arrays.items()}
    for view in views.values():
        view.flags.writeable = False
    return views
