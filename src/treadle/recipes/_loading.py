"""A recipe's file imported and its task made: from here on Keras is there."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import keras

from ..errors import BackendError, ConfigurationError
from ..steps.task import Datasets, Task
from ._reading import Recipe


@dataclass(frozen=True)
class Made:
    """A task, and what its class or its file says beside the steps.

    Attributes:
        task: The task.
        module: The module of its file where the task is an object of it, else None.
    """

    task: Task
    module: ModuleType | None

    def datasets(self) -> Datasets:
        """Return the task's data.

        Raises:
            ConfigurationError: It has none, or what `datasets` returned is something else.
        """
        found = getattr(self.module, "datasets", None) or self.task.datasets
        datasets = found()
        if not isinstance(datasets, Datasets):
            raise ConfigurationError(
                "datasets() must return treadle.Datasets(train=…, validation=…), but returned "
                f"{type(datasets).__name__}"
            )
        return datasets

    def hooks(self) -> list[Any]:
        """Return the task's own hooks."""
        found = self._said("hooks")
        return list(found()) if found is not None else []

    def describe(self) -> str | None:
        """Return the text to print before training, or None."""
        found = self._said("describe")
        return found() if found is not None else None

    @property
    def lasts(self) -> dict[str, int]:
        """How long it trains where nobody says so: `{"epochs": 10}`."""
        said = {name: self._said(name) for name in ("epochs", "steps")}
        return {name: value for name, value in said.items() if value is not None}

    def _said(self, name: str) -> Any:
        """Return an attribute of the task, or of its module."""
        found = getattr(self.task, name, None)
        return found if found is not None else getattr(self.module, name, None)


def make(recipe: Recipe, settings: Mapping[str, Any]) -> Made:
    """Import a recipe's file and make its task.

    Raises:
        BackendError: It runs on another backend than the one that is active.
        ConfigurationError: What it names is no task.
    """
    if recipe.backend not in (None, keras.config.backend()):
        raise BackendError(
            f"{recipe.name} runs on {recipe.backend} only, and Keras runs on "
            f"{keras.config.backend()}: use --backend {recipe.backend}, or set "
            f"KERAS_BACKEND={recipe.backend}"
        )
    known = sys.modules.get(recipe.module) if recipe.module else None
    module = importlib.import_module(recipe.module) if recipe.module else _imported(recipe)
    found = getattr(module, recipe.target)
    if known is not None and isinstance(found, Task):  # an object has learned since it was made
        found = getattr(importlib.reload(module), recipe.target)
    is_class = isinstance(found, type)
    task = found(**settings) if is_class or inspect.isfunction(found) else found
    if not isinstance(task, Task):
        raise ConfigurationError(
            f"{recipe.source} is no task, but {type(task).__name__}: it must be a class that "
            "inherits from treadle.Task, a function that returns one, or made by treadle.task(…)"
        )
    return Made(task, None if is_class else module)


def _imported(recipe: Recipe) -> ModuleType:
    """Import a file by its path, with the files beside it in reach as in a script."""
    folder = str(recipe.path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # A name of its own: `random.py` or `keras.py` must not take another module's place.
    name = f"treadle_task_{recipe.path.stem}"
    spec = importlib.util.spec_from_file_location(name, recipe.path)
    assert spec is not None and spec.loader is not None  # it ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
