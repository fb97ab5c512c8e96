"""Lowering the learning rate where a value no longer improves."""

from collections.abc import Mapping
from typing import Any, Literal

from ..core.hook import Hook, LoopView
from ..core.logs import Record
from ..errors import ConfigurationError
from .monitor import Monitor


class ReduceOnPlateau(Hook):
    """Multiplies learning rates by a factor when a value has not improved for a while.

    The value is looked for in the records of epochs and validations, once at each step. NaN is
    never an improvement. What it does is told in the log. The learning rate is a variable of the
    optimizer: the compiled step reads it, and checkpoints hold it.

    Args:
        monitor: The name of the value.
        factor: What the learning rate is multiplied by.
        patience: After how many records in a row without an improvement.
        cooldown: How many records after a reduction count for nothing.
        minimum: The smallest learning rate.
        direction: `"min"` or `"max"`: what is better. To be stated where it does not follow from
            the name; see `EarlyStopping`.
        min_delta: By how much a better value must be better.
        optimizer: The path of the optimizer, such as `"optimizers/critic"`; None for all that the
            task has.

    Raises:
        ConfigurationError: An argument cannot be meant. When training starts: there is no such
            optimizer, or its learning rate is a schedule. At the first record of a validation:
            nothing has the name.

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
        """Begin anew, unless this run goes on where another process left it."""
        self._rates(loop)
        if not self._resumed:
            self._monitor.begin()
            self._cooling = 0
        self._resumed = False

    def record(self, loop: LoopView, record: Record) -> None:
        """Compare the monitored value with the best one, and reduce where it is time."""
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
        """Return the best value and the counts."""
        return {**self._monitor.state(), "cooling": self._cooling}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned."""
        self._monitor.restore(state)
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
        """Return the variables that hold learning rates, by the optimizer's path.

        Raises:
            ConfigurationError: A learning rate is no variable.
        """
        import keras  # late: it fixes the backend, which nobody may have chosen at import

        from ..schedules import learning_rate_of, optimizers_of

        found = optimizers_of(loop.state.optimizers, self._optimizer)
        rates = {path: learning_rate_of(optimizer) for path, optimizer in found.items()}
        for path, rate in rates.items():
            if not isinstance(rate, keras.Variable):
                raise ConfigurationError(
                    f"the learning rate of {path} is a schedule ({type(rate).__name__}), which "
                    "ReduceOnPlateau cannot change: give the optimizer a number, or name another "
                    "one with ReduceOnPlateau(optimizer=…)"
                )
        return rates
