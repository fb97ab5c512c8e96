"""Checkpoints of a run, so that it goes on where it was, whatever ended it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ..checkpoint import Checkpoint as Saved
from ..checkpoint import Checkpoints, LeftoverError
from ..core.directory import CHECKPOINTS
from ..core.hook import Hook, LoopView
from ..core.logs import Record
from ..core.progress import Progress
from ..core.triggers import Span, When
from ..errors import CheckpointError, ConfigurationError
from .monitor import direction_of
from .nonfinite import not_finite


class Checkpoint(Hook):
    """Saves all that a run is, now and then, and when it is asked to end.

    A checkpoint holds every variable, the optimizer's and the metrics' among them, the Python
    values of the task that changed, the place in the data, random states, and what hooks keep: the
    same script, or the same `treadle run`, goes on from the newest one as if it had never stopped.
    Writing happens in a thread of its own; training waits while floats are looked at for NaN,
    values are copied, and the log is brought to the disk.

    One of step 0 is always kept. What holds NaN or infinity that was not there at the start is not
    saved.

    Args:
        every: How often: steps, epochs, examples or time.
        keep_last: How many of the newest are kept.
        keep_every: Keep those of every so many steps for good, as `"1000 steps"`.
        keep_best: How many of the best are kept for good, by `monitor`: of the states that it was
            measured of, each of which is saved for that.
        monitor: The name of a recorded value: what is best.
        direction: `"min"` or `"max"`, where the name does not say it; see `EarlyStopping`.

    Raises:
        ConfigurationError: A moment cannot be read, or `keep_best` lacks a `monitor`.

    Example:
        >>> import treadle
        >>> often = treadle.hooks.Checkpoint(every="10 s", keep_last=3)
    """

    def __init__(
        self,
        every: str = "1 min",
        keep_last: int = 2,
        keep_every: str | None = None,
        keep_best: int = 0,
        monitor: str | None = None,
        direction: Literal["min", "max"] | None = None,
    ) -> None:
        self.when = When(Span.parse(every))
        spacing = None if keep_every is None else Span.parse(keep_every)
        if spacing is not None and spacing.of != "step":
            raise ConfigurationError(f"keep_every={keep_every!r} must count steps, as '1000 steps'")
        if keep_best and monitor is None:
            raise ConfigurationError(
                f"keep_best={keep_best} needs monitor=…, the value that says what is best, as "
                "monitor='val_loss'"
            )
        self._keep: dict[str, Any] = {
            "keep_last": keep_last,
            "keep_every": None if spacing is None else int(spacing.amount),
            "keep_best": keep_best,
        }
        self._monitor = monitor
        if monitor is not None:
            self._keep["direction"] = direction_of(monitor, direction)
        self._measured: tuple[int, float] | None = None  # the step, and what was recorded there
        self._buffers: Mapping[str, Any] = {}
        self._saved: Checkpoints | None = None
        self._saved_step, self._late = -1, False
        self._meant: set[str] = set()

    def open(self, directory: Path | None) -> None:
        """Say which run's checkpoints these are.

        Raises:
            ConfigurationError: The run has no directory.
        """
        if directory is None:
            raise ConfigurationError(
                "Checkpoint writes into the run directory, but this run has none: pass one to the "
                "loop, as treadle.Loop(task, 'runs/1')"
            )
        self._saved = Checkpoints(directory / CHECKPOINTS, **self._keep)

    @property
    def saved(self) -> Checkpoints:
        """The checkpoints of the run."""
        assert self._saved is not None  # `Watchers` opens it
        return self._saved

    def start(self, loop: LoopView) -> None:
        """Remove what a killed process left half-written; keep the state before the first step."""
        self.saved.clean()
        if loop.progress.step == 0:
            self.save(loop)
        else:
            self._saved_step = loop.progress.step

    def record(self, loop: LoopView, record: Record) -> None:
        """Take note of what says what is best; where the best are kept, this state is saved."""
        name = self._monitor
        if name is None or record.kind == "log" or name not in record.values:
            return
        measured = record.progress.step, float(record.values[name])
        if self._keep["keep_best"] and measured != self._measured:
            self._late = True
        self._measured = measured

    def save_if_due(
        self, loop: LoopView, before: Progress, after: Progress, epoch_ended: bool = False
    ) -> None:
        """Save where it became due; where the one before is still being written, a little later.

        What was measured here is waited for: later it would be another state.
        """
        if self._late and self._score(after) is not None:
            self.saved.settle()
        self._tell_failure(loop)
        if self._late or self.when.due(before, after, epoch_ended):
            self._late = not self.save(loop)

    def save(self, loop: LoopView, wait: bool = False) -> bool:
        """Save now.

        Args:
            loop: What is running, at the end of a window.
            wait: Return when it is on the disk, and raise what went wrong with it. What went wrong
                with the one before is logged.

        Returns:
            False where another one is being written, and nothing was done.
        """
        if wait:
            self.saved.settle()
            self._tell_failure(loop)
        elif self.saved.busy:
            return False
        if self._is_poisoned(loop):
            return True
        checkpoint: Saved = loop.capture(self._buffers, self._score(loop.progress))
        self._buffers, self._saved_step = checkpoint.state, loop.progress.step
        self.saved.save(checkpoint)
        self._late = False
        if wait:
            self.saved.settle()
            self._check(loop)
        return True

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Wait for what is being written."""
        self._buffers = {}
        if self._saved is not None:
            self._saved.wait()

    def state(self) -> dict[str, Any]:
        """Return the newest value of what says what is best, and what is not finite on purpose."""
        return {"measured": self._measured, "meant": sorted(self._meant)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned."""
        measured = state.get("measured")  # a version before wrote the value without its step
        self._measured = (measured[0], measured[1]) if measured else None
        self._meant = set(state["meant"])

    def _score(self, progress: Progress) -> float | None:
        """Return what was measured of the state at hand, if anything was."""
        if self._measured is None or self._measured[0] != progress.step:
            return None
        return self._measured[1]

    def _is_poisoned(self, loop: LoopView) -> bool:
        """Say, and log, that the state holds what is not finite and was so before."""
        bad = set(not_finite(loop))
        if loop.progress.step == 0:
            self._meant = bad
        bad -= self._meant
        if bad:
            loop.log(
                {
                    "warning": f"no checkpoint of step {loop.progress.step}: {min(bad)} holds "
                    "values that are not finite, so it would be of no use"
                }
            )
        return bool(bad)

    def _check(self, loop: LoopView) -> None:
        """Raise what went wrong with the last save; log what it could not remove.

        Raises:
            CheckpointError: Nothing was saved.
        """
        try:
            self.saved.check()
        except LeftoverError as failure:
            loop.log({"warning": str(failure)})

    def _tell_failure(self, loop: LoopView) -> None:
        """Log what went wrong with the last save, and try again where nothing was saved."""
        try:
            self._check(loop)
        except CheckpointError as failure:
            loop.log({"warning": f"no checkpoint of step {self._saved_step}: {failure}"})
            self._late = True
