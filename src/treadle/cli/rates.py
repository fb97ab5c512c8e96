"""The commands `treadle find-lr` (learning rate range test) and `treadle schedule`."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

import treadle

from ..core.drawing import checked_picture
from ..errors import ConfigurationError
from . import environment, output, schedule_texts
from .commands import command
from .options import Backend, Json, Plot, Settings, TaskOptions, option


@dataclass(frozen=True, kw_only=True)
class FindLr(TaskOptions):
    """Options of `treadle find-lr`."""

    optimizer: Annotated[
        str | None,
        option("Optimizer to test if the task has several, as critic_optimizer.", "PATH"),
    ] = None
    monitor: Annotated[
        str,
        option("The value to monitor, as returned by train_step.", "NAME", default_shown=True),
    ] = "loss"
    begin: Annotated[float, option("First learning rate.", "RATE", default_shown=True)] = 1e-6
    end: Annotated[float, option("Last learning rate.", "RATE", default_shown=True)] = 10.0
    steps: Annotated[
        int, option("Steps from the first rate to the last.", "N", default_shown=True, min=10)
    ] = 100
    plot: Plot = None


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Options of `treadle schedule`."""

    what: Annotated[
        str,
        typer.Argument(
            metavar="SCHEDULE|TASK",
            help="A schedule, as 'cyclic(1e-4, 1e-2, step_size=500)', or a task, to show the "
            "learning rates of its optimizers.",
            show_default=False,
        ),
    ]
    set_: Settings = None
    steps: Annotated[int, option("Number of steps.", "N", default_shown=True, min=1)] = 1000
    plot: Plot = None
    backend: Backend = None
    json: Json = False


@command(name="find-lr")
def find_lr(options: FindLr) -> None:
    """Suggest a learning rate with a range test.

    The task trains a few steps, with a learning rate that increases in every step, until the loss
    diverges.

    Examples:
      treadle find-lr digits --plot rates.png
      treadle find-lr my_task.py --optimizer critic_optimizer --steps 200
    """
    recipe = options.recipe()
    picture = None if options.plot is None else checked_picture(options.plot)
    with output.kept_free(options.json):
        made = options.made(options.json)
        with environment.showing("training with rising learning rates", options.json):
            found = treadle.doctor.find_learning_rate(
                made.task,
                made.datasets().train,
                optimizer=options.optimizer,
                monitor=options.monitor,
                begin=options.begin,
                end=options.end,
                steps=options.steps,
            )
    if picture is not None:
        found.draw(picture)
    if options.json:
        output.print_json(found.facts())
        return
    for line in found.lines():
        output.print_line(line)
    names = [parameter.name for parameter in recipe.parameters or ()]
    if found.suggestion is not None and "learning_rate" in names:
        output.print_line(
            f"try it: treadle run {options.task} --set learning_rate={found.suggestion:.2g}"
        )


@command()
def schedule(options: Schedule) -> None:
    """Show the values of a schedule, or the learning rates of a task.

    The schedules of treadle.schedules and keras.optimizers.schedules are available, and can be
    nested. For a task, each optimizer is assumed to be applied once per step.

    Examples:
      treadle schedule 'cyclic(1e-4, 1e-2, step_size=500)' --steps 2000 --plot cyclic.png
      treadle schedule my_task.py
    """
    what, picture = options.what, options.plot and checked_picture(options.plot)
    with output.kept_free(options.json):
        if what.rstrip().endswith(")"):
            schedule_texts.parsed(what)  # before Keras is imported, which takes seconds
            environment.prepare(options.backend, quiet=options.json)
            shown = {what: schedule_texts.build(what)}
        else:
            task = TaskOptions(task=what, set_=options.set_, backend=options.backend)
            shown = _rates(task.made(options.json).task)
        try:
            found = {
                name: treadle.schedules.values(part, options.steps) for name, part in shown.items()
            }
        except (TypeError, ValueError) as error:  # of an argument that only a call checks
            raise ConfigurationError(f"{what}: {error}") from error
    if picture is not None:
        treadle.schedules.draw(shown, picture, options.steps)
    if options.json:
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
