"""Built-in hooks that display, log, checkpoint, guard and stop a run.

Importing this package imports neither Keras nor rich: each submodule is imported when one of its
names is first used.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.hook import Hook

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .console import Console
    from .curves import LearningCurve
    from .final import FinalModel
    from .gradient_health import GradientHealth
    from .images import Images
    from .keras_callbacks import KerasCallbacks
    from .lines import CSV, JSONLines
    from .mlflow import MLflow
    from .nonfinite import NonFinite
    from .plateau import ReduceOnPlateau
    from .profiler import Profiler
    from .spikes import LossSpikes
    from .stopping import EarlyStopping
    from .tensorboard import TensorBoard
    from .wandb import Wandb
    from .watchdog import Watchdog

_PUBLIC = {
    "Checkpoint": "checkpoint",
    "Console": "console",
    "JSONLines": "lines",
    "CSV": "lines",
    "EarlyStopping": "stopping",
    "LossSpikes": "spikes",
    "MLflow": "mlflow",
    "NonFinite": "nonfinite",
    "FinalModel": "final",
    "GradientHealth": "gradient_health",
    "Images": "images",
    "LearningCurve": "curves",
    "ReduceOnPlateau": "plateau",
    "KerasCallbacks": "keras_callbacks",
    "TensorBoard": "tensorboard",
    "Profiler": "profiler",
    "Wandb": "wandb",
    "Watchdog": "watchdog",
}

__all__ = [
    "CSV",
    "Checkpoint",
    "Console",
    "EarlyStopping",
    "FinalModel",
    "GradientHealth",
    "Images",
    "JSONLines",
    "KerasCallbacks",
    "LearningCurve",
    "LossSpikes",
    "MLflow",
    "NonFinite",
    "Profiler",
    "ReduceOnPlateau",
    "TensorBoard",
    "Wandb",
    "Watchdog",
    "defaults",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"treadle.hooks.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'treadle.hooks' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])


def defaults(directory: Path | None, quiet: bool) -> list[Hook]:
    """Return the default hooks of a run, in the order in which they are called.

    `NonFinite` comes after the hooks that write logs, so that the log contains the value that ended
    the run. `end` is called in reverse order, so `NonFinite` checks the weights before they are
    written.

    Args:
        directory: The run directory. Without one, hooks that write files are omitted.
        quiet: Omit the console output.

    Example:
        >>> [type(hook).__name__ for hook in defaults(None, quiet=False)]
        ['Console', 'NonFinite']
    """
    from .checkpoint import Checkpoint
    from .console import Console
    from .curves import LearningCurve
    from .final import FinalModel
    from .images import Images
    from .lines import CSV, JSONLines
    from .nonfinite import NonFinite

    hooks: list[Hook] = [] if quiet else [Console()]
    if directory is None:
        return [*hooks, NonFinite()]
    written = [Images(), JSONLines(), CSV(), FinalModel(), NonFinite(), LearningCurve()]
    return [*hooks, *written, Checkpoint()]
