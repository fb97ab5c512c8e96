"""Several processes of JAX, each with its own devices, which run one program together.

Every process has all batches, and hands its devices their parts. What is read as a NumPy array is
whole in every process.
"""

import atexit
import os
import sys
from typing import Any

import jax
import keras
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from ...core.processes import ProcessGroup
from ...errors import ConfigurationError


def join(group: ProcessGroup, address: str) -> None:
    """Start JAX in a process of a group, and train on the devices of all.

    Several processes of a machine with accelerators have one each, unless each sees only one.

    Args:
        group: The processes.
        address: The host and port where process 0 coordinates them.

    Raises:
        ConfigurationError: JAX has already started.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    sees_one = os.environ.get("CUDA_VISIBLE_DEVICES", ",").count(",") == 0
    own = [group.local_rank] if group.local_size > 1 and not sees_one else None
    try:
        jax.distributed.initialize(address, group.size, group.rank, local_device_ids=own)
    except RuntimeError as error:
        raise ConfigurationError(
            "treadle.setup joins the other processes, and must come before JAX computes anything: "
            "move it to the top of the script"
        ) from error
    atexit.register(_leave_after_failure, group)
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(devices=keras.distribution.list_devices())
    )


def _leave_after_failure(group: ProcessGroup) -> None:
    """End the process at once after a failure: JAX would wait for the others, and then abort."""
    if group.failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def several() -> bool:
    """Return whether JAX runs in several processes."""
    return jax.process_count() > 1


def put(x: Any, layout: Sharding) -> Any:
    """Copy an array that every process has to the devices; each process sends the parts of its own.

    `jax.device_put` would first compare the arrays of all processes.
    """
    if not several():
        return jax.device_put(x, layout)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, layout, lambda index: x[index])


def is_split(x: Any) -> bool:
    """Return whether devices of other processes hold parts of an array."""
    return not (x.is_fully_addressable or x.is_fully_replicated)


def whole(x: Any) -> np.ndarray:
    """Return an array of the devices as NumPy; all processes must call this if it is split."""
    if isinstance(x, jax.Array) and is_split(x):
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)
