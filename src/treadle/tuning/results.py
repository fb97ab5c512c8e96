"""Results of a search: `Trial`, `Tuned`, and the command that repeats the best trial."""

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Ended = Literal["complete", "pruned", "diverged", "failed", "unfinished"]


@dataclass(frozen=True)
class Trial:
    """A trial of a search: one combination of settings.

    Attributes:
        number: Number of the trial, from 0; the name of its run directory.
        ended: `"complete"`; `"pruned"`: ended early, because other trials were better at the same
            point; `"diverged"`: the value became NaN or infinite; `"failed"`: ended by an `error`;
            `"unfinished"`: interrupted, and resumed when the search is resumed.
        value: The monitored value of the weights that the trial leaves, or None: of the best step
            if a hook such as `EarlyStopping` restored it, else of the last one.
        step: The step at which this value was logged, or None.
        parameters: The searched settings, by name.
        reports: How many times the value was logged; for validation values, the number of epochs.
        seconds: Duration in the process that ended the trial, or None.
        error: The error that ended the trial, or None.
        directory: The run directory, or None.
    """

    number: int
    ended: Ended
    value: float | None
    step: int | None
    parameters: Mapping[str, Any]
    reports: int
    seconds: float | None
    error: str | None
    directory: str | None


@dataclass(frozen=True)
class Tuned:
    """The result of a search.

    Attributes:
        monitor: Name of the optimized value.
        direction: `"min"` or `"max"`: whether smaller or larger values are better.
        trials: All trials.
        directory: The folder with the database and the run directories, or None.
        command: The `treadle run` command that trains with the best settings and ends with the same
            value bit for bit; None if no trial completed, or if the task was given as a class or
            function.
        before: Whether the search was already finished, so that no trial ran in this call.
        exhausted: Whether every combination of the search space was tried. There may be fewer
            combinations than requested trials.
        changed: A sentence on what changed in the task's code since the first trials; empty if
            nothing changed, or no trial ran.
    """

    monitor: str
    direction: Literal["min", "max"]
    trials: tuple[Trial, ...]
    directory: str | None = None
    command: str | None = None
    before: bool = False
    exhausted: bool = False
    changed: str = ""

    @property
    def ranked(self) -> list[Trial]:
        """Completed trials, best first."""
        complete = [trial for trial in self.trials if trial.ended == "complete"]
        sign = 1 if self.direction == "min" else -1
        return sorted(complete, key=lambda trial: sign * (trial.value or 0.0))

    @property
    def best(self) -> Trial | None:
        """The best completed trial, or None."""
        return next(iter(self.ranked), None)

    @property
    def parameters(self) -> dict[str, Any] | None:
        """The searched settings of the best trial, or None."""
        return dict(self.best.parameters) if self.best else None

    @property
    def value(self) -> float | None:
        """The value of the best trial, or None."""
        return self.best.value if self.best else None

    def facts(self) -> dict[str, Any]:
        """Return all fields and the best trial, as JSON types."""
        return {**asdict(self), "best": asdict(self.best) if self.best else None}


def command_of(
    task: str,
    settings: Mapping[str, Any],
    lasts: Mapping[str, int],
    seed: int,
    more: Mapping[str, str | None],
) -> str:
    """Return the `treadle run` command that trains with these settings.

    Args:
        task: The recipe, or `file.py:Task`.
        settings: Settings to pass with `--set`; the others keep the task's defaults.
        lasts: Number of epochs or steps by name; empty for the task's own.
        seed: Seed of the run.
        more: Further options by name; None values are left out.

    Example:
        >>> command_of("digits", {"units": 32, "name": "a b"}, {"epochs": 2}, 0, {"backend": None})
        "treadle run digits --set units=32 --set 'name=a b' --epochs 2 --seed 0"
    """
    words = ["treadle", "run", task]
    for name, value in settings.items():
        words += ["--set", f"{name}={value}"]
    for name, value in {**lasts, "seed": seed, **more}.items():
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)
