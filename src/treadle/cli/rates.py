"""The commands `treadle find-lr` (learning rate range test) and `treadle schedule`."""

import ast
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import treadle

from ..core.drawing import checked_picture
from ..core.ranges import evaluate
from ..errors import ConfigurationError, did_you_mean
from . import environment, output
from .commands import command
from .options import (
    TaskOptions,
    argument,
    backend_option,
    json_flag,
    option,
    plot_option,
    settings_option,
)


@dataclass(frozen=True, kw_only=True)
class FindLr(TaskOptions):
    """Options of `treadle find-lr`."""

    optimizer: str | None = option(
        "Optimizer to test if the task has several, as critic_optimizer.", "PATH"
    )
    monitor: str = option(
        "The value to monitor, as returned by train_step.",
        "NAME",
        default_shown=True,
        default="loss",
    )
    begin: float = option("First learning rate.", "RATE", default_shown=True, default=1e-06)
    end: float = option("Last learning rate.", "RATE", default_shown=True, default=10.0)
    steps: int = option(
        "Steps from the first rate to the last.", "N", default_shown=True, min=10, default=100
    )
    plot: Path | None = plot_option()


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Options of `treadle schedule`."""

    what: str = argument(
        metavar="SCHEDULE|TASK",
        help="A schedule, as 'cyclic(1e-4, 1e-2, step_size=500)', or a task, to show the "
        "learning rates of its optimizers.",
        show_default=False,
    )
    set_: list[str] | None = settings_option()
    steps: int = option("Number of steps.", "N", default_shown=True, min=1, default=1000)
    plot: Path | None = plot_option()
    backend: str | None = backend_option()
    json: bool = json_flag()


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
            _parsed(what)  # before Keras is imported, which takes seconds
            environment.prepare(environment.Setup(backend=options.backend, quiet=options.json))
            shown = {what: _schedule_of(what)}
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


def _parsed(text: str) -> ast.expr:
    """Parse a schedule's text; needs no Keras.

    Raises:
        ConfigurationError: If the text is not an expression.
    """
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise _unreadable(text) from error


def _schedule_of(text: str) -> Any:
    """Return the schedule that a text describes. Imports Keras.

    No code of the text is executed: it may only contain calls of known schedules, by the name of
    the class or in lower case, lists, numbers, strings and None.

    Raises:
        ConfigurationError: If it contains anything else, names an unknown schedule, or has
            arguments that the schedule does not accept.
    """
    node, kinds = _parsed(text), _schedules()
    known = kinds | {re.sub(r"(?<=[a-z])(?=[A-Z])", "_", n).lower(): k for n, k in kinds.items()}
    try:
        found = evaluate(
            node, {}, {name: partial(_make, text, kind) for name, kind in known.items()}
        )
    except NameError as error:
        raise ConfigurationError(
            f"there is no schedule {error.name!r}.{did_you_mean(str(error.name), kinds)}"
        ) from error
    except (LookupError, TypeError, ValueError) as error:
        raise _unreadable(text) from error
    if type(found) not in (*kinds.values(), int, float):
        raise _unreadable(text)
    return found


def _unreadable(text: str) -> ConfigurationError:
    return ConfigurationError(
        f"cannot read the schedule {text!r}: write it as a call with numbers, such as "
        "'cyclic(1e-4, 1e-2, step_size=500)'"
    )


def _make(text: str, kind: Callable[..., Any], *args: Any, **named: Any) -> Any:
    signature = inspect.signature(kind)
    try:
        signature.bind(*args, **named)
    except TypeError as error:
        raise ConfigurationError(
            f"{text}: {kind.__name__}: {error}; its arguments are {', '.join(signature.parameters)}"
        ) from error
    try:
        return kind(*args, **named)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{text}: {error}") from error


def _schedules() -> dict[str, Callable[..., Any]]:
    """Return the schedules of Keras and Treadle by the names of their classes."""
    from keras.optimizers import schedules as of_keras

    from .. import schedules

    base = of_keras.LearningRateSchedule
    return {
        name: kind
        for module in (of_keras, schedules)
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, base) and kind is not base and name[0] != "_"
    }
