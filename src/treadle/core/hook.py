"""Hooks: the `Hook` base classes, and `LoopView`, the interface through which hooks see the loop.

A hook is either a function `fn(loop)` with a trigger (`every`, `at`, `after`), or an object with
some of the methods of `Hook`. Both access the loop only through `LoopView`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import NonFiniteError
from .history import History
from .logs import Record, StepLogs
from .options import Options
from .progress import Costs, Progress

if TYPE_CHECKING:  # importing NumPy takes a tenth of a second, which commands should not need
    import numpy as np


class Variables(Protocol):
    """The variables, optimizers and metrics of a task, named by the path of their attribute.

    Attributes:
        variables: Path to variable; those of optimizers come last.
        optimizers: Path to optimizer, without those that are parts of others.
        all_optimizers: Path to optimizer, with those that are parts of others.
        metrics: Name to metric.
    """

    variables: dict[str, Any]
    optimizers: dict[str, Any]
    all_optimizers: dict[str, Any]
    metrics: dict[str, Any]

    def arrays(self) -> "dict[str, np.ndarray[Any, Any]]":
        """Return a copy of every value as a NumPy array."""
        ...


class LoopView(Protocol):
    """The loop as seen by hooks: its progress, its state, and methods to control the run."""

    @property
    def task(self) -> Any:
        """The task being trained."""
        ...

    @property
    def progress(self) -> Progress:
        """The progress of the run: step, epoch, batch, examples and seconds."""
        ...

    @property
    def history(self) -> History:
        """The history: everything logged so far."""
        ...

    @property
    def directory(self) -> Path | None:
        """The run directory, or None."""
        ...

    @property
    def options(self) -> Options:
        """The execution options of the run."""
        ...

    @property
    def plan(self) -> str:
        """The execution plan of the steps, in one line; empty before the first step."""
        ...

    @property
    def executed(self) -> Mapping[str, Any] | None:
        """How steps are executed, as the recorded fields; None before the first step.

        See `treadle.backends.plans.Execution.facts`.
        """
        ...

    @property
    def optimizers(self) -> Mapping[str, Any]:
        """The optimizers that `train_step` applies, by path; none before the first step."""
        ...

    @property
    def compiling(self) -> bool:
        """Whether steps are being compiled now."""
        ...

    @property
    def evaluated(self) -> tuple[int, int | None] | None:
        """Finished and total batches of the running evaluation; the total is None if unknown.

        None if no evaluation is running.
        """
        ...

    @property
    def costs(self) -> Costs:
        """The number of compiled programs, and the seconds spent on what is not training.

        That is compiling, waiting for data, validating and saving.
        """
        ...

    @property
    def epochs_planned(self) -> int | None:
        """The number of epochs of the run at the end of this call, or None if unknown."""
        ...

    @property
    def steps_planned(self) -> int | None:
        """The step at which this call ends, or None if unknown."""
        ...

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of batches in an epoch, or None if unknown."""
        ...

    @property
    def reads_shares(self) -> bool:
        """Whether each process reads its own share of the data.

        If so, every process must call `capture`.
        """
        ...

    @property
    def reason(self) -> str | None:
        """The reason given for stopping the call, or None."""
        ...

    @property
    def unfinished(self) -> bool:
        """Whether the call was interrupted before its planned end, and is meant to be resumed."""
        ...

    @property
    def state(self) -> Variables:
        """All variables of the task by path; exact at window boundaries.

        Each access searches the task, which takes milliseconds for hundreds of variables.
        """
        ...

    @property
    def known_state(self) -> Variables:
        """The variables that the task had when its step was built: `state` without a search."""
        ...

    @property
    def measured(self) -> Any:
        """The statistics of the layers in the first step of the window that ran last.

        A `treadle.steps.layer_statistics.StepStatistics`; None without `measure_next_step`, or if
        they could not be measured.
        """
        ...

    @property
    def unmeasured(self) -> str:
        """Why the layers were not measured although that was requested; else empty."""
        ...

    def measure_next_step(self) -> None:
        """Measure the layers in the first step of the next window; costs about one more step.

        To be called by the method `before` of a hook.
        """
        ...

    def batch_at(self, step: int) -> Any:
        """Return the batch of a step (from 1) of the window that ran last, as NumPy arrays.

        If each process reads its own share of the data, all must call this: it has all rows.
        """
        ...

    def stop(self, why: str) -> None:
        """Stop training at this window boundary; the reason `why` is printed and recorded."""
        ...

    def log(self, values: Mapping[str, Any]) -> None:
        """Log values at the current step."""
        ...

    def print(self, text: str) -> None:
        """Print a text in the console, if progress is shown."""
        ...

    def save(self) -> None:
        """Save a checkpoint now, and wait until it is on disk."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return the training means and metric results since they were last reset."""
        ...

    def snapshot(self) -> Any:
        """Return a copy of every variable's value, for `restore`."""
        ...

    def restore(self, snapshot: Any) -> None:
        """Set every variable to the value it had when `snapshot` was taken."""
        ...

    def capture(self, buffers: Mapping[str, Any], score: float | None = None) -> Any:
        """Return the complete state of the run as a `treadle.checkpoint.SavedState`.

        Args:
            buffers: The `state` of an earlier checkpoint that is no longer needed; it is
                overwritten.
            score: The value of the monitored metric, if the best checkpoints are kept.
        """
        ...

    def evaluate(self, source: Any) -> dict[str, float]:
        """Evaluate a source with `eval_step` and return the means and metrics."""
        ...

    def predict(self, source: Any) -> Any:
        """Run `predict_step` over a source and return all outputs as NumPy arrays."""
        ...

    def call(self, function: Any, *inputs: Any) -> Any:
        """Run a function compiled and return NumPy arrays; its state changes are discarded."""
        ...


