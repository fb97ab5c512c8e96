"""The connection of the processes, and the one collective operation that all others are made of."""

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ....core.processes import ProcessGroup
from ....errors import ConfigurationError
from ..capture.recording import current
from ..capture.trials import device
from ..patches import functional_collectives

# A collective fails after this time, for example if another process hangs. One that has ended is
# noticed at once.
TIMEOUT: Final = timedelta(minutes=10)


class Processes:
    """The processes of a run, connected by `torch.distributed`.

    Args:
        group: The processes; its `exchange` transports short messages.

    Attributes:
        rank: The number of this process.
        size: The number of processes.
        is_alone: Whether collectives are replaced by local operations.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size
        self.is_alone = False
        self._forms: list[str] = []
        self._shared: dict[int, ref[Any]] = {}

    def share(self, variable: Any) -> bool:
        """Return whether a variable is new, and from now on has the same value in all processes."""
        known = self._shared.get(id(variable))
        self._shared[id(variable)] = ref(variable)
        return known is None or known() is not variable

    @contextmanager
    def alone(self) -> Generator[list[str]]:
        """Replace collectives by local operations, so that processes need not do the same.

        The context gets the forms of the tensors that are summed.
        """
        before, self.is_alone = self.is_alone, True
        self._forms = []
        try:
            yield self._forms
        finally:
            self.is_alone, self._forms = before, []

    def note(self, x: Any) -> None:
        """Note a tensor that would be summed."""
        self._forms.append(f"{x.dtype} {tuple(x.shape)}")

    def sum(self, x: Any) -> Any:
        """Return the sum of the tensors of all processes, which has the same bits in all."""
        collectives = functional_collectives()
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", name))

    def broadcast(self, tensor: Any) -> None:
        """Overwrite a tensor with that of process 0."""
        sent = tensor.to(device())
        dist.broadcast(sent, 0)
        tensor.copy_(sent)


_processes: Processes | None = None


def processes() -> Processes | None:
    """Return the processes that this one is connected to, or None if it trains alone."""
    return _processes


def connect(group: ProcessGroup, address: str) -> None:
    """Connect this process to the others with `torch.distributed`, unless that is done already.

    Args:
        group: The processes.
        address: The host and port at which process 0 listens, as `host:port`.

    Raises:
        ConfigurationError: The processes cannot connect, or `torch.distributed` was initialized
            for others.
    """
    global _processes
    kind = "nccl" if device() == "cuda" else "gloo"
    if kind == "nccl":
        torch.cuda.set_device(getattr(group, "local_rank", group.rank))
    if not dist.is_initialized():
        host, port = address.rsplit(":", 1)
        try:
            # With `init_method`, processes of torchrun would wait for a store of torchrun there.
            store = TCPStore(host, int(port), group.size, group.rank == 0, TIMEOUT)
            dist.init_process_group(
                kind, store=store, rank=group.rank, world_size=group.size, timeout=TIMEOUT
            )
        except (RuntimeError, ValueError) as error:
            raise ConfigurationError(
                f"process {group.rank} of {group.size} cannot connect to the others at {address} "
                f"with torch.distributed ({kind}): {error}. Check that this address of process 0 "
                "can be reached from each machine, and that its port is free"
            ) from error
    found = dist.get_rank(), dist.get_world_size()
    if found != (group.rank, group.size):
        raise ConfigurationError(
            f"torch.distributed was initialized as process {found[0]} of {found[1]}, but this is "
            f"process {group.rank} of {group.size}: leave the initialization to Treadle, or give "
            "both the same environment variables"
        )
    _processes = Processes(group)


class Total:
    """The sum of a tensor over all processes, as one operation that can be recorded.

    Args:
        processes: The processes.
        stand_in: What a float is multiplied by instead if this process is alone.
    """

    acts = True  # all processes call it, or none: it is not dropped where its result is unused

    def __init__(self, processes: Processes, stand_in: float) -> None:
        self._processes, self._stand_in = processes, stand_in

    def __call__(self, x: Any) -> Any:
        """Return the sum; the tensor is not differentiated."""
        if not self._processes.is_alone:
            return self._processes.sum(x)
        self._processes.note(x)
        return x * self._stand_in if x.dtype.is_floating_point else x.clone()

    def recorded(self, x: Any) -> Any:
        """Return the sum, and record it on the tape if there is one."""
        tape = current()
        return self(x) if tape is None else tape.call(self, x)
