"""The `treadle export` command: writes the `predict_step` of a run as a file."""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import treadle

from ..core.directory import CHECKPOINTS, MODEL
from ..errors import ConfigurationError, TreadleWarning
from ..exporting.formats import FORMATS, Format, check_free, check_writable, chosen_format
from . import environment, output
from .commands import command
from .opening import NAME_TASK, made_again, opened, options_of, recipe_of, state_of
from .options import HOW, WEIGHTS, WHERE, RunOptions, flag, option

if TYPE_CHECKING:  # importing them imports NumPy and Keras
    from ..checkpoint import SavedState
    from ..exporting.exported import Exported


@dataclass(frozen=True, kw_only=True)
class Export(RunOptions):
    """Options of `treadle export`."""

    format: str | None = option(
        f"{', '.join(list(FORMATS)[:-1])} or {list(FORMATS)[-1]}; default: that of the suffix "
        "of --output.",
        "NAME",
        HOW,
    )
    path: Path | None = option(
        "Where the file is written; default: in the run directory, named after the task.",
        "PATH",
        WHERE,
        "--output",
    )
    force: bool = flag("Replace an existing file.", WHERE)
    checkpoint: str | None = option(
        "Export the weights of this checkpoint; default: those at the end of the run, or the "
        "newest checkpoint of an unfinished run.",
        "newest|best|STEP",
        WEIGHTS,
    )
    averages: bool = flag(
        "Use the averages of weights that an optimizer keeps (use_ema=True). At the end of a "
        "run, the weights are the averages already.",
        WEIGHTS,
    )
    backend: str | None = option(
        "tensorflow, jax or torch; default: the backend of the run.", "NAME", HOW
    )
    tolerance: float | None = option(
        "The largest difference from predict that is accepted; default: 1e-4, or 1e-2 in "
        "half precision.",
        "X",
        HOW,
        min=0.0,
    )


@command(
    "Exit codes: 0 done, 1 the file fails or differs from predict, or an error in the "
    "task's code, 2 wrong usage, configuration, backend, data or directory, 130 interrupted."
)
def export(options: Export) -> None:
    """Write the predict_step of a run as a file that is used without Treadle.

    The file is loaded in its own runtime, and its outputs are compared with those of predict on a
    batch of the task's data; above the tolerance, nothing is written.

    A recipe is executed at once; a script, only if you started the run with it in this directory,
    or with --trust or --task.

    Examples:
      treadle export runs/mine --format onnx
      treadle export runs/mine --output digits.tflite --backend tensorflow
    """
    form = chosen_format(options.format, options.path)
    with output.kept_free(options.json):
        found = _written(options, form)
    _print(found, form.title, options.json)


def _written(options: Export, form: Format) -> "Exported":
    """Make the task of a run again, and write the file with the weights of a checkpoint or the run.

    Raises:
        TreadleError: If the directory holds no run of a command, or the file cannot be written.
    """
    directory = options.directory
    if options.backend is not None:
        check_writable(form, options.backend)
    record, recovered = opened(
        directory, f"{NAME_TASK}call treadle.export in the script", options.backend, options.task
    )
    configuration = record["configuration"]
    if recovered:
        output.note(recovered)
    recipe = recipe_of(options, configuration)
    runs_on = options.backend or recipe.backend or configuration["backend"]
    check_writable(form, runs_on)
    # `load_run` takes other files `.keras` for models that are attributes of the task.
    name = f"{recipe.name}-predict" if form.suffix == MODEL else recipe.name
    path = options.path or directory / f"{name}{form.suffix}"
    check_free(form, path, options.force)
    made = made_again(options, configuration, runs_on)
    # Late: importing it imports NumPy and Keras, whose messages `made_again` hides.
    from .trained_loop import trained_loop

    which = options.checkpoint
    found = None if which is None else _checkpoint(directory, which)
    state = found.state if found is not None else state_of(directory, "exporting")
    # The compiler of the run may be another backend's.
    execution = replace(options_of(configuration), compiler="auto")
    train = made.datasets().train
    with (
        environment.showing(f"writing {path}", options.json),
        trained_loop(directory, made.task, execution, train, state, found) as loop,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", TreadleWarning)  # `_print` prints it
        return treadle.export(
            loop,
            path,
            form.name,
            averages=options.averages,
            tolerance=options.tolerance,
            overwrite=options.force,
        )


def _checkpoint(directory: Path, which: str) -> "SavedState":
    """Return a checkpoint of a run.

    Raises:
        ConfigurationError: There is none like this.
    """
    from ..checkpoint import Checkpoints  # late: it imports NumPy

    checkpoints = Checkpoints(directory / CHECKPOINTS)
    if which.isdigit():
        step = int(which)
        found = checkpoints.before(step)
        found = found if found is not None and found.progress.step == step else None
    elif which in ("newest", "best"):
        found = checkpoints.latest() if which == "newest" else checkpoints.best()
    else:
        raise ConfigurationError(f"--checkpoint {which}: expected newest, best or a step")
    if found is None:
        steps = ", ".join(map(str, checkpoints.steps())) or "none"
        raise ConfigurationError(
            f"--checkpoint {which}: {directory} has no such valid checkpoint. It has checkpoints "
            f"of the steps: {steps}"
        )
    return found


def _print(found: "Exported", title: str, as_json: bool) -> None:
    """Print what was written, and the largest difference."""
    if as_json:
        output.print_json(found.as_dict())
        return
    output.print_line(f"{found.path}: {title}, {found.bytes / 1024:,.0f} KiB")
    for what, parts in (("takes", found.inputs), ("returns", found.outputs)):
        for name, text in parts.items():
            output.print_line(f"  {what} {name}: {text.replace('None', 'batch', 1)}")
    if found.difference is None:
        output.note(f"not compared with predict: {found.not_compared}")
    else:
        output.print_line(
            f"compared with predict in {found.runtime}: the largest difference is "
            f"{found.difference:.1e} (tolerance {found.tolerance:.0e})"
        )
