"""Messages between the main process and workers: trial orders and outcomes, as JSON types."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

OUTPUT: Final = "output.txt"
"""File with the task's printed output, in the run directory."""
PRUNED: Final = "pruned"
DIVERGED: Final = "diverged"


@dataclass(frozen=True)
class Order:
    """A trial to start or to resume.

    Attributes:
        number: Number of the trial, from 0.
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
    """

    number: int
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


@dataclass
class Outcome:
    """The outcome of a trial.

    Attributes:
        ended: As `Trial.ended`.
        value: The last logged value, or None.
        error: The error that ended the trial, or None.
        stops: Name of an error class that ends the whole search, because every trial would fail in
            the same way; None otherwise.
        seconds: Duration of the trial.
        seed: Seed of the run, or None if the run did not start.
        code: Hashes of the user's code, as returned by `user_code.code_of`; empty if the task could
            not be made.
    """

    ended: str
    value: float | None = None
    error: str | None = None
    stops: str | None = None
    seconds: float = 0.0
    seed: int | None = None
    code: Mapping[str, str] = field(default_factory=lambda: dict[str, str]())
