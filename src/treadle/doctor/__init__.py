"""Diagnosis: re-run and inspect a step of a past run, and find a learning rate.

Each public name is imported on first access (PEP 562).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .find_lr import RangeTest as RangeTest
    from .find_lr import find_learning_rate as find_learning_rate
    from .findings import Replay as Replay
    from .preflight.examining import examine as examine
    from .preflight.report import Finding as Finding
    from .preflight.report import Report as Report
    from .replaying import replay as replay

_MODULE_OF = {
    "Finding": "preflight.report",
    "RangeTest": "find_lr",
    "Replay": "findings",
    "Report": "preflight.report",
    "examine": "preflight.examining",
    "find_learning_rate": "find_lr",
    "replay": "replaying",
}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"treadle.doctor.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'treadle.doctor' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
