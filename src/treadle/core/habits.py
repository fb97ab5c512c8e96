"""Errors for arguments and attributes of other libraries, with the line to write."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Final, ParamSpec, TypeVar

from ..errors import ConfigurationError
from .tracebacks import shortened

OF_MONITORS: Final = {
    "mode": 'write direction="min" or direction="max"',
    "verbose": "leave it out, the console shows what happens",
}
"""What to write for arguments of Keras' callbacks that monitor a value."""

OF_STOPPING: Final = OF_MONITORS | {"restore_best_weights": "write restore_best=…"}
OF_PLATEAU: Final = OF_MONITORS | {"min_lr": "write minimum=…"}
OF_MODEL_CHECKPOINT: Final = OF_MONITORS | {
    "filepath": 'pass directory="runs/mine" to treadle.Loop, whose folder holds the checkpoints',
    "save_best_only": 'write keep_best=1, monitor="val_loss"',
    "save_weights_only": "leave it out, a checkpoint holds all that a run needs to resume",
    "save_freq": 'write every="1 epoch"',
}
OF_TENSORBOARD: Final = {
    "log_dir": 'write directory="logs/first"',
    "histogram_freq": 'write histograms="1 epoch"',
    "update_freq": "leave it out, the values of every step are written",
}

OF_TREADLE: Final = {
    "Trainer": "write treadle.Loop(task).fit(train, epochs=…)",
    "LightningModule": "write a subclass of treadle.Task",
    "Model": "write a subclass of treadle.Task, whose attributes hold models",
    "Callback": "write a subclass of treadle.Hook",
    "callbacks": "write treadle.hooks, whose KerasCallbacks([…]) runs Keras callbacks",
    "load": 'write treadle.load_run("runs/mine")',
    "GradientTape": "write loss, grads = treadle.gradients(objective, variables)",
}
"""What to write for names of TensorFlow, Keras and Lightning that `treadle` does not have."""

OF_HOOKS: Final = {
    "ModelCheckpoint": 'write treadle.hooks.Checkpoint(keep_best=1, monitor="val_loss")',
    "ReduceLROnPlateau": "write treadle.hooks.ReduceOnPlateau()",
    "CSVLogger": 'write treadle.hooks.CSV("epochs.csv")',
    "TerminateOnNaN": "leave it out, a loss that is NaN ends a run",
    "BackupAndRestore": 'pass directory="runs/mine" to treadle.Loop, and the run resumes',
    "LearningRateScheduler": "pass a schedule to the optimizer, as one of treadle.schedules",
    "LambdaCallback": 'write treadle.every("1 epoch", function)',
    "ProgbarLogger": "leave it out, the console shows progress",
}
"""What to write for callbacks of Keras that `treadle.hooks` does not have."""


P = ParamSpec("P")
R = TypeVar("R")


def explains(subject: str, habits: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that rejects arguments of other libraries, with the line to write.

    Args:
        subject: The name of the method.
        habits: What to write for each argument that the method does not have.
    """

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @wraps(method)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            with shortened():  # so that tracebacks do not show this wrapper
                if given := habits.keys() & kwargs.keys():
                    name = min(given)
                    raise ConfigurationError(f"{subject} has no argument {name}: {habits[name]}")
                return method(*args, **kwargs)

        return checked

    return decorate


def no_attribute(owner: str, name: str, habits: Mapping[str, str]) -> AttributeError:
    """Return the error for an attribute that does not exist, with what to write instead.

    Args:
        owner: What has no such attribute, as `"module 'treadle'"`.
        name: The name of the attribute.
        habits: What to write for names of other libraries.

    Example:
        >>> print(no_attribute("module 'treadle'", "Trainer", {"Trainer": "write treadle.Loop"}))
        module 'treadle' has no attribute 'Trainer': write treadle.Loop
    """
    advice = f": {habits[name]}" if name in habits else ""
    return AttributeError(f"{owner} has no attribute {name!r}{advice}")
