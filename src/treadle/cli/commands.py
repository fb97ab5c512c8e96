"""The commands and their options."""

from pathlib import Path
from typing import Annotated

import typer

from .. import __version__
from ..errors import ConfigurationError
from ..options import Options
from ..recipes import find, resolve
from . import output, running
from .output import told

HOW_LONG, HOW, WHERE, PRINTED = "How long", "How it runs", "Files", "Output"
EPILOG = (
    "Exit codes: 0 done or finished before, 1 an error while training, "
    "2 wrong usage, configuration, backend, data or directory, 3 its time was up and it can be "
    "resumed, 130 interrupted and saved, 143 terminated and saved."
)

app = typer.Typer(
    name="treadle",
    help="You write the step; Treadle runs the loop: custom training loops on Keras 3, "
    "for TensorFlow, JAX and PyTorch.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=PRINTED),
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
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Show no progress.", rich_help_panel=PRINTED)
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"treadle {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take the options that stand before a command."""


@app.command(epilog=EPILOG)
def recipes() -> None:
    """List the tasks that come with Treadle, and their settings."""
    with told():
        output.print_recipes(find())


@app.command(epilog=EPILOG, context_settings={"allow_extra_args": True})
def run(
    context: typer.Context,
    task: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE.py:TASK",
            help="A recipe, or a task of your own: a class in a file, or a treadle.task(…) object.",
            show_default=False,
        ),
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A setting of the task: an argument of its __init__. May be repeated.",
            show_default=False,
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Passes over the data; default: the task's own.",
            show_default=False,
            rich_help_panel=HOW_LONG,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Steps: calls of train_step.",
            show_default=False,
            rich_help_panel=HOW_LONG,
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time, as '30 min'. Whichever of these comes first ends the run.",
            show_default=False,
            rich_help_panel=HOW_LONG,
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="tensorflow, jax or torch; default: KERAS_BACKEND, then Keras' own configuration.",
            show_default=False,
            rich_help_panel=HOW,
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            help="float32, mixed_bfloat16, mixed_float16 or float64; default: Keras' own setting.",
            show_default=False,
            rich_help_panel=HOW,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="For initial weights and the data's order; default: the file's own, else 0.",
            show_default=False,
            rich_help_panel=HOW,
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="The most steps in one compiled call; results do not depend on it.",
            show_default=False,
            rich_help_panel=HOW,
        ),
    ] = None,
    eager: Annotated[
        bool,
        typer.Option(
            "--eager", help="Run steps uncompiled, to debug them: slow.", rich_help_panel=HOW
        ),
    ] = False,
    directory: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="What the run leaves goes here; default: runs/NAME-1, then -2 ….",
            show_default=False,
            rich_help_panel=WHERE,
        ),
    ] = None,
    data_dir: DataDir = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Start anew in a directory that holds a run.", rich_help_panel=WHERE
        ),
    ] = False,
    override: Annotated[
        bool,
        typer.Option(
            "--override",
            help="Go on with a run although its configuration differs.",
            rich_help_panel=WHERE,
        ),
    ] = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Train a task.

    In a directory that holds a run, the same configuration goes on where
    that run was, or does nothing where it is finished; another
    configuration is refused.
    """
    with told():
        refuse_extra(context.args)
        recipe = resolve(task)
        request = running.Request(
            recipe=recipe,
            settings=recipe.settings(set_ or []),
            epochs=epochs,
            steps=steps,
            until=until,
            backend=backend,
            precision=precision,
            seed=seed,
            options=Options(execution="eager" if eager else "auto", window=window),
            directory=directory,
            data_dir=data_dir,
            fresh=fresh,
            quiet=quiet or json,
            override=override,
        )
        with output.kept_free(json):
            outcome = running.train(request)
        _end(outcome, json)


@app.command(epilog=EPILOG)
def resume(
    directory: Annotated[Path, typer.Argument(metavar="FOLDER", help="The directory of a run.")],
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Passes over the data in all.", rich_help_panel=HOW_LONG
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Steps in all.", rich_help_panel=HOW_LONG),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Time from now on.", rich_help_panel=HOW_LONG),
    ] = None,
    data_dir: DataDir = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Go on with a run where it was, whatever ended it; a finished one does nothing.

    With --epochs or --steps it becomes a longer run, also a finished one.
    """
    with told():
        lasts = {"epochs": epochs, "steps": steps, "until": until}
        with output.kept_free(json):
            outcome = running.resume(directory, lasts, data_dir, quiet or json)
        _end(outcome, json)


def _end(outcome: running.Outcome, json: bool) -> None:
    output.print_outcome(outcome, json)
    if outcome.unfinished:
        raise typer.Exit(output.UNFINISHED)


def refuse_extra(arguments: list[str]) -> None:
    """Refuse words that belong to no option; a setting among them lacks its own `--set`.

    Raises:
        ConfigurationError: There is one.
    """
    for word in arguments:
        hint = f"repeat --set for each setting, as --set {word}" if "=" in word else "see --help"
        raise ConfigurationError(f"{word!r} belongs to no option: {hint}")


@app.command(epilog=EPILOG)
def evaluate(
    directory: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The directory of a finished run.")
    ],
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Measure a finished run on its validation and test data."""
    with told():
        with output.kept_free(json):
            results = running.evaluate(directory, data_dir)
        output.print_results(results, json)


@app.command(epilog=EPILOG)
def replay(
    directory: Annotated[Path, typer.Argument(metavar="FOLDER", help="The directory of a run.")],
    step: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="The step to go to.", show_default=False),
    ] = None,
    bisect: Annotated[
        str | None,
        typer.Option(
            metavar="CONDITION",
            help="Go to the first step where this holds: 'loss > 5', 'isnan(loss)', "
            "'norm(model/layers/0/kernel) > 10'.",
            show_default=False,
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npz",
            help="Write batch, activations, gradients and updates into this file.",
            show_default=False,
            rich_help_panel=WHERE,
        ),
    ] = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Go back to a step of a run, and show everything that it computed.

    From the newest checkpoint before it, steps are run again as they
    were; then the step itself once more, uncompiled. Nothing in the
    directory is changed.
    """
    with told():
        if save is not None and not save.absolute().parent.is_dir():
            raise ConfigurationError(f"--save {save}: there is no folder {save.parent}")
        with output.kept_free(json):
            found = running.replay(directory, step, bisect, data_dir)
        if save is not None:
            found.save(save)
        output.print_replay(found, json)
