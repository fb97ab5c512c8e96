"""The hooks `BestWeights`, `EarlyStopping` and `ReduceOnPlateau`, which watch a value."""

from collections.abc import Mapping
from typing import Any, Literal

from ..core import schema
from ..core.habits import OF_MONITORS, OF_PLATEAU, OF_STOPPING, explains
from ..core.history import History
from ..core.hook import Hook, LoopView
from ..core.logs import Record
from ..errors import ConfigurationError
from .monitor import Monitor, check_names

RESTORED = "the weights are those of step "


def restored_step(history: History) -> int | None:
    """Return the step whose weights a hook restored at the end of a run, or None."""
    end = max((record.progress.step for record in history.records), default=0)
    for record in reversed(history.records):
        note = record.values.get("note")
        if record.progress.step < end:  # trained on since
            break
        if isinstance(note, str) and note.startswith(RESTORED):
            return int(note.removeprefix(RESTORED).partition(",")[0])
    return None


class BestWeights(Hook):
    """Restores the state of the step with the best value when training ends.

    The value is read from the records of epochs and validations, once per step. NaN never counts as
    an improvement. The best state of all variables is restored whenever training ends: also when it
    was completed, when a hook stopped it, and after an exception or Ctrl-C. If training completed,
    a note in the log names the step. Weights that an optimizer averages (`use_ema=True`) become the
    averages of that step.

    Checkpoints include the best state, so that a resumed run can restore it. This doubles their
    size.

    Args:
        monitor: The name of the monitored value.
        direction: `"min"` or `"max"`: whether smaller or larger is better. Required unless the name
            ends with loss, error, mae or mse, or contains accuracy, acc, auc, f1, precision or
            recall.
        min_delta: The minimum change that counts as an improvement.

    Raises:
        ConfigurationError: If the direction is unknown or cannot be inferred from the name, or if
            min_delta is negative. Before the first step of `fit`: if no recorded value has
            this name.

    Example:
        >>> import treadle
        >>> best = treadle.hooks.BestWeights("val_accuracy")
    """

    _restores = True

    @explains("BestWeights", OF_MONITORS)
    def __init__(
        self,
        monitor: str = "val_loss",
        direction: Literal["min", "max"] | None = None,
        min_delta: float = 0.0,
    ) -> None:
        owner = type(self).__name__
        if min_delta < 0:
            raise ConfigurationError(f"{owner} needs a min_delta of at least 0, not {min_delta!r}")
        self._monitor = Monitor(owner, monitor, direction, min_delta)
        self.identity = self._monitor.identity
        self._resumed = False
        self._begin()

    def _check_names(self, loop: LoopView, names: Mapping[str, float]) -> None:
        """Check the monitored name before the first step."""
        check_names(type(self).__name__, self._monitor.name, loop, names)

    def start(self, loop: LoopView) -> None:
        """Reset the best value, unless this run is resumed from a checkpoint."""
        if not self._resumed:
            self._begin()
        self._resumed = False

    def record(self, loop: LoopView, record: Record) -> None:
        """Compare the monitored value with the best one, and keep the state if it is better."""
        self._improved(loop, record)

    def _improved(self, loop: LoopView, record: Record) -> bool | None:
        improved = self._monitor.improved(record)
        if improved and self._restores:
            self._snapshot, self._arrays = loop.snapshot(), None
        return improved

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Restore the best state."""
        monitor = self._monitor
        snapshot, self._snapshot = self._snapshot, None  # frees device memory
        self._arrays = None
        if snapshot is not None:
            loop.restore(snapshot)
            if error is None and not loop.unfinished:
                at = f"{monitor.best_step}, the best {monitor.name}: {monitor.best:.6g}"
                loop.log({"note": f"{RESTORED}{at}"})
        elif not monitor.seen and loop.history.records and error is None:
            loop.log(
                {
                    "warning": f"{type(self).__name__} found no {monitor.name}: pass a validation "
                    "source to fit, or monitor a value that is recorded every epoch"
                }
            )

    def state(self) -> dict[str, Any]:
        """Return the best value, the counters, and the best state as NumPy arrays."""
        if self._snapshot is not None and self._arrays is None:
            from ..backends.base import active  # late: it imports Keras

            arrays = {path: active().to_numpy(value) for path, value in self._snapshot.items()}
            self._arrays = _read_only(arrays)
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


class EarlyStopping(BestWeights):
    """Stops training when a monitored value stops improving, and restores the best state.

    Reads values and restores the best state like `BestWeights`.

    Args:
        monitor: The name of the monitored value.
        direction: `"min"` or `"max"`: whether smaller or larger is better; see `BestWeights`.
        patience: The number of consecutive records without improvement after which training stops.
        min_delta: The minimum change that counts as an improvement.
        restore_best: Whether to restore the best state when training ends.

    Raises:
        ConfigurationError: As for `BestWeights`, or if patience is negative.

    Example:
        >>> import treadle
        >>> stopping = treadle.hooks.EarlyStopping("val_accuracy", patience=3)
    """

    @explains("EarlyStopping", OF_STOPPING)
    def __init__(
        self,
        monitor: str = "val_loss",
        direction: Literal["min", "max"] | None = None,
        patience: int = 5,
        min_delta: float = 0.0,
        restore_best: bool = True,
    ) -> None:
        super().__init__(monitor, direction, min_delta)
        if patience < 0:
            raise ConfigurationError(
                f"EarlyStopping needs a patience of at least 0, not {patience!r}"
            )
        self._patience, self._restores = patience, restore_best

    def record(self, loop: LoopView, record: Record) -> None:
        """Compare the monitored value with the best one, and stop if patience is exhausted."""
        if self._improved(loop, record) is False and self._monitor.waited >= self._patience:
            loop.stop(self._monitor.why())


def _read_only(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return read-only views, which checkpoints do not copy."""
    views = {path: array.view() for path, array in arrays.items()}
    for view in views.values():
        view.flags.writeable = False
    return views


