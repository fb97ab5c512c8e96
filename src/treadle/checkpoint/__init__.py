"""Saving and reading checkpoints: written atomically and validated before use."""

from .format import FORMAT, SavedState, write
from .manager import Checkpoints
from .reading import read
from .retention import LeftoverError

__all__ = ["FORMAT", "Checkpoints", "LeftoverError", "SavedState", "read", "write"]
