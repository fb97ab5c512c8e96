"""Diagnosis: inspect what a step does, re-run a step of a past run, and find a learning rate.

Each public name is imported on first access (PEP 562).
"""

from typing import TYPE_CHECKING

from ..core.lazy import lazy

if TYPE_CHECKING:
    from .find_lr import RangeTest as RangeTest
    from .find_lr import find_learning_rate as find_learning_rate
    from .findings import Replay as Replay
    from .replaying import replay as replay
    from .sheets.differences import Difference as Difference
    from .sheets.findings import Finding as Finding
    from .sheets.inspecting import inspect as inspect
    from .sheets.lines import Line as Line
    from .sheets.sheet import Sheet as Sheet

__getattr__, __dir__, __all__ = lazy(__name__)
