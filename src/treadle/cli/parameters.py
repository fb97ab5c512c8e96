"""What commands take: every argument and option, declared once."""

from pathlib import Path
from typing import Annotated

import typer

HOW_LONG, HOW, WHERE, PRINTED = "How long", "How it runs", "Files", "Output"

# Which task, or which run

TaskName = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FILE.py:TASK",
        help="A recipe, or a task of your own: a class in a file, or a treadle.task(…) object.",
        show_default=False,
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
        help="Steps: calls of train_step.",
        show_default=False,
        rich_help_panel=HOW_LONG,
    ),
]
Until = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Time, as '30 min'. Whichever of these comes first ends the run.",
        show_default=False,
        rich_help_panel=HOW_LONG,
    ),
]
EpochsInAll = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Passes over the data in all.", rich_help_panel=HOW_LONG),
]
StepsInAll = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Steps in all.", rich_help_panel=HOW_LONG),
]
UntilThen = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Time from now on.", rich_help_panel=HOW_LONG),
]
StepsBefore = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="K",
        help="Steps before the checkpoint; as many follow. Default: 8, or one and a half "
        "epochs where an epoch has at most 24 batches.",
        show_default=False,
    ),
]

# How it runs

Backend = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="tensorflow, jax or torch; default: KERAS_BACKEND, the only installed backend, then "
        "Keras' own configuration.",
        show_default=False,
        rich_help_panel=HOW,
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        metavar="POLICY",
        help="float32, mixed_bfloat16, mixed_float16 or float64; default: Keras' own setting.",
        show_default=False,
        rich_help_panel=HOW,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="N",
        help="For initial weights and the data's order; default: the file's own, else 0.",
        show_default=False,
        rich_help_panel=HOW,
    ),
]
WindowSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="The most steps in one compiled call; results do not depend on it.",
        show_default=False,
        rich_help_panel=HOW,
    ),
]
Eager = Annotated[
    bool,
    typer.Option("--eager", help="Run steps uncompiled, to debug them: slow.", rich_help_panel=HOW),
]

# Where a replay goes

StepNumber = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="The step to go to.", show_default=False),
]
Bisect = Annotated[
    str | None,
    typer.Option(
        metavar="CONDITION",
        help="Go to the first step where this holds: 'loss > 5', 'isnan(loss)', "
        "'norm(model/layers/0/kernel) > 10'.",
        show_default=False,
    ),
]

# Files

Directory = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder for the files of the run; default: runs/NAME-1, then -2 ….",
        show_default=False,
        rich_help_panel=WHERE,
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder with data sets; default: the variable TREADLE_DATA, then Keras' downloads.",
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
Override = Annotated[
    bool,
    typer.Option(
        "--override",
        help="Resume a run although its configuration differs.",
        rich_help_panel=WHERE,
    ),
]
WeightsFrom = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Begin with the weights of this other run.",
        show_default=False,
        rich_help_panel=WHERE,
    ),
]
Save = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.npz",
        help="Write batch, activations, gradients and updates into this file.",
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
