"""Training in several processes, and on several devices: all that knows a group of processes."""

from .environment import Place as Place
from .environment import check_joined as check_joined
from .environment import found_place as found_place
from .environment import single_process_only as single_process_only

__all__ = ["Place", "check_joined", "found_place", "single_process_only"]
