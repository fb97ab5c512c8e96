"""The `ReduceOnPlateau` hook, which reduces learning rates when a value stops improving."""

from collections.abc import Mapping
from typing import Any, Literal

from ..core import schema
from ..core.hook import Hook, LoopView
from ..core.logs import Record
from ..errors import ConfigurationError
from .monitor import Monitor


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
            inferred from the name; see `EarlyStopping`.
        min_delta: The minimum change that counts as an improvement.
        optimizer: The path of the optimizer, such as `"optimizers/critic"`; None for all optimizers
            of the task.

    Raises:
        ConfigurationError: If an argument is out of range. When training starts: if there is no
            such optimizer, or its learning rate is a schedule. At the first validation record: if
            no recorded value has the name.

    Example:
        >>> import treadle
        >>> hook = treadle.hooks.ReduceOnPlateau("val_loss", factor=0.5, patience=3)
    """

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
        self._factor, self._patience, self._cooldown = factor, patience, cooldown
        self._minimum, self._optimizer = minimum, optimizer
        self._cooling, self._resumed = 0, False

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
