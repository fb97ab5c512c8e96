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
from ...core.split_arrays import Grid, OwnParts, Readable, region_of
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


def put_stored(x: Readable, layout: Sharding, dtype: Any) -> jax.Array:
    """Copy an array to the devices, of which each process reads what its devices hold."""
    read: dict[str, np.ndarray] = {}  # devices may hold the same

    def part(index: Any) -> np.ndarray:
        if str(index) not in read:
            read[str(index)] = np.asarray(x[index], dtype)
        return read[str(index)]

    return jax.make_array_from_callback(x.shape, layout, part)


def own_parts(x: jax.Array) -> OwnParts:
    """Return the parts of a split array that this process writes to checkpoints.

    Processes that hold the same parts write them in turns.
    """
    everywhere = x.sharding.devices_indices_map(x.shape)
    regions = {device: region_of(index, x.shape) for device, index in everywhere.items()}
    grid = Grid.of(x.shape, list(regions.values()))
    numbers = {str(region): number for number, region in enumerate(grid.regions())}
    holders: list[set[int]] = [set() for _ in numbers]
    for device, region in regions.items():
        holders[numbers[str(region)]].add(device.process_index)
    owners = [sorted(them)[number % len(them)] for number, them in enumerate(holders)]
    own: dict[int, np.ndarray] = {}
    for shard in x.addressable_shards:
        number = numbers[str(region_of(shard.index, x.shape))]
        if owners[number] == jax.process_index() and number not in own:
            own[number] = np.array(shard.data)
    return OwnParts(grid, np.dtype(x.dtype), tuple(owners), own)


def is_finite(x: jax.Array) -> bool:
    """Return whether all values of an array are finite, of those that this process holds."""
    parts = [shard.data for shard in x.addressable_shards] if is_split(x) else [x]
    return all(bool(np.isfinite(np.asarray(part)).all()) for part in parts)


def is_split(x: Any) -> bool:
    """Return whether devices of other processes hold parts of an array."""
    return not (x.is_fully_addressable or x.is_fully_replicated)


def whole(x: Any) -> np.ndarray:
    """Return an array of the devices as NumPy; all processes must call this if it is split."""
    if isinstance(x, jax.Array) and is_split(x):
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)
