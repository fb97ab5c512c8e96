"""The PyTorch backend: steps are captured and replayed; only objectives record gradients."""

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ...core import structures
from ...core.float64 import CONVERTED
from ...core.keras_internals import stateless_scope
from ...core.options import Options
from .. import hints
from ..background import take_back
from ..base import Backend, Caller, Executor
from ..eager import EagerExecutor
from ..models import build_model
from ..program import Program
from ..reads import copied
from ..recomputing import Recomputed
from ..scope import DirectScope, Scope, hand_losses, hand_outward, restored
from ..step_context import StepContext, context, deeper, running
from ..traces import TRACE
from ..types import Losses, Tensor, Variable, Weighted, unweighted
from .calls import CALLS_ALONE, CapturingCaller, EagerCaller
from .capture.code import Captured
from .capture.cuda_graph import CUDA_GRAPH
from .capture.inductor import INDUCTOR, pays
from .capture.trials import device
from .capture.windows import CAPTURED, CaptureExecutor, is_shareable, placed
from .control_flow import TorchControlFlow
from .functional import differentiated, gradients_of
from .in_place import kept_arguments, kept_reads, whole_assignments
from .models import in_mode, is_of_keras, recorded_backward
from .patches import INTERNALS, fused_lstm, updates_in_parts

_OUTSIDE = re.compile(
    r"Target -?\d+ is out of bounds|index out of range in self|"
    "Class values must be smaller than num_classes"
)
"""What PyTorch's operators for losses and embeddings say on a CPU; the last before Keras 3.14."""


