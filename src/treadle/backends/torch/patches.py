"""The private parts of PyTorch that Treadle uses, and its patches of Keras on PyTorch.

A step is captured by recording its operators. A few functions of Keras read tensors as Python
values, which no operator shows; they are patched while a step is recorded (`capturable_keras`).

`tests/conformance/test_patches.py` fails by name when one of the entries changes.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Final

import keras
import torch

from ...core.internals import KERAS, Attribute, Internal, in_this_thread
from ...core.keras_internals import seed_generator
from ..step_context import context

_PYTORCH = "https://github.com/pytorch/pytorch/blob/main"
_RANDOM = f"{KERAS}/backend/torch/random.py"
_RNN = f"{KERAS}/backend/torch/rnn.py"

INTERNALS: dict[str, Internal] = {
    "get_device": Internal(
        "keras.src.backend.torch.core:get_device",
        "the device of new variables, which has no public name",
        f"{KERAS}/backend/torch/core.py",
        "()",
    ),
    "torch_seed_generator": Internal(
        "keras.src.backend.torch.random:torch_seed_generator",
        "patched while recording: it reads the state of a seed generator",
        _RANDOM,
        "(seed)",
    ),
    "gamma": Internal(
        "keras.src.backend.torch.random:gamma",
        "patched while recording: it reads the state of a seed generator",
        _RANDOM,
        "(shape, alpha, dtype=None, seed=None)",
    ),
    "beta": Internal(
        "keras.src.backend.torch.random:beta",
        "patched while recording: it reads the state of a seed generator",
        _RANDOM,
        "(shape, alpha, beta, dtype=None, seed=None)",
    ),
    "binomial": Internal(
        "keras.src.backend.torch.random:binomial",
        "patched while recording: it reads the state of a seed generator",
        _RANDOM,
        "(shape, counts, probabilities, dtype=None, seed=None)",
    ),
    "nadam_core": Internal(
        "keras.src.backend.torch.optimizers.torch_nadam:core",
        "patched while recording: Nadam divides by NumPy numbers",
        f"{KERAS}/backend/torch/optimizers/torch_nadam.py",
        members=("convert_to_numpy",),
    ),
    "adam_update": Internal(
        "keras.src.backend.torch.optimizers.torch_adam:Adam._parallel_update_step",
        "patched in steps: it allocates several times the bytes of all variables that it updates",
        f"{KERAS}/backend/torch/optimizers/torch_adam.py",
        "(self, grads, variables, learning_rate)",
    ),
    "direct_assign": Internal(
        "keras.src.backend.torch.core:Variable._direct_assign",
        "patched in steps: it changes memory that the backward pass needs, and in mixed precision "
        "a copy of the variable",
        f"{KERAS}/backend/torch/core.py",
        "(self, value)",
    ),
    "lstm_by_cells": Internal(
        "keras.src.backend.torch.rnn:_fallback_lstm",
        "patched in steps: it calls 14 operators for each element of a sequence",
        _RNN,
        "(inputs, initial_state_h, initial_state_c, kernel, recurrent_kernel, bias, activation, "
        "recurrent_activation, return_sequences, batch_first)",
    ),
    "lstm": Internal(
        "keras.src.backend.torch.rnn:_cudnn_lstm",
        "PyTorch's LSTM for a whole sequence, which Keras calls on CUDA only",
        _RNN,
        "(inputs, initial_state_h, initial_state_c, kernel, recurrent_kernel, bias, "
        "return_sequences, device)",
    ),
    "value": Internal(
        "keras.src.backend.torch.core:Variable.value",
        "patched in steps: what the user reads does not change when the variable is assigned",
        f"{KERAS}/backend/torch/core.py",
    ),
    "transform_level": Internal(
        "torch._C._functorch:maybe_current_level",
        "whether a function runs inside of `torch.vmap` or `torch.func.grad`",
        f"{_PYTORCH}/torch/csrc/functorch/init.cpp",
    ),
    "variable_init": Internal(
        "keras.src.backend.common:KerasVariable.__init__",
        "patched while proving: variables that a trial creates are reset",
        f"{KERAS}/backend/common/variables.py",
        "(self, initializer, shape=None, dtype=None, trainable=True, autocast=True, "
        "aggregation='none', synchronization='auto', name=None, layout=None, **kwargs)",
    ),
    "TorchDispatchMode": Internal(
        "torch.utils._python_dispatch:TorchDispatchMode",
        "records operators below autograd; documented, but in a private module",
        f"{_PYTORCH}/torch/utils/_python_dispatch.py",
        "(_dispatch_key=None)",
        ("__torch_dispatch__",),
    ),
    "standalone_compile": Internal(
        "torch._inductor:standalone_compile",
        "compiles a recorded step as a whole, without tracing Python again",
        f"{_PYTORCH}/torch/_inductor/__init__.py",
        "(gm, example_inputs, *, dynamic_shapes='from_graph', options=None, aot=False, "
        "donate_graph_module=False, fake_mode=None)",
    ),
    "FakeTensorMode": Internal(
        "torch._subclasses.fake_tensor:FakeTensorMode",
        "describes the inputs of a compiled step without memory for them",
        f"{_PYTORCH}/torch/_subclasses/fake_tensor.py",
    ),
    "ShapeEnv": Internal(
        "torch.fx.experimental.symbolic_shapes:ShapeEnv",
        "which the mode needs, although all shapes are fixed",
        f"{_PYTORCH}/torch/fx/experimental/symbolic_shapes.py",
    ),
    "moments": Internal(
        "keras.src.backend.torch.nn:moments",
        "patched on several processes: the moments are those of the whole batch",
        f"{KERAS}/backend/torch/nn.py",
        "(x, axes, keepdims=False, synchronized=False)",
    ),
    "C": Internal(
        "torch:_C",
        "replays call operators below autograd by their C functions, which takes less time",
        f"{_PYTORCH}/torch/_C/__init__.pyi.in",
        members=(
            "_AutoDispatchBelowAutograd",
            "_VariableFunctions",
            "TensorBase",
            "DisableTorchFunction",
        ),
    ),
    **{
        f"__i{name}__": Internal(
            f"torch:Tensor.__i{name}__",
            "patched in steps: Keras changes its arguments with it, such as sample weights",
            f"{_PYTORCH}/torch/_tensor.py",
        )
        for name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"]
    },
}

ATTRIBUTES: dict[str, Attribute] = {
    "_schema": Attribute(
        "OpOverload", "which arguments an operator changes or returns", f"{_PYTORCH}/torch/_ops.py"
    ),
    "_op": Attribute(
        "OpOverload", "calls an operator without its Python wrapper", f"{_PYTORCH}/torch/_ops.py"
    ),
    "_unsafe_view": Attribute(
        "torch.ops.aten",
        "the operator that a matrix product of more dimensions records",
        f"{_PYTORCH}/aten/src/ATen/native/native_functions.yaml",
    ),
    **{
        name: Attribute(
            "torch.ops.aten",
            "an operator whose `alpha` may be a tensor in a step that Inductor compiles",
            f"{_PYTORCH}/aten/src/ATen/native/native_functions.yaml",
        )
        for name in ("_foreach_add", "_foreach_add_", "_foreach_sub", "_foreach_sub_")
    },
    "_native_batch_norm_legit": Attribute(
        "torch.ops.aten",
        "the operator whose schema declares that it changes its statistics",
        f"{_PYTORCH}/aten/src/ATen/native/native_functions.yaml",
    ),
    "_cdata": Attribute(
        "UntypedStorage and Generator",
        "the address of the C++ object: PyTorch creates a new Python object for each access",
        f"{_PYTORCH}/torch/_C/__init__.pyi.in",
    ),
    "_base": Attribute(
        "Tensor", "whose memory a view shares", f"{_PYTORCH}/torch/_C/__init__.pyi.in"
    ),
    "_torch_params": Attribute(
        "Layer",
        "the parameters that Keras collected while variables had the values of a scope",
        f"{KERAS}/backend/torch/layer.py",
    ),
    "_modules": Attribute(
        "Layer",
        "layers that are attributes are held there, as Keras layers are PyTorch modules",
        f"{_PYTORCH}/torch/nn/modules/module.py",
    ),
}

get_device: Any = INTERNALS["get_device"].resolve()
TorchDispatchMode: Any = INTERNALS["TorchDispatchMode"].resolve()
C: Any = INTERNALS["C"].resolve()

Call = Callable[..., Any]

PART_BYTES: Final = 64 * 2**20
"""Variables of so many bytes are updated together."""


@contextmanager
def capturable_keras(call: Call) -> Generator[None]:
    """Make functions of Keras record their reads of tensors in this context, in this thread.

    Args:
        call: Calls a function of tensors, and records it as one operation.
    """
    replaced: Mapping[str, Any] = {
        "torch_seed_generator": lambda seed: call(_Seeded(), _sum_of_seed(seed)),
        "gamma": _drawn(call, INTERNALS["gamma"].resolve()),
        "beta": _drawn(call, INTERNALS["beta"].resolve()),
        "binomial": _drawn(call, INTERNALS["binomial"].resolve()),
        # Dividing by tensors gives the same as dividing by NumPy numbers.
        "nadam_core": SimpleNamespace(convert_to_numpy=lambda x: x),
    }
    with ExitStack() as stack:
        for name, replacement in replaced.items():
            internal = INTERNALS[name]
            stack.enter_context(internal.replaced(in_this_thread(replacement, internal.resolve())))
        yield


@contextmanager
def updates_in_parts() -> Generator[None]:
    """Let Adam and AdamW update large variables one after the other, with the same results.

    Updating all at once needs up to four times the memory of the weights.
    """
    original: Call = INTERNALS["adam_update"].resolve()

    def update(self: Any, grads: Any, variables: Any, learning_rate: Any) -> None:
        for part in _parts([variable.value for variable in variables]):
            original(self, grads[part], variables[part], learning_rate)

    with INTERNALS["adam_update"].replaced(update):
        yield


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

    Cells by themselves remain where the operator cannot be used: for other activations and types,
    and inside nested `gradients`, since it can be differentiated only once.
    """
    by_cells: Call = INTERNALS["lstm_by_cells"].resolve()
    fused: Call = INTERNALS["lstm"].resolve()

    def lstm(inputs: Any, h: Any, c: Any, kernel: Any, recurrent: Any, bias: Any, *how: Any) -> Any:
        activation, recurrent_activation, return_sequences, batch_first = how
        # Copies, since the state of a stateful layer changes in place before the backward pass.
        usual = activation is keras.activations.tanh
        usual = usual and recurrent_activation is keras.activations.sigmoid
        if not (usual and batch_first and _is_fusible(inputs)):
            return by_cells(inputs, h, c, kernel, recurrent, bias, *how)
        if bias is None:  # the operator has one
            bias = kernel.new_zeros(kernel.shape[1])
        return fused(inputs, h, c, kernel, recurrent, bias, return_sequences, inputs.device)

    replacement = in_this_thread(lstm, by_cells)
    with INTERNALS["lstm_by_cells"].replaced(replacement):
        yield


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
    first, second = seed_generator.draw_seed(seed)
    return first + second


