"""The backend of several processes, and the operations between them that a framework provides."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any, cast
from weakref import ref

import keras
from keras import ops

from ...backends.base import Backend, Executor, active
from ...backends.program import Program
from ...backends.types import Tensor, Variable
from ...core.options import Options
from ...core.processes import ProcessGroup


class GroupBackend:
    """Base class of backends for several processes: wraps the backend of one process.

    Args:
        own: The backend of one process.
        group: The processes.
    """

    # All processes compile a form at once, and compare its results.
    rare_steps: Mapping[str, int] = MappingProxyType({})

    def __init__(self, own: Backend, group: ProcessGroup) -> None:
        self.own, self.group = own, group

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def computes_own_rows(self, examples: int) -> bool:
        """Return whether each process needs only its own rows of a batch of this many examples."""
        raise NotImplementedError


def group_backend() -> GroupBackend:
    """Return the active backend, in a process that has joined others."""
    return cast(GroupBackend, active())


class Collectives(GroupBackend, ABC):
    """A backend of several processes, with the operations between them that steps need.

    All processes must call the functions that communicate in the same order, with tensors of the
    same shapes and types.

    Args:
        own: The backend of one process.
        group: The processes.

    Attributes:
        rank: The number of this process.
        size: The number of processes.
        is_alone: Whether collectives are replaced by local operations.
    """

    def __init__(self, own: Backend, group: ProcessGroup) -> None:
        super().__init__(own, group)
        self.rank, self.size = group.rank, group.size
        self.is_alone = False
        self._forms: list[str] = []
        self._shared: dict[int, ref[Any]] = {}

    @abstractmethod
    def made(self, program: Program, options: Options) -> Executor:
        """Return the executor of one process for a program."""

    @abstractmethod
    def around(self, program: Program) -> AbstractContextManager[Any]:
        """Return the context in which a step runs eagerly."""

    @abstractmethod
    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the tensors of all processes, with the same bits in all."""

    @abstractmethod
    def from_first(self, x: Tensor) -> Tensor:
        """Return the tensor of process 0."""

    @abstractmethod
    def recorded(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Call a function of a tensor, as one operation of the step, and not differentiated."""

    @abstractmethod
    def differentiable(self, forward: Callable[[Tensor], Tensor], is_idle: bool, x: Tensor) -> Any:
        """Return `forward(x)`, whose gradient is summed by `forward` as well; zeros if idle.

        The gradient can be differentiated in the same way.
        """

    @abstractmethod
    def split(self, x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Return consecutive parts of a flat tensor."""

    def begin_step(self) -> None:
        """Prepare for the communication of a step, which is now run, recorded or traced."""

    @abstractmethod
    def preparing(self) -> AbstractContextManager[Any]:
        """Return a context in which the executor of a step captures or traces it."""

    @abstractmethod
    def patched(self) -> AbstractContextManager[Any]:
        """Return a context in which moments, draws and optimizers use the rows of this process."""

    @abstractmethod
    def undone(self, program: Program) -> AbstractContextManager[Any]:
        """Return a context at whose end variables and random states are what they were before."""

    @abstractmethod
    def watched(self, variables: Iterable[Variable]) -> Callable[[Variable], bool]:
        """Return a function that returns whether a variable was assigned since this call."""

    def generator(self) -> Tensor | None:
        """Return the state of a generator that all random draws share, or None."""
        return None

    def set_generator(self, state: Tensor) -> None:
        """Set the state of that generator."""

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

    def __init__(self, processes: Collectives, stand_in: float) -> None:
        self._processes, self._stand_in = processes, stand_in

    def __call__(self, x: Any) -> Any:
        """Return the sum; the tensor is not differentiated."""
        if not self._processes.is_alone:
            return self._processes.sum(x)
        self._processes.note(x)
        return x * self._stand_in if is_float(x) else ops.copy(x)


def is_float(x: Tensor) -> bool:
    """Return whether a tensor's type is one of floats."""
    return keras.backend.is_float_dtype(x.dtype)
