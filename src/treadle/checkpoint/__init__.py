"""Saving and reading checkpoints: written atomically and validated before use."""

from .files import Files
from .format import FORMAT, Checkpoint, write
from .manager import Checkpoints, LeftoverError
from .reading import read

__all__ = ["FORMAT", "Checkpoint", "Checkpoints", "Files", "LeftoverError", "read", "write"]
