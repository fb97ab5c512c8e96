"""Import a recipe's file and make its task. This module imports Keras."""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import keras

from ..core.user_code import importing
from ..data.fit_arguments import FitData
from ..errors import BackendError, ConfigurationError
from ..steps.keras_task import KerasTask
from ..steps.task import Datasets, Task
from ._reading import Recipe


@dataclass(frozen=True)
class Made:
    """A task, with the further attributes of its class or its file.

    Attributes:
        task: The task.
        module: The module of its file if the task was made by a function or is an object of the
            module; None if it was made from a class.
        data: The data that the function returned next to a compiled model, or None.
    """

    task: Task
    module: ModuleType | None
    data: Datasets | None = None

    def datasets(self) -> Datasets:
        """Return the task's data.

        Raises:
            ConfigurationError: If the task has no data, or `datasets()` returned another type.
        """
        if self.data is not None:
            return self.data
        found = getattr(self.module, "datasets", None) or self.task.datasets
        datasets = found()
        if not isinstance(datasets, Datasets):
            raise ConfigurationError(
                "datasets() must return treadle.Datasets(train=…, validation=…), but returned "
                f"{type(datasets).__name__}"
            )
        return datasets

    def hooks(self) -> list[Any]:
        """Return the hooks that the task defines, or else those of its module."""
        found: Any = getattr(self.task, "hooks", None)
        if found is None or getattr(found, "__func__", None) is Task.hooks:
            found = getattr(self.module, "hooks", None)
        # A module has the name after `from treadle import hooks`.
        return list(found()) if found is not None and not isinstance(found, ModuleType) else []

    def describe(self) -> str | None:
        """Return the text to print before training, or None."""
        found = self._attribute("describe")
        return found() if found is not None else None

    @property
    def lasts(self) -> dict[str, int]:
        """The default training length: `{"epochs": 10}`."""
        found = {name: self._attribute(name) for name in ("epochs", "steps")}
        return {name: value for name, value in found.items() if value is not None}

    def _attribute(self, name: str) -> Any:
        """Return an attribute of the task or of its module, or None."""
        found = getattr(self.task, name, None)
        return found if found is not None else getattr(self.module, name, None)


def make(recipe: Recipe, settings: Mapping[str, Any]) -> Made:
    """Import a recipe's file and make its task.

    Raises:
        BackendError: If the recipe does not support the active backend.
        ConfigurationError: If the named object is not a task.
    """
    if recipe.backend not in (None, keras.config.backend()):
        raise BackendError(
            f"{recipe.name} runs on {recipe.backend} only, and Keras runs on "
            f"{keras.config.backend()}: use --backend {recipe.backend}, or set "
            f"KERAS_BACKEND={recipe.backend}"
        )
    known = sys.modules.get(recipe.module) if recipe.module else None
    module = importlib.import_module(recipe.module) if recipe.module else imported(recipe.path)
    found = getattr(module, recipe.target)
    if known is not None and isinstance(found, Task):  # the object may have been trained: remake it
        found = getattr(importlib.reload(module), recipe.target)
    is_class = isinstance(found, type)
    task, data = found(**settings) if is_class or inspect.isfunction(found) else found, None
    if isinstance(task, tuple) and len(task) == 2 and isinstance(task[0], keras.Model):
        task, data = task
    if isinstance(task, keras.Model) and not isinstance(task, Task):
        task = KerasTask(task)
    if not isinstance(task, Task):
        raise ConfigurationError(
            f"{recipe.source} is no task, but {type(task).__name__}: it must be a class that "
            "inherits from treadle.Task, a function that returns one, or made by treadle.task(…). "
            "A function may also return a compiled keras.Model and its data"
        )
    if data is not None and not isinstance(data, Datasets):  # arrays `(x, y)` or a source
        data = Datasets(train=FitData.of(data).source(shuffle=True))
    return Made(task, None if is_class else module, data)


def imported(path: Path) -> ModuleType:
    """Import a file by its path; its folder is put on `sys.path`, as for a script."""
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the path ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    importing.append(path)
    try:
        spec.loader.exec_module(module)
    finally:
        importing.remove(path)
    return module


def imported_before(path: Path) -> ModuleType | None:
    """Return the module that `imported` made of a file, or None."""
    module = sys.modules.get(_module_name(path))
    file = module.__file__ if module is not None else None
    return module if file and os.path.realpath(file) == os.path.realpath(path) else None


def _module_name(path: Path) -> str:
    """Return a name such that a file `random.py` or `keras.py` does not replace that module."""
    return f"treadle_task_{path.stem}"
