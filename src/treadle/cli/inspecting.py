"""Implementation of `evaluate` and `replay` with the public API."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import treadle

from ..errors import ConfigurationError
from . import environment, output
from .opening import made_again, opened, options_of, state_of
from .other_data import OtherData
from .trusting import Given

if TYPE_CHECKING:  # importing them imports NumPy and Keras
    from ..doctor import Replay
    from ..steps.task import Datasets


def evaluate(
    directory: Path, given: Given, quiet: bool = False, other: OtherData | None = None
) -> dict[str, dict[str, float]]:
    """Make the task of a run again with its trained weights, and evaluate it.

    An unfinished run is evaluated with its newest checkpoint, and a note is printed. Python values
    that hooks changed during the run are those of the newest checkpoint.

    The only code executed is the task's file, if it is trusted, and the file of other data; arrays
    are read as plain data.

    Args:
        directory: The run directory.
        given: Its task or data folder if they moved, and whether the recorded ones are trusted.
        quiet: Show no progress.
        other: Data to evaluate instead of those of the task.

    Returns:
        The results for each data set that the task has: `validation` (or `validation/<name>` if
        the sets are named) and `test`; or those of the other data.

    Raises:
        TreadleError: If the directory holds no run of a command, or an unfinished run without a
            checkpoint, if the task cannot be made again, or if there is no evaluation data.
    """
    record, recovered = opened(directory, "call loop.evaluate in the script")
    configuration = record["configuration"]
    if recovered:
        output.note(recovered)
    made = made_again(directory, configuration, given, quiet)
    # Late: importing it imports NumPy and Keras, whose messages `made_again` hides.
    from .trained_loop import trained_loop

    state = state_of(directory, "evaluating")
    data = made.datasets()
    sets = _sets_of(data) if other is None else other.sets()
    if not sets:
        raise ConfigurationError(
            f"{directory}: its task has neither validation nor test data. Name data with --data "
            "FILE.py:FUNCTION"
        )
    options = options_of(configuration)
    with (
        environment.showing("evaluating", quiet),
        trained_loop(directory, made.task, options, data.train, state) as loop,
    ):
        return {name: loop.evaluate(part) for name, part in sets.items()}


def _sets_of(data: "Datasets") -> dict[str, Any]:
    """Return the data sets of a task that it can be evaluated on, by name."""
    named = data.validation if isinstance(data.validation, dict) else {"": data.validation}
    sets = {f"validation/{name}" if name else "validation": part for name, part in named.items()}
    return {name: part for name, part in {**sets, "test": data.test}.items() if part is not None}


def replay(
    directory: Path,
    step: int | None,
    bisect: str | None,
    given: Given,
    quiet: bool = False,
) -> "Replay":
    """Make the task of a run again, and replay one of its steps.

    Raises:
        TreadleError: If the run was started by a script, or for any reason that
            `treadle.doctor.replay` raises.
    """
    if (step is None) == (bisect is None):
        raise ConfigurationError(
            "specify the step: either --step N, or a condition, such as --bisect 'loss > 5'"
        )
    which = f"step={step}" if bisect is None else f"bisect={bisect!r}"
    record, _ = opened(  # the report has a note on a lost record
        directory,
        f"call treadle.doctor.replay(task, train, {str(directory)!r}, {which}) in Python, with the "
        "task and the source that the script makes",
    )
    from ..doctor.conditions import parse  # late: it imports NumPy
    from ..doctor.recorded import Recorded

    recorded = Recorded(directory)
    if bisect is not None:
        recorded.check_condition(parse(bisect))
    elif step is not None:
        recorded.check_step(step)
    configuration = record["configuration"]
    # On as many devices as the run: the same bits are expected.
    made = made_again(directory, configuration, given, quiet, configuration.get("devices"))
    data = made.datasets()
    with environment.showing("running the steps again", quiet):
        return treadle.doctor.replay(
            made.task,
            data.train,
            directory,
            step,
            bisect=bisect,
            validation=data.validation,
            hooks=made.hooks(),
        )
