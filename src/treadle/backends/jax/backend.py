"""The JAX backend: a `Scope` makes a step a pure function of the state, so that jit can compile it.

User code does not pass state explicitly. The file is as long as the protocol
`backends.base.Backend` requires: one class implements all of it.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ...core import structures
from ...core.cores import cores
from ...core.options import Options
from ...core.processes import ProcessGroup, process_group
from ...core.split_arrays import StoredParts
from ...errors import ConfigurationError
from .. import hints
from ..base import Caller, Executor, RefusedDistribution
from ..eager import EagerExecutor
from ..program import Program
from ..scope import Scope
from ..step_context import StepContext, deeper, running
from ..types import Losses, Tensor, Variable, unweighted
from . import layouts, processes
from .calls import JitCaller
from .control_flow import JaxControlFlow
from .layouts import active_layouts, adopt, layout_of, standard
from .patches import Var, get_opaque_trace_state, jaxpr_as_fun, keras_random
from .pure import Pure, Split, stateful
from .ranges import computed
from .trace import tracing
from .windows import JaxExecutor, device_leaves

_OUTSIDE = get_opaque_trace_state()


class JaxBackend(JaxControlFlow):
    """The backend for Keras on JAX."""

    name = "jax"
    compilers = ()
    _had_float64 = False  # whether JAX's 64-bit mode was on before Treadle enabled it

    def is_native_variable(self, thing: Any) -> bool:
        """Return False: JAX has no variables of its own."""
        return False

    def native_children(self, thing: Any) -> Mapping[str, Any] | None:
        """Return None: JAX has no modules of its own."""
        return None

    def differentiate(
        self,
        function: Callable[[Sequence[Tensor]], tuple[Losses, Any]],
        variables: Sequence[Variable],
        inputs: Sequence[Tensor],
        groups: Mapping[str, Sequence[int]],
    ) -> tuple[Any, dict[str, list[Tensor | None]]]:
        """Differentiate a jaxpr of the objective, which also shows what each loss depends on."""
        pure = Pure(variables, differentiated=True)
        leaves = [jnp.asarray(v.value) for v in variables] + [jnp.asarray(x) for x in inputs]
        count = len(variables)

        def losses_and_result(inputs: Sequence[Tensor]) -> Any:
            losses, result = function(inputs)
            return {name: unweighted(loss) for name, loss in losses.items()}, result

        def values_to_losses(leaves: Sequence[Tensor]) -> Any:
            with deeper():
                return pure(leaves[:count], lambda: losses_and_result(leaves[count:]))

        with stateful():
            closed, shapes = jax.make_jaxpr(values_to_losses, return_shape=True)(leaves)
            names = list(shapes[0])  # as JAX orders a dict's leaves
            structure = jax.tree.structure(shapes)
            if any(isinstance(x, Tracer) for x in [*leaves, *closed.consts]):
                run: Callable[..., Any] = lambda *leaves: structure.unflatten(  # noqa: E731
                    jaxpr_as_fun(closed)(*leaves)
                )
            else:  # nothing is traced: run the Python code itself, so that its values are concrete
                run = lambda *leaves: values_to_losses(leaves)  # noqa: E731
            gradients, aux = _gradients(run, leaves, names)
            result = pure.release(aux)
        reach = {name: _reached(closed.jaxpr, output) for output, name in enumerate(names)}
        return result, {
            name: [gradients[name][i] if i in reach[name] else None for i in group]
            for name, group in groups.items()
        }

    def undifferentiated(self) -> AbstractContextManager[Any]:
        """Return an empty context: intermediate results are only stored in a transformation."""
        return nullcontext()

    def reads_of(self, written: frozenset[int]) -> AbstractContextManager[Any]:
        """Return an empty context: JAX arrays never change."""
        return nullcontext()

    def gathered(self, x: Tensor) -> Tensor:
        """Return the tensor, which has all rows of the batch already."""
        return x

    def total(self, x: Tensor) -> Tensor:
        """Return the tensor, which was computed from all rows."""
        return x

    def place(self) -> Any:
        """Return the state of the current trace."""
        now = get_opaque_trace_state()
        return None if now == _OUTSIDE else now

    def remat(
        self, function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Run `jax.checkpoint` on a new function each time, since it caches traces by function."""
        pure = Pure((), False)
        _, aux = jax.checkpoint(lambda inputs: pure((), lambda: (None, function(*inputs))))(inputs)
        return pure.release(aux)

    def abstract_run(self, function: Callable[[Any], Any], batch: Any, step: StepContext) -> Scope:
        """Trace the step for its shapes, without computing values."""
        scope = Scope()

        def abstract(leaves: Sequence[Tensor]) -> Any:
            with running(step):
                tensors = Split(function(structures.pack(batch, leaves))).tensors
            return [ends for _, ends in step.ranges.used] if step.ranges else [], tensors

        arrays = device_leaves(batch)
        with keras_random(), scope:  # variables are initialized at the scope's end, after the trace
            closed = jax.make_jaxpr(abstract)(arrays)
        if step.ranges is not None and step.ranges.used:
            step.ranges.used = computed(step.ranges.used, closed, arrays)
        return scope

    def abstract_update(
        self, function: Callable[[Sequence[Any]], Any], tensors: Sequence[Any]
    ) -> Scope:
        """Trace the call as a part of the step."""
        with Scope() as scope:
            function(tensors)
        return scope

    def compiler(self, steps: int | None) -> str:
        """Return `"auto"`: the plan chooses."""
        return "auto"

    def executor(self, program: Program, options: Options) -> Executor:
        """Return the executor of the jitted loop, or the eager one."""
        if options.execution == "eager":
            device, several = jax.default_backend(), active_layouts()
            if several is not None:
                adopt(program.seeds)
            put = self.to_device if several is None else lambda x: several.put(standard(x))
            return EagerExecutor(program, _eager_step, put, processes.whole, device)
        return JaxExecutor(program)

    def caller(
        self, program: Program, reads: Sequence[Variable] | None = None, soon: bool = True
    ) -> Caller:
        """Jit a function over the state; its assignments are discarded."""
        return JitCaller(program, reads)

    def explain(self, error: Exception) -> str:
        """Explain errors of tracing."""
        if isinstance(error, jax.errors.TracerBoolConversionError):
            return hints.CONDITION
        found = hints.common(error, self.name)
        if found:
            return found
        if isinstance(error, jax.errors.TracerArrayConversionError):
            return hints.numpy_called(error)
        if isinstance(
            error, (jax.errors.ConcretizationTypeError, jax.errors.TracerIntegerConversionError)
        ):
            return hints.NUMBER
        if isinstance(error, jax.errors.UnexpectedTracerError):
            return hints.KEPT
        if isinstance(error, OverflowError):
            return hints.INTEGERS
        value = isinstance(error, AttributeError) and error.name in ("numpy", "item", "tolist")
        return hints.VALUE if value else ""

    def bfloat16_pays(self) -> bool:
        """Return False: on CPUs bfloat16 has 0.6 (matmul) to 0.9 (conv) times float32's speed."""
        return False

    def distribute(self, devices: Any) -> None:
        """Set Keras' distribution: `DataParallel` over the first devices, or a given one."""
        layouts.distribute(devices)

    def join_processes(self, group: ProcessGroup, address: str) -> None:
        """Let JAX see the devices of all processes; it must not have started yet."""
        processes.join(group, address)

    def summation(self) -> None:
        """Return None: programs run on the devices of all processes."""

    def computes_own_rows(self, examples: int) -> bool:
        """Return whether the layout of a batch gives the devices of each process its rows."""
        return layouts.gives_own_rows(examples)

    def refused_distribution(
        self, variables: Sequence[Variable], built: bool
    ) -> RefusedDistribution | None:
        """Refuse several processes, and variables whose layout is not that of the distribution."""
        return layouts.refused(variables, built)

    def computes_on(self) -> dict[str, Any]:
        """Return the devices and the number of threads."""
        return {"devices": layouts.described(), "threads": cores()}

    def use_deterministic_algorithms(self, late: bool) -> None:
        """Check that XLA reads the flag for deterministic operators: it does so only once."""
        if late and jax.default_backend() != "cpu":
            raise ConfigurationError(
                "setup(deterministic=True) must come before Keras is imported, since XLA reads its "
                "flags when it starts: start again with the call moved up, or with the environment "
                "variable XLA_FLAGS=--xla_gpu_deterministic_ops=true"
            )

    def use_float64(self, on: bool) -> None:
        """Enable JAX's 64-bit mode, or set it to what it was before."""
        layouts.forget_data_sets()
        if on:
            self._had_float64 = bool(jax.config.read("jax_enable_x64"))
        jax.config.update("jax_enable_x64", on or self._had_float64)

    def trace(self, directory: Path) -> AbstractContextManager[None]:
        """Return a context in which the profiler records."""
        return tracing(directory)

    def own_random(self) -> AbstractContextManager[Any]:
        """Return an empty context: JAX has no global random state."""
        return nullcontext()

    def read(self, variable: Variable) -> Any:
        """Return a copy of a variable's value as a NumPy array."""
        return np.array(processes.whole(variable._value))

    def stage(self, variable: Variable, buffer: Any) -> Any:
        """Return the value itself, as JAX arrays are immutable; on a CPU without a copy."""
        x = variable._value
        return processes.own_parts(x) if processes.is_split(x) else np.asarray(x)

    def write(self, variable: Variable, value: Any) -> None:
        """Set a variable, which keeps its layout; on several devices, each is sent its part."""
        layout = layout_of(variable)
        if isinstance(value, StoredParts) and layout is not None:
            value = processes.put_stored(value, layout, jnp.dtype(variable._dtype))
        elif layout is not None and not isinstance(value, jax.Array):
            value = np.asarray(value, dtype=jnp.dtype(variable._dtype))
        else:
            value = jnp.asarray(value, dtype=variable._dtype)
        variable._direct_assign(value)

    def keep(self, variable: Variable) -> Any:
        """Return the value itself, as JAX arrays are immutable."""
        return variable._value

    def is_split(self, variables: Iterable[Variable]) -> bool:
        """Return whether devices of other processes hold parts of a variable."""
        return processes.several() and any(processes.is_split(v._value) for v in variables)

    def finite(self, variables: Sequence[Variable]) -> Sequence[bool]:
        """Check all variables in one program; on a CPU with NumPy, which needs no compilation."""
        values = [v._value for v in variables]
        if jax.default_backend() == "cpu":
            found = [processes.is_finite(x) for x in values]
            if not self.is_split(variables):
                return found
            all_found = process_group().exchange(found, "checking that values are finite")
            return [all(flags) for flags in zip(*all_found, strict=True)]
        return np.asarray(_finite(values)).tolist()

    def to_numpy(self, tensor: Any) -> Any:
        """Return a tensor as a NumPy array."""
        return processes.whole(tensor)

    def to_device(self, array: Any) -> Tensor:
        """Convert an array to a JAX array; 64-bit types become 32-bit, unless x64 is enabled."""
        return jnp.asarray(standard(array))


