"""What is asked of who tries settings, and what comes back: plain values, as JSON takes them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

OUTPUT: Final = "output.txt"
"""What a task printed, beside its run."""
PRUNED: Final = "pruned"
DIVERGED: Final = "diverged"


@dataclass(frozen=True)
class Order:
    """A trial that is to be made, or to go on.

    Attributes:
        number: Of the trial, from 0.
        task: The recipe, `file.py:Task`, or the name of what makes the task.
        settings: Those that are given or searched, by name; the others are the task's defaults.
        lasts: Epochs or steps; nothing means the task's own.
        monitor: The value that it is judged by.
        direction: Whether a smaller or a larger one is better.
        directory: Its run directory, or None.
        seed: Of the run; None means the file's own, else 0.
        backend: None means what the environment says.
        precision: None means Keras' own setting.
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
    """What came of a trial.

    Attributes:
        ended: As `Trial.ended`.
        value: The last one, or None.
        error: What ended it, or None.
        stops: The name of the error that is to be raised, where no settings would do better.
        seconds: How long it took.
        seed: Of the run, or None where it did not begin.
        code: Hashes of the user's own code, as `identity.code_of` returns them; nothing where the
            task was not made.
    """

    ended: str
    value: float | None = None
    error: str | None = None
    stops: str | None = None
    seconds: float = 0.0
    seed: int | None = None
    code: Mapping[str, str] = field(default_factory=lambda: dict[str, str]())
