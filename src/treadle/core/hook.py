"""What can watch and steer a run, and what it sees of it.

A hook is a function `fn(loop)` with a moment (`every`, `at`, `after`), or an object with some of
the methods of `Hook`. Both know the loop only through `LoopView`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .logs import History, Record, StepLogs
from .options import Options
from .progress import Costs, Progress

if TYPE_CHECKING:  # importing it takes a tenth of a second, which commands need not wait
    import numpy as np


class Variables(Protocol):
    """The variables of a task, by the path of the attribute that reaches them.

    Attributes:
        variables: Path to variable, those of optimizers last.
        optimizers: Path to optimizer.
        metrics: Name to metric.
    """

    variables: dict[str, Any]
    optimizers: dict[str, Any]
    metrics: dict[str, Any]

    def arrays(self) -> "dict[str, np.ndarray[Any, Any]]":
        """Return a copy of every value as a NumPy array."""
        ...


class LoopView(Protocol):
    """What a hook sees of the loop: where it stands, what it holds, and how to steer it."""

    @property
    def task(self) -> Any:
        """The task being trained."""
        ...

    @property
    def progress(self) -> Progress:
        """Where the run stands."""
        ...

    @property
    def history(self) -> History:
        """All that was logged so far."""
        ...

    @property
    def directory(self) -> Path | None:
        """The run directory, or None."""
        ...

    @property
    def options(self) -> Options:
        """How the run is executed."""
        ...

    @property
    def plan(self) -> str:
        """How steps are executed, in one line; empty before the first step."""
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
        """Batches that the evaluation now running has done, and how many there are if known."""
        ...

    @property
    def costs(self) -> Costs:
        """What the run has spent its time on beside training."""
        ...

    @property
    def epochs_planned(self) -> int | None:
        """How many epochs this call of `fit` runs to in all, or None where it is not by epochs."""
        ...

    @property
    def steps_planned(self) -> int | None:
        """The step at which this call of `fit` ends, or None where that is not known."""
        ...

    @property
    def steps_per_epoch(self) -> int | None:
        """Batches in an epoch, or None where the source cannot say."""
        ...

    @property
    def reason(self) -> str | None:
        """Why the run was asked to stop, or None."""
        ...

    @property
    def unfinished(self) -> bool:
        """Whether it was asked to end before its epochs or steps were done, and is to go on."""
        ...

    @property
    def state(self) -> Variables:
        """All variables of the task by path; exact at window boundaries."""
        ...

    def batch_at(self, step: int) -> Any:
        """Return the batch of a step (from 1) of the window that ran last, as NumPy arrays."""
        ...

    def stop(self, why: str) -> None:
        """End training at this boundary; `why` is told and recorded."""
        ...

    def log(self, values: Mapping[str, Any]) -> None:
        """Record values of the user's own at this moment."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return the training means and metric results since they were last reset."""
        ...

    def snapshot(self) -> Any:
        """Return a copy of every variable's value, to be handed to `restore`."""
        ...

    def restore(self, snapshot: Any) -> None:
        """Set every variable to the value it had when `snapshot` was taken."""
        ...

    def capture(self, buffers: Mapping[str, Any], score: float | None = None) -> Any:
        """Return all that the run is, as a `treadle.checkpoint.Checkpoint`.

        Args:
            buffers: The `state` of an earlier one that nobody needs any more: it is overwritten.
            score: How good this is, where some are kept for being the best.
        """
        ...

    def evaluate(self, source: Any) -> dict[str, float]:
        """Run `eval_step` over a source and return its means and metrics."""
        ...

    def predict(self, source: Any) -> Any:
        """Run the prediction step over a source and return all outputs as NumPy arrays."""
        ...

    def call(self, function: Any, *inputs: Any) -> Any:
        """Run a method compiled; state changes are discarded."""
        ...


class Hook:
    """Something that watches a run; override what you need.

    A hook may also have `when`, one `treadle.core.triggers.When` or several: windows then end at
    these moments, so that the state it sees there is exactly of that step.

    Example:
        >>> class Loud(Hook):
        ...     def record(self, loop, record):
        ...         print(record.kind, dict(record.values))
    """

    def start(self, loop: LoopView) -> None:
        """Called before the first step of a call that trains."""

    def before(self, loop: LoopView) -> None:
        """Called before each window; the state is exactly that after `loop.progress.step`."""

    def steps(self, loop: LoopView, logs: StepLogs) -> None:
        """Called after each window with every step's values; cheap work only."""

    def validation(self, loop: LoopView, results: Mapping[str, float] | None) -> None:
        """Called before each validation, with None, and after it, with its results: `val_…`."""

    def record(self, loop: LoopView, record: Record) -> None:
        """Called with each record: the end of an epoch, a validation, or a log of the user's."""

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Called when training ends in whatever way; `error` is what ended it, if anything."""

    def state(self) -> dict[str, Any]:
        """Return what must survive a restart: numbers, texts, arrays.

        It may be what the hook goes on changing: a checkpoint takes it as it is now. An array that
        is read-only is not copied, so nobody may change it afterwards.
        """
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned."""
