"""The private parts of PyTorch that Treadle uses, and its patches of Keras on PyTorch.

A step is captured by recording its operators. A few functions of Keras read tensors as Python
values, which no operator shows; they are patched while a step is recorded (`capturable_keras`).

`tests/conformance/test_patches.py` fails by name when one of the entries changes.
"""

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from inspect import signature
from types import SimpleNamespace
from typing import Any, Final

import keras
import torch

from ...core.internals import Attributes, Internal, in_this_thread
from ...core.keras_internals import device_of_scope, seed_generator
from ..step_context import context

OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")

_EAGER = "steps that {} run eagerly"

INTERNALS: dict[str, Internal] = {
    "torch_seed_generator": Internal(
        ("keras.src.backend.torch.random:torch_seed_generator",),
        "patched while recording: it reads the state of a seed generator",
        ("(seed)",),
        loses="speed",
        lost=_EAGER.format("draw random numbers"),
    ),
    **{
        name: Internal(
            (f"keras.src.backend.torch.random:{name}",),
            "patched while recording: it reads the state of a seed generator",
            (parameters,),
            loses="speed",
            lost=_EAGER.format(f"draw from keras.random.{name}"),
        )
        for name, parameters in {
            "gamma": "(shape, alpha, dtype=None, seed=None)",
            "beta": "(shape, alpha, beta, dtype=None, seed=None)",
            "binomial": "(shape, counts, probabilities, dtype=None, seed=None)",
        }.items()
    },
    "backward": Internal(
        ("torch:Tensor.backward",),
        "patched in the steps of compiled models: gradients are computed by an operation, which a "
        "captured step can repeat",
        ("(self, gradient=None, retain_graph=None, create_graph=False, inputs=None)",),
    ),
    "nadam_core": Internal(
        ("keras.src.backend.torch.optimizers.torch_nadam:core",),
        "patched while recording: Nadam divides by NumPy numbers",
        members=("convert_to_numpy",),
        loses="speed",
        lost=_EAGER.format("use Nadam"),
    ),
    "adam_update": Internal(
        ("keras.src.backend.torch.optimizers.torch_adam:Adam._parallel_update_step",),
        "patched in steps: it allocates several times the bytes of all variables that it updates",
        ("(self, grads, variables, learning_rate)",),
        loses="comfort",
        lost="updates of Adam and AdamW need several times the memory of the weights",
    ),
    "direct_assign": Internal(
        ("keras:Variable._direct_assign",),
        "patched in steps: it changes memory that the backward pass needs, and in mixed precision "
        "a copy of the variable",
        ("(self, value)",),
    ),
    "lstm": Internal(
        ("keras.src.backend:rnn.lstm", "keras.src.backend:lstm"),
        "patched in steps: on a CPU it calls 14 operators for each element of a sequence",
        loses="speed",
        lost="LSTM layers run cell by cell on a CPU",
    ),
    "value": Internal(
        ("keras:Variable.value",),
        "patched in steps: what the user reads does not change when the variable is assigned",
    ),
    "transform_level": Internal(
        ("torch._C._functorch:maybe_current_level",),
        "whether a function runs inside of `torch.vmap` or `torch.func.grad`",
    ),
    "variable_init": Internal(
        ("keras:Variable.__init__",),
        "patched while proving: variables that a trial creates are reset",
    ),
    "TorchDispatchMode": Internal(
        ("torch.utils._python_dispatch:TorchDispatchMode",),
        "records operators below autograd; documented, but in a private module",
        members=("__torch_dispatch__",),
    ),
    "standalone_compile": Internal(
        ("torch._inductor:standalone_compile",),
        "compiles a recorded step as a whole, without tracing Python again",
        (
            "(gm, example_inputs, *, dynamic_shapes='from_graph', options=None, aot=False, "
            "donate_graph_module=False, fake_mode=None)",
        ),
        loses="speed",
        lost="steps are captured and not compiled",
    ),
    "FakeTensorMode": Internal(
        ("torch._subclasses.fake_tensor:FakeTensorMode",),
        "describes the inputs of a compiled step without memory for them",
        loses="speed",
        lost="steps are captured and not compiled",
    ),
    "ShapeEnv": Internal(
        ("torch.fx.experimental.symbolic_shapes:ShapeEnv",),
        "which the mode needs, although all shapes are fixed",
        loses="speed",
        lost="steps are captured and not compiled",
    ),
    "C": Internal(
        ("torch:_C",),
        "replays call operators below autograd, which takes less time; the memory of a tensor is "
        "read without recording that",
        members=("_AutoDispatchBelowAutograd", "DisableTorchFunction"),
    ),
    **{
        f"__i{name}__": Internal(
            (f"torch:Tensor.__i{name}__",),
            "patched in steps: Keras changes its arguments with it, such as sample weights",
        )
        for name in OPERATORS
    },
}