@jax.jit
def _finite(values: Sequence[Tensor]) -> Tensor:
    return jnp.stack([jnp.isfinite(x).all() for x in values])  # fetched together


def _gradients(
    run: Callable[..., Any], leaves: Sequence[Tensor], names: Sequence[str]
) -> tuple[dict[str, Sequence[Tensor]], Any]:
    """Differentiate each loss that `run` returns, with one shared forward pass."""
    if len(names) == 1:

        def single(*leaves: Any) -> Any:
            losses, aux = run(*leaves)
            return losses[names[0]], aux

        loss, pull, aux = jax.vjp(single, *leaves, has_aux=True)
        return {names[0]: pull(jnp.ones_like(loss))}, aux
    losses, push, aux = jax.linearize(run, *leaves, has_aux=True)
    gradients: dict[str, Sequence[Tensor]] = {}
    for name in names:  # one by one: otherwise another, infinite loss would contribute 0 * inf
        pull = jax.linear_transpose(lambda *t, name=name: push(*t)[name], *leaves)
        gradients[name] = pull(jnp.ones_like(losses[name]))
    return gradients, aux


def _reached(jaxpr: Any, output: int) -> set[int]:
    """Return the inputs of a jaxpr that one output depends on differentiably.

    Integers and booleans carry no gradient, and `stop_gradient` cuts it. The outputs of loops are
    assumed to depend on all inputs of the loop.
    """
    last = jaxpr.outvars[output]
    needed: set[Any] = {last} if isinstance(last, Var) else set()
    for equation in reversed(jaxpr.eqns):
        hit = [i for i, v in enumerate(equation.outvars) if v in needed]
        if not hit or equation.primitive.name == "stop_gradient":
            continue
        used = range(len(equation.invars))
        inner = next(
            (
                equation.params[key]
                for key in ("jaxpr", "call_jaxpr", "fun_jaxpr")
                if key in equation.params
            ),
            None,
        )
        if inner is not None and equation.primitive.name not in ("scan", "while"):
            inner = getattr(inner, "jaxpr", inner)
            if len(inner.invars) == len(equation.invars):
                used = sorted(set[int]().union(*(_reached(inner, i) for i in hit)))
        for i in used:
            variable = equation.invars[i]
            if isinstance(variable, Var) and _is_float(variable.aval):
                needed.add(variable)
    return {i for i, v in enumerate(jaxpr.invars) if v in needed}


def _is_float(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


@contextmanager
def _eager_step(program: Program) -> Generator[None]:
    with stateful():
        yield


BACKEND = JaxBackend()
