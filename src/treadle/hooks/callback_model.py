"""The model of Keras callbacks, and its attributes that `compile` would have set."""

import re
from collections.abc import Sequence
from typing import Any

from ..core import keras_internals
from ..core.attributes import attributes_of
from ..core.hook import LoopView
from ..errors import ConfigurationError


def only_model(task: Any) -> Any:
    """Return the task's only model.

    Raises:
        ConfigurationError: The task has no model, or several.
    """
    import keras

    if isinstance(task, keras.Model):
        return task
    found = {
        name: value for name, value in attributes_of(task).items() if isinstance(value, keras.Model)
    }
    if len(found) != 1:
        names = ", ".join(found) or "none as an attribute"
        example = next(iter(found), "model")
        raise ConfigurationError(
            f"KerasCallbacks needs exactly one model, but {type(task).__name__} has {names}: pass "
            f"it, as KerasCallbacks([...], model=task.{example})"
        )
    return next(iter(found.values()))


def optimizer_of(loop: LoopView, model: Any) -> Any:
    """Return the optimizer with which `train_step` updates a model, or None if there is none.

    Optimizers that update weights of the model take precedence. An optimizer passed to
    `model.compile` that `train_step` does not apply is ignored, since it has no effect.
    """
    weights = {id(variable) for variable in model.variables}
    all_of_task = loop.state.optimizers
    applied = {path: o for path, o in loop.optimizers.items() if path in all_of_task} or {
        path: o for path, o in all_of_task.items() if o is not getattr(model, "optimizer", None)
    }
    owning = {
        path: optimizer
        for path, optimizer in applied.items()
        if any(id(v) in weights for v in optimizer._trainable_variables)
    }
    found = owning or applied or all_of_task
    if len(found) < 2:
        return next(iter(found.values()), None)
    return _Ambiguous(list(found), type(loop.task).__name__)


def compiled_attributes(task: Any, model: Any, optimizer: Any) -> dict[str, Any]:
    """Return the attributes with which Keras saves the model as a compiled model.

    The file then contains the optimizer and, for `treadle.Supervised`, the loss and the metrics. If
    the optimizer also updates weights of other models, or the model overrides `compile`, this is
    not possible: the result is empty, and the file contains the model only.
    """
    import keras

    from ..steps.supervised import Supervised

    if isinstance(optimizer, _Ambiguous):
        return {}
    own = [id(v) for v in model.trainable_variables]
    updated = [id(v) for v in optimizer._trainable_variables]
    if not own or own != updated or type(model).compile is not keras.Model.compile:
        return {}
    before = getattr(model, "_compile_config", None)  # set if the model was compiled
    kept = ("run_eagerly", "steps_per_execution", "jit_compile")
    config = {} if before is None else {name: before.config[name] for name in kept}
    config["optimizer"] = optimizer
    if isinstance(task, Supervised) and task.model is model:
        config |= task.compiled.arguments
    serializable = keras_internals.SerializableDict(**config)
    return {"compiled": True, "_compile_config": serializable}


class _Ambiguous:
    """A placeholder for the optimizer of a model updated by several; raises when it is used."""

    def __init__(self, paths: Sequence[str], task: str) -> None:
        self._paths, self._task = paths, task

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        example = re.sub(r"/(\d+)", r"[\1]", f"task.{self._paths[0]}").replace("/", ".")
        raise ConfigurationError(
            f"a callback uses model.optimizer, and {self._task} updates the model with "
            f"{', '.join(self._paths)}: choose one, as KerasCallbacks([...], optimizer={example})"
        )
