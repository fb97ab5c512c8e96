"""Early validation of the arguments of a loop, so that mistakes raise clear errors."""

from collections.abc import Sequence
from typing import Any, Final

import keras

from ..backends.base import active
from ..core import float64
from ..core.hook import Hook
from ..core.options import Options, precision_name
from ..core.triggers import Scheduled
from ..errors import ConfigurationError, listed
from ..steps.keras_task import KerasTask
from ..steps.state import State
from ..steps.task import Task, adapter, missing_step
from .habits import check_steps

NAMED: Final = 3  # narrow parts in a message


def checked_task(task: Any) -> Any:
    """Return a task after validating it; a compiled Keras model becomes a `KerasTask`.

    Raises:
        ConfigurationError: If it is a class, a Keras model that is not compiled, or has no
            `train_step`; if a step does not take one batch; or if Keras' dtype policy is float64,
            and `setup` did not set it.
    """
    if isinstance(task, type):
        raise ConfigurationError(
            f"Loop needs a task, but got the class {task.__name__}: pass an "
            f"instance, treadle.Loop({task.__name__}())"
        )
    if isinstance(task, keras.Model) and not isinstance(task, Task):
        task = KerasTask(task)
    if not callable(getattr(task, "train_step", None)):
        if hasattr(task, "training_step"):
            raise ConfigurationError(missing_step(task, "train_step"))
        raise ConfigurationError(
            f"Loop needs a task, but got {_shown(task)}, which has no train_step: inherit from "
            "treadle.Task, or create a task with treadle.task(train_step, model=model)"
        )
    check_steps(task)
    if precision_name() == "float64" and not float64.is_on():
        raise ConfigurationError(
            "Keras' dtype policy is float64, but losses, metrics and optimizers would be computed "
            "in float32: call treadle.setup(precision='float64'), before anything is built"
        )
    return task


def narrow_parts(task: Any) -> str:
    """Return a warning about what a task computes in float32 in spite of `precision="float64"`."""
    if precision_name() != "float64":
        return ""
    found = State.discover(task).narrow()
    if not found:
        return ""
    return (
        f"precision='float64', but {listed(found, NAMED)} are not float64: create them after "
        "treadle.setup, without a dtype, or with dtype='float64'"
    )


def checked_options(options: Any, task: Task) -> Options:
    """Return options after validating them; None becomes the defaults of the task.

    Raises:
        ConfigurationError: If `options` is neither None nor `treadle.Options`, or names a compiler
            of another backend.
    """
    if options is None:
        return adapter(task).default_options()
    if not isinstance(options, Options):
        raise ConfigurationError(
            f"options must be treadle.Options, not {_shown(options)}: write "
            "options=treadle.Options(window=8)"
        )
    backend = active()
    if options.compiler not in ("auto", *backend.compilers):
        raise ConfigurationError(
            f"compiler={options.compiler!r} is for PyTorch, and Keras runs on {backend.name}: "
            "remove it, or choose the backend 'torch'"
        )
    return options


def checked_hooks(hooks: Any) -> Sequence[Hook | Scheduled]:
    """Return hooks after checking that they are a list or a tuple.

    Raises:
        ConfigurationError: If `hooks` is a single hook, or not a list.
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


def _shown(value: Any) -> str:
    return f"{value!r:.60}" if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"