class Hook:
    """Base class for hooks; override the methods that you need.

    A hook may also have an attribute `when`, one `treadle.core.triggers.When` or several. Windows
    then end at these steps, so that the hook sees exactly the state after that step. `DetailedHook`
    has further methods.

    If several processes train one task, hooks are called in all of them, with equal values. A hook
    that only writes files or messages sets `chief_only`; it must not change the run.

    Attributes:
        chief_only: Whether the hook is called only in the process that writes files.
        identity: What distinguishes the hook from others of its class, such as the name of the
            value that it monitors. A resumed run gives the hook the state that was saved by the
            hook of the same class and identity.

    Example:
        >>> class Loud(Hook):
        ...     chief_only = True
        ...
        ...     def record(self, loop, record):
        ...         print(record.kind, dict(record.values))
    """

    chief_only: bool = False
    identity: str = ""

    def start(self, loop: LoopView) -> None:
        """Called before the first step of a call that trains, such as `fit`."""

    def steps(self, loop: LoopView, logs: StepLogs) -> None:
        """Called after each window with the values of every step. Must be cheap."""

    def record(self, loop: LoopView, record: Record) -> None:
        """Called with each record: the end of an epoch, a validation, or a user log."""

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Called when training ends, with the exception that ended it or None."""

    def state(self) -> dict[str, Any]:
        """Return the hook's state to save in checkpoints: numbers, strings and arrays.

        The hook may change the returned objects later, because a checkpoint copies them. Read-only
        arrays are not copied and must not be changed afterwards.
        """
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the hook's state from what `state` returned."""


class DetailedHook(Hook):
    """Base class for hooks that are also called before windows, around evaluations, and last.

    Example:
        >>> import keras, numpy as np, treadle
        >>> class Validations(treadle.DetailedHook):
        ...     def start(self, loop):
        ...         self.seen = []
        ...     def validation(self, loop, results):
        ...         self.seen.append("begins" if results is None else sorted(results))
        >>> task = treadle.Supervised(keras.Sequential([keras.layers.Dense(1)]), "mse", "sgd")
        >>> batches, hook = [(np.ones((2, 3)), np.ones((2, 1)))], Validations()
        >>> with treadle.Loop(task, hooks=[hook], console=False) as loop:
        ...     history = loop.fit(batches, validation=batches, epochs=1)
        >>> hook.seen
        ['begins', ['val_loss']]
    """

    def before(self, loop: LoopView) -> None:
        """Called before each window; the state is that after step `loop.progress.step`."""

    def validation(self, loop: LoopView, results: Mapping[str, float] | None) -> None:
        """Called before each validation with None, and after it with its results (`val_…`)."""

    def evaluation(self, loop: LoopView, results: Mapping[str, float] | None) -> None:
        """Called before each `loop.evaluate` of the user with None, and after it with its results.

        Only calls between the first step and the end of training count.
        """

    def after_end(self, loop: LoopView, error: BaseException | None) -> None:
        """Called after the `end` of all hooks, when all files of the run are written."""


class RolledBack(NonFiniteError):
    """Raised by a hook to make the loop roll back to a checkpoint. Users never see it.

    Args:
        why: What was not finite.
        passed: The progress before the batch that must be skipped; None if the step that caused
            the non-finite value is not known yet.
    """

    def __init__(self, why: str, passed: Progress | None = None) -> None:
        super().__init__(why)
        self.passed = passed
