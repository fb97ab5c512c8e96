"""The PyTorch backend: steps are captured and replayed; only objectives record gradients."""

import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ...core import structures
from ...core.float64 import CONVERTED
from ...core.keras_internals import in_stateless_scope
from ...core.options import Options
from ...core.processes import ProcessGroup
from .. import hints
from ..base import Caller, Executor, RefusedDistribution, single_device_only
from ..eager import EagerExecutor
from ..processes.agreement import refusal
from ..processes.group import processes, summation
from ..processes.rows import rows, seen, shared
from ..processes.shared import SharedExecutor
from ..program import Program
from ..reads import copied
from ..recomputing import Recomputed, no_assignments
from ..scope import DirectScope, Scope, hand_losses, hand_outward, restored
from ..step_context import StepContext, context, deeper, running
from ..types import Losses, Tensor, Variable, Weighted, unweighted
from .calls import CALLS_ALONE, CapturingCaller, EagerCaller
from .capture.cuda_graph import CUDA_GRAPH
from .capture.inductor import INDUCTOR, pays
from .capture.proof import Captured
from .capture.trials import device
from .capture.windows import CAPTURED, CaptureExecutor, is_shareable, placed
from .control_flow import TorchControlFlow
from .functional import differentiated
from .in_place import kept_arguments, kept_reads, whole_assignments
from .patches import INTERNALS, fused_lstm, updates_in_parts
from .processes.engine import connect
from .trace import tracing

_OUTSIDE = re.compile(r"Target -?\d+ is out of bounds|index out of range in self")
"""What PyTorch's operators for losses and embeddings say on a CPU."""


