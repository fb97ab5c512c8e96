"""The commands `treadle find-lr` (learning rate range test) and `treadle schedule`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import treadle

from ..core.drawing import checked_picture
from ..recipes import Recipe, make, resolve
from ..run.setup import overriding
from . import environment, output, schedule_texts
from .commands import EPILOG_WITHOUT_RUN, app, refuse_extra
from .help import Command
from .output import reporting_errors
from .parameters import PRINTED, Backend, DataDir, Json, Precision, Seed, Settings, TaskName

if TYPE_CHECKING:  # importing it would import Keras
    from ..recipes._loading import Made

Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.png",
        help="Save a plot to this file: .png, .svg or .pdf.",
        show_default=False,
        rich_help_panel=PRINTED,
    ),
]


@app.command(
    "find-lr", cls=Command, epilog=EPILOG_WITHOUT_RUN, context_settings={"allow_extra_args": True}
)
def find_lr(
    context: typer.Context,
    task: TaskName,
    set_: Settings = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Optimizer to test if the task has several, as critic_optimizer.",
            show_default=False,
        ),
    ] = None,
    monitor: Annotated[
        str, typer.Option(metavar="NAME", help="The value to monitor, as returned by train_step.")
    ] = "loss",
    begin: Annotated[float, typer.Option(metavar="RATE", help="First learning rate.")] = 1e-6,
    end: Annotated[float, typer.Option(metavar="RATE", help="Last learning rate.")] = 10.0,
    steps: Annotated[
        int, typer.Option(min=10, metavar="N", help="Steps from the first rate to the last.")
    ] = 100,
    plot: Plot = None,
    backend: Backend = None,
    precision: Precision = None,
    seed: Seed = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Suggest a learning rate with a range test.

    The task trains a few steps, with a learning rate that increases in every step, until the loss
    diverges.

    Examples:
      treadle find-lr digits --plot rates.png
      treadle find-lr my_task.py --optimizer critic_optimizer --steps 200
    """
    with reporting_errors():
        refuse_extra(context.args)
        recipe = resolve(task)
        settings = recipe.settings(set_ or [])
        picture = None if plot is None else checked_picture(plot)
        with output.kept_free(json):
            made = _made(recipe, settings, backend, precision, seed, data_dir, json)
            with environment.showing("training with rising learning rates", json):
                found = treadle.doctor.find_learning_rate(
                    made.task,
                    made.datasets().train,
                    optimizer=optimizer,
                    monitor=monitor,
                    begin=begin,
                    end=end,
                    steps=steps,
                )
        if picture is not None:
            found.draw(picture)
        if json:
            output.print_json(found.facts())
            return
        for line in found.lines():
            output.print_line(line)
        names = [parameter.name for parameter in recipe.parameters or ()]
        if found.suggestion is not None and "learning_rate" in names:
            output.print_line(
                f"try it: treadle run {task} --set learning_rate={found.suggestion:.2g}"
            )


@app.command(cls=Command, epilog=EPILOG_WITHOUT_RUN, context_settings={"allow_extra_args": True})
def schedule(
    context: typer.Context,
    what: Annotated[
        str,
        typer.Argument(
            metavar="SCHEDULE|TASK",
            help="A schedule, as 'cyclic(1e-4, 1e-2, step_size=500)', or a task, to show the "
            "learning rates of its optimizers.",
            show_default=False,
        ),
    ],
    set_: Settings = None,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Number of steps.")] = 1000,
    plot: Plot = None,
    backend: Backend = None,
    json: Json = False,
) -> None:
    """Show the values of a schedule, or the learning rates of a task.

    The schedules of treadle.schedules and keras.optimizers.schedules are available, and can be
    nested. For a task, each optimizer is assumed to be applied once per step.

    Examples:
      treadle schedule 'cyclic(1e-4, 1e-2, step_size=500)' --steps 2000 --plot cyclic.png
      treadle schedule my_task.py
    """
    with reporting_errors():
        refuse_extra(context.args)
        picture = None if plot is None else checked_picture(plot)
        with output.kept_free(json):
            if what.rstrip().endswith(")"):
                schedule_texts.parsed(what)
                environment.prepare(backend, None, None, None, None, json)
                shown = {what: schedule_texts.build(what)}
            else:
                recipe = resolve(what)
                made = _made(recipe, recipe.settings(set_ or []), backend, quiet=json)
                shown = _rates(made.task)
            found = {name: treadle.schedules.values(part, steps) for name, part in shown.items()}
        if picture is not None:
            treadle.schedules.draw(shown, picture, steps)
        if json:
            output.print_json(
                {
                    name: {"steps": at.tolist(), "values": values.tolist()}
                    for name, (at, values) in found.items()
                }
            )
            return
        for name, (at, values) in found.items():
            output.print_line(
                f"{name}: {values[0]:.4g} at step 0, {values[-1]:.4g} at step {at[-1]}; "
                f"from {values.min():.4g} to {values.max():.4g}"
            )


def _made(
    recipe: Recipe,
    settings: Mapping[str, Any],
    backend: str | None,
    precision: str | None = None,
    seed: int | None = None,
    data_dir: Path | None = None,
    quiet: bool = False,
) -> "Made":
    """Make a task; this imports Keras."""
    environment.prepare(backend, recipe.backend, data_dir, seed, precision, quiet)
    with environment.showing("making the task", quiet), overriding(seed, precision, backend):
        return make(recipe, settings)


def _rates(task: Any) -> dict[str, Any]:
    """Return the learning rates of a task's optimizers, schedules or numbers, by path."""
    from keras.optimizers.schedules import LearningRateSchedule

    from ..schedules import learning_rate_of, optimizers_of
    from ..steps.state import State

    found = optimizers_of(State.discover(task).all_optimizers)
    rates = {path: learning_rate_of(optimizer) for path, optimizer in found.items()}
    return {
        path: rate if isinstance(rate, LearningRateSchedule) else float(found[path].learning_rate)
        for path, rate in rates.items()
    }
