"""All that a run is, on the disk: written completely or not at all, checked before it is used."""

from .files import Files
from .format import FORMAT, Checkpoint, write
from .manager import Checkpoints, LeftoverError
from .reading import read

__all__ = ["FORMAT", "Checkpoint", "Checkpoints", "Files", "LeftoverError", "read", "write"]
