"""Saving and reading checkpoints: written atomically and validated before use."""

from .format import FORMAT, Checkpoint, write
from .manager import Checkpoints
from .reading import read
from .retention import LeftoverError

__all__ = ["FORMAT", "Checkpoint", "Checkpoints", "LeftoverError", "read", "write"]
