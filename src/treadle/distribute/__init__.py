"""Training in several processes: which of them this is, and how they talk to one another."""

from .environment import Place as Place
from .environment import found_place as found_place
from .joining import join_processes as join_processes

__all__ = ["Place", "found_place", "join_processes"]
