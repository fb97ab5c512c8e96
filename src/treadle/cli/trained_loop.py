"""A loop with the variables and the Python values of an earlier run, for `evaluate`, `export`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import treadle

from ..checkpoint import Checkpoints, SavedState
from ..core.directory import CHECKPOINTS, LOG
from ..core.options import Options
from ..core.progress import Progress
from ..errors import CheckpointError
from ..loop import loop_with
from ..run.dispatch import HookDispatcher
from ..run.reporter import Reporter
from ..run.services import Services, StartPoint
from ..run.state import RunState
from ..steps.optimizers import build_as_saved
from ..steps.python_values import PythonValues, described
from . import output


def trained_loop(
    directory: Path,
    task: Any,
    options: Options,
    train: Any,
    state: Mapping[str, Any],
    checkpoint: SavedState | None = None,
) -> treadle.Loop:
    """Return a loop whose task has the variables and the Python values of a run.

    Args:
        directory: The run directory.
        task: The task, made again.
        options: Execution options.
        train: The training source: building the step reads a batch.
        state: The values of all variables.
        checkpoint: The checkpoint with the Python values; by default the newest.
    """
    try:
        found = checkpoint or Checkpoints(directory / CHECKPOINTS).latest()
    except CheckpointError as error:  # a finished run, whose variables are in another file
        output.note(f"{error}; Python values that hooks changed are not restored")
        found = None
    values = PythonValues(task)
    start = None
    if found is not None:
        # From the first batch on, so that there is one to build the step with. The checkpoint also
        # lists the batch forms for which variables were created.
        begun = replace(found, progress=Progress(), source=None, state=state)
        start = StartPoint(begun, directory / LOG, values, {})
    services = Services(hooks=HookDispatcher([], []), reporter=Reporter(silent=True), start=start)
    loop = loop_with(task, options, services)
    loop.prepare(train)
    build_as_saved(task, state)
    loop.state.assign(state)
    if found is not None:
        with found.reading("loop.python_values"):
            changes = values.read(RunState.of(found).python_values)
        values.restore(changes)
        missing = values.missing(changes)
        if missing:
            output.note(
                f"{described(missing)} during the run, and is not restored: results that depend on "
                "it differ from those of the run"
            )
    return loop
