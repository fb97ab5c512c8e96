"""Reading the history of a run from its log."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..core.logs import History, Record, StepLogs
from ..core.progress import Progress
from ..hooks.lines import read_log


def recorded_history(
    path: Path, step: int | None = None, hooks: Mapping[str, Mapping[str, Any]] | None = None
) -> History:
    """Return the history of a run from its log file; empty if the file does not exist.

    Args:
        path: The log file.
        step: The last step to read; None reads to the end.
        hooks: The states of the hooks at that step, which include the size of the log.
    """
    history = History()
    if not path.exists():
        return history
    size = (hooks or {}).get("JSONLines", {}).get("size")
    steps, records = read_log(path, size)
    if step is not None:
        steps = [line for line in steps if line["step"] <= step]
        records = [line for line in records if line["step"] <= step]
    if steps:
        names = dict.fromkeys(name for line in steps for name in line if name != "step")
        columns = {n: np.array([line.get(n, np.nan) for line in steps]) for n in names}
        ones = {n: np.array([float(n in line) for line in steps]) for n in names}
        last = Progress(step=steps[-1]["step"])
        history.add_steps(StepLogs(steps[0]["step"], columns, ones, 1, last))
    for line in records:
        at = Progress(line["step"], line["epoch"] - 1, seconds=line["seconds"])
        own = ("kind", "step", "epoch", "seconds")
        values = {name: value for name, value in line.items() if name not in own}
        history.add(Record(line["kind"], at, values))
    return history
