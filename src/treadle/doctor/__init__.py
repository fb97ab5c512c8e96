"""Looking into runs: back to any step of one, and whether what runs promise is true of a task.

Each public name is imported when it is first asked for (PEP 562).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .findings import Replay as Replay
    from .replaying import replay as replay

_MODULE_OF = {"Replay": "findings", "replay": "replaying"}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"treadle.doctor.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'treadle.doctor' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
