"""The commands `evaluate` and `replay`."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import treadle

from ..errors import ConfigurationError, did_you_mean
from ..recipes._reading import read_file
from . import environment, output
from .commands import command
from .opening import NAME_TASK, made_again, opened, options_of, state_of
from .options import WHERE, RunOptions, option

if TYPE_CHECKING:  # importing them imports NumPy and Keras
    from ..doctor import Replay as Replayed
    from ..steps.task import Datasets


@dataclass(frozen=True, kw_only=True)
class Evaluate(RunOptions):
    """Options of `treadle evaluate`."""

    data: str | None = option(
        "Evaluate other data: a function without arguments that returns batches, or a dict of "
        "data sets by name.",
        "FILE.py:FUNCTION",
        WHERE,
    )


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(RunOptions):
    """Options of `treadle replay`."""

    step: int | None = option("Replay this step.", "N", min=1)
    bisect: str | None = option(
        "Replay the first step where this holds: 'loss > 5', 'isnan(loss)', "
        "'norm(model/layers/0/kernel) > 10'.",
        "CONDITION",
    )
    save: Path | None = option(
        "Write batch, activations, gradients and updates to this file.", "FILE.safetensors", WHERE
    )


@command()
def evaluate(options: Evaluate) -> None:
    """Evaluate a run on its validation and test data, or on other data.

    An unfinished run is evaluated with its newest checkpoint.

    A recipe is executed at once; a script, only if you started the run with it in this directory,
    or with --trust or --task.

    Examples:
      treadle evaluate runs/mine
      treadle evaluate runs/mine --json
      treadle evaluate runs/mine --data other.py:photos
    """
    other = None if options.data is None else _function_of(options.data)
    with output.kept_free(options.json):
        results = _evaluated(options, other)
    if options.json:
        output.print_json(results)
        return
    from ..core.logs import short  # late: it imports NumPy

    for name, values in results.items():
        numbers = "  ".join(f"{key} {short(value)}" for key, value in values.items())
        output.print_line(f"{name}: {numbers}")


def _evaluated(options: Evaluate, other: tuple[Path, str] | None) -> dict[str, dict[str, float]]:
    """Make the task of a run again with its trained weights, and evaluate it.

    Python values that hooks changed during the run are those of the newest checkpoint. The only
    code executed is the task's file, if it is trusted, and the file of other data; arrays are read
    as plain data.

    Returns:
        The results for each data set that the task has: `validation` (or `validation/<name>` if
        the sets are named) and `test`; or those of the other data.

    Raises:
        TreadleError: If the directory holds no run of a command, or an unfinished run without a
            checkpoint, if the task cannot be made again, or if there is no evaluation data.
    """
    directory = options.directory
    record, recovered = opened(
        directory, f"{NAME_TASK}call loop.evaluate in the script", task=options.task
    )
    configuration = record["configuration"]
    if recovered:
        output.note(recovered)
    made = made_again(options, configuration)
    # Late: importing it imports NumPy and Keras, whose messages `made_again` hides.
    from .trained_loop import trained_loop

    state = state_of(directory, "evaluating")
    data = made.datasets()
    sets = _sets_of(data) if other is None else _sets_from(*other)
    if not sets:
        raise ConfigurationError(
            f"{directory}: its task has neither validation nor test data. Name data with --data "
            "FILE.py:FUNCTION"
        )
    execution = options_of(configuration)
    with (
        environment.showing("evaluating", options.json),
        trained_loop(directory, made.task, execution, data.train, state) as loop,
    ):
        return {name: loop.evaluate(part) for name, part in sets.items()}


def _sets_of(data: "Datasets") -> dict[str, Any]:
    """Return the data sets of a task that it can be evaluated on, by name."""
    named = data.validation if isinstance(data.validation, dict) else {"": data.validation}
    sets = {f"validation/{name}" if name else "validation": part for name, part in named.items()}
    return {name: part for name, part in {**sets, "test": data.test}.items() if part is not None}


@command()
def replay(options: ReplayOptions) -> None:
    """Run one step of a past run again, and show everything that it computed.

    Training is repeated from the newest checkpoint before the step, with compiled steps as in the
    run; then the step itself runs uncompiled. The run's directory is not changed.

    A recipe is executed at once; a script, only if you started the run with it in this directory,
    or with --trust or --task.

    Examples:
      treadle replay runs/mine --step 120
      treadle replay runs/mine --bisect 'loss > 5' --save step.safetensors
    """
    save = options.save
    if save is not None and not save.absolute().parent.is_dir():
        raise ConfigurationError(f"--save {save}: there is no folder {save.parent}")
    if save is not None and save.suffix != ".safetensors":
        raise ConfigurationError(
            f"--save {save}: arrays are saved as .safetensors. Use --save "
            f"{save.with_suffix('.safetensors')}"
        )
    with output.kept_free(options.json):
        found = _replayed(options)
    if save is not None:
        found.save(save)
    if options.json:
        output.print_json(found.as_dict())
        return
    from ..doctor.findings import show  # late: it imports NumPy

    show(found)


def _replayed(options: ReplayOptions) -> "Replayed":
    """Make the task of a run again, and replay one of its steps.

    Raises:
        TreadleError: If the run was started by a script, or for any reason that
            `treadle.doctor.replay` raises.
    """
    directory, step, bisect = options.directory, options.step, options.bisect
    if (step is None) == (bisect is None):
        raise ConfigurationError(
            "specify the step: either --step N, or a condition, such as --bisect 'loss > 5'"
        )
    which = f"step={step}" if bisect is None else f"bisect={bisect!r}"
    record, _ = opened(  # the report has a note on a lost record
        directory,
        f"{NAME_TASK}call treadle.doctor.replay(task, train, {str(directory)!r}, {which}) in "
        "Python, with the task and the source that the script makes",
        task=options.task,
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
    made = made_again(options, configuration, devices=configuration.get("devices"))
    data = made.datasets()
    with environment.showing("running the steps again", options.json):
        return treadle.doctor.replay(
            made.task,
            data.train,
            directory,
            step,
            bisect=bisect,
            validation=data.validation,
            hooks=made.hooks(),
        )


def _function_of(text: str) -> tuple[Path, str]:
    """Return the file and the function that `FILE.py:FUNCTION` names, without executing the file.

    Raises:
        ConfigurationError: If the text has another form, or there is no such file or function.
    """
    file, _, name = text.rpartition(":")
    if not file.endswith(".py") or not name:
        raise ConfigurationError(
            f"--data takes FILE.py:FUNCTION, not {text!r}: name a function without arguments "
            "that returns batches, such as treadle.data.from_arrays(x, y, batch_size=32)"
        )
    path = Path(file).expanduser().absolute()
    found = read_file(path)
    if name not in found:
        raise ConfigurationError(
            f"--data: {path} has no function {name!r}.{did_you_mean(name, found)}"
        )
    return path, name


def _sets_from(path: Path, function: str) -> dict[str, Any]:
    """Execute a file, call a function of it, and return the data sets by name; imports Keras.

    The file of the task is not executed again: it may call `treadle.setup` or register classes.
    A dict of data sets has the names `FUNCTION/KEY`, a single one the name `FUNCTION`.

    Raises:
        ConfigurationError: If it is no function, or it returned no data.
    """
    from ..recipes._loading import imported, imported_before  # late: it imports Keras

    module = imported_before(path) or imported(path)
    made: Any = getattr(module, function)
    if not inspect.isroutine(made):
        raise ConfigurationError(
            f"--data: {function} in {path} is of type {type(made).__name__}, and not a function: "
            "name a function without arguments that returns batches"
        )
    found = made()
    if found is None or (isinstance(found, Mapping) and not found):
        raise ConfigurationError(
            f"--data: {function}() in {path} returned no data, but {found!r}: return batches, or "
            "a dict of data sets by name"
        )
    if isinstance(found, Mapping):
        parts = cast(Mapping[Any, Any], found)
        return {f"{function}/{name}": part for name, part in parts.items()}
    return {function: found}
