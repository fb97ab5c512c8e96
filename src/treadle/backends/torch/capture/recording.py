"""Recording a step, including accesses to tensors that are not operations.

Some accesses to a tensor's value are not operations; they are refused during recording. A few Keras
functions convert tensors to Python values; `patches` replaces them by versions that also record on
the tape how to repeat the conversion.
"""

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...plans import RefusedError
from ..patches import capturable_keras
from .tape import Tape

_READS = frozenset(  # they read values without an operation
    {
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        torch.Tensor.tolist,
        torch.Tensor.untyped_storage,
        torch.Tensor.__deepcopy__,
        torch.Tensor.__reduce_ex__,
        torch.Tensor.__dlpack__,
    }
)
_CHECKS = frozenset({torch.nn.functional.one_hot})  # they read values only to validate them
BACKWARD = "it calls backward() itself"
_running = threading.local()


def current() -> Tape | None:
    """Return the tape that is recording in this thread, or None."""
    return getattr(_running, "tape", None)


@contextmanager
def recording(
    state: Sequence[Any], batch: Sequence[Any], number: Any, rolled: bool = False
) -> Generator[Tape]:
    """Record the tensor operations in this context.

    Args:
        state: The variables' own tensors, which the operations may change.
        batch: The batch's tensors, which differ in every step.
        number: The step's number, a tensor.
        rolled: Whether to record mapped functions as loops, if possible.

    Raises:
        RefusedError: The operations cannot be replayed.
    """
    tape = Tape(state, batch, number, rolled)
    forms = [_form(tensor) for tensor in state]
    gradients = [tensor.grad for tensor in state]
    called_backward = False
    _running.tape = tape
    try:
        with capturable_keras(tape.call), _TensorWatch(tape), tape:
            yield tape
    except Exception:
        tape.check()  # raises the original error: Keras wraps exceptions that pass its layers
        raise
    finally:
        _running.tape = None
        for tensor, gradient in zip(state, gradients, strict=True):
            if tensor.grad is not gradient:
                tensor.grad, called_backward = gradient, True
    tape.check()
    if called_backward:
        raise RefusedError(BACKWARD)
    if [_form(tensor) for tensor in state] != forms:
        raise RefusedError("it replaces the memory of a variable")


def _form(tensor: Any) -> Any:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


class _TensorWatch(TorchFunctionMode):
    """Intercepts accesses to tensors that are not operations."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a PyTorch function, unless it reads values."""
        kwargs, tape = kwargs or {}, self._tape
        if tape.idle:
            return func(*args, **kwargs)
        if func in _CHECKS and not kwargs:
            return tape.call(func, *args)
        if func in _READS and tape.is_seen(args[0]):
            tape.refuse_value()
        if func is torch.Tensor.backward:
            tape.refuse(BACKWARD)
        if isinstance(kwargs.get("alpha"), torch.Tensor):  # Keras' optimizers: the learning rate
            with tape.scale_of(kwargs["alpha"]) as alpha:
                return func(*args, **{**kwargs, "alpha": alpha})
        return func(*args, **kwargs)
