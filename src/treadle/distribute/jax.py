"""JAX on several processes, each with its own devices, which run one program together.

Every process has all batches, and hands its devices their parts. What is read as a NumPy array is
whole in every process.
"""

import atexit
import os
import sys
from collections.abc import Sequence

import jax
import keras

from ..backends.base import Backend, RefusedDistribution
from ..backends.jax import layouts
from ..backends.types import Variable
from ..core.processes import ProcessGroup
from ..errors import ConfigurationError
from .dividing.collectives import GroupBackend


class JaxGroup(GroupBackend):
    """The backend for Keras on JAX on several processes."""

    def computes_own_rows(self, examples: int) -> bool:
        """Return whether the layout of a batch gives the devices of each process its rows."""
        return layouts.gives_own_rows(examples)

    def refused_distribution(
        self, variables: Sequence[Variable], built: bool
    ) -> RefusedDistribution | None:
        """Refuse variables whose layout is not that of the distribution."""
        return layouts.refused(variables, built, joined=True)

    def finite(self, variables: Sequence[Variable]) -> Sequence[bool]:
        """Return for each variable whether all values are finite, also those that others hold."""
        found = self.own.finite(variables)
        if not self.own.is_split(variables):
            return found
        everyone = self.group.exchange(list(found), "checking that values are finite")
        return [all(flags) for flags in zip(*everyone, strict=True)]


def connect(group: ProcessGroup, address: str, own: Backend) -> JaxGroup:
    """Start JAX in a process of a group, and train on the devices of all.

    Several processes of a machine with accelerators have one each, unless each sees only one.

    Args:
        group: The processes.
        address: The host and port where process 0 coordinates them; the port is free.
        own: The backend of one process.

    Raises:
        ConfigurationError: JAX has already started, or was connected with other numbers.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    sees_one = os.environ.get("CUDA_VISIBLE_DEVICES", ",").count(",") == 0
    devices = [group.local_rank] if group.local_size > 1 and not sees_one else None
    try:
        # Ray's JaxTrainer does it for accelerators; versions of JAX before 0.6 do not tell.
        if not getattr(jax.distributed, "is_initialized", bool)():
            jax.distributed.initialize(address, group.size, group.rank, local_device_ids=devices)
    except RuntimeError as error:
        raise ConfigurationError(
            "treadle.setup joins the other processes, and must come before JAX computes anything: "
            "move it to the top of the script"
        ) from error
    check_connected(group)
    atexit.register(_leave_after_failure, group)
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(devices=keras.distribution.list_devices())
    )
    return JaxGroup(own, group)


def check_connected(group: ProcessGroup) -> None:
    """Check that JAX numbers the processes as the group does.

    Raises:
        ConfigurationError: It was connected before, with other numbers.
    """
    found = jax.process_index(), jax.process_count()
    if found != (group.rank, group.size):
        raise ConfigurationError(
            f"JAX was connected as process {found[0]} of {found[1]}, but this is process "
            f"{group.rank} of {group.size}: leave jax.distributed.initialize to treadle.setup"
        )


def _leave_after_failure(group: ProcessGroup) -> None:
    """End the process at once after a failure: JAX would wait for the others, and then abort."""
    if group.failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
