"""One trial: a task made with its settings and trained, while somebody may say that it is enough.

From here on Keras is there.
"""

import math
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.directory import read_run
from ..core.hook import Hook, LoopView
from ..core.identity import code_of
from ..core.logs import History, Record
from ..core.options import run_seed
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
from ..loop import Loop
from ..recipes._loading import Made
from .orders import DIVERGED, PRUNED, Order, Outcome

Report = Callable[[int, float], bool]


class Unfit(ConfigurationError):
    """What was asked for can be done with no settings at all; `treadle.tune` raises its parent."""


STOPPING = (BackendError, CheckpointError, DataError, DirectoryError, Unfit)
"""What other settings would meet as well. Of a `DataError` that is so only until some trial has
been through: one batch size may leave no batch."""


@dataclass(frozen=True)
class Subject:
    """A task with its data, and how its run is recorded.

    Attributes:
        made: The task.
        train: What it trains on; None means its own data.
        validation: What it is validated on.
        configuration: What else its run is, in JSON's types; without how long it lasts.
    """

    made: Made
    train: Any = None
    validation: Any = None
    configuration: Mapping[str, Any] | None = None


class Reporting(Hook):
    """Tells how good a run is each time that is known, and ends it where that is the answer.

    Args:
        order: What it is judged by.
        report: Takes how many values were known before, and the value; says whether to end.

    Attributes:
        ended: `"pruned"` or `"diverged"`, or None.
    """

    def __init__(self, order: Order, report: Report) -> None:
        self._monitor = Monitor("tune", order.monitor, order.direction, 0.0, logged=True)
        self._report, self._reports = report, 0
        self.ended: str | None = None

    def record(self, loop: LoopView, record: Record) -> None:
        """Report the value, if it is a new one.

        Raises:
            ConfigurationError: It is not among those that the task logs.
        """
        try:
            improved = self._monitor.improved(record)
        except ConfigurationError as error:
            raise missing(self._monitor.name, _logged(loop.history)) from error
        if record.kind == "epoch" and not self._monitor.seen:
            raise missing(self._monitor.name, _logged(loop.history))
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
        """Return what must survive a restart."""
        return {**self._monitor.state(), "reports": self._reports}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned."""
        self._monitor.restore(state)
        self._reports = state["reports"]


def tried(order: Order, make: Callable[[], Subject], report: Report) -> Outcome:
    """Train a task with the settings of an order; whatever ends it, return what came of it.

    Args:
        order: What is asked for.
        make: Makes the task and its data.
        report: Takes a number from 0 and a value, each time one is known; says whether to end.
    """
    began = time.monotonic()
    seed: int | None = None
    code: Mapping[str, str] = {}
    try:
        subject = make()
        seed, found = run_seed(), code_of(subject.made.task)
        # A task that a function defines may hold settings by their names.
        code = {name: value for name, value in found.items() if name not in order.settings}
        ended, value = _trained(order, subject, report)
        outcome = Outcome(ended, value)
    except NonFiniteError as error:
        outcome = Outcome("diverged", error=_told(error))
    except Exception as error:  # the user's own: a trial that fails is one of the results
        stops = isinstance(error, STOPPING)
        if not stops or isinstance(error, DataError):
            traceback.print_exception(error)
        outcome = Outcome("failed", error=_told(error), stops=_kind(error) if stops else None)
    outcome.seconds, outcome.seed, outcome.code = time.monotonic() - began, seed, code
    return outcome


def missing(name: str, known: Mapping[str, Any]) -> Unfit:
    """Return the error that a value is not among those that a task logs."""
    return Unfit(
        f"tune cannot find {name!r} in what epochs, validations and hooks log."
        f"{did_you_mean(name, known)}"
    )


def _trained(order: Order, subject: Subject, report: Report) -> tuple[str, float | None]:
    lasts: dict[str, Any] = dict(order.lasts) or dict(subject.made.lasts)
    if not lasts:
        raise Unfit(
            f"{order.task} does not say how long it trains: add --epochs or --steps, or give the "
            "class an attribute, as `epochs = 10`"
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
        subject.made.task,
        order.directory,
        hooks=hooks,
        configuration=configuration,
        console=False,
    )
    with loop:
        history = loop.fit(train, validation, **lasts)
    if reporting.ended is None and order.directory is not None:
        # It may have ended before, in a process that could not tell of it any more.
        reason = str(read_run(Path(order.directory)).get("reason") or "").partition(":")[0]
        reporting.ended = reason if reason in (DIVERGED, PRUNED) else None
    logged = _logged(history)
    if order.monitor not in logged:
        raise missing(order.monitor, logged)
    value = float(logged[order.monitor])
    ended = reporting.ended or ("complete" if math.isfinite(value) else "diverged")
    return ended, value if math.isfinite(value) else None


def _logged(history: History) -> dict[str, Any]:
    """Return the last number of each name that epochs, validations and hooks logged."""
    found: dict[str, Any] = {}
    for record in history.records:
        found |= {k: value for k, value in record.values.items() if isinstance(value, (int, float))}
    return found


def _told(error: Exception) -> str:
    return f"{_kind(error)}: {error}".rstrip(": ")


def _kind(error: Exception) -> str:
    return next(kind for kind in type(error).__mro__ if kind is not Unfit).__name__
