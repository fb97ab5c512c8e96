"""Runnable tasks, one short file each: the best documentation there is.

A recipe, like a user's own file, holds a `treadle.Task` class whose `__init__` takes typed
settings, and what the command line looks for beside its steps, all of it optional:

| name | what it is |
| --- | --- |
| `datasets()` | the data, as `treadle.Datasets` |
| `epochs`, `steps` | how long to train where nobody says so |
| `hooks()` | a list of the task's own hooks |
| `describe()` | a text to print before training |
| `backend` | the one backend it can run on |

In place of the class may stand a function that returns a task, or a task made by `treadle.task`;
what a class has as attributes then stands in the module.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError, did_you_mean
from ._reading import Recipe, choose, read_file
from ._settings import Parameter, known_parameters

if TYPE_CHECKING:  # importing it would import Keras
    from ._loading import Made

__all__ = ["Parameter", "Recipe", "find", "known_parameters", "make", "resolve"]

FOLDER = Path(__file__).parent


@lru_cache(maxsize=1)
def find() -> dict[str, Recipe]:
    """Return the recipes that come with Treadle, by name; their files are read, not run.

    Example:
        >>> find()["digits"].target
        'Digits'
    """
    paths = [path for path in sorted(FOLDER.glob("*.py")) if path.stem[0] != "_"]
    return {
        name: choose(read_file(path), path, None).renamed(name, f"{__name__}.{path.stem}")
        for path in paths
        for name in [path.stem.replace("_", "-")]
    }


def resolve(text: str) -> Recipe:
    """Return the recipe that `NAME`, `file.py` or `file.py:Task` means, without running its file.

    Raises:
        ConfigurationError: There is no such recipe, file or task, or the file holds several tasks
            and none is named.

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
            f"there is no recipe {text!r}.{did_you_mean(text, recipes)} A task of your own is "
            "named by its file: my_task.py:MyTask"
        )
    return recipes[text]


def make(recipe: Recipe, settings: Mapping[str, Any]) -> "Made":
    """Run a recipe's file and make its task; imports Keras.

    Raises:
        BackendError: The recipe runs on another backend than the active one.
        ConfigurationError: The name does not stand for a task.
    """
    from . import _loading

    return _loading.make(recipe, settings)
