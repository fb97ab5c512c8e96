"""The place of a worker of Ray Train, which the workers agree on through Ray.

Not all of its trainers set environment variables: `JaxTrainer` sets none. And a port next to the
one that Ray has chosen for PyTorch may be in use.
"""

import importlib
import sys
from typing import Any

from .environment import RAY_TRAIN, Place, free_port, is_in_ray


def ray_place() -> Place | None:
    """Return the place of this worker of Ray Train, or None if it is none or trains alone.

    All workers must call this: process 0 sends its address to the others.
    """
    train: Any = sys.modules.get("ray.train")
    if train is None or not is_in_ray():  # Ray can also train in processes that others started
        return None
    try:
        context = train.get_context()
        rank, size = context.get_world_rank(), context.get_world_size()
        collective: Any = importlib.import_module("ray.train.collective")
    except Exception:  # not within a worker; each version of Ray raises another error
        return None
    if size == 1:
        return None
    address = importlib.import_module("ray.util").get_node_ip_address()
    host, port = collective.broadcast_from_rank_zero([address, free_port()])
    return Place(rank, size, host, port, RAY_TRAIN)
