"""Messages for what users of Keras and Lightning write out of habit, with the line to write."""

import inspect
from typing import Any, Final

from ..core.hook import DetailedHook, Hook
from ..core.user_code import unfit_parameters
from ..errors import ConfigurationError
from ..steps.task import FunctionTask

_ARRAYS: Final = "train on treadle.data.from_arrays(x, y, batch_size=32, shuffle=True)"
_CALLBACKS: Final = "pass hooks=[treadle.hooks.KerasCallbacks([…])] to treadle.Loop"
_STEPS: Final = "train on treadle.data.limited(source, batches)"
_QUIET: Final = "pass console=False to treadle.Loop to show nothing"
OF_FIT: Final = {
    "x": _ARRAYS,
    "y": _ARRAYS,
    "batch_size": _ARRAYS,
    "shuffle": _ARRAYS,
    "sample_weight": "give batches (x, y, sample_weight), which treadle.Supervised uses",
    "class_weight": "give batches (x, y, sample_weight), with the weight of each row's class",
    "validation_data": "write validation=source",
    "val_dataloaders": "write validation=source",
    "train_data": "write train=source",
    "train_dataloaders": "write train=source",
    "hooks": "pass hooks=[…] to treadle.Loop",
    "validation_split": "split the arrays, and write validation=source",
    "validation_steps": "write validation=treadle.data.limited(source, batches)",
    "validation_freq": 'write validate_every="2 epochs"',
    "epoch": "write epochs=…",
    "num_epochs": "write epochs=…",
    "max_epochs": "write epochs=…",
    "max_steps": "write steps=…",
    "initial_epoch": "pass a directory to treadle.Loop, and the run resumes at its epoch",
    "steps_per_epoch": _STEPS,
    "limit_train_batches": _STEPS,
    "callbacks": _CALLBACKS,
    "verbose": _QUIET,
}
OF_LOOP: Final = {
    "callbacks": _CALLBACKS,
    "optimizer": "give it to the task, as in treadle.Supervised(model, loss, optimizer)",
    "loss": "give it to the task, as in treadle.Supervised(model, loss, optimizer)",
    "metrics": "give them to the task, as in treadle.Supervised(model, loss, optimizer, metrics)",
    "epochs": "write loop.fit(train, epochs=…)",
    "max_epochs": "write loop.fit(train, epochs=…)",
    "verbose": _QUIET,
    "log_dir": 'write directory="runs/mine"',
    "logdir": 'write directory="runs/mine"',
    "dir": 'write directory="runs/mine"',
    "default_root_dir": 'write directory="runs/mine"',
    "seed": "call treadle.setup(seed=…) before",
}
_FIT: Final = "write loop.fit(train, epochs=…)"
_EVALUATE: Final = "write loop.evaluate(source)"
OF_LOOPS: Final = {
    "train": _FIT,
    "run": _FIT,
    "validate": _EVALUATE,
    "test": _EVALUATE,
    "compile": "give the task what it needs, as treadle.Supervised(model, loss, optimizer)",
    "model": "write loop.task.model, if the task has this attribute",
    "optimizer": "write loop.task.optimizer, if the task has this attribute",
    "save_weights": 'write loop.task.model.save_weights("mine.weights.h5")',
    "load_weights": 'write loop.task.model.load_weights("mine.weights.h5")',
    "export": 'write treadle.export(loop, "mine.keras")',
}
"""What to write for attributes of trainers and models that a loop does not have."""
_FREQUENCY: Final = "write validation_freq=2, in epochs, or train with treadle.Loop(model).fit"
_LENGTH: Final = "write epochs=…, or train with treadle.Loop(model).fit(source, {}=…)"
OF_KERAS_FIT: Final = {
    "validation": "write validation_data=…",
    "epoch": "write epochs=…",
    "num_epochs": "write epochs=…",
    "max_epochs": "write epochs=…",
    "steps": _LENGTH.format("steps"),
    "max_steps": _LENGTH.format("steps"),
    "until": _LENGTH.format("until"),
    "validate_every": _FREQUENCY,
    "metrics": "give them to model.compile(metrics=[…])",
    "optimizer": "give it to model.compile(optimizer=…)",
    "loss": "give it to model.compile(loss=…)",
    "console": "write verbose=0 to show nothing",
    "log_dir": 'write directory="runs/mine"',
    "seed": "call treadle.setup(seed=…) before",
}
_HOOK_METHODS: Final = (
    *("start", "steps", "record", "end"),
    *("before", "validation", "evaluation", "after_end"),
)
_STEP_NAMES: Final = ("train_step", "eval_step", "predict_step")


def check_steps(task: Any) -> None:
    """Check that each step of a task can be called with one batch.

    Raises:
        ConfigurationError: If a step takes no or several arguments.
    """
    if isinstance(task, FunctionTask):  # whose functions may take the parts of a batch
        return
    kind = type(task).__name__
    for name in _STEP_NAMES:
        taken = unfit_parameters(getattr(task, name, None), 1)
        if taken is not None:
            raise ConfigurationError(
                f"{name} of {kind} takes {taken}, but is called with one batch: write "
                f"`def {name}(self, batch):`, and take the batch apart in it, as in `x, y = batch`;"
                " treadle.step() is the number of the step"
            )


def check_methods(hook: Hook) -> None:
    """Check that each method of a user's hook can be called with the arguments that it gets.

    Raises:
        ConfigurationError: If a method takes fewer or more.
    """
    for name in _HOOK_METHODS:
        method, parent = getattr(hook, name, None), getattr(DetailedHook, name)
        if method is None or getattr(type(hook), name, None) is parent:
            continue
        if name == "after_end" and not isinstance(hook, DetailedHook):
            continue  # it is never called
        expected = [*inspect.signature(parent).parameters]
        taken = unfit_parameters(method, len(expected) - 1)
        if taken is not None:
            raise ConfigurationError(
                f"{name} of the hook {type(hook).__name__} takes {taken}: write `def "
                f"{name}({', '.join(expected)}):`"
            )
