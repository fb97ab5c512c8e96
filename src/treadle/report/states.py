"""Reading the state of runs from their directories, without importing a framework."""

import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..core.directory import (
    CHECKPOINTS,
    LOG,
    RUN,
    LostRecordError,
    RunFile,
    flattened,
    progress_of,
    read_run,
)
from ..core.folder import Folder
from ..core.lock import is_in_use
from ..errors import TreadleError

DEEPEST = 4  # levels of folders in which runs are found; those of a search are two levels down
LOWER_IS_BETTER = ("loss", "error", "perplexity", "entropy")
HIGHER_IS_BETTER = ("accuracy", "acc", "auc", "precision", "recall", "f1", "score", "return")
STOPPED = ("KeyboardInterrupt", "Terminated")
_MISSING = object()
_NOT_SETTINGS = (
    *("backend", "precision", "seed", "devices", "execution", "data_dir", "recipe", "task"),
)


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """What the files of a run directory say about the run.

    Attributes:
        directory: The run directory.
        state: `running`, `finished`, `interrupted` or `failed`; `unreadable` if a file is damaged.
        reason: Why it ended, or what is wrong with a file; may be empty.
        started: The time of the first step.
        backend: The backend.
        step: The number of the last step.
        epoch: The number of finished epochs.
        settings: The settings of the task.
        last: The latest value of every name in the records.
        best: The best value and its epoch for each metric whose name implies a direction.
    """

    directory: Path
    state: str
    reason: str = ""
    started: str = ""
    backend: str = ""
    step: int = 0
    epoch: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    last: Mapping[str, Any] = field(default_factory=dict[str, Any])
    best: Mapping[str, tuple[float, int]] = field(default_factory=dict[str, tuple[float, int]])


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


def run_directories(root: Path) -> Iterator[Path]:
    """Yield each folder in a folder that holds a run, in the order of names. Links are skipped."""
    base = len(root.parts)
    for found, folders, files in os.walk(root):
        path = Path(found)
        deep = len(path.parts) - base >= DEEPEST
        inside = tuple(folders)
        folders[:] = [] if deep else sorted(n for n in folders if n != CHECKPOINTS and n[0] != ".")
        if RUN in files or (CHECKPOINTS in inside and _has_checkpoint(path)):
            yield path


def _has_checkpoint(directory: Path) -> bool:
    try:
        return has_checkpoint(directory)
    except TreadleError:  # such as a link in the place of the folder
        return False


def differing_settings(runs: Collection[RunStatus]) -> set[str]:
    """Return the dotted names of the settings that differ among runs; all those of a single run.

    Example:
        >>> settings = {"units": 64, "rate": 0.1}, {"units": 8, "rate": 0.1}
        >>> differing_settings(
        ...     [RunStatus(directory=Path(), state="failed", settings=found) for found in settings]
        ... )
        {'units'}
    """
    readable = [flattened(run.settings) for run in runs if run.state != "unreadable"]
    names = dict.fromkeys(name for settings in readable for name in settings)
    if len(readable) < 2:
        return set(names)
    return {n for n in names if len({repr(found.get(n, _MISSING)) for found in readable}) > 1}


def state_of(directory: Path) -> RunStatus:
    """Return the state of a run. Damaged files are reported in it, and raise nothing."""
    try:
        run, recovered = recorded_run(directory)
        state = read_state(directory, run)
    except TreadleError as error:
        return RunStatus(directory=directory, state="unreadable", reason=str(error))
    return replace(state, reason=recovered) if recovered else state


def read_state(directory: Path, run: RunFile) -> RunStatus:
    """Return the state of a run.

    Raises:
        DataError: If the log is damaged.
        DirectoryError: If a file cannot be read.
    """
    from ..core.logs import values_of  # late: they import NumPy
    from ..hooks.log_tail import read_records

    with Folder.open(directory) as folder:
        has_log = folder.kind(LOG) is not None
    records, logged = read_records(directory / LOG) if has_log else ([], 0)
    epochs = {line["epoch"]: values_of(line) for line in records if line["kind"] == "epoch"}
    last = {k: v for line in records for k, v in values_of(line).items() if not isinstance(v, str)}
    progress, configuration = progress_of(run), run["configuration"]
    state, why = _how(directory, run)
    settings = configuration.get("settings")
    if not isinstance(settings, dict):  # of a script
        settings = {k: v for k, v in configuration.items() if k not in _NOT_SETTINGS}
    return RunStatus(
        directory=directory,
        state=state,
        reason=why,
        started=run.get("started") or "",
        backend=run.get("backend", ""),
        step=progress.step if state == "finished" else max(progress.step, logged),
        epoch=max([progress.epoch, *epochs]),
        settings=settings,  # pyright: ignore[reportUnknownArgumentType]
        last=last,
        best=best_values(epochs),
    )


def _how(directory: Path, run: RunFile) -> tuple[str, str]:
    """Return the state of a run, and why it ended."""
    error = run.get("error") or ""
    if is_in_use(directory):
        return "running", ""
    if run.get("finished"):
        return "finished", run.get("reason") or ""
    if error and not error.startswith(STOPPED):
        return "failed", error
    return "interrupted", error or run.get("reason") or ""


def best_values(epochs: Mapping[int, Mapping[str, Any]]) -> dict[str, tuple[float, int]]:
    """Return the best value and its epoch for each metric whose name implies a direction.

    The last part of the name decides: `val_loss` is better when lower, `head/accuracy` when higher.

    Args:
        epochs: The values of each epoch by its number, from 1.
    """
    best: dict[str, tuple[float, int]] = {}
    for number, values in epochs.items():
        for name, value in values.items():
            kind = re.split("[_/]", name)[-1].lower()
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                continue
            if kind not in (*LOWER_IS_BETTER, *HIGHER_IS_BETTER):
                continue
            sign = 1 if kind in HIGHER_IS_BETTER else -1
            if name not in best or sign * value > sign * best[name][0]:
                best[name] = value, number
    return best
