"""Changes in place that Keras makes on PyTorch, and on no other backend.

Keras' layers, losses and metrics are written for tensors that never change. On PyTorch, `x *= y`
changes the tensor that the step has passed to Keras, and an assignment of a variable changes the
memory that the backward pass needs.
"""

import inspect
import operator
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from ...core.internals import in_this_thread
from ...core.keras_internals import device_of_scope
from .patches import INTERNALS, OPERATORS


@contextmanager
def kept_arguments() -> Generator[None]:
    """Let `x *= y` in the code of Keras make a new tensor, so that arguments keep their values."""
    with ExitStack() as stack:
        for name in OPERATORS:
            internal, operate = INTERNALS[f"__i{name}__"], getattr(operator, f"__{name}__")
            stack.enter_context(internal.replaced(_not_in_keras(internal.resolve(), operate)))
        yield


def _not_in_keras(original: Any, operate: Any) -> Callable[[Any, Any], Any]:
    """Return an operator in place that makes a new tensor if the code of Keras calls it."""

    def changed(self: Any, other: Any) -> Any:
        frame = inspect.currentframe()
        caller = frame and frame.f_back
        module = caller.f_globals.get("__name__", "") if caller else ""
        if not str(module).startswith("keras"):  # also of packages on top of it, such as KerasHub
            return original(self, other)
        found = operate(self, other)
        return found.to(self.dtype) if torch.can_cast(found.dtype, self.dtype) else found

    return changed


def whole_assignments() -> AbstractContextManager[Any]:
    """Let layers of mixed precision assign their variables, and not a copy in the lower precision.

    Without it, a stateful RNN layer keeps no state in mixed precision.
    """
    original = INTERNALS["direct_assign"].resolve()

    def assign(self: Any, value: Any) -> None:
        if self._value is None or str(device_of_scope()) == "meta":
            original(self, value)
            return
        with torch.no_grad():
            self._value.copy_(value)

    return INTERNALS["direct_assign"].replaced(in_this_thread(assign, original))


@contextmanager
def kept_reads() -> Generator[None]:
    """Keep the memory of variables that are not trained until the end of this context.

    An assignment gives the variable another tensor, whose values it gets in its own memory at the
    end: a layer may compute with a variable and then assign it, as stateful RNN layers do.
    """
    original = INTERNALS["direct_assign"].resolve()
    held: dict[int, tuple[Any, Any]] = {}

    def assign(self: Any, value: Any) -> None:
        own = self._value
        if own is None or own.requires_grad or str(device_of_scope()) == "meta":
            original(self, value)
            return
        held.setdefault(id(self), (self, own))
        self._value = value.detach()

    changed: list[tuple[Any, Any]] = []
    try:
        with INTERNALS["direct_assign"].replaced(in_this_thread(assign, original)):
            yield
        changed = [(own, variable._value) for variable, own in held.values()]
    finally:
        for variable, own in held.values():
            variable._value = own
    with torch.no_grad():
        for own, value in changed:
            own.copy_(value)
