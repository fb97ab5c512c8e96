"""Reading the history of a run from its log."""

from collections.abc import Collection
from pathlib import Path

from ..core.folder import Folder
from ..core.history import History
from ..core.logs import StepLogs, record_of
from ..core.progress import Progress
from ..errors import DataError
from ..hooks.log_file import ADVICE, Log, Mark, read


def recorded_history(
    path: Path, marks: Collection[Mark] = (), step: int | None = None, last: int | None = None
) -> tuple[History, str]:
    """Return the history of a run from its log file.

    Args:
        path: The log file.
        marks: What the checkpoints of the run note about it. Up to the last mark, the file must be
            as noted.
        step: The step of the checkpoint to resume from, which ends the history; None reads to the
            end of the file.
        last: The last step of a finished run, which the file must contain.

    Returns:
        The history, and a warning if the file is missing, or "".

    Raises:
        DataError: If the file is damaged.
    """
    noted = max((mark.size for mark in marks), default=0)
    sizes = [mark.size for mark in marks if mark.step == step]
    if not _exists(path):
        lost = f"{path} is missing, so the values logged before are not in the history"
        return History(), f"{lost}. The weights are not affected" if noted else ""
    log = read(path, marks, sizes[0] if sizes else None)
    if step is not None:
        log = log.up_to(step)
    if last is not None and noted and log.last_step != last:
        raise DataError(
            f"{path} is damaged: it ends with step {log.last_step}, and the run with step {last}"
            f"{ADVICE}"
        )
    return history_of(log), ""


def history_of(log: Log) -> History:
    """Return the content of a log as a history."""
    history = History()
    if log.parts:
        steps = log.steps
        columns = {name: log.column(name, steps) for name in log.names}
        values = {name: column[0] for name, column in columns.items()}
        weights = {name: column[1] for name, column in columns.items()}
        last = Progress(step=int(steps[-1]))
        history.add_steps(StepLogs(int(steps[0]), values, weights, 1, last))
    for line in log.records:
        history.add(record_of(line))
    return history


def _exists(path: Path) -> bool:
    if not path.parent.is_dir():
        return False
    with Folder.open(path.parent, error=DataError) as folder:
        return folder.kind(path.name) is not None