ATTRIBUTES: dict[str, Attributes] = {
    "OpOverload": Attributes(
        ("_schema", "_op"),
        "torch._ops",
        "which arguments an operator changes or returns, and a call without its Python wrapper",
    ),
    "UntypedStorage and Generator": Attributes(
        ("_cdata",),
        "torch._C",
        "the address of the C++ object: PyTorch creates a new Python object for each access",
    ),
    "Tensor": Attributes(("_base",), "torch._C", "whose memory a view shares"),
    "Layer": Attributes(
        ("_torch_params",),
        "keras.src.backend.torch.layer",
        "the parameters that Keras collected while variables had the values of a scope",
    ),
}

TorchDispatchMode: Any = INTERNALS["TorchDispatchMode"].resolve()
C: Any = INTERNALS["C"].resolve()

Call = Callable[..., Any]

PART_BYTES: Final = 64 * 2**20
"""Variables of so many bytes are updated together."""


def get_device() -> Any:
    """Return the device of new variables."""
    return device_of_scope() or _default_device()


@cache
def _default_device() -> str:
    """Return the device of new variables outside of `keras.device`."""
    # Without an index, which `torch.cuda.set_device` may change later.
    return os.environ.get("KERAS_TORCH_DEVICE") or keras.ops.zeros(()).device.type


@contextmanager
def capturable_keras(call: Call) -> Generator[None]:
    """Make functions of Keras record their reads of tensors in this context, in this thread.

    Args:
        call: Calls a function of tensors, and records it as one operation.
    """
    _seed_mask()  # before the recording
    _default_device()
    replaced: Mapping[str, Any] = {
        "torch_seed_generator": lambda seed: call(_Seeded(), _sum_of_seed(seed)),
        **{name: _drawn(call, INTERNALS[name].get()) for name in ("gamma", "beta", "binomial")},
        # Dividing by tensors gives the same as dividing by NumPy numbers.
        "nadam_core": SimpleNamespace(convert_to_numpy=lambda x: x),
    }
    with ExitStack() as stack:
        for name, replacement in replaced.items():
            internal = INTERNALS[name]
            # No warning: most steps do not need it, and the plan says why one runs eagerly.
            if not internal.missing():
                original = internal.resolve()
                stack.enter_context(internal.replaced(in_this_thread(replacement, original)))
        yield


def updates_in_parts() -> AbstractContextManager[Any]:
    """Let Adam and AdamW update large variables one after the other, with the same results.

    Updating all at once needs up to four times the memory of the weights.
    """
    original: Any = INTERNALS["adam_update"].get()

    def update(self: Any, grads: Any, variables: Any, learning_rate: Any) -> None:
        for part in _parts([variable.value for variable in variables]):
            original(self, grads[part], variables[part], learning_rate)

    return INTERNALS["adam_update"].replaced(update)


def _parts(tensors: Sequence[Any]) -> list[slice]:
    """Return consecutive parts of tensors, each of few bytes or a single tensor.

    Tensors of several types are not split: the type of the first one is that of the learning rate.
    """
    sizes = [x.nbytes for x in tensors]
    if sum(sizes) <= PART_BYTES or len({x.dtype for x in tensors}) > 1:
        return [slice(None)]
    starts, total = [0], 0
    for i, size in enumerate(sizes):
        total += size
        if total > PART_BYTES and i > starts[-1]:
            starts.append(i)
            total = size
    return [slice(*ends) for ends in zip(starts, [*starts[1:], None], strict=True)]


@contextmanager
def fused_lstm() -> Generator[None]:
    """Let Keras' LSTM call PyTorch's LSTM on a CPU, which is one operator for a whole sequence.

    Keras calls it on CUDA only. Its own function remains where the operator cannot be used: for
    other activations and types, masks, and inside nested `gradients`, since the operator can be
    differentiated only once.
    """
    internal = INTERNALS["lstm"]
    original: Any = internal.get()
    if original is None:
        yield
        return

    def lstm(inputs: Any, h: Any, c: Any, mask: Any, **how: Any) -> Any:
        usual = how["activation"] is keras.activations.tanh
        usual = usual and how["recurrent_activation"] is keras.activations.sigmoid
        usual = usual and mask is None and how.get("batch_first", True)
        given = [how[name] for name in ("kernel", "recurrent_kernel", "bias")]
        weights: Any = [None if x is None else keras.ops.convert_to_tensor(x) for x in given]
        tensors = (inputs, *(x for x in weights if x is not None))
        if usual and h.ndim == c.ndim == 2 and all(map(_is_fusible, tensors)):
            chosen = [bool(how.get(name)) for name in ("return_sequences", "go_backwards")]
            return _lstm(inputs, h, c, *weights, *chosen)
        return original(inputs, h, c, mask, **how)

    with internal.replaced(in_this_thread(lstm, original)):
        yield


