"""Reading the variables of a run: at its end, at its newest checkpoint, or at one of a step."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.directory import CHECKPOINTS, why_unfinished
from ..errors import CheckpointError, DirectoryError, TreadleWarning
from .final_files import final_state
from .manager import Checkpoints
from .recovery import recorded_run


def learned(directory: Path) -> tuple[Mapping[str, Any], int | None]:
    """Return the variables of a run, from its end or its newest checkpoint.

    Warns about damaged checkpoints, which are skipped, and about a damaged final state.

    Returns:
        The arrays by path, and the step of the checkpoint; the step is None if they are those at
        the end of the run.

    Raises:
        DirectoryError: If the directory holds no run, a run without a checkpoint, or a damaged
            final state that no checkpoint holds.
        CheckpointError: If none of its checkpoints can be read.
    """
    record, _ = recorded_run(directory)
    if record.get("finished"):
        state, note = final_state(directory, record)
        if note:
            warnings.warn(note, TreadleWarning, stacklevel=3)
        if state:
            return state, None
    checkpoints = Checkpoints(directory / CHECKPOINTS)
    found = checkpoints.latest()
    for name, reason in checkpoints.rejected:
        warnings.warn(f"skipped checkpoint {name}: {reason}", TreadleWarning, stacklevel=3)
    if found is None:
        raise DirectoryError(
            f"{directory} holds a run that did not finish{why_unfinished(record)}, and has no "
            "checkpoint"
        )
    return found.state, found.progress.step


def learned_at(directory: Path, step: int) -> Mapping[str, Any]:
    """Return the variables of a run after a step, from the checkpoint of that step.

    Raises:
        DirectoryError: If there is no checkpoint of this step; the message lists the steps.
        CheckpointError: If the checkpoint is damaged.
    """
    checkpoints = Checkpoints(directory / CHECKPOINTS)
    steps = checkpoints.steps()
    if step not in steps:
        listed = ", ".join(str(other) for other in steps) or "none"
        raise DirectoryError(
            f"{directory} has no checkpoint of step {step}. There are: {listed}. Choose one of "
            "these steps"
        )
    found = checkpoints.before(step)
    if found is None or found.progress.step != step:
        reasons = "; ".join(reason for _, reason in checkpoints.rejected)
        raise CheckpointError(
            f"the checkpoint of step {step} in {directory} cannot be read: {reasons}. Choose "
            "another step"
        )
    return found.state
