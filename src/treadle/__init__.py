"""Treadle: you write the train step, it runs the training loop.

Public names are imported lazily, on first access (PEP 562). So `import treadle` imports neither
Keras nor a framework, and the backend can still be chosen afterwards. If only one backend is
installed, `import treadle` chooses it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .core.habits import OF_TREADLE as _OF_TREADLE
from .core.habits import no_attribute as _no_attribute
from .core.process_settings import choose_default_backend as _choose_default_backend
from .core.process_settings import choose_only_backend as _choose_only_backend

if TYPE_CHECKING:
    from . import data as data
    from . import datasets as datasets
    from . import doctor as doctor
    from . import errors as errors
    from . import hooks as hooks
    from . import report as report
    from . import schedules as schedules
    from . import testing as testing
    from .core.hook import DetailedHook as DetailedHook
    from .core.hook import Hook as Hook
    from .core.images import Image as Image
    from .core.options import Options as Options
    from .core.processes import is_chief as is_chief
    from .core.ranges import Choice as Choice
    from .core.ranges import Range as Range
    from .core.triggers import after as after
    from .core.triggers import at as at
    from .core.triggers import every as every
    from .distribute.setup import setup as setup
    from .exporting.exported import export as export
    from .fitting import evaluate as evaluate
    from .fitting import fit as fit
    from .fitting import predict as predict
    from .loop import Loop as Loop
    from .report.saved_run import load_run as load_run
    from .run.warm_start import warm_start as warm_start
    from .steps import transforms as transforms
    from .steps.accumulation import Accumulator as Accumulator
    from .steps.control_flow import cond as cond
    from .steps.control_flow import for_each as for_each
    from .steps.control_flow import remat as remat
    from .steps.gradients import gradients as gradients
    from .steps.gradients import input_gradients as input_gradients
    from .steps.gradients import minimize as minimize
    from .steps.gradients import substituted as substituted
    from .steps.helpers import blend as blend
    from .steps.helpers import frozen_copy as frozen_copy
    from .steps.helpers import gathered as gathered
    from .steps.helpers import phase as phase
    from .steps.helpers import step as step
    from .steps.helpers import weighted as weighted
    from .steps.keras_task import KerasTask as KerasTask
    from .steps.loss_scale import LossScale as LossScale
    from .steps.supervised import Supervised as Supervised
    from .steps.task import Datasets as Datasets
    from .steps.task import Task as Task
    from .steps.task import task as task
    from .steps.transforms import clip_by_global_norm as clip_by_global_norm
    from .tuning import tune as tune

__version__ = "0.1.0"

_NAMES = {
    "core.hook": "DetailedHook Hook",
    "core.images": "Image",
    "core.options": "Options",
    "core.processes": "is_chief",
    "core.ranges": "Choice Range",
    "core.triggers": "after at every",
    "exporting.exported": "export",
    "fitting": "evaluate fit predict",
    "loop": "Loop",
    "report.saved_run": "load_run",
    "distribute.setup": "setup",
    "run.warm_start": "warm_start",
    "steps.accumulation": "Accumulator",
    "steps.control_flow": "cond for_each remat",
    "steps.gradients": "gradients input_gradients minimize substituted",
    "steps.helpers": "blend frozen_copy gathered phase step weighted",
    "steps.keras_task": "KerasTask",
    "steps.loss_scale": "LossScale",
    "steps.supervised": "Supervised",
    "steps.task": "Datasets Task task",
    "steps.transforms": "clip_by_global_norm",
    "tuning": "tune",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = {
    "data": "data",
    "datasets": "datasets",
    "doctor": "doctor",
    "errors": "errors",
    "hooks": "hooks",
    "report": "report",
    "schedules": "schedules",
    "testing": "testing",
    "transforms": "steps.transforms",
}
_IMPORT_KERAS = ("exporting", "fitting", "loop", "run.warm_start", "schedules", "steps.", "testing")

__all__ = ["__version__", *_MODULE_OF, *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]

_choose_only_backend()


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name) or _MODULES.get(name, name)
    if name not in _MODULE_OF and name not in _MODULES:
        raise _no_attribute("module 'treadle'", name, _OF_TREADLE)
    if module.startswith(_IMPORT_KERAS):
        _choose_default_backend()  # otherwise Keras fails with a less helpful traceback
    found = importlib.import_module(f"treadle.{module}")
    return getattr(found, name) if name in _MODULE_OF else found


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
