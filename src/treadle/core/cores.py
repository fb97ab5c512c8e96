"""The number of CPU cores available to this process."""

import os


def cores() -> int:
    """Return the number of cores this process may run on, or all cores if that is unknown.

    Example:
        >>> cores() >= 1
        True
    """
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
