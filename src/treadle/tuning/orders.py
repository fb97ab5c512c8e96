"""The configuration of a search, and the orders and outcomes of its trials.

Orders and outcomes are messages between the main process and workers, as JSON types.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ..core.identity import described
from ..core.ranges import Range, Space

OUTPUT: Final = "output.txt"
"""File with the task's printed output, in the run directory."""
PRUNED: Final = "pruned"
DIVERGED: Final = "diverged"


@dataclass(frozen=True)
class Order:
    """A trial to start or to resume.

    Attributes:
        task: The recipe, `file.py:Task`, or the name of the class or function that makes the task.
        settings: Fixed and searched settings, by name; the others keep the task's defaults.
        lasts: Number of epochs or steps by name; if empty, the task's own.
        monitor: Name of the value to optimize.
        direction: Whether to minimize or maximize it.
        directory: The run directory, or None.
        seed: Seed of the run; None means the seed set in the task's file, else 0.
        backend: The backend; None means the default of the environment.
        precision: The dtype policy; None means Keras' setting.
        data_dir: The folder with data sets, or None.
        number: Number of the trial, from 0.
    """

    task: str
    settings: Mapping[str, Any]
    lasts: Mapping[str, int]
    monitor: str
    direction: Literal["min", "max"]
    directory: str | None = None
    seed: int | None = None
    backend: str | None = None
    precision: str | None = None
    data_dir: str | None = None
    number: int = 0


@dataclass
class Outcome:
    """The outcome of a trial.

    Attributes:
        ended: As `Trial.ended`.
        value: The value of the weights that the trial leaves, or None.
        step: The step at which it was logged, or None.
        error: The error that ended the trial, or None.
        stops: Name of an error class that ends the whole search, because every trial would fail in
            the same way; None otherwise.
        seconds: Duration of the trial in the process that ended it, or None.
        seed: Seed of the run, or None if the run did not start.
        code: Hashes of the user's code, as returned by `user_code.code_of`; empty if the task could
            not be made.
    """

    ended: str
    value: float | None = None
    step: int | None = None
    error: str | None = None
    stops: str | None = None
    seconds: float | None = None
    seed: int | None = None
    code: Mapping[str, str] = field(default_factory=lambda: dict[str, str]())


@dataclass(frozen=True)
class Configuration:
    """Configuration of a search. A database is only reused by a search of the same configuration.

    Attributes:
        order: What the orders of all trials share. Its settings are those that are not searched.
        spaces: Search spaces by name of the setting.
        others: Known defaults of settings that are neither searched nor fixed. They are not passed
            to the task, but if they change, the configuration is a different one.
        defaults: The task's defaults of the searched settings, used by the first trial; empty if
            they are unknown or outside the search space.
        pruning: Whether to end bad trials early.
        data: Facts that identify the data, if it is not the task's own.
    """

    order: Order
    spaces: Mapping[str, Space]
    others: Mapping[str, Any]
    defaults: Mapping[str, Any]
    pruning: bool
    data: Mapping[str, Any]

    @property
    def objective(self) -> Literal["minimize", "maximize"]:
        """The direction, as Optuna names it."""
        return "minimize" if self.order.direction == "min" else "maximize"

    @property
    def options(self) -> dict[str, str | None]:
        """The options that trials run with, by name."""
        return {name: getattr(self.order, name) for name in ("backend", "precision", "data_dir")}

    def facts(self) -> dict[str, Any]:
        """Return the values that are compared when a search is resumed, as JSON types."""
        order, settings = self.order, {**self.others, **self.order.settings}
        return {
            "task": order.task,
            "search": {name: _text(space) for name, space in self.spaces.items()},
            "fixed": {name: described(settings[name]) for name in sorted(settings)},
            **order.lasts,
            "monitor": order.monitor,
            "direction": order.direction,
            "pruning": self.pruning,
            "seed": order.seed or 0,
            **self.options,
            **self.data,
        }


def _text(space: Space) -> str:
    """Return a text that identifies a space; `str` of a choice is the same for 1 and "1"."""
    return str(space) if isinstance(space, Range) else repr(space)
