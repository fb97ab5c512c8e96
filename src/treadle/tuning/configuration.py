"""Configuration of a search: what it optimizes, in which search space, and with which runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..core.identity import described
from ..core.ranges import Range, Space


@dataclass(frozen=True)
class Configuration:
    """Configuration of a search. A database is only reused by a search of the same configuration.

    Attributes:
        task: The recipe, `file.py:Task`, or the name of the class or function that makes the task.
        spaces: Search spaces by name of the setting.
        fixed: Values of settings that are not searched.
        others: Known defaults of settings that are neither searched nor fixed. They are not passed
            to the task, but if they change, the configuration is a different one.
        defaults: The task's defaults of the searched settings, used by the first trial; empty if
            they are unknown or outside the search space.
        lasts: Number of epochs or steps by name; if empty, the task's own.
        monitor: Name of the value to optimize.
        direction: Whether to minimize or maximize it.
        pruning: Whether to end bad trials early.
        seed: Seed of the runs and of the suggestions; None means the seed set in the task's file,
            else 0.
        options: Further fields of the orders: backend, precision and data folder.
        data: Facts that identify the data, if it is not the task's own.
    """

    task: str
    spaces: Mapping[str, Space]
    fixed: Mapping[str, Any]
    others: Mapping[str, Any]
    defaults: Mapping[str, Any]
    lasts: Mapping[str, int]
    monitor: str
    direction: Literal["min", "max"]
    pruning: bool
    seed: int | None
    options: Mapping[str, Any]
    data: Mapping[str, Any]

    @property
    def objective(self) -> Literal["minimize", "maximize"]:
        """The direction, as Optuna names it."""
        return "minimize" if self.direction == "min" else "maximize"

    def facts(self) -> dict[str, Any]:
        """Return the values that are compared when a search is resumed, as JSON types."""
        settings = {**self.others, **self.fixed}
        return {
            "task": self.task,
            "search": {name: _text(space) for name, space in self.spaces.items()},
            "fixed": {name: described(settings[name]) for name in sorted(settings)},
            **self.lasts,
            "monitor": self.monitor,
            "direction": self.direction,
            "pruning": self.pruning,
            "seed": self.seed or 0,
            **self.options,
            **self.data,
        }


def _text(space: Space) -> str:
    """Return a text that identifies a space; `str` of a choice is the same for 1 and "1"."""
    return str(space) if isinstance(space, Range) else repr(space)
