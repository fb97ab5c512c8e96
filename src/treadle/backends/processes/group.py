"""The processes of a run, and the operations between them that a framework provides."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol
from weakref import ref

import keras
from keras import ops

from ...core.processes import ProcessGroup
from ..program import Program
from ..types import Tensor, Variable


class Engine(Protocol):
    """What a framework provides for steps on several processes.

    All processes must call the functions that communicate in the same order, with tensors of the
    same shapes and types.
    """

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the tensors of all processes, with the same bits in all."""
        ...

    def from_first(self, x: Tensor) -> Tensor:
        """Return the tensor of process 0."""
        ...

    def recorded(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Call a function of a tensor, as one operation of the step, and not differentiated."""
        ...

    def differentiable(self, forward: Callable[[Tensor], Tensor], is_idle: bool, x: Tensor) -> Any:
        """Return `forward(x)`, whose gradient is summed by `forward` as well; zeros if idle.

        The gradient can be differentiated in the same way.
        """
        ...

    def split(self, x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Return consecutive parts of a flat tensor."""
        ...

    def begin_step(self) -> None:
        """Prepare for the communication of a step, which is now run, recorded or traced."""
        ...

    def preparing(self, processes: "Processes") -> AbstractContextManager[Any]:
        """Return a context in which the executor of a step captures or traces it."""
        ...

    def patched(self) -> AbstractContextManager[Any]:
        """Return a context in which moments, draws and optimizers use the rows of this process."""
        ...

    def undone(self, program: Program) -> AbstractContextManager[Any]:
        """Return a context at whose end variables and random states are what they were before."""
        ...

    def watched(self, variables: Iterable[Variable]) -> Callable[[Variable], bool]:
        """Return a function that returns whether a variable was assigned since this call."""
        ...

    def generator(self) -> Tensor | None:
        """Return the state of a generator that all random draws share, or None."""
        ...

    def set_generator(self, state: Tensor) -> None:
        """Set the state of that generator."""
        ...


class Processes:
    """The processes of a run.

    Args:
        group: The processes; its `exchange` transports short messages.
        engine: The operations between them.

    Attributes:
        rank: The number of this process.
        size: The number of processes.
        is_alone: Whether collectives are replaced by local operations.
    """

    def __init__(self, group: ProcessGroup, engine: Engine) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size
        self.engine = engine
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


class Total:
    """The sum of a tensor over all processes, as one operation that can be recorded.

    Args:
        processes: The processes.
        stand_in: What a float is multiplied by instead if this process is alone.

    Attributes:
        acts: True: all processes call it, or none, so it is not dropped where its result is unused.
        adds_elements: True: the sum of concatenated tensors is that of each.
    """

    acts = adds_elements = True

    def __init__(self, processes: Processes, stand_in: float) -> None:
        self._processes, self._stand_in = processes, stand_in

    def __call__(self, x: Any) -> Any:
        """Return the sum; the tensor is not differentiated."""
        if not self._processes.is_alone:
            return self._processes.engine.sum(x)
        self._processes.note(x)
        return x * self._stand_in if is_float(x) else ops.copy(x)


def is_float(x: Tensor) -> bool:
    """Return whether a tensor's type is one of floats."""
    return keras.backend.is_float_dtype(x.dtype)


_processes: Processes | None = None


def processes() -> Processes | None:
    """Return the processes that this one is connected to, or None if it trains alone."""
    return _processes


def summation(
    to_device: Callable[[Any], Tensor], to_numpy: Callable[[Tensor], Any]
) -> Callable[[Any], Any] | None:
    """Return a function that sums an array over all processes; None if this one trains alone.

    It is called outside of steps, by all processes.

    Args:
        to_device: Converts an array to a tensor.
        to_numpy: Converts a tensor to an array.
    """
    if _processes is None:
        return None
    engine = _processes.engine

    def total(x: Any) -> Any:
        engine.begin_step()
        return to_numpy(engine.sum(to_device(x)))

    return total


def connected(found: Processes) -> None:
    """Note that this process is connected to others, unless it is the only one."""
    global _processes
    _processes = found if found.size > 1 else None
