"""Treadle: you write the step, it runs the loop.

Each public name is imported when it is first asked for (PEP 562), so that `import treadle` imports
neither Keras nor a framework, and the backend can still be chosen. If only one backend is
installed, `import treadle` chooses it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .backend_choice import choose_default_backend as _choose_default_backend
from .backend_choice import choose_only_backend as _choose_only_backend

if TYPE_CHECKING:
    from . import checkpoint as checkpoint
    from . import data as data
    from . import datasets as datasets
    from . import doctor as doctor
    from . import errors as errors
    from . import hooks as hooks
    from . import schedules as schedules
    from . import testing as testing
    from .accumulation import Accumulator as Accumulator
    from .autodiff import cond as cond
    from .autodiff import for_each as for_each
    from .autodiff import gradients as gradients
    from .autodiff import input_gradients as input_gradients
    from .autodiff import minimize as minimize
    from .autodiff import remat as remat
    from .autodiff import substituted as substituted
    from .errors import TreadleError as TreadleError
    from .hook import Hook as Hook
    from .images import Image as Image
    from .images import image_grid as image_grid
    from .logs import History as History
    from .loop import Loop as Loop
    from .loss_scale import LossScale as LossScale
    from .options import Options as Options
    from .options import setup as setup
    from .progress import Progress as Progress
    from .ranges import Choice as Choice
    from .ranges import Range as Range
    from .stepping import blend as blend
    from .stepping import frozen_copy as frozen_copy
    from .stepping import phase as phase
    from .stepping import step as step
    from .stepping import weighted as weighted
    from .tasks import Datasets as Datasets
    from .tasks import Supervised as Supervised
    from .tasks import Task as Task
    from .tasks import task as task
    from .transforms import centralized as centralized
    from .transforms import clip_by_global_norm as clip_by_global_norm
    from .transforms import clip_by_norm as clip_by_norm
    from .transforms import clip_by_value as clip_by_value
    from .transforms import global_norm as global_norm
    from .transforms import gradient_norms as gradient_norms
    from .transforms import scaled_by as scaled_by
    from .transforms import trainable as trainable
    from .transforms import with_noise as with_noise
    from .tuning import tune as tune
    from .warm import warm_start as warm_start
    from .when import after as after
    from .when import at as at
    from .when import every as every

__version__ = "0.1.0"

_NAMES = {
    "accumulation": "Accumulator",
    "autodiff": "cond for_each gradients input_gradients minimize remat substituted",
    "errors": "TreadleError",
    "hook": "Hook",
    "images": "Image image_grid",
    "logs": "History",
    "loop": "Loop",
    "loss_scale": "LossScale",
    "options": "Options setup",
    "progress": "Progress",
    "ranges": "Choice Range",
    "stepping": "blend frozen_copy phase step weighted",
    "tasks": "Datasets Supervised Task task",
    "transforms": "centralized clip_by_global_norm clip_by_norm clip_by_value global_norm "
    "gradient_norms scaled_by trainable with_noise",
    "tuning": "tune",
    "warm": "warm_start",
    "when": "after at every",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = ("checkpoint", "data", "datasets", "doctor", "errors", "hooks", "schedules", "testing")
_IMPORT_KERAS = [
    "accumulation",
    "autodiff",
    "loop",
    "loss_scale",
    "stepping",
    "tasks",
    "transforms",
    "warm",
    "schedules",
    "testing",
]

__all__ = ["__version__", *_MODULE_OF, *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]

_choose_only_backend()


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name, name)
    if name not in _MODULE_OF and name not in _MODULES:
        raise AttributeError(f"module 'treadle' has no attribute {name!r}")
    if module in _IMPORT_KERAS:
        _choose_default_backend()  # otherwise Keras fails with a traceback of its own
    found = importlib.import_module(f"treadle.{module}")
    return getattr(found, name) if name in _MODULE_OF else found


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
