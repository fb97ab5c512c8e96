"""Recording a step, including accesses to tensors that are not operations.

Some accesses to a tensor's value are not operations; they are refused during recording. A few Keras
functions convert tensors to Python values; they are replaced by versions that also record on the
tape how to repeat the conversion.
"""

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from keras.src.backend.torch import core
from keras.src.backend.torch import random as keras_random
from keras.src.backend.torch.optimizers import torch_nadam
from torch.overrides import TorchFunctionMode

from ....core.keras_internals import seed_generator
from ...plans import RefusedError
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
        with _capturable_keras(tape), _TensorWatch(tape), tape:
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
            tape.refuse("it converts a tensor to a Python value")
        if func is torch.Tensor.backward:
            tape.refuse(BACKWARD)
        if isinstance(kwargs.get("alpha"), torch.Tensor):  # Keras' optimizers: the learning rate
            with tape.scale_of(kwargs["alpha"]) as alpha:
                return func(*args, **{**kwargs, "alpha": alpha})
        return func(*args, **kwargs)


@contextmanager
def _capturable_keras(tape: Tape) -> Generator[None]:
    """Replace Keras functions that convert tensors to Python values while `tape` records."""
    replaced: Mapping[Any, Mapping[str, Any]] = {
        core: {"cond": tape.cond},
        keras_random: {
            "torch_seed_generator": lambda seed: tape.call(_Seeded(), _sum_of_seed(seed)),
            "gamma": _drawn(tape, keras_random.gamma),
            "beta": _drawn(tape, keras_random.beta),
            "binomial": _drawn(tape, keras_random.binomial),
        },
        # Nadam divides by NumPy numbers; dividing by tensors gives the same.
        torch_nadam: {"core": SimpleNamespace(convert_to_numpy=lambda x: x)},
    }
    originals = [(at, name, getattr(at, name)) for at, names in replaced.items() for name in names]
    for at, name, original in originals:
        setattr(at, name, _in_this_thread(replaced[at][name], original))
    try:
        yield
    finally:
        for at, name, original in originals:
            setattr(at, name, original)


def _in_this_thread(function: Any, original: Any) -> Any:
    """Return `function` in this thread, and `original` in others, which may be reading data."""
    if not callable(function):
        return function
    thread = threading.get_ident()

    def choose(*args: Any, **kwargs: Any) -> Any:
        chosen = function if threading.get_ident() == thread else original
        return chosen(*args, **kwargs)

    return choose


def _sum_of_seed(seed: Any) -> Any:
    """Return the number that Keras seeds a generator with, as a tensor; advances the seed."""
    first, second = seed_generator.draw_seed(seed)
    return first + second


class _Seeded:
    """Seeds a generator as `keras.random` does, from the sum of a seed's two parts.

    The generator is created once, since creating one takes longer than seeding it.
    """

    def __init__(self) -> None:
        self._generator = torch.Generator(device=core.get_device())

    def __call__(self, total: Any) -> torch.Generator:
        return self._generator.manual_seed(int(total) & 0xFFFFFFFF)


class _Drawn:
    """A Keras function that temporarily seeds PyTorch's global generator, as one operation."""

    draws = True

    def __init__(self, original: Callable[..., Any], shape: Any, dtype: Any, names: Any) -> None:
        self._original, self._shape, self._dtype, self._names = original, shape, dtype, names

    def __call__(self, total: Any, *parameters: Any) -> Any:
        named = dict(zip(self._names, parameters, strict=True))
        seed = int(total) & 0xFFFFFFFF
        return self._original(self._shape, dtype=self._dtype, seed=seed, **named)


def _drawn(tape: Tape, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for such a function that records it on the tape."""

    def draw(shape: Any, dtype: Any = None, seed: Any = None, **parameters: Any) -> Any:
        function = _Drawn(original, shape, dtype, list(parameters))
        tensors = [core.convert_to_tensor(x) for x in parameters.values()]
        return tape.call(function, _sum_of_seed(seed), *tensors)

    return draw
