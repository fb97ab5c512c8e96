"""Reading the record of a run without NumPy, which is imported only if `run.json` is lost."""

from pathlib import Path

from ..core.directory import CHECKPOINTS, LostRecordError, read_run
from ..core.run_file import RunFile


def recorded_run(directory: Path) -> tuple[RunFile, str]:
    """Return the record of a run, and a sentence if it comes from a checkpoint.

    See `treadle.checkpoint.recovery.recorded_run`.
    """
    try:
        return read_run(directory), ""
    except LostRecordError:
        from ..checkpoint.recovery import recorded_run as recovered  # late: it imports NumPy

        return recovered(directory)


def has_checkpoint(directory: Path, least: int = 0) -> bool:
    """Return whether a run directory has checkpoints from a step on, which may be damaged."""
    from ..checkpoint import Checkpoints  # late: it imports NumPy

    return any(step >= least for step in Checkpoints(directory / CHECKPOINTS).steps())
