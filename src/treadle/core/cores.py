"""How many cores this process may use."""

import os


def cores() -> int:
    """Return how many cores this process may run on; all of the machine where nothing tells.

    Example:
        >>> cores() >= 1
        True
    """
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
