"""The JAX backend: a `Scope` makes a step a pure function of the state, so that jit can compile it.

User code does not pass state explicitly. The file is as long as the protocol
`backends.base.Backend` requires: one class implements all of it.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ...core import structures
from ...core.options import Options
from ...core.process_settings import cores
from ...core.split_arrays import StoredParts
from ...errors import ConfigurationError
from .. import hints
from ..base import Backend, Caller, Executor, RefusedDistribution
from ..eager import EagerExecutor
from ..models import build_model
from ..program import Program
from ..scope import Scope
from ..step_context import Limit, StepContext, context, deeper, running
from ..traces import TraceEvent, newest, write_trace
from ..types import Losses, Tensor, Variable, unweighted
from . import layouts
from .calls import JitCaller
from .control_flow import JaxControlFlow
from .layouts import active_layouts, adopt, layout_of, standard, standard_leaves
from .patches import INTERNALS, free_layouts, get_opaque_trace_state, jaxpr_as_fun, keras_random
from .pure import Pure, Split, stateful
from .windows import JaxExecutor, primitives

_OUTSIDE = get_opaque_trace_state()


class JaxBackend(JaxControlFlow, Backend):
    """The backend for Keras on JAX."""

    name = "jax"
    bfloat16_pays = False  # it has 0.6 (matmul) to 0.9 (conv) times the speed of float32
    _had_float64 = False  # whether JAX's 64-bit mode was on before Treadle enabled it

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
            is_traced = any(isinstance(x, Tracer) for x in [*leaves, *closed.consts])
            recorder = context().recorder
            may_reuse = not is_traced and recorder is not None and recorder.is_fast
            # A branch could run as Python.
            if may_reuse and not closed.effects and "cond" not in primitives(closed.jaxpr):
                gradients, aux = _reused(closed, structure, names, leaves)
            else:
                run: Callable[..., Any] = (
                    (lambda *leaves: structure.unflatten(jaxpr_as_fun(closed)(*leaves)))
                    if is_traced
                    # Run the Python code itself, so that its values are concrete.
                    else (lambda *leaves: values_to_losses(leaves))
                )
                gradients, aux = _gradients(run, leaves, names)
            result = pure.release(aux)
        reach = {name: _reached(closed.jaxpr, output) for output, name in enumerate(names)}
        return result, {
            name: [gradients[name][i] if i in reach[name] else None for i in group]
            for name, group in groups.items()
        }

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

        arrays = standard_leaves(batch)
        with keras_random(), scope:  # variables are initialized at the scope's end, after the trace
            closed = jax.make_jaxpr(abstract)(arrays)
        if step.ranges is not None and step.ranges.used:
            step.ranges.used = _computed(step.ranges.used, closed, arrays)
        return scope

    def abstract_update(
        self, function: Callable[[Sequence[Any]], Any], tensors: Sequence[Any]
    ) -> Scope:
        """Trace the call as a part of the step."""
        with Scope() as scope:
            function(tensors)
        return scope

    def build_model(self, model: Any, batch: Any) -> None:
        """Build the model from the shapes of the batch."""
        build_model(model, batch, required=True)

    def model_step(self, model: Any, name: str, batch: Any) -> Any:
        """Call the model's step with the values of its variables, and assign those it returns."""
        groups = [model.trainable_variables, model.non_trainable_variables]
        if name == "train_step":
            groups.append([] if model.optimizer is None else model.optimizer.variables)
        if name != "predict_step":
            groups.append(model.metrics_variables)
        state = tuple([v.value for v in group] for group in groups)
        with free_layouts():
            logs, after = getattr(model, name)(state, batch)
        if name == "predict_step":  # it returns one group, which changes nothing
            return logs
        for group, old, new in zip(groups, state, after, strict=True):
            for variable, before, value in zip(group, old, new, strict=True):
                if value is not before:
                    variable.assign(value)
        return logs

    def executor(self, program: Program, options: Options) -> Executor:
        """Return the executor of the jitted loop, or the eager one."""
        if options.execution == "eager":
            device, several = jax.default_backend(), active_layouts()
            if several is not None:
                adopt(program.seeds)
            put = self.to_device if several is None else lambda x: several.put(standard(x))
            return EagerExecutor(program, lambda program: stateful(), put, layouts.whole, device)
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

    def distribute(self, devices: Any) -> None:
        """Set Keras' distribution: `DataParallel` over the first devices, or a given one."""
        layouts.distribute(devices)

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

    @contextmanager
    def trace(self, directory: Path) -> Generator[None]:
        """Let JAX's profiler record, and write its events as a Perfetto trace too."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # otherwise every call of every Python function is traced
        jax.profiler.start_trace(str(directory), profiler_options=options)
        try:
            yield
        finally:
            jax.profiler.stop_trace()
        file = newest(directory, "*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
        spans = (
            TraceEvent(plane.name, line.name, x.name, x.start_ns / 1e3, x.duration_ns / 1e3)
            for plane in data.planes
            for line in plane.lines
            for x in line.events
        )
        write_trace(spans, directory)

    def read(self, variable: Variable) -> Any:
        """Return a copy of a variable's value as a NumPy array."""
        return np.array(layouts.whole(variable._value))

    def stage(self, variable: Variable, buffer: Any) -> Any:
        """Return the value itself, as JAX arrays are immutable; on a CPU without a copy."""
        x = variable._value
        return layouts.own_parts(x) if layouts.is_split(x) else np.asarray(x)

    def write(self, variable: Variable, value: Any) -> None:
        """Set a variable, which keeps its layout; on several devices, each is sent its part."""
        layout, dtype = layout_of(variable), variable._value.dtype
        if isinstance(value, StoredParts) and layout is not None:
            value = layouts.put_stored(value, layout, dtype)
        elif layout is not None and not isinstance(value, jax.Array):
            value = np.asarray(value, dtype=dtype)
        else:
            value = jnp.asarray(value, dtype=dtype)
        variable._direct_assign(value)

    def keep(self, variable: Variable) -> Any:
        """Return the value itself, as JAX arrays are immutable."""
        return variable._value

    def is_split(self, variables: Iterable[Variable]) -> bool:
        """Return whether devices of other processes hold parts of a variable."""
        return layouts.several() and any(layouts.is_split(v._value) for v in variables)

    def finite(self, variables: Sequence[Variable]) -> Sequence[bool]:
        """Check all variables in one program; on a CPU with NumPy, which needs no compilation.

        There, each process checks the parts that it holds.
        """
        values = [v._value for v in variables]
        if jax.default_backend() == "cpu":
            return [layouts.is_finite(x) for x in values]
        return np.asarray(_finite(values)).tolist()

    def to_numpy(self, tensor: Any) -> Any:
        """Return a tensor as a NumPy array."""
        return layouts.whole(tensor)

    def to_device(self, array: Any) -> Tensor:
        """Convert an array to a JAX array; 64-bit types become 32-bit, unless x64 is enabled."""
        return jnp.asarray(standard(array))