class _Seeded:
    """Seeds a generator as `keras.random` does, from the sum of a seed's two parts.

    The generator is created once, since creating one takes longer than seeding it.
    """

    def __init__(self) -> None:
        self._generator = torch.Generator(device=get_device())

    def __call__(self, total: Any) -> torch.Generator:
        return self._generator.manual_seed(int(total) & 0xFFFFFFFF)


class _Drawn:
    """A Keras function that temporarily seeds PyTorch's global generator, as one operation."""

    draws = True

    def __init__(self, original: Call, shape: Any, dtype: Any, names: Any) -> None:
        self._original, self._shape, self._dtype, self._names = original, shape, dtype, names

    def __call__(self, total: Any, *parameters: Any) -> Any:
        named = dict(zip(self._names, parameters, strict=True))
        seed = int(total) & 0xFFFFFFFF
        return self._original(self._shape, dtype=self._dtype, seed=seed, **named)


def _drawn(call: Call, original: Call) -> Call:
    """Return a replacement for such a function that records it."""

    def draw(shape: Any, dtype: Any = None, seed: Any = None, **parameters: Any) -> Any:
        function = _Drawn(original, shape, dtype, list(parameters))
        tensors = [keras.ops.convert_to_tensor(x) for x in parameters.values()]
        return call(function, _sum_of_seed(seed), *tensors)

    return draw
