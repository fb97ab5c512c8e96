"""The `Checkpoint` hook, which saves a run so that it can be resumed after any interruption."""

from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any, Literal

from ..checkpoint import Checkpoints, LeftoverError, SavedState
from ..checkpoint.format import temporary_name
from ..core import schema
from ..core.directory import CHECKPOINTS
from ..core.habits import OF_MODEL_CHECKPOINT, explains
from ..core.hook import Hook, LoopView
from ..core.logs import Record
from ..core.processes import is_chief, process_group
from ..core.progress import Progress
from ..core.split_arrays import OwnParts
from ..core.triggers import Span, When
from ..errors import CheckpointError, ConfigurationError
from .monitor import check_names, direction_of
from .nonfinite import not_finite


class Checkpoint(Hook):
    """Saves the complete state of a run at regular intervals and when it is stopped.

    A checkpoint contains every variable (including those of optimizers and metrics), the Python
    values of the task that changed, the position in the data, random states, and the state of
    hooks. The same script, or the same `treadle run` command, resumes from the newest checkpoint
    with the same results as an uninterrupted run. A background thread writes the files. Training
    waits while floats are checked for NaN, values are copied, and the log is flushed to disk.
    A checkpoint that is due while the previous one is being written is saved after that, at a later
    step.

    The checkpoint of step 0 is always kept. A state is not saved if it contains NaN or infinity
    that was not there at the start.

    Args:
        every: The interval between checkpoints, in steps, epochs, examples or time.
        keep_last: The number of newest checkpoints to keep.
        keep_every: Permanently keep checkpoints whose step is a multiple of this, such as
            `"1000 steps"`.
        keep_best: The number of best checkpoints to keep permanently, ranked by `monitor`. Each
            state for which `monitor` is recorded is saved for this ranking.
        monitor: The name of the recorded value that ranks checkpoints.
        direction: `"min"` or `"max"`: whether smaller or larger is better. Required if it cannot be
            inferred from the name; see `EarlyStopping`.

    Raises:
        ConfigurationError: If an interval is invalid, or `keep_best` is given without `monitor`.
            Before the first step of `fit`: if no recorded value has the name `monitor`.

    Example:
        >>> import treadle
        >>> often = treadle.hooks.Checkpoint(every="10 s", keep_last=3)
    """

    @explains("Checkpoint", OF_MODEL_CHECKPOINT)
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
                f"keep_best={keep_best} needs monitor=…, the value that ranks checkpoints, such as "
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
        self._measured: tuple[int, float] | None = None  # a step, and the value recorded there
        self._buffers: Mapping[str, Any] = {}
        self._saved: Checkpoints | None = None
        self._saved_step, self._late = -1, False
        self.waited = 0.0  # seconds
        self._exempt: set[str] = set()  # paths that were not finite at the start

    def _check_names(self, loop: LoopView, names: Mapping[str, float]) -> None:
        """Check the monitored name before the first step."""
        if self._monitor is not None and self._keep["keep_best"]:
            check_names(type(self).__name__, self._monitor, loop, names)

    def open(self, directory: Path | None) -> None:
        """Open the checkpoint directory of a run.

        Raises:
            ConfigurationError: If the run has no directory.
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
        assert self._saved is not None  # `services_of` opens it
        return self._saved

    def start(self, loop: LoopView) -> None:
        """Remove partially written files of a killed process; save the state of step 0."""
        if is_chief():
            self.saved.clean()
        if loop.progress.step == 0:
            self.save(loop)
        else:
            self._saved_step = loop.progress.step

    def record(self, loop: LoopView, record: Record) -> None:
        """Remember the monitored value, and schedule a save if the best are kept."""
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
        """Save if a checkpoint is due, or as soon as the previous one has been written.

        If the monitored value was recorded at this step, this waits for the previous checkpoint,
        since the state changes with the next step.
        """
        if self._late and self._score(after) is not None:
            self.saved.settle()
        self._log_failure(loop)
        if self._late or self.when.due(before, after, epoch_ended):
            self._late = not self.save(loop)

    def save(self, loop: LoopView, wait: bool = False, begins: bool = False) -> bool:
        """Save a checkpoint now.

        Args:
            loop: The loop, at the end of a window.
            begins: Whether a call begins, before which the script may have changed anything: the
                monitored value is not that of this state, and what is not finite is so on purpose.
            wait: Wait until the checkpoint is on disk, and raise the error if writing it fails. An
                error in the previous checkpoint is logged.

        Returns:
            False if another checkpoint is still being written; nothing is saved then.
        """
        started = monotonic()
        try:
            return self._save(loop, wait, begins)
        finally:
            self.waited += monotonic() - started

    def _save(self, loop: LoopView, wait: bool, begins: bool) -> bool:
        together = _is_split(loop) or loop.reads_shares
        if wait:
            self.saved.settle()
            self._log_failure(loop)
        temporary = self._agree(loop) if together else None
        if self.saved.busy if temporary is None else not temporary:
            return False
        if self._is_non_finite(loop, begins):
            return True
        if not is_chief() and not together:
            return True
        score = None if begins else self._score(loop.progress)
        checkpoint: SavedState = loop.capture(self._buffers, score)
        self._saved_step = loop.progress.step
        if temporary and not _is_split(loop):
            temporary = None  # all know their positions in the data, which the chief writes
        if not is_chief():
            if temporary:
                self.saved.save_parts(checkpoint, temporary)
            self._late = False
            return True
        # On JAX, they are the variables' own memory: kept, they would hold an old state there.
        self._buffers = {
            path: x
            for path, x in checkpoint.state.items()
            if not isinstance(x, OwnParts) and x.flags.writeable
        }
        self.saved.save(checkpoint, temporary)
        self._late = False
        if wait:
            self.saved.settle()
            self._check(loop)
        return True

    def _agree(self, loop: LoopView) -> str:
        """Return the name of the folder into which all processes write; "" if one still writes."""
        mine = [self.saved.busy, temporary_name(loop.progress.step)]
        found = process_group().exchange(mine, f"saving step {loop.progress.step}")
        return "" if any(busy for busy, _ in found) else found[0][1]

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Wait until the current checkpoint is written."""
        self._buffers = {}
        if self._saved is not None:
            self._saved.wait()

    def state(self) -> dict[str, Any]:
        """Return the latest monitored value and the paths that were non-finite at the start."""
        return {"measured": self._measured, "meant": sorted(self._exempt)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state`."""
        measured = state["measured"]
        if measured:
            step, value = measured
            schema.whole()(step, "measured[0]")
            schema.number(value, "measured[1]")
            self._measured = step, value
        else:
            self._measured = None
        self._exempt = set(state["meant"])

    def _score(self, progress: Progress) -> float | None:
        """Return the monitored value of the current step, or None if it was not recorded."""
        if self._measured is None or self._measured[0] != progress.step:
            return None
        return self._measured[1]

    def _is_non_finite(self, loop: LoopView, begins: bool) -> bool:
        """Return whether the state became non-finite since the start, and log a warning if so."""
        found = not_finite(loop.state)
        if begins or loop.progress.step == 0:
            self._exempt = {p for p, v in found.items() if not getattr(v, "trainable", True)}
            return False
        bad = {*found} - self._exempt
        if bad:
            loop.log(
                {
                    "warning": f"no checkpoint of step {loop.progress.step}: {min(bad)} holds "
                    "values that are not finite"
                }
            )
        return bool(bad)

    def _check(self, loop: LoopView) -> None:
        """Raise the error of the last save; log a warning if old files could not be removed.

        Raises:
            CheckpointError: If nothing was saved.
        """
        try:
            self.saved.check()
        except LeftoverError as failure:
            loop.log({"warning": str(failure)})

    def _log_failure(self, loop: LoopView) -> None:
        """Log the error of the last save, and schedule another one if nothing was saved."""
        try:
            self._check(loop)
        except CheckpointError as failure:
            loop.log({"warning": f"no checkpoint of step {self._saved_step}: {failure}"})
            # If all processes write, all must decide alike; only the chief knows of the failure.
            self._late = self._late or not (_is_split(loop) or loop.reads_shares)


def _is_split(loop: LoopView) -> bool:
    """Return whether other processes hold parts of variables, which must all be read together."""
    from ..backends.base import active  # late: it imports Keras

    return process_group().size > 1 and active().is_split(loop.state.variables.values())