_LARGE = ("dot_general", "conv_general_dilated", "scan", "while", "sort", "pure_callback")
"""Primitives that take long, or do something else than compute."""


def _computed(
    used: Sequence[tuple[Limit, Tensor]], closed: Any, batch: Sequence[Any]
) -> list[tuple[Limit, Any]]:
    """Compute the smallest and the largest integers that a traced step uses.

    Those that depend on a matrix product, a convolution or a loop are left out, since computing
    them takes as long as compiling the step. Such integers are a model's own predictions. What the
    step prints or calls is left out too, since a dry run must have no effects.

    Args:
        used: The limits, each with a tensor of the trace.
        closed: The jaxpr of the trace, whose first outputs are these tensors.
        batch: The arrays of the batch, on the device.
    """
    dce_jaxpr = INTERNALS["dce_jaxpr"].get()
    if dce_jaxpr is None:
        return []
    outputs = len(closed.jaxpr.outvars)
    jaxpr = closed.jaxpr.replace(eqns=[e for e in closed.jaxpr.eqns if e.outvars or not e.effects])
    chosen: list[int] = []
    for i in range(len(used)):
        part, _ = dce_jaxpr(jaxpr, [j == i for j in range(outputs)])
        if not part.effects and not primitives(part).intersection(_LARGE):
            chosen.append(i)
    part, needed = dce_jaxpr(jaxpr, [j in chosen for j in range(outputs)])
    inputs = [x for x, is_needed in zip(batch, needed, strict=True) if is_needed]
    run = jax.jit(jaxpr_as_fun(type(closed)(part, closed.consts)))
    found = jax.device_get(run(*inputs)) if chosen else []
    return [(used[i][0], ends) for i, ends in zip(chosen, found, strict=True)]


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


_PROGRAMS: Final = 32
_programs: dict[str, Callable[..., Any]] = {}


def _reused(
    closed: Any, structure: Any, names: Sequence[str], leaves: Sequence[Tensor]
) -> tuple[dict[str, Sequence[Tensor]], Any]:
    """Differentiate a jaxpr in one program, or in an earlier one whose jaxpr has the same text.

    The text is that of the derivative, which holds each operation with its settings, and numbers;
    arrays are arguments. Of a custom gradient, the first jaxpr holds only the name of the rule.
    """

    def differentiate(leaves: Sequence[Tensor]) -> Any:
        run = jaxpr_as_fun(closed)
        return _gradients(lambda *x: structure.unflatten(run(*x)), leaves, names)

    derivative, shapes = jax.make_jaxpr(differentiate, return_shape=True)(leaves)
    key = str(derivative.jaxpr)
    if key not in _programs:

        def program(consts: Sequence[Tensor], leaves: Sequence[Tensor]) -> Any:
            return jaxpr_as_fun(type(derivative)(derivative.jaxpr, consts))(*leaves)

        if len(_programs) == _PROGRAMS:
            _programs.clear()
        _programs[key] = jax.jit(program)
    results = _programs[key](derivative.consts, leaves)
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _reached(jaxpr: Any, output: int) -> set[int]:
    """Return the inputs of a jaxpr that one output depends on differentiably.

    Integers and booleans carry no gradient, and `stop_gradient` cuts it. The outputs of loops are
    assumed to depend on all inputs of the loop.
    """
    last = jaxpr.outvars[output]
    needed: set[Any] = set() if _is_literal(last) else {last}
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
            if not _is_literal(variable) and jnp.issubdtype(variable.aval.dtype, jnp.inexact):
                needed.add(variable)
    return {i for i, v in enumerate(jaxpr.invars) if v in needed}


def _is_literal(part: Any) -> bool:
    """Return whether a part of a jaxpr is a value, and not a variable."""
    return hasattr(part, "val")


BACKEND = JaxBackend()
