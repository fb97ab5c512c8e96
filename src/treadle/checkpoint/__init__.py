"""Saving and reading checkpoints: written atomically and validated before use."""

from .format import FORMAT, Checkpoint, write
from .manager import Checkpoints, LeftoverError
from .reading import read

__all__ = ["FORMAT", "Checkpoint", "Checkpoints", "LeftoverError", "read", "write"]
