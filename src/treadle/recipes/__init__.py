"""Runnable example tasks, one short file each.

A recipe, like a user's own task file, defines a `treadle.Task` class whose `__init__` takes typed
settings. In addition to its steps, the class may define these attributes, which the command line
uses:

| name | meaning |
| --- | --- |
| `datasets()` | the data, as `treadle.Datasets` |
| `epochs`, `steps` | default training length |
| `hooks()` | a list of the task's hooks |
| `describe()` | a text to print before training |
| `backend` | the only backend that the task supports |

Instead of a class, the file may define a function that returns a task, or a task made by
`treadle.task`. The attributes are then defined in the module.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError, did_you_mean
from ._reading import Recipe, choose, read_file
from ._settings import Parameter, parameters_of

if TYPE_CHECKING:  # importing it would import Keras
    from ._loading import Made

__all__ = ["Parameter", "Recipe", "find", "make", "parameters_of", "resolve"]

FOLDER = Path(__file__).parent


@lru_cache(maxsize=1)
def find() -> dict[str, Recipe]:
    """Return Treadle's recipes by name. Their files are parsed, not run.

    Example:
        >>> find()["digits"].target
        'Digits'
    """
    paths = [path for path in sorted(FOLDER.glob("*.py")) if path.stem[0] != "_"]
    return {
        name: replace(
            choose(read_file(path), path, None), name=name, module=f"{__name__}.{path.stem}"
        )
        for path in paths
        for name in [path.stem.replace("_", "-")]
    }


def resolve(text: str) -> Recipe:
    """Return the recipe for `NAME`, `file.py` or `file.py:Task`, without running the file.

    Raises:
        ConfigurationError: If there is no such recipe, file or task, or the file holds several
            tasks and none is named.

    Example:
        >>> resolve("digits").description[:27]
        'Classify handwritten digits'
    """
    file, colon, target = text.rpartition(":")
    if not colon or not file.endswith(".py"):
        file, target = text, ""
    if file.endswith(".py"):
        path = Path(file).expanduser().absolute()
        return choose(read_file(path), path, target or None)
    recipes = find()
    if text not in recipes:
        raise ConfigurationError(
            f"there is no recipe {text!r}.{did_you_mean(text, recipes)} To use your own task, give "
            "its file and class, as my_task.py:MyTask"
        )
    return recipes[text]


def make(recipe: Recipe, settings: Mapping[str, Any]) -> "Made":
    """Run a recipe's file and make its task; imports Keras.

    Raises:
        BackendError: If the recipe does not support the active backend.
        ConfigurationError: If the named object is not a task.
    """
    from . import _loading

    return _loading.make(recipe, settings)