class TorchBackend(TorchControlFlow):
    """The backend for Keras on PyTorch."""

    name = "torch"
    compilers = (INDUCTOR, CUDA_GRAPH, CAPTURED)

    def is_native_variable(self, thing: Any) -> bool:
        """Return False: only Keras variables are part of the state."""
        return False

    def native_children(self, thing: Any) -> Mapping[str, Any] | None:
        """Return None: PyTorch modules are wrapped in `keras.layers.TorchModuleWrapper`."""
        return None

    def differentiate(
        self,
        function: Callable[[Sequence[Tensor]], tuple[Losses, Any]],
        variables: Sequence[Variable],
        inputs: Sequence[Tensor],
        groups: Mapping[str, Sequence[int]],
    ) -> tuple[Any, dict[str, list[Tensor | None]]]:
        """Differentiate, keeping what the objective reads until its gradients are computed."""
        with kept_reads() if context().depth == 0 else nullcontext():
            return self._differentiate(function, variables, inputs, groups)

    def _differentiate(
        self,
        function: Callable[[Sequence[Tensor]], tuple[Losses, Any]],
        variables: Sequence[Variable],
        inputs: Sequence[Tensor],
        groups: Mapping[str, Sequence[int]],
    ) -> tuple[Any, dict[str, list[Tensor | None]]]:
        """Differentiate with `torch.autograd.grad`, keeping the graph inside another objective."""
        if self.place() is not None:
            return differentiated(function, variables, inputs, groups)
        mine, whole = rows(), seen()
        scoped = _scoped() or any(not v.value.requires_grad for v in variables)
        with deeper() as nested, torch.enable_grad():
            sources = [_leaf(v.value, fresh=scoped) for v in variables]
            inputs = [_leaf(x, fresh=True) for x in inputs]
            scope = Scope(zip(variables, sources, strict=True), True) if scoped else None
            with scope or nullcontext():
                weighted, result = function(inputs)
                own = losses = {name: unweighted(loss) for name, loss in weighted.items()}
                if not variables or (nested and not (mine and mine.sums_nested)):
                    mine = None
                shares = {} if mine is None else mine.shares(weighted)
                if shares:
                    losses = {name: shared(loss, shares[name]) for name, loss in own.items()}
        gradients: dict[str, list[Tensor | None]] = {}
        last = len(groups) - 1
        for position, (name, group) in enumerate(groups.items()):
            chosen = [[*sources, *inputs][i] for i in group]
            if not losses[name].requires_grad:
                gradients[name] = [None] * len(chosen)
                continue
            with no_assignments():
                gradients[name] = list(
                    torch.autograd.grad(
                        losses[name],
                        chosen,
                        allow_unused=True,
                        retain_graph=nested or position < last,
                        create_graph=nested,
                    )
                )
        if scope is not None:
            hand_outward(scope.changed())
            hand_losses(scope)
        if nested:
            return result, gradients if mine is None else mine.summed(gradients)
        if mine is not None:
            return mine.reduced(_detached(result), gradients, own, shares)
        if whole is not None and variables:
            whole.note(own, gradients)
        return _detached(result), gradients

    def undifferentiated(self) -> AbstractContextManager[Any]:
        """Return `torch.no_grad()`."""
        return torch.no_grad()

    def reads_of(self, written: frozenset[int]) -> AbstractContextManager[Any]:
        """Return a context in which these variables are read as copies.

        Inside an objective, weights are not: autograd needs them. `differentiate` copies results.
        """
        return copied(INTERNALS["value"], written, _copy)

    def gathered(self, x: Tensor) -> Tensor:
        """Return the rows of all processes."""
        mine = rows()
        return x if mine is None else mine.gathered(x)

    def total(self, x: Tensor) -> Tensor:
        """Return the sum over the processes."""
        mine = rows()
        return x if mine is None else mine.total(x)

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
        try:
            with torch.random.fork_rng(), running(step), kept_arguments(), scope:
                function(structures.mapped(self.to_device, batch))
        finally:
            for variable in scope.foreign.values():  # gradients from a native step's backward()
                if variable._value is not None:
                    variable._value.grad = None
            for layer in step.layers:  # Keras collected parameters with the scope's values
                layer._modules.pop("_torch_params", None)
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

    def executor(self, program: Program, options: Options) -> Executor:
        """Return the executor of the captured step, or the eager one."""
        group = processes()

        def agreed(captured: Captured | str) -> Captured | str:
            if group is None:
                return captured
            if isinstance(captured, str):
                return refusal(captured, (), group)
            return refusal("", captured.messages, group) or captured

        def make(program: Program) -> Executor:
            if options.execution == "eager":
                return EagerExecutor(program, _step, self.to_device, self.to_numpy, device())
            return CaptureExecutor(program, options, _step, self.to_device, agreed)

        if group is None:
            return make(program)
        return SharedExecutor(program, make, _step, self.to_device, group)

    def caller(
        self, program: Program, reads: Sequence[Variable] | None = None, soon: bool = True
    ) -> Caller:
        """Return a caller that runs the program eagerly, or captures it."""
        if reads is None:
            return EagerCaller(program, self.to_device)
        return CapturingCaller(program, reads, self.to_device, _step, 1 if soon else CALLS_ALONE)

    def explain(self, error: Exception) -> str:
        """Explain errors of PyTorch tensors."""
        found = hints.common(error, self.name)
        if isinstance(error, IndexError) and _OUTSIDE.search(str(error)):
            return hints.OUT_OF_RANGE
        numpy = hints.innermost(error) == "numpy" or "Can't call numpy() on Tensor" in str(error)
        return found or (hints.numpy_called(error) if numpy else "")

    def bfloat16_pays(self) -> bool:
        """Return True on a CPU, where bfloat16 was 1.3 (conv) to 1.9 (matmul) times as fast."""
        return not torch.cuda.is_available()

    def distribute(self, devices: Any) -> None:
        """Raise an error: a loop trains on one device."""
        raise single_device_only(devices, self.name)

    def join_processes(self, group: ProcessGroup, address: str) -> None:
        """Connect this process to the others with `torch.distributed`."""
        connect(group, address)

    def summation(self) -> Callable[[Any], Any] | None:
        """Return a function that sums an array over all processes; None if there is one."""
        return summation(self.to_device, self.to_numpy)

    def computes_own_rows(self, examples: int) -> bool:
        """Return True: each process takes its rows of every batch."""
        return True

    def refused_distribution(
        self, variables: Sequence[Variable], built: bool
    ) -> RefusedDistribution | None:
        """Return None: Keras does not distribute variables on PyTorch."""
        return None

    def computes_on(self) -> dict[str, Any]:
        """Return the devices and the number of threads."""
        kind = device()
        if kind == "cuda":
            kind = f"{torch.cuda.device_count()} × gpu"
        group = processes()
        if group is not None:
            kind = f"{kind} ({group.size} processes)"
        return {"devices": kind, "threads": torch.get_num_threads()}

    def use_deterministic_algorithms(self, late: bool) -> None:
        """Switch PyTorch's deterministic algorithms on; operators without one raise an error."""
        torch.use_deterministic_algorithms(True)

    def use_float64(self, on: bool) -> None:
        """Drop data sets; PyTorch's default dtype stays, since Keras' `segment_sum` needs it."""
        placed.clear()

    def trace(self, directory: Path) -> AbstractContextManager[None]:
        """Return a context in which the profiler records."""
        return tracing(directory)

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

    def is_split(self, variables: Iterable[Variable]) -> bool:
        """Return False: every process holds all variables."""
        return False

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


def _scoped() -> bool:
    """Return whether variables have the values of a scope."""
    return in_stateless_scope()


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


@contextmanager
def _step(program: Program) -> Generator[None]:
    """Record gradients inside objectives only; a native step records its own everywhere."""
    gradients = nullcontext() if program.native else torch.no_grad()
    # A native training step may differentiate twice, which the fused operator does not allow.
    fuses = not program.native or program.name == "eval_step"
    fused = fused_lstm() if fuses else nullcontext()
    with updates_in_parts(), fused, whole_assignments(), kept_arguments(), gradients:
        yield


BACKEND = TorchBackend()
