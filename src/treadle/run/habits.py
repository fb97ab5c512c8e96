"""Messages for what users of Keras and Lightning write out of habit, with the line to write."""

import inspect
from collections.abc import Iterable
from typing import Any, Final

from ..core import user_code
from ..core.hook import DetailedHook, Hook
from ..errors import ConfigurationError
from ..steps.task import FunctionTask, Task

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
    "seed": "call treadle.setup(seed=…) before",
}
OF_LOOPS: Final = {
    "train": "write loop.fit(train, epochs=…)",
    "validate": "write loop.evaluate(source)",
    "test": "write loop.evaluate(source)",
    "compile": "give the task what it needs, as treadle.Supervised(model, loss, optimizer)",
    "model": "write loop.task.model, if the task has this attribute",
    "save_weights": 'write loop.task.model.save_weights("mine.weights.h5")',
}
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
_INSTEAD: Final = {
    "write start(self, loop)": "on_train_begin on_train_start on_fit_start",
    "write end(self, loop, error)": "on_train_end on_fit_end",
    "write steps(self, loop, logs)": "on_batch_end on_train_batch_end",
    "write record(self, loop, record)": "on_epoch_end on_train_epoch_end",
    "write before(self, loop) in a treadle.DetailedHook": "on_batch_begin on_epoch_begin "
    "on_train_batch_begin on_train_batch_start on_train_epoch_start",
    "write validation(self, loop, results) in a treadle.DetailedHook": "on_test_begin on_test_end "
    "on_validation_start on_validation_end on_validation_epoch_start on_validation_epoch_end",
}
OF_HOOKS: Final = {name: text for text, names in _INSTEAD.items() for name in names.split()}
_OF_TASKS: Final = dict.fromkeys(OF_HOOKS, "write a hook, see treadle.Hook") | {
    "training_step": "write train_step(self, batch)",
    "validation_step": "write eval_step(self, batch)",
    "test_step": "write eval_step(self, batch)",
    "configure_optimizers": "make the optimizer in __init__, and apply it in train_step",
}
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
        taken = user_code.unfit_parameters(getattr(task, name, None), 1)
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
        taken = user_code.unfit_parameters(method, len(expected) - 1)
        if taken is not None:
            raise ConfigurationError(
                f"{name} of the hook {type(hook).__name__} takes {taken}: write `def "
                f"{name}({', '.join(expected)}):`"
            )


def never_called(parts: Iterable[Any]) -> str:
    """Return a warning about methods of a task and hooks that only Keras or Lightning would call.

    Left out are methods that a library defines, those that another method names, and classes of
    Keras, whose trainer or list of callbacks may call them.
    """
    kinds: list[type] = []
    for kind in dict.fromkeys(map(type, parts)):
        for owner in kind.__mro__:
            if owner.__module__.startswith("keras."):
                break
        else:
            if issubclass(kind, Hook | Task):
                kinds.append(kind)
    found: dict[str, str] = {}
    for kind in kinds:
        advice = OF_HOOKS if issubclass(kind, Hook) else _OF_TASKS
        for owner in kind.__mro__:
            for name in sorted(advice.keys() & vars(owner).keys()):
                of_user = not user_code.is_library(user_code.namespace_of_class(owner))
                if of_user and not _is_named(name, kinds):
                    found[f"a loop does not call {kind.__name__}.{name}"] = advice[name]
    return "; ".join(map(": ".join, found.items()))


def _is_named(name: str, kinds: Iterable[type]) -> bool:
    """Return whether other methods of the classes use a name, also as text for `getattr`."""
    members = (each for kind in kinds for owner in kind.__mro__ for each in vars(owner).items())
    functions = (f for n, x in members if n != name for f in user_code.functions_of(x))
    codes = (code for f in functions for code in user_code.code_in(f.__code__))
    return any(name in code.co_names or name in code.co_consts for code in codes)