class TorchBackend(TorchControlFlow, Backend):
    """The backend for Keras on PyTorch."""

    name = "torch"
    compilers = (INDUCTOR, CUDA_GRAPH, CAPTURED)
    # To build and capture a small step takes as long as 16 to 24 of its steps as Python, which have
    # the same bits.
    rare_steps: Mapping[str, int] = {CAPTURED: 16}
    bfloat16_pays = True  # it was 1.3 (conv) to 1.9 (matmul) times as fast

    def differentiate(
        self,
        function: Callable[[Sequence[Tensor]], tuple[Losses, Any]],
        variables: Sequence[Variable],
        inputs: Sequence[Tensor],
        groups: Mapping[str, Sequence[int]],
    ) -> tuple[Any, dict[str, list[Tensor | None]]]:
        """Differentiate with `torch.autograd.grad`, keeping the graph inside another objective.

        What the objective reads is kept until its gradients are computed.
        """
        with kept_reads() if context().depth == 0 else nullcontext():
            if self.place() is not None:
                return differentiated(function, variables, inputs, groups)
            scoped = stateless_scope() is not None
            scoped = scoped or any(not v.value.requires_grad for v in variables)
            with deeper() as nested, torch.enable_grad():
                sources = [_leaf(v.value, fresh=scoped) for v in variables]
                inputs = [_leaf(x, fresh=True) for x in inputs]
                scope = Scope(zip(variables, sources, strict=True), True) if scoped else None
                with scope or nullcontext():
                    weighted, result = function(inputs)
                    losses = {name: unweighted(loss) for name, loss in weighted.items()}
            gradients = gradients_of(losses, [*sources, *inputs], groups, again=nested)
            if scope is not None:
                hand_outward(scope.changed())
                hand_losses(scope)
            return result if nested else _detached(result), gradients

    def undifferentiated(self) -> AbstractContextManager[Any]:
        """Return `torch.no_grad()`."""
        return torch.no_grad()

    def reads_of(self, written: frozenset[int]) -> AbstractContextManager[Any]:
        """Return a context in which these variables are read as copies.

        Inside an objective, weights are not: autograd needs them. `differentiate` copies results.
        """
        return copied(INTERNALS["value"], written, _copy)

    def place(self) -> Any:
        """Return the level of `torch.vmap` and `torch.func.grad`."""
        return INTERNALS["transform_level"].resolve()()

    def remat(
        self, function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Run PyTorch's `checkpoint`, which also restores PyTorch's random state."""
        again = Recomputed(function)
        # Early stopping raises an exception, whose frames Keras would keep alive.
        with set_checkpoint_early_stop(False):
            result = checkpoint(lambda *tensors: again(tensors), *inputs, use_reentrant=False)
        again.release()
        return result

    def abstract_run(self, function: Callable[[Any], Any], batch: Any, step: StepContext) -> Scope:
        """Run a real batch in a scope; PyTorch's random state is restored afterwards."""
        scope = Scope()
        take_back()
        try:
            with torch.random.fork_rng(), running(step), kept_arguments(), scope:
                function(structures.mapped(self.to_device, batch))
        finally:
            for variable in scope.foreign.values():  # gradients from a native step's backward()
                if variable._value is not None:
                    variable._value.grad = None
            for layer in step.layers:  # Keras collected parameters with the scope's values
                if hasattr(layer, "_torch_params"):
                    del layer._torch_params
        return scope

    def abstract_update(
        self, function: Callable[[Sequence[Any]], Any], tensors: Sequence[Any]
    ) -> Scope:
        """Run the call without values; if that fails, run it and restore the variables."""
        try:
            with keras.device("meta"), DirectScope() as scope:
                function([None if x is None else keras.ops.convert_to_tensor(x) for x in tensors])
        except Exception:
            scope = restored(lambda: function(tensors), self)
        return scope

    def compiler(self, steps: int | None) -> str:
        """Return `"inductor"` where compiling pays, see `inductor.pays`, else `"captured"`."""
        return INDUCTOR if pays(device(), steps) else CAPTURED

    def build_model(self, model: Any, batch: Any) -> None:
        """Build the model from the shapes of the batch."""
        build_model(model, batch)

    def model_step(self, model: Any, name: str, batch: Any) -> Any:
        """Call the model's step, whose `backward()` is recorded as a differentiation."""
        if name == "train_step":
            # A step or a loss of its own may differentiate twice, see `around`.
            plain = all(is_of_keras(model, method) for method in ("train_step", "compute_loss"))
            fused = fused_lstm() if plain else nullcontext()
            mode = in_mode(model, training=True)
            with mode, torch.enable_grad(), fused, recorded_backward(model):
                return _detached(model.train_step(batch))
        with in_mode(model, training=False), torch.no_grad():
            return getattr(model, name)(batch)

    def executor(self, program: Program, options: Options) -> Executor:
        """Return the executor of the captured step, or the eager one."""
        return executor(program, options, self)

    def caller(
        self, program: Program, reads: Sequence[Variable] | None = None, soon: bool = True
    ) -> Caller:
        """Return a caller that runs the program eagerly, or captures it."""
        if reads is None:
            return EagerCaller(program, self.to_device)
        return CapturingCaller(program, reads, self.to_device, around, 1 if soon else CALLS_ALONE)

    def explain(self, error: Exception) -> str:
        """Explain errors of PyTorch tensors."""
        found = hints.common(error, self.name)
        if isinstance(error, (IndexError, RuntimeError)) and _OUTSIDE.search(str(error)):
            return hints.OUT_OF_RANGE
        numpy = hints.innermost(error) == "numpy" or "Can't call numpy() on Tensor" in str(error)
        return found or (hints.numpy_called(error) if numpy else "")

    def computes_on(self) -> dict[str, Any]:
        """Return the devices and the number of threads."""
        kind = device()
        if kind == "cuda":
            kind = f"{torch.cuda.device_count()} × gpu"
        return {"devices": kind, "threads": torch.get_num_threads()}

    def use_deterministic_algorithms(self, late: bool) -> None:
        """Switch PyTorch's deterministic algorithms on; operators without one raise an error."""
        torch.use_deterministic_algorithms(True)

    def use_float64(self, on: bool) -> None:
        """Drop data sets; PyTorch's default dtype stays, since Keras' `segment_sum` needs it."""
        placed.clear()

    @contextmanager
    def trace(self, directory: Path) -> Generator[None]:
        """Let PyTorch's profiler record, which writes Perfetto traces itself."""
        directory.mkdir(parents=True, exist_ok=True)
        with profile() as profiler:
            yield
        profiler.export_chrome_trace(str(directory / TRACE))

    def own_random(self) -> AbstractContextManager[Any]:
        """Return a context that restores PyTorch's generator, from which unseeded Dropout draws."""
        return torch.random.fork_rng()

    def read(self, variable: Variable) -> Any:
        """Return a copy of a variable's value as a NumPy array."""
        return np.array(self.to_numpy(variable._value))

    def stage(self, variable: Variable, buffer: Any) -> Any:
        """Copy a variable's value into a buffer."""
        value = variable._value.detach()
        if buffer is None or value.dtype == torch.bfloat16:  # from_numpy has no bfloat16
            return self.read(variable)
        torch.from_numpy(buffer).copy_(value)
        return buffer

    def write(self, variable: Variable, value: Any) -> None:
        """Set a variable."""
        with torch.no_grad():
            variable._value.copy_(keras.ops.convert_to_tensor(value))

    def keep(self, variable: Variable) -> Any:
        """Return a copy of a variable's value."""
        return variable._value.detach().clone()

    def finite(self, variables: Sequence[Variable]) -> Sequence[bool]:
        """Check each variable, and fetch all results at once; on a CPU with NumPy, for speed."""
        values = [v._value.detach() for v in variables]
        if all(x.is_cpu and x.dtype in (torch.float32, torch.float64) for x in values):
            return [bool(np.isfinite(x.numpy()).all()) for x in values]
        return torch.stack([torch.isfinite(x).all() for x in values]).tolist()

    def to_numpy(self, tensor: Any) -> Any:
        """Return a tensor as a NumPy array."""
        return keras.ops.convert_to_numpy(tensor)

    def to_device(self, array: Any) -> Tensor:
        """Convert an array to a tensor; float64 becomes Keras' float type."""
        if isinstance(array, np.ndarray):
            if array.dtype in CONVERTED:
                array = array.astype(keras.config.floatx())
            elif array.flags.carray and is_shareable(array):
                return torch.from_numpy(array).clone()  # Keras does the same, but takes 20 µs
        return keras.ops.convert_to_tensor(array)


def _copy(variable: Variable, value: Tensor) -> Tensor:
    # Also while `remat` recomputes an objective, after it has ended, gradients are enabled.
    differentiated = variable.trainable and torch.is_grad_enabled()
    return value if differentiated else value.detach().clone()


def _leaf(tensor: Tensor, fresh: bool) -> Tensor:
    """Return a tensor to differentiate at, connected to the outer graph only."""
    if not fresh:
        return tensor
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()


def _detached(structure: Any) -> Any:
    def detached(x: Any) -> Any:
        if isinstance(x, Weighted):
            return Weighted(detached(x.value), detached(x.weight))
        if not isinstance(x, torch.Tensor):
            return x
        owner = x if x._base is None else x._base
        if owner.is_leaf and owner.requires_grad:  # a weight, which an optimizer changes in place
            return x.detach().clone()
        return x.detach()

    return structures.mapped(detached, structure)


def executor(
    program: Program,
    options: Options,
    backend: Backend,
    agreed: Callable[[Captured | str], Captured | str] = lambda captured: captured,
) -> Executor:
    """Return the executor of the captured step, or the eager one.

    Args:
        program: The step.
        options: The options of the loop.
        backend: Converts arrays and tensors.
        agreed: Returns the captured step, or the reason why it cannot be used.
    """
    if options.execution == "eager":
        return EagerExecutor(program, around, backend.to_device, backend.to_numpy, device())
    return CaptureExecutor(program, options, around, backend.to_device, agreed)


@contextmanager
def around(program: Program) -> Generator[None]:
    """Return the context of a step, which records gradients inside objectives only.

    A native step records its own everywhere.
    """
    take_back()
    gradients = nullcontext() if program.native else torch.no_grad()
    # A native training step may differentiate twice, which the fused operator does not allow.
    fuses = not program.native or program.name == "eval_step"
    fused = fused_lstm() if fuses else nullcontext()
    with updates_in_parts(), fused, whole_assignments(), kept_arguments(), gradients:
        yield


BACKEND = TorchBackend()
