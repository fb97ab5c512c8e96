"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..recipes import find

HOW_LONG, HOW, WHERE, PRINTED = "How long", "How it runs", "Files", "Output"

# Which task, or which run


def _recipe_names(incomplete: str) -> list[str]:
    """Return the recipes that a shell offers for the beginning of a name; none: it offers files."""
    return [name for name in find() if name.startswith(incomplete)]


TaskName = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FILE.py:TASK",
        help="A recipe, or your own task: a class in a file, or a treadle.task(…) object.",
        show_default=False,
        autocompletion=_recipe_names,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A setting of the task, as --set units=128. May be repeated. NAME --help lists them.",
        show_default=False,
    ),
]
RunDirectory = Annotated[Path, typer.Argument(metavar="FOLDER", help="The directory of a run.")]

# How long it trains

Epochs = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Passes over the data; default: the task's own.",
        show_default=False,
        rich_help_panel=HOW_LONG,
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Number of steps (calls of train_step).",
        show_default=False,
        rich_help_panel=HOW_LONG,
    ),
]
Until = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Time limit, as '30 min'. The first of these limits that is reached ends the run.",
        show_default=False,
        rich_help_panel=HOW_LONG,
    ),
]
EpochsInAll = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Passes over the data in total, including those already done. Replaces a recorded "
        "--epochs and --steps.",
        rich_help_panel=HOW_LONG,
    ),
]
StepsInAll = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Steps in total, including those already done. Replaces a recorded --steps and "
        "--epochs.",
        rich_help_panel=HOW_LONG,
    ),
]
UntilThen = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Time limit, counted from now.", rich_help_panel=HOW_LONG),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=2,
        metavar="N",
        help="Compare training in N processes with training in one instead, over 16 steps or those "
        "of --steps.",
        show_default=False,
    ),
]
StepsBefore = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="K",
        help="Steps before the checkpoint; the same number of steps follows it. Default: 8, or "
        "one and a half epochs if an epoch has at most 24 batches.",
        show_default=False,
    ),
]

# How it runs

Backend = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="tensorflow, jax or torch; default: KERAS_BACKEND, then the only installed backend, "
        "then Keras' configuration file.",
        show_default=False,
        rich_help_panel=HOW,
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        metavar="POLICY",
        help="float32, mixed_bfloat16, mixed_float16 or float64; default: Keras' setting.",
        show_default=False,
        rich_help_panel=HOW,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="N",
        help="Seed of initial weights and data order; default: the seed set in the file, else 0.",
        show_default=False,
        rich_help_panel=HOW,
    ),
]
Devices = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Split each batch among N devices (JAX); results are those of one device, within "
        "rounding. On a CPU, it is divided into N virtual devices, for a trial.",
        show_default=False,
        rich_help_panel=HOW,
    ),
]
WindowSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Maximum number of steps in one compiled call; does not change results.",
        show_default=False,
        rich_help_panel=HOW,
    ),
]
Eager = Annotated[
    bool,
    typer.Option(
        "--eager", help="Run steps uncompiled, for debugging (slow).", rich_help_panel=HOW
    ),
]
Compiler = Annotated[
    Literal["auto", "inductor", "cuda-graph", "captured"],
    typer.Option(
        help="How captured steps run on PyTorch: 'captured', 'inductor' (PyTorch's compiler), or "
        "'cuda-graph' (the same, replayed as a CUDA graph).",
        rich_help_panel=HOW,
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="On a GPU, compute the same bits again, by algorithms that may be slower.",
        rich_help_panel=HOW,
    ),
]
NoCompileCache = Annotated[
    bool,
    typer.Option(
        "--no-compile-cache",
        help="Compile all programs again, and keep none for the next run (JAX); for all commands: "
        "TREADLE_COMPILE_CACHE=off.",
        rich_help_panel=HOW,
    ),
]

# Which step to replay

StepNumber = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Replay this step.", show_default=False),
]
Bisect = Annotated[
    str | None,
    typer.Option(
        metavar="CONDITION",
        help="Replay the first step where this holds: 'loss > 5', 'isnan(loss)', "
        "'norm(model/layers/0/kernel) > 10'.",
        show_default=False,
    ),
]

# Files

Directory = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder for the files of the run; other files in it are kept. Default: runs/NAME-1, "
        "runs/NAME-2, ….",
        show_default=False,
        rich_help_panel=WHERE,
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder with data sets; default: the environment variable TREADLE_DATA, then Keras' "
        "download folder.",
        show_default=False,
        rich_help_panel=WHERE,
    ),
]
Fresh = Annotated[
    bool,
    typer.Option(
        "--fresh",
        help="Remove the run in the directory, and start from scratch.",
        rich_help_panel=WHERE,
    ),
]
Preflight = Annotated[
    bool,
    typer.Option(
        "--preflight",
        help="Search for mistakes first, as treadle doctor does, and train only if it finds no "
        "error. The findings are kept in doctor.json in the run directory.",
        rich_help_panel=HOW,
    ),
]
Override = Annotated[
    bool,
    typer.Option(
        "--override",
        help="Resume a run even if its configuration differs.",
        rich_help_panel=WHERE,
    ),
]
WeightsFrom = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Initialize the weights from this other run.",
        show_default=False,
        rich_help_panel=WHERE,
    ),
]
TaskOfRun = Annotated[
    str | None,
    typer.Option(
        "--task",
        metavar="FILE.py:TASK",
        help="The task of the run, in the place of the one that its directory names.",
        show_default=False,
        rich_help_panel=WHERE,
    ),
]
OtherDataOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="FILE.py:FUNCTION",
        help="Evaluate other data: a function without arguments that returns batches, or a dict of "
        "data sets by name.",
        show_default=False,
        rich_help_panel=WHERE,
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Execute the script and read the data folder that the directory names, even if you "
        "did not start the run with them here. Inspect the script first.",
        rich_help_panel=WHERE,
    ),
]
Save = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.safetensors",
        help="Write batch, activations, gradients and updates to this file.",
        show_default=False,
        rich_help_panel=WHERE,
    ),
]

# Output

Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Show no progress.", rich_help_panel=PRINTED)
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=PRINTED),
]
