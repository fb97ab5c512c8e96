"""The options of the commands: each is declared once, in a dataclass.

A command is a function of one dataclass, whose fields are its arguments and options. `TaskOptions`
and `RunOptions` hold those that several commands share.
"""

from dataclasses import MISSING, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..recipes import Recipe, find, resolve
from . import environment

if TYPE_CHECKING:  # importing it would import Keras
    from ..recipes._loading import Made

HOW_LONG, HOW, WHERE, WEIGHTS, PRINTED = "How long", "How it runs", "Files", "Weights", "Output"
PANELS = (None, HOW_LONG, HOW, WHERE, WEIGHTS, PRINTED)
"""The groups of options, in the order of `--help`."""
DECLARED = "typer"
"""The key of the declaration of an option in the metadata of a field."""


def option(
    text: str,
    metavar: str | None = None,
    panel: str | None = None,
    *names: str,
    default: Any = None,
    required: bool = False,
    default_shown: bool = False,
    **more: Any,
) -> Any:
    """Declare a field of a dataclass as an option.

    Args:
        text: The help text.
        metavar: The name of the value.
        panel: The group of options that it belongs to.
        *names: Names, if they differ from `--FIELD`.
        default: The default value.
        required: Whether there is no default.
        default_shown: Whether the help shows the default; else the help text names it.
        **more: Further arguments of `typer.Option`, such as `min`.
    """
    declared = typer.Option(
        *names,
        help=text,
        metavar=metavar,
        rich_help_panel=panel,
        show_default=default_shown,
        **more,
    )
    return _field(declared, MISSING if required else default)


def flag(text: str, panel: str | None, *names: str) -> Any:
    """Declare a field of a dataclass as an option without a value, named `--FIELD` by default."""
    return _field(typer.Option(*names, help=text, rich_help_panel=panel), False)


def argument(default: Any = MISSING, **more: Any) -> Any:
    """Declare a field of a dataclass as an argument of the command.

    Args:
        default: The default value; required without it.
        **more: Arguments of `typer.Argument`.
    """
    return _field(typer.Argument(**more), default)


def _field(declared: Any, default: Any) -> Any:
    return field(default=default, metadata={DECLARED: declared})


# Options that several commands share: each call declares one as a field.
backend_option = partial(
    option,
    "tensorflow, jax or torch; default: KERAS_BACKEND, then the only installed backend, then "
    "Keras' configuration file.",
    "NAME",
    HOW,
)
data_dir_option = partial(
    option,
    "Folder with data sets; default: the environment variable TREADLE_DATA, then Keras' "
    "download folder.",
    "FOLDER",
    WHERE,
)
epochs_option = partial(
    option, "Passes over the data; default: the task's own.", "N", HOW_LONG, min=1
)
steps_option = partial(option, "Number of steps (calls of train_step).", "N", HOW_LONG, min=1)
devices_option = partial(
    option,
    "Split each batch among N devices (JAX); results are those of one device, within rounding. "
    "On a CPU, it is divided into N virtual devices, for a trial.",
    "N",
    HOW,
    min=1,
)
deterministic_flag = partial(
    flag, "On a GPU, compute the same bits again, by algorithms that may be slower.", HOW
)
no_compile_cache_flag = partial(
    flag,
    "Compile all programs again, and keep none for the next run (JAX); for all commands: "
    "TREADLE_COMPILE_CACHE=off.",
    HOW,
)
plot_option = partial(option, "Save a plot to this file: .png, .svg or .pdf.", "FILE.png", PRINTED)
quiet_flag = partial(flag, "Show no progress.", PRINTED, "--quiet", "-q")
json_flag = partial(flag, "Print one JSON object and nothing else.", PRINTED)
run_directory = partial(argument, metavar="FOLDER", help="The directory of a run.")
settings_option = partial(
    option,
    "A setting of the task, as --set units=128. May be repeated. NAME --help lists them.",
    "NAME=VALUE",
    None,
    "--set",
)


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Options of the commands that make a task."""

    task: str = argument(
        metavar="NAME|FILE.py:TASK",
        help="A recipe, or your own task in a file: a class, a treadle.task(…) object, or a "
        "function that returns a task, or a compiled keras.Model and its data.",
        show_default=False,
        # Where no recipe begins like this, a shell offers files.
        autocompletion=lambda incomplete: [x for x in find() if x.startswith(incomplete)],
    )
    set_: list[str] | None = settings_option()
    backend: str | None = backend_option()
    precision: str | None = option(
        "float32, mixed_bfloat16, mixed_float16 or float64; default: Keras' setting.", "POLICY", HOW
    )
    seed: int | None = option(
        "Seed of initial weights and data order; default: the seed set in the file, else 0.",
        "N",
        HOW,
        min=0,
    )
    data_dir: Path | None = data_dir_option()
    json: bool = json_flag()

    def recipe(self) -> Recipe:
        """Find the task; imports no framework.

        Raises:
            ConfigurationError: If there is no such task.
        """
        return resolve(self.task)

    def made(self, quiet: bool) -> "Made":
        """Check the settings, import Keras and make the task.

        Raises:
            TreadleError: If an option is invalid, or the task cannot be made.
        """
        recipe = self.recipe()
        settings = recipe.settings(self.set_ or [])
        return environment.make_task(recipe, settings, environment.Setup.of(self, quiet=quiet))


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of the commands that make the task of a run again."""

    directory: Path = run_directory()
    data_dir: Path | None = data_dir_option()
    task: str | None = option(
        "The task of the run, in the place of the one that its directory names; needed for a "
        "run that a script started.",
        "FILE.py:TASK",
        WHERE,
    )
    trust: bool = flag(
        "Execute the script and read the data folder that the directory names, even if you did "
        "not start the run with them here. Inspect the script first.",
        WHERE,
    )
    json: bool = json_flag()
