"""One trial: makes a task with its settings and trains it, reporting values as they are logged.

This module imports Keras.
"""

import math
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.directory import read_run
from ..core.history import History
from ..core.hook import Hook, LoopView
from ..core.logs import Record
from ..core.options import run_seed
from ..core.user_code import code_of
from ..errors import (
    BackendError,
    CheckpointError,
    ConfigurationError,
    DataError,
    DirectoryError,
    NonFiniteError,
    did_you_mean,
)
from ..hooks.monitor import Monitor
from ..hooks.stopping import restored_step
from ..loop import Loop
from ..recipes._loading import Made
from .orders import DIVERGED, PRUNED, Order, Outcome

Report = Callable[[int, float], bool]


class Unfit(ConfigurationError):
    """The search cannot work with any settings; `treadle.tune` raises the parent class instead."""


STOPPING = (BackendError, CheckpointError, DataError, DirectoryError, Unfit)
"""Errors that do not depend on the settings, so that they end the whole search.

A `DataError` ends it only until some trial has completed: a batch size may be too large for the
data."""


@dataclass(frozen=True)
class TrialTask:
    """A task with its data and the recorded configuration of its run.

    Attributes:
        made: The task.
        train: Training data; None means the task's own.
        validation: Validation data.
        configuration: Further configuration of the run, as JSON types, without its duration.
    """

    made: Made
    train: Any = None
    validation: Any = None
    configuration: Mapping[str, Any] | None = None


class Reporting(Hook):
    """Reports the monitored value each time it is logged, and ends the trial if it is pruned.

    Args:
        order: The order, for the name and direction of the monitored value.
        report: Receives the number of earlier reports and the value; returns whether to end the
            trial.

    Attributes:
        ended: `"pruned"` or `"diverged"` if the hook ended the trial, else None.
    """

    def __init__(self, order: Order, report: Report) -> None:
        self._monitor = Monitor("tune", order.monitor, order.direction, 0.0, logged=True)
        self._report, self._reports = report, 0
        self.ended: str | None = None

    def record(self, loop: LoopView, record: Record) -> None:
        """Report the monitored value if the record contains it.

        Raises:
            ConfigurationError: If the task does not log the monitored value.
        """
        try:
            improved = self._monitor.improved(record)
        except ConfigurationError as error:
            raise missing(self._monitor.name, loop.history.last) from error
        if record.kind == "epoch" and not self._monitor.seen:
            raise missing(self._monitor.name, loop.history.last)
        if improved is None:
            return
        value = float(record.values[self._monitor.name])
        if not math.isfinite(value):
            self.ended = "diverged"
            loop.stop(f"{DIVERGED}: {self._monitor.name} is {value}")
        elif self._report(self._reports, value):
            self.ended = "pruned"
            loop.stop(f"{PRUNED}: {self._monitor.name} was {value:.6g}, and others were better")
        self._reports += 1

    def state(self) -> dict[str, Any]:
        """Return the hook's state for checkpoints."""
        return {**self._monitor.state(), "reports": self._reports}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state`."""
        self._monitor.restore(state)
        self._reports = state["reports"]


def tried(order: Order, make: Callable[[], TrialTask], report: Report) -> Outcome:
    """Train a task with the settings of an order, and return the outcome. Errors are caught.

    Args:
        order: The trial to run.
        make: Makes the task and its data.
        report: Called each time that the monitored value is logged, with the number of earlier
            reports and the value; returns whether to end the trial.
    """
    began = time.monotonic()
    seed: int | None = None
    code: Mapping[str, str] = {}
    try:
        subject = make()
        seed, found = run_seed(), code_of(subject.made.task)
        # For a task class defined in a function, these may include settings: closure variables.
        code = {name: value for name, value in found.items() if name not in order.settings}
        ended, value, step = _trained(order, subject, report)
        outcome = Outcome(ended, value, step=step)
    except NonFiniteError as error:
        outcome = Outcome("diverged", error=_described(error))
    except Exception as error:  # raised by the user's code: the trial counts as failed
        stops = isinstance(error, STOPPING)
        if not stops or isinstance(error, DataError):
            traceback.print_exception(error)
        outcome = Outcome("failed", error=_described(error), stops=_kind(error) if stops else None)
    outcome.seconds, outcome.seed, outcome.code = time.monotonic() - began, seed, code
    return outcome


def missing(name: str, known: Mapping[str, Any]) -> Unfit:
    """Return the error for a monitored value that the task does not log."""
    return Unfit(
        f"tune cannot find {name!r} among the values that epochs, validations and hooks log."
        f"{did_you_mean(name, known)}"
    )


def _trained(order: Order, subject: TrialTask, report: Report) -> tuple[str, float | None, int]:
    lasts: dict[str, Any] = dict(order.lasts) or dict(subject.made.lasts)
    if not lasts:
        raise Unfit(
            f"{order.task} does not define how long it trains: add --epochs or --steps, or give "
            "the class an attribute, as `epochs = 10`"
        )
    train, validation = subject.train, subject.validation
    if train is None:
        data = subject.made.datasets()
        train = data.train
        validation = data.validation if validation is None else validation
    reporting = Reporting(order, report)
    configuration = {**(subject.configuration or {}), **lasts}
    hooks = [*subject.made.hooks(), reporting]
    loop = Loop(
        subject.made.task, order.directory, hooks=hooks, configuration=configuration, console=False
    )
    with loop:
        history = loop.fit(train, validation, **lasts)
    if reporting.ended is None and order.directory is not None:
        # The trial may have ended in an earlier process that was killed before it sent the outcome.
        reason = str(read_run(Path(order.directory)).get("reason") or "").partition(":")[0]
        reporting.ended = reason if reason in (DIVERGED, PRUNED) else None
    value, step = _value(history, order.monitor)
    ended = reporting.ended or ("complete" if math.isfinite(value) else "diverged")
    return ended, value if math.isfinite(value) else None, step


def _value(history: History, name: str) -> tuple[float, int]:
    """Return the value of the weights that a run leaves, and the step at which it was logged.

    Raises:
        ConfigurationError: No value of this name was logged.
    """
    found = [
        (float(value), record.progress.step)
        for record in history.records
        if isinstance(value := record.values.get(name), (int, float))
    ]
    if not found:
        raise missing(name, history.last)
    restored = restored_step(history)
    of_weights = [pair for pair in found if restored is None or pair[1] <= restored]
    return of_weights[-1] if of_weights else found[-1]


def _described(error: Exception) -> str:
    return f"{_kind(error)}: {error}".rstrip(": ")


def _kind(error: Exception) -> str:
    return next(kind for kind in type(error).__mro__ if kind is not Unfit).__name__