class ReduceOnPlateau(Hook):
    """Multiplies learning rates by a factor when a monitored value stops improving.

    The value is read from the records of epochs and validations, once per step. NaN never counts as
    an improvement. Each reduction is logged. The learning rate is a variable of the optimizer, so
    the change needs no recompilation and is part of checkpoints.

    Args:
        monitor: The name of the monitored value.
        factor: The factor by which the learning rate is multiplied.
        patience: The number of consecutive records without improvement before a reduction.
        cooldown: The number of records ignored after a reduction.
        minimum: The lower bound of the learning rate.
        direction: `"min"` or `"max"`: whether smaller or larger is better. Required if it cannot be
            inferred from the name; see `BestWeights`.
        min_delta: The minimum change that counts as an improvement.
        optimizer: The path of the optimizer, such as `"optimizers/critic"`; None for all optimizers
            of the task.

    Raises:
        ConfigurationError: If an argument is out of range. When training starts: if there is no
            such optimizer, if its learning rate is a schedule, or if no recorded value has the
            name.

    Example:
        >>> import treadle
        >>> hook = treadle.hooks.ReduceOnPlateau("val_loss", factor=0.5, patience=3)
    """

    @explains("ReduceOnPlateau", OF_PLATEAU)
    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        cooldown: int = 0,
        minimum: float = 0.0,
        direction: Literal["min", "max"] | None = None,
        min_delta: float = 0.0,
        optimizer: str | None = None,
    ) -> None:
        if not 0 < factor < 1:
            raise ConfigurationError(
                f"ReduceOnPlateau needs a factor between 0 and 1, not {factor!r}: the learning "
                "rate is multiplied by it"
            )
        least = {"patience": 1, "cooldown": 0, "minimum": 0, "min_delta": 0}
        given = {"patience": patience, "cooldown": cooldown, "minimum": minimum}
        for name, value in {**given, "min_delta": min_delta}.items():
            if value < least[name]:
                raise ConfigurationError(
                    f"ReduceOnPlateau needs a {name} of at least {least[name]}, not {value!r}"
                )
        self._monitor = Monitor("ReduceOnPlateau", monitor, direction, min_delta)
        self.identity = " ".join(filter(None, (self._monitor.identity, optimizer)))
        self._factor, self._patience, self._cooldown = factor, patience, cooldown
        self._minimum, self._optimizer = minimum, optimizer
        self._cooling, self._resumed = 0, False

    def _check_names(self, loop: LoopView, names: Mapping[str, float]) -> None:
        """Check the monitored name before the first step."""
        check_names(type(self).__name__, self._monitor.name, loop, names)

    def start(self, loop: LoopView) -> None:
        """Reset the best value, unless this run is resumed from a checkpoint."""
        self._rates(loop)
        if not self._resumed:
            self._monitor.begin()
            self._cooling = 0
        self._resumed = False

    def record(self, loop: LoopView, record: Record) -> None:
        """Compare the monitored value with the best one, and reduce if patience is exhausted."""
        improved = self._monitor.improved(record)
        if improved is None:
            return
        if self._cooling > 0:
            self._cooling -= 1
            self._monitor.waited = 0
        elif self._monitor.waited >= self._patience:
            self._reduce(loop)
            self._monitor.waited, self._cooling = 0, self._cooldown

    def state(self) -> dict[str, Any]:
        """Return the best value and the counters."""
        return {**self._monitor.state(), "cooling": self._cooling}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state`."""
        self._monitor.restore(state)
        schema.whole()(state["cooling"], "cooling")
        self._cooling, self._resumed = state["cooling"], True

    def _reduce(self, loop: LoopView) -> None:
        for path, variable in self._rates(loop).items():
            before = float(variable.numpy())
            after = max(before * self._factor, self._minimum)
            if after < before:
                variable.assign(after)
                loop.log(
                    {
                        f"{path}/learning_rate": after,
                        "note": f"the learning rate of {path} went from {before:.6g} to "
                        f"{after:.6g}, because {self._monitor.why()}",
                    }
                )

    def _rates(self, loop: LoopView) -> dict[str, Any]:
        """Return the learning rate variables by the path of their optimizer.

        Raises:
            ConfigurationError: If a learning rate is not a variable.
        """
        import keras  # late: it fixes the backend, which may not be chosen yet at import

        from ..schedules import learning_rate_of, optimizers_of

        found = optimizers_of(loop.state.all_optimizers, self._optimizer)
        rates = {path: learning_rate_of(optimizer) for path, optimizer in found.items()}
        for path, rate in rates.items():
            if not isinstance(rate, keras.Variable):
                raise ConfigurationError(
                    f"the learning rate of {path} is a schedule ({type(rate).__name__}), which "
                    "ReduceOnPlateau cannot change: give the optimizer a number, or name another "
                    "one with ReduceOnPlateau(optimizer=…)"
                )
        return rates
