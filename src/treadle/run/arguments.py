"""What a loop is given, checked at once: a mistake would show later, as something else."""

from collections.abc import Sequence
from typing import Any

import keras

from ..core.hook import Hook
from ..core.options import Options
from ..core.triggers import Scheduled
from ..errors import ConfigurationError, whole_number
from ..steps.task import Task


def checked_task(task: Any) -> Any:
    """Return a task.

    Raises:
        ConfigurationError: It is a class, a Keras model, or has no `train_step`.
    """
    if isinstance(task, type):
        raise ConfigurationError(
            f"Loop needs a task, but got the class {task.__name__}: make one, as "
            f"treadle.Loop({task.__name__}())"
        )
    if isinstance(task, keras.Model) and not isinstance(task, Task):
        raise ConfigurationError(
            f"Loop needs a task, but got a Keras model ({type(task).__name__} {task.name!r}): "
            "write treadle.Loop(treadle.Supervised(model, loss, optimizer)), or a treadle.Task "
            "with a train_step of your own"
        )
    if not callable(getattr(task, "train_step", None)):
        raise ConfigurationError(
            f"Loop needs a task, but got {_shown(task)}, which has no train_step: inherit from "
            "treadle.Task, or make one of functions with treadle.task(train_step, model=model)"
        )
    return task


def checked_options(options: Any) -> Options:
    """Return options.

    Raises:
        ConfigurationError: They are something else.
    """
    if options is None:
        return Options()
    if not isinstance(options, Options):
        raise ConfigurationError(
            f"options must be treadle.Options, not {_shown(options)}: write "
            "options=treadle.Options(window=8)"
        )
    return options


def checked_hooks(hooks: Any) -> Sequence[Hook | Scheduled]:
    """Return a list of hooks.

    Raises:
        ConfigurationError: It is one hook, or no list.
    """
    if isinstance(hooks, (Hook, Scheduled)):
        raise ConfigurationError(
            f"hooks must be a list, not one {type(hooks).__name__}: write hooks=[…] around it"
        )
    if not isinstance(hooks, (list, tuple)):
        raise ConfigurationError(
            f"hooks must be a list, not {_shown(hooks)}: write "
            "hooks=[treadle.every('200 steps', function)]"
        )
    return hooks


def checked_count(name: str, count: Any) -> int | None:
    """Return a number of epochs or steps, or None.

    Raises:
        ConfigurationError: It is no whole number from 1.
    """
    return None if count is None else whole_number(name, count, ConfigurationError)


def _shown(value: Any) -> str:
    return f"{value!r:.60}" if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"
