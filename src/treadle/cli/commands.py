"""The commands `recipes`, `run`, `resume`, `evaluate` and `replay`."""

from typing import Annotated

import typer

from .. import __version__
from ..core import compile_cache
from ..core.installation import chosen_backend, package_version
from ..core.options import Options
from ..core.processes import is_chief
from ..errors import ConfigurationError
from ..recipes import find, resolve
from . import inspecting, output, running
from .help import Command, Group
from .other_data import OtherData
from .output import reporting_errors
from .parameters import (
    Backend,
    Bisect,
    Compiler,
    DataDir,
    Deterministic,
    Devices,
    Directory,
    Eager,
    Epochs,
    EpochsInAll,
    Fresh,
    Json,
    NoCompileCache,
    OtherDataOption,
    Override,
    Precision,
    Preflight,
    Quiet,
    RunDirectory,
    Save,
    Seed,
    Settings,
    StepNumber,
    Steps,
    StepsInAll,
    TaskName,
    TaskOfRun,
    Trust,
    Until,
    UntilThen,
    WeightsFrom,
    WindowSize,
)
from .trusting import Given

EPILOG = (
    "Exit codes: 0 done or finished before, 1 an error while training, "
    "2 wrong usage, configuration, backend, data or directory, 3 time limit reached, can be "
    "resumed, 130 interrupted and saved, 143 terminated and saved."
)
EPILOG_WITHOUT_RUN = (  # of commands that save nothing and have no time limit
    "Exit codes: 0 done, 1 an error in the task's code, 2 wrong usage, configuration, backend, "
    "data or directory, 130 interrupted."
)

app = typer.Typer(
    name="treadle",
    cls=Group,
    help="You write the step; Treadle runs the loop: custom training loops on Keras 3, "
    "for TensorFlow, JAX and PyTorch.",
    epilog="Examples:\n  treadle run digits --epochs 3\n  treadle run digits --help\n"
    "  treadle run my_task.py:MyTask --set units=128 --directory runs/mine\n"
    "  treadle resume runs/mine\n\n" + EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        backend = chosen_backend()["name"]
        versions = [
            f"{name} {package_version(name) or 'not installed'}"
            for name in ("keras", backend)
            if name
        ]
        typer.echo(f"treadle {__version__} ({', '.join(versions)})")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the versions."),
    ] = False,
) -> None:
    """Parse the options before the command."""


@app.command(cls=Command, epilog=EPILOG_WITHOUT_RUN)
def recipes() -> None:
    """List the tasks that come with Treadle, and their settings."""
    with reporting_errors():
        output.print_recipes(find())


@app.command(cls=Command, epilog=EPILOG, context_settings={"allow_extra_args": True})
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
    devices: Devices = None,
    window: WindowSize = None,
    eager: Eager = False,
    compiler: Compiler = "auto",
    deterministic: Deterministic = False,
    no_compile_cache: NoCompileCache = False,
    preflight: Preflight = False,
    directory: Directory = None,
    data_dir: DataDir = None,
    fresh: Fresh = False,
    override: Override = False,
    weights_from: WeightsFrom = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Train a task.

    If --directory holds a run of the same configuration, that run is resumed; a finished run is
    left as it is. A run of another configuration is refused.

    Examples:
      treadle run digits --epochs 3 --set units=128
      treadle run my_task.py:MyTask --backend jax --directory runs/mine
      treadle run digits --help    (also lists the settings of digits)
    """
    with reporting_errors():
        refuse_extra(context.args)
        if no_compile_cache:
            compile_cache.switch(on=False)
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
            devices=devices,
            options=Options("eager" if eager else "auto", window, compiler=compiler),
            deterministic=deterministic,
            preflight=preflight,
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


@app.command(cls=Command, epilog=EPILOG)
def resume(
    directory: RunDirectory,
    epochs: EpochsInAll = None,
    steps: StepsInAll = None,
    until: UntilThen = None,
    devices: Devices = None,
    no_compile_cache: NoCompileCache = False,
    data_dir: DataDir = None,
    task: TaskOfRun = None,
    trust: Trust = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Resume an interrupted run. Does nothing if the run is already finished.

    Use --epochs or --steps to extend the run; a finished run can be extended too.

    A recipe is executed at once; a script, only if you started the run with it in this directory,
    or with --trust or --task.

    Examples:
      treadle resume runs/mine
      treadle resume runs/mine --epochs 20
    """
    with reporting_errors():
        if no_compile_cache:
            compile_cache.switch(on=False)
        lasts = {"epochs": epochs, "steps": steps, "until": until}
        with output.kept_free(json):
            given = Given(data_dir, task, trust)
            outcome = running.resume(directory, lasts, given, quiet or json, devices)
        _end(outcome, json)


def _end(outcome: output.RunOutcome, json: bool) -> None:
    if is_chief():
        output.print_outcome(outcome, json)
    if outcome.unfinished:
        raise typer.Exit(output.UNFINISHED)


def refuse_extra(arguments: list[str]) -> None:
    """Reject extra arguments; for one of the form `NAME=VALUE`, suggest `--set`.

    Raises:
        ConfigurationError: If there is an extra argument.
    """
    for word in arguments:
        hint = f"repeat --set for each setting, as --set {word}" if "=" in word else "see --help"
        raise ConfigurationError(f"unexpected argument {word!r}: {hint}")


@app.command(cls=Command, epilog=EPILOG_WITHOUT_RUN)
def evaluate(
    directory: RunDirectory,
    data: OtherDataOption = None,
    data_dir: DataDir = None,
    task: TaskOfRun = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Evaluate a run on its validation and test data, or on other data.

    An unfinished run is evaluated with its newest checkpoint.

    A recipe is executed at once; a script, only if you started the run with it in this directory,
    or with --trust or --task.

    Examples:
      treadle evaluate runs/mine
      treadle evaluate runs/mine --json
      treadle evaluate runs/mine --data other.py:photos
    """
    with reporting_errors():
        other = None if data is None else OtherData.parse(data)
        with output.kept_free(json):
            given = Given(data_dir, task, trust)
            results = inspecting.evaluate(directory, given, quiet=json, other=other)
        output.print_results(results, json)


@app.command(cls=Command, epilog=EPILOG_WITHOUT_RUN)
def replay(
    directory: RunDirectory,
    step: StepNumber = None,
    bisect: Bisect = None,
    save: Save = None,
    data_dir: DataDir = None,
    task: TaskOfRun = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Run one step of a past run again, and show everything that it computed.

    Training is repeated from the newest checkpoint before the step, with compiled steps as in the
    run; then the step itself runs uncompiled. The run's directory is not changed.

    A recipe is executed at once; a script, only if you started the run with it in this directory,
    or with --trust or --task.

    Examples:
      treadle replay runs/mine --step 120
      treadle replay runs/mine --bisect 'loss > 5' --save step.safetensors
    """
    with reporting_errors():
        if save is not None and not save.absolute().parent.is_dir():
            raise ConfigurationError(f"--save {save}: there is no folder {save.parent}")
        if save is not None and save.suffix != ".safetensors":
            raise ConfigurationError(
                f"--save {save}: arrays are saved as .safetensors. Use --save "
                f"{save.with_suffix('.safetensors')}"
            )
        with output.kept_free(json):
            given = Given(data_dir, task, trust)
            found = inspecting.replay(directory, step, bisect, given, quiet=json)
        if save is not None:
            found.save(save)
        output.print_replay(found, json)