def _lstm(
    inputs: Any,
    h: Any,
    c: Any,
    kernel: Any,
    recurrent: Any,
    bias: Any,
    return_sequences: bool,
    go_backwards: bool,
) -> Any:
    """Return the last output, all outputs and the states, in the form that Keras expects."""
    weights = kernel.T.contiguous(), recurrent.T.contiguous()
    zeros = kernel.new_zeros(kernel.shape[1])  # PyTorch has two biases
    biases = zeros if bias is None else bias, zeros
    if go_backwards:
        inputs = torch.flip(inputs, dims=[1])
    # Biases, one layer, no dropout, whether it is differentiated, one direction, the batch first.
    settings = True, 1, 0.0, torch.is_grad_enabled(), False, True
    state = [x.to(inputs.dtype).unsqueeze(0) for x in (h, c)]
    outputs, h, c = torch.lstm(inputs, state, [*weights, *biases], *settings)
    last = outputs[:, -1]
    sequence = outputs if return_sequences else last.unsqueeze(1)
    return last, sequence, [h.squeeze(0), c.squeeze(0)]


def _is_fusible(inputs: Any) -> bool:
    """Return whether PyTorch has a differentiable LSTM operator for these inputs on this device."""
    return (
        inputs.device.type == "cpu"
        and inputs.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and context().depth < 2
        and INTERNALS["transform_level"].resolve()() is None  # `vectorized_map` has no rule for it
        and inputs.numel() > 0
    )


@contextmanager
def variables_made() -> Generator[list[tuple[Any, Any]]]:
    """Collect the Keras variables that are created in this context, with their initial values."""
    made: list[tuple[Any, Any]] = []
    original = INTERNALS["variable_init"].resolve()

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self._value is not None:
            made.append((self, self._value.detach().clone()))

    with INTERNALS["variable_init"].replaced(init):
        yield made


def _sum_of_seed(seed: Any) -> Any:
    """Return the number that Keras seeds a generator with, as a tensor; advances the seed."""
    if isinstance(seed, int):
        return keras.ops.convert_to_tensor(seed, "int64")
    if seed is None:
        first, second = seed_generator.global_seed_generator().next(ordered=False)
    else:
        first, second = seed.next()
    return first + second


class _Seeded:
    """Seeds a generator as `keras.random` does, from the sum of a seed's two parts.

    The generator is created once, since creating one takes longer than seeding it.
    """

    def __init__(self) -> None:
        self._generator, self._mask = torch.Generator(device=get_device()), _seed_mask()

    def __call__(self, total: Any) -> torch.Generator:
        return self._generator.manual_seed(int(total) & self._mask)


@cache
def _seed_mask() -> int:
    """Return the bits of a seed that Keras passes to a generator: 32 since 3.14, before 64."""
    internal = INTERNALS["torch_seed_generator"]
    return 0 if internal.missing() else int(internal.resolve()(-1).initial_seed())


class _Drawn:
    """A Keras function that temporarily seeds PyTorch's global generator, as one operation."""

    draws = True

    def __init__(self, original: Call, shape: Any, dtype: Any, names: Any) -> None:
        self._original, self._shape, self._dtype, self._names = original, shape, dtype, names

    def __call__(self, total: Any, *parameters: Any) -> Any:
        named = dict(zip(self._names, parameters, strict=True))
        return self._original(self._shape, dtype=self._dtype, seed=int(total), **named)


def _drawn(call: Call, original: Call) -> Call:
    """Return a replacement for such a function that records it."""

    def draw(*args: Any, **kwargs: Any) -> Any:
        given = signature(original).bind(*args, **kwargs).arguments
        shape, dtype, seed = given.pop("shape"), given.pop("dtype", None), given.pop("seed", None)
        function = _Drawn(original, shape, dtype, list(given))
        tensors = [keras.ops.convert_to_tensor(x) for x in given.values()]
        return call(function, _sum_of_seed(seed), *tensors)

    return draw
