"""What was tried, and what came of it."""

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Ended = Literal["complete", "pruned", "diverged", "failed", "unfinished"]


@dataclass(frozen=True)
class Trial:
    """One set of settings that was tried.

    Attributes:
        number: From 0; its run directory ends with it.
        ended: `"complete"`; `"pruned"`, because others were better by then; `"diverged"`, because
            a value became NaN or infinite; `"failed"`, with an `error`; `"unfinished"`: it goes on
            when the search does.
        value: The last of the value that is searched by, or None.
        parameters: What was tried, by name.
        reports: How many times the value was known: epochs, where it is of validation.
        seconds: How long it took, in the process that ended it.
        error: What ended it, or None.
        directory: Its run directory, or None.
    """

    number: int
    ended: Ended
    value: float | None
    parameters: Mapping[str, Any]
    reports: int
    seconds: float | None
    error: str | None
    directory: str | None


@dataclass(frozen=True)
class Tuned:
    """What a search found.

    Attributes:
        monitor: The value that it was searched by.
        direction: `"min"` or `"max"`: what is better.
        trials: All that were tried.
        directory: Where the database and the runs are, or None.
        command: What trains with the best settings again, and ends with the same value bit for
            bit; None where there is no best one, or the task is no recipe and no file's.
        before: All had been tried before, and nothing ran now.
        exhausted: Every combination of what is searched was tried, which may be fewer than were
            asked for.
        changed: A sentence on what changed in the task's code since the first trials; empty where
            nothing did, or nothing ran now.
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
        """Trials that came to their end, the best first."""
        complete = [trial for trial in self.trials if trial.ended == "complete"]
        sign = 1 if self.direction == "min" else -1
        return sorted(complete, key=lambda trial: sign * (trial.value or 0.0))

    @property
    def best(self) -> Trial | None:
        """The best trial of those that came to their end; None where none did."""
        return next(iter(self.ranked), None)

    @property
    def parameters(self) -> dict[str, Any] | None:
        """The settings of the best trial."""
        return dict(self.best.parameters) if self.best else None

    @property
    def value(self) -> float | None:
        """The value of the best trial."""
        return self.best.value if self.best else None

    def facts(self) -> dict[str, Any]:
        """Return all of it in JSON's types."""
        return {**asdict(self), "best": asdict(self.best) if self.best else None}


def command_of(
    task: str,
    settings: Mapping[str, Any],
    lasts: Mapping[str, int],
    seed: int,
    more: Mapping[str, str | None],
) -> str:
    """Return the `treadle run` that trains with these settings.

    Args:
        task: The recipe, or `file.py:Task`.
        settings: Those that are not the task's defaults.
        lasts: Epochs or steps; nothing where it is the task's own.
        seed: Of the run.
        more: Further options by name; those that are None are left out.

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
