"""PyTorch on several processes, which `torch.distributed` connects."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ...backends.base import Backend, Executor
from ...backends.program import Program
from ...backends.torch.backend import around, executor
from ...backends.torch.capture.proof import Captured
from ...backends.torch.capture.recording import current
from ...backends.torch.capture.trials import device, undone
from ...backends.types import Tensor, Variable
from ...backends.window import examples_of
from ...core.internals import wrapped
from ...core.options import Options
from ...core.processes import ProcessGroup
from ...errors import ConfigurationError
from ..dividing.agreement import first_rows, is_of_memory, refusal, rows_to_compare
from ..dividing.backend import DividedBackend
from .replacements import REPLACEMENTS, Draws

# A collective fails after this time, for example if another process hangs. One that has ended is
# noticed at once.
TIMEOUT: Final = timedelta(minutes=10)


class TorchGroup(DividedBackend):
    """The backend for Keras on PyTorch on several processes."""

    def made(self, program: Program, options: Options) -> Executor:
        """Return the executor of the step that all processes have captured, or the eager one."""
        return executor(program, options, self.own, self._agreed)

    def around(self, program: Program) -> AbstractContextManager[Any]:
        """Return the context in which a step runs eagerly."""
        return around(program)

    def fewer_rows(self, batch: Any, error: Exception) -> Any:
        """Return as many rows of a batch as one process computes, if memory was lacking."""
        examples = examples_of(batch)
        few = rows_to_compare(examples, self.size)
        return first_rows(batch, examples, few) if is_of_memory(error) else None

    def divides(self) -> bool:
        """Return whether no function of `torch.vmap` or `torch.func.grad` is running."""
        return self.own.place() is None

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the tensors of all processes, which has the same bits in all.

        The public functions around `ProcessGroup.allreduce` take longer than a small message.
        """
        sent = x.clone(memory_format=torch.contiguous_format)
        dist.group.WORLD.allreduce([sent]).wait()  # type: ignore[union-attr]
        return sent

    def from_first(self, x: Tensor) -> Tensor:
        """Return the tensor of process 0."""
        sent = x.detach().to(device()).clone()
        dist.broadcast(sent, 0)
        return sent.to(x.device)

    def recorded(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Call a function, and record it on the tape if there is one."""
        tape = current()
        return function(x) if tape is None else tape.call(function, x)

    def differentiable(self, forward: Callable[[Tensor], Tensor], is_idle: bool, x: Tensor) -> Any:
        """Return a sum over all processes: what flows back is summed as well."""
        return _Sum.apply(x, forward, is_idle)

    def split(self, x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Return consecutive parts of a flat tensor."""
        return x.split(sizes)

    def preparing(self) -> AbstractContextManager[Any]:
        """Run trials of a captured step alone: processes may need different numbers of them."""
        return self.alone()

    @contextmanager
    def patched(self) -> Generator[None]:
        """Run a step such that what depends on the whole batch goes through `OwnRows`."""
        with wrapped(REPLACEMENTS, required=True), Draws():
            yield

    def undone(self, program: Program) -> AbstractContextManager[Any]:
        """Restore every variable and every random state afterwards."""
        return undone(program)

    def watched(self, variables: Iterable[Variable]) -> Callable[[Variable], bool]:
        """Return a function that compares the versions of the variables' tensors."""
        versions = {id(v): v._value._version for v in variables}
        return lambda v: v._value._version != versions[id(v)]

    def generator(self) -> Tensor:
        """Return the state of the generator from which operators draw."""
        return torch.get_rng_state()

    def set_generator(self, state: Tensor) -> None:
        """Set the state of that generator."""
        torch.set_rng_state(state)

    def _agreed(self, captured: Captured | str) -> Captured | str:
        """Return the captured step, or the reason why a process could not capture it."""
        if isinstance(captured, str):
            return refusal(captured, (), self)
        return refusal("", captured.messages, self) or captured


class _Sum(torch.autograd.Function):
    """The sum of a tensor over all processes: what flows back is summed as well."""

    @staticmethod
    def forward(ctx: Any, x: Any, total: Callable[[Any], Any], is_idle: bool) -> Any:
        ctx.total, ctx.is_idle = total, is_idle
        return total(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # All processes take part, those without rows too: their graphs are the same.
        total = _Sum.apply(gradients[0], ctx.total, ctx.is_idle)
        return torch.zeros_like(total) if ctx.is_idle else total, None, None


def connect(group: ProcessGroup, address: str, own: Backend) -> TorchGroup:
    """Connect this process to the others with `torch.distributed`, unless that is done already.

    Args:
        group: The processes.
        address: The host and port at which process 0 listens, as `host:port`; the port is free.
        own: The backend of one process.

    Raises:
        ConfigurationError: The processes cannot connect, or `torch.distributed` was initialized
            for others.
    """
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
    return TorchGroup(own, group)
