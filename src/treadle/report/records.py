"""Reading the record of a run, without NumPy if there is no run."""

from contextlib import suppress
from pathlib import Path

from ..core.directory import CHECKPOINTS, LostRecordError, read_run
from ..core.run_file import RunFile


def recorded_run(directory: Path) -> tuple[RunFile, str]:
    """Return the record of a run, and a sentence if it is not that of `run.json`.

    See `treadle.checkpoint.run_files.recorded_run`.
    """
    with suppress(LostRecordError):
        read_run(directory)
    from ..checkpoint.run_files import recorded_run  # late: it imports NumPy

    return recorded_run(directory)


def has_checkpoint(directory: Path, least: int = 0) -> bool:
    """Return whether a run directory has checkpoints from a step on, which may be damaged."""
    from ..checkpoint import Checkpoints  # late: it imports NumPy

    return any(step >= least for step in Checkpoints(directory / CHECKPOINTS).steps())
