"""Built-in hooks that display, log, checkpoint, guard and stop a run.

Importing this package imports neither Keras nor rich: each submodule is imported when one of its
names is first used.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from ..core.habits import OF_HOOKS
from ..core.hook import Hook
from ..core.lazy import lazy

if TYPE_CHECKING:
    from .checkpoint import Checkpoint as Checkpoint
    from .console import Console as Console
    from .final import FinalModel as FinalModel
    from .final import LearningCurve as LearningCurve
    from .gradient_health import GradientHealth as GradientHealth
    from .images import Images as Images
    from .keras_callbacks import KerasCallbacks as KerasCallbacks
    from .lines import CSV as CSV
    from .lines import JSONLines as JSONLines
    from .mlflow import MLflow as MLflow
    from .nonfinite import NonFinite as NonFinite
    from .profiler import Profiler as Profiler
    from .spikes import LossSpikes as LossSpikes
    from .stopping import BestWeights as BestWeights
    from .stopping import EarlyStopping as EarlyStopping
    from .stopping import ReduceOnPlateau as ReduceOnPlateau
    from .tensorboard import TensorBoard as TensorBoard
    from .wandb import Wandb as Wandb
    from .watchdog import Watchdog as Watchdog

__getattr__, __dir__, __all__ = lazy(__name__, OF_HOOKS)


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
    from .final import FinalModel, LearningCurve
    from .images import Images
    from .lines import CSV, JSONLines
    from .nonfinite import NonFinite

    hooks: list[Hook] = [] if quiet else [Console()]
    if directory is None:
        return [*hooks, NonFinite()]
    written = [Images(), JSONLines(), CSV(), FinalModel(), NonFinite(), LearningCurve()]
    return [*hooks, *written, Checkpoint()]
