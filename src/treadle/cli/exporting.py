"""The `treadle export` command: writes the `predict_step` of a run as a file."""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import treadle

from ..core.directory import CHECKPOINTS, MODEL
from ..core.options import Options
from ..errors import ConfigurationError, TreadleWarning
from ..exporting.files import check_free
from ..exporting.formats import FORMATS, Format, check_writable, chosen_format
from . import environment, output
from .commands import app
from .help import Command
from .opening import made_again, opened, options_of, state_of
from .output import reporting_errors
from .parameters import HOW, WHERE, DataDir, Json, RunDirectory, TaskOfRun, Trust
from .trusting import Given, recipe_of

if TYPE_CHECKING:  # importing them imports NumPy and Keras
    from ..checkpoint import Checkpoint
    from ..exporting.exported import Exported
    from ..recipes._loading import Made

WEIGHTS = "Weights"

FormatName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"{', '.join(list(FORMATS)[:-1])} or {list(FORMATS)[-1]}; default: that of the suffix "
        "of --output.",
        show_default=False,
        rich_help_panel=HOW,
    ),
]
OtherBackend = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="tensorflow, jax or torch; default: the backend of the run.",
        show_default=False,
        rich_help_panel=HOW,
    ),
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        metavar="X",
        help="The largest difference from predict that is accepted; default: 1e-4, or 1e-2 in "
        "half precision.",
        show_default=False,
        rich_help_panel=HOW,
    ),
]
WhichCheckpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="newest|best|STEP",
        help="Export the weights of this checkpoint; default: those at the end of the run, or the "
        "newest checkpoint of an unfinished run.",
        show_default=False,
        rich_help_panel=WEIGHTS,
    ),
]
UseAverages = Annotated[
    bool,
    typer.Option(
        "--averages",
        help="Use the averages of weights that an optimizer keeps (use_ema=True). At the end of a "
        "run, the weights are the averages already.",
        rich_help_panel=WEIGHTS,
    ),
]
OutputPath = Annotated[
    Path | None,
    typer.Option(
        "--output",
        metavar="PATH",
        help="Where the file is written; default: in the run directory, named after the task.",
        show_default=False,
        rich_help_panel=WHERE,
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Replace an existing file.", rich_help_panel=WHERE)
]


@app.command(
    cls=Command,
    epilog="Exit codes: 0 done, 1 the file fails or differs from predict, or an error in the "
    "task's code, 2 wrong usage, configuration, backend, data or directory, 130 interrupted.",
)
def export(
    directory: RunDirectory,
    format: FormatName = None,
    path: OutputPath = None,
    force: Force = False,
    checkpoint: WhichCheckpoint = None,
    averages: UseAverages = False,
    backend: OtherBackend = None,
    tolerance: Tolerance = None,
    data_dir: DataDir = None,
    task: TaskOfRun = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Write the predict_step of a run as a file that is used without Treadle.

    The file is loaded in its own runtime, and its outputs are compared with those of predict on a
    batch of the task's data; above the tolerance, nothing is written.

    A recipe is executed at once; a script, only if you started the run with it in this directory,
    or with --trust or --task.

    Examples:
      treadle export runs/mine --format onnx
      treadle export runs/mine --output digits.tflite --backend tensorflow
    """
    with reporting_errors():
        chosen = chosen_format(format, path)
        with output.kept_free(json):
            made = _made(
                directory, chosen, backend, path, force, Given(data_dir, task, trust), json
            )
            found = _written(made, checkpoint, averages, tolerance, force, json)
        _print(found, chosen.title, json)


@dataclass(frozen=True)
class _Made:
    """The task of a run, made again, and where its file is written."""

    directory: Path
    task: "Made"
    options: Options
    format: Format
    path: Path


def _made(
    directory: Path,
    form: Format,
    backend: str | None,
    path: Path | None,
    overwrite: bool,
    given: Given,
    quiet: bool,
) -> _Made:
    """Make the task of a run, after checking that the file can be written.

    Raises:
        TreadleError: If it cannot, or the directory holds no run of a command.
    """
    if backend is not None:
        check_writable(form, backend)
    record, recovered = opened(directory, "call treadle.export in the script", backend)
    configuration = record["configuration"]
    if recovered:
        output.note(recovered)
    recipe = recipe_of(directory, configuration, given)
    runs_on = backend or recipe.backend or configuration["backend"]
    check_writable(form, runs_on)
    # `load_run` takes other files `.keras` for models that are attributes of the task.
    name = f"{recipe.name}-predict" if form.suffix == MODEL else recipe.name
    path = path or directory / f"{name}{form.suffix}"
    check_free(form, path, overwrite)
    task = made_again(directory, configuration, given, quiet, backend=runs_on)
    return _Made(directory, task, options_of(configuration), form, path)


def _written(
    made: _Made,
    checkpoint: str | None,
    averages: bool,
    tolerance: float | None,
    overwrite: bool,
    quiet: bool,
) -> "Exported":
    """Write the file with the weights of a checkpoint, or those of the run."""
    # Late: importing it imports NumPy and Keras, whose messages `made_again` hides.
    from .trained_loop import trained_loop

    found = None if checkpoint is None else _checkpoint(made.directory, checkpoint)
    state = found.state if found is not None else state_of(made.directory, "exporting")
    train = made.task.datasets().train
    options = replace(made.options, compiler="auto")  # that of the run may be another backend's
    with (
        environment.showing(f"writing {made.path}", quiet),
        trained_loop(made.directory, made.task.task, options, train, state, found) as loop,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", TreadleWarning)  # `_print` prints it
        return treadle.export(
            loop,
            made.path,
            made.format.name,
            averages=averages,
            tolerance=tolerance,
            overwrite=overwrite,
        )


def _checkpoint(directory: Path, which: str) -> "Checkpoint":
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
