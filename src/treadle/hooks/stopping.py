"""Stopping where a value no longer improves."""

from collections.abc import Mapping
from typing import Any, Literal

from ..core.hook import Hook, LoopView
from ..core.logs import Record
from ..errors import ConfigurationError
from .monitor import Monitor


class EarlyStopping(Hook):
    """Ends training when a value has not improved for a while, and puts the best weights back.

    The value is looked for in the records of epochs and validations, once at each step. NaN is
    never an improvement. The best state, of all variables, is put back whenever training ends:
    also when it ran to its end, when something else stopped it, and after an exception or Ctrl-C.
    Weights that an optimizer averages (`use_ema=True`) become the averages of the best step.

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
        self._monitor = Monitor("EarlyStopping", monitor, direction, min_delta)
        self._patience, self._restore_best = patience, restore_best
        self._resumed = False
        self._begin()

    def start(self, loop: LoopView) -> None:
        """Begin anew, unless this run goes on where another process left it."""
        if not self._resumed:
            self._begin()
        self._resumed = False

    def record(self, loop: LoopView, record: Record) -> None:
        """Compare the monitored value with the best one."""
        improved = self._monitor.improved(record)
        if improved and self._restore_best:
            self._snapshot, self._arrays = loop.snapshot(), None
        elif improved is False and self._monitor.waited >= self._patience:
            loop.stop(self._monitor.why())

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Put the best state back, however training ended."""
        snapshot, self._snapshot = self._snapshot, None  # it may be all of a device's memory
        self._arrays = None
        if snapshot is not None:
            loop.restore(snapshot)
        elif not self._monitor.seen and loop.history.records and error is None:
            loop.log(
                {
                    "warning": f"EarlyStopping never saw {self._monitor.name}: pass a validation "
                    "source to fit, or monitor a value that epochs have"
                }
            )

    def state(self) -> dict[str, Any]:
        """Return the best value, the count, and the best state as NumPy arrays."""
        if self._snapshot is not None and self._arrays is None:
            self._arrays = _read_only(_as_arrays(self._snapshot))
        return {**self._monitor.state(), "arrays": self._arrays}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned."""
        self._monitor.restore(state)
        self._resumed = True
        self._snapshot = state["arrays"]
        self._arrays = state["arrays"] and _read_only(state["arrays"])

    def _begin(self) -> None:
        self._monitor.begin()
        self._snapshot: Any = None
        self._arrays: dict[str, Any] | None = None  # the same for checkpoints, made when needed


def _as_arrays(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    from ..backends.base import active  # late: it imports Keras

    return {path: active().to_numpy(value) for path, value in snapshot.items()}


def _read_only(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return views that cannot be written to, which a checkpoint need not copy."""
    views = {path: array.view() for path, array in arrays.items()}
    for view in views.values():
        view.flags.writeable = False
    return views
