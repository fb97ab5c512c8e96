"""The options of the commands: each is declared once, in a dataclass.

A command is a function of one dataclass, whose fields are its arguments and options. `TaskOptions`
and `RunOptions` hold those that several commands share.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..recipes import Recipe, find, resolve
from . import environment

if TYPE_CHECKING:  # importing it would import Keras
    from ..recipes._loading import Made

HOW_LONG, HOW, WHERE, WEIGHTS, PRINTED = "How long", "How it runs", "Files", "Weights", "Output"
PANELS = (None, HOW_LONG, HOW, WHERE, WEIGHTS, PRINTED)
"""The groups of options, in the order of `--help`."""


def option(
    text: str,
    metavar: str | None = None,
    panel: str | None = None,
    *names: str,
    default_shown: bool = False,
    **more: Any,
) -> Any:
    """Return the declaration of an option.

    Args:
        text: The help text.
        metavar: The name of the value.
        panel: The group of options that it belongs to.
        *names: Names, if they differ from `--FIELD`. A flag needs one.
        default_shown: Whether the help shows the default; else the help text names it.
        **more: Further arguments of `typer.Option`, such as `min`.
    """
    return typer.Option(
        *names,
        help=text,
        metavar=metavar,
        rich_help_panel=panel,
        show_default=default_shown,
        **more,
    )


def flag(text: str, panel: str | None, *names: str) -> Any:
    """Return the declaration of an option without a value."""
    return typer.Option(*names, help=text, rich_help_panel=panel)


def _recipe_names(incomplete: str) -> list[str]:
    """Return the recipes that a shell offers for the beginning of a name; none: it offers files."""
    return [name for name in find() if name.startswith(incomplete)]


Backend = Annotated[
    str | None,
    option(
        "tensorflow, jax or torch; default: KERAS_BACKEND, then the only installed backend, then "
        "Keras' configuration file.",
        "NAME",
        HOW,
    ),
]
DataDir = Annotated[
    Path | None,
    option(
        "Folder with data sets; default: the environment variable TREADLE_DATA, then Keras' "
        "download folder.",
        "FOLDER",
        WHERE,
    ),
]
Epochs = Annotated[
    int | None, option("Passes over the data; default: the task's own.", "N", HOW_LONG, min=1)
]
Steps = Annotated[
    int | None, option("Number of steps (calls of train_step).", "N", HOW_LONG, min=1)
]
Devices = Annotated[
    int | None,
    option(
        "Split each batch among N devices (JAX); results are those of one device, within rounding. "
        "On a CPU, it is divided into N virtual devices, for a trial.",
        "N",
        HOW,
        min=1,
    ),
]
Deterministic = Annotated[
    bool,
    flag(
        "On a GPU, compute the same bits again, by algorithms that may be slower.",
        HOW,
        "--deterministic",
    ),
]
NoCompileCache = Annotated[
    bool,
    flag(
        "Compile all programs again, and keep none for the next run (JAX); for all commands: "
        "TREADLE_COMPILE_CACHE=off.",
        HOW,
        "--no-compile-cache",
    ),
]
Plot = Annotated[
    Path | None, option("Save a plot to this file: .png, .svg or .pdf.", "FILE.png", PRINTED)
]
Quiet = Annotated[bool, flag("Show no progress.", PRINTED, "--quiet", "-q")]
Json = Annotated[bool, flag("Print one JSON object and nothing else.", PRINTED, "--json")]
RunDirectory = Annotated[Path, typer.Argument(metavar="FOLDER", help="The directory of a run.")]
Settings = Annotated[
    list[str] | None,
    option(
        "A setting of the task, as --set units=128. May be repeated. NAME --help lists them.",
        "NAME=VALUE",
        None,
        "--set",
    ),
]


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Options of the commands that make a task."""

    task: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE.py:TASK",
            help="A recipe, or your own task: a class in a file, or a treadle.task(…) object.",
            show_default=False,
            autocompletion=_recipe_names,
        ),
    ]
    set_: Settings = None
    backend: Backend = None
    precision: Annotated[
        str | None,
        option(
            "float32, mixed_bfloat16, mixed_float16 or float64; default: Keras' setting.",
            "POLICY",
            HOW,
        ),
    ] = None
    seed: Annotated[
        int | None,
        option(
            "Seed of initial weights and data order; default: the seed set in the file, else 0.",
            "N",
            HOW,
            min=0,
        ),
    ] = None
    data_dir: DataDir = None
    json: Json = False

    def recipe(self) -> Recipe:
        """Find the task; imports no framework.

        Raises:
            ConfigurationError: If there is no such task.
        """
        return resolve(self.task)

    def made(self, quiet: bool, deterministic: bool = False) -> "Made":
        """Check the settings, import Keras and make the task.

        Raises:
            TreadleError: If an option is invalid, or the task cannot be made.
        """
        recipe = self.recipe()
        return environment.make_task(
            recipe,
            recipe.settings(self.set_ or []),
            backend=self.backend,
            precision=self.precision,
            seed=self.seed,
            data_dir=self.data_dir,
            quiet=quiet,
            deterministic=deterministic,
        )


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of the commands that make the task of a run again."""

    directory: RunDirectory
    data_dir: DataDir = None
    task: Annotated[
        str | None,
        option(
            "The task of the run, in the place of the one that its directory names.",
            "FILE.py:TASK",
            WHERE,
        ),
    ] = None
    trust: Annotated[
        bool,
        flag(
            "Execute the script and read the data folder that the directory names, even if you did "
            "not start the run with them here. Inspect the script first.",
            WHERE,
            "--trust",
        ),
    ] = False
    json: Json = False
