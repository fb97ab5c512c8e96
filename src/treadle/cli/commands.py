"""The commands and their options."""

from typing import Annotated

import typer

from .. import __version__
from ..errors import ConfigurationError
from ..options import Options
from ..recipes import find, resolve
from . import output, running
from .output import told
from .parameters import (
    Backend,
    Bisect,
    DataDir,
    Directory,
    Eager,
    Epochs,
    EpochsInAll,
    Fresh,
    Json,
    Override,
    Precision,
    Quiet,
    RunDirectory,
    Save,
    Seed,
    Settings,
    StepNumber,
    Steps,
    StepsInAll,
    TaskName,
    Until,
    UntilThen,
    WeightsFrom,
    WindowSize,
)

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
    task: TaskName,
    set_: Settings = None,
    epochs: Epochs = None,
    steps: Steps = None,
    until: Until = None,
    backend: Backend = None,
    precision: Precision = None,
    seed: Seed = None,
    window: WindowSize = None,
    eager: Eager = False,
    directory: Directory = None,
    data_dir: DataDir = None,
    fresh: Fresh = False,
    override: Override = False,
    weights_from: WeightsFrom = None,
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
            weights_from=weights_from,
        )
        with output.kept_free(json):
            outcome = running.train(request)
        _end(outcome, json)


@app.command(epilog=EPILOG)
def resume(
    directory: RunDirectory,
    epochs: EpochsInAll = None,
    steps: StepsInAll = None,
    until: UntilThen = None,
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
    directory: RunDirectory,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Measure a run on its validation and test data.

    Of a run that did not finish, the newest checkpoint is measured.
    """
    with told():
        with output.kept_free(json):
            results = running.evaluate(directory, data_dir)
        output.print_results(results, json)


@app.command(epilog=EPILOG)
def replay(
    directory: RunDirectory,
    step: StepNumber = None,
    bisect: Bisect = None,
    save: Save = None,
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
