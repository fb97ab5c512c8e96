"""JAX: a step is made a pure function of the state by a `Scope`; a window is a loop in one jit.

Users never see state being passed around.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer
from jax.extend.core import Var, jaxpr_as_fun
from keras.src.random import seed_generator

from ..options import Options
from .base import (
    Executor,
    Losses,
    Program,
    Scope,
    StepContext,
    Tensor,
    Variable,
    context,
    deeper,
    hand_outward,
    running,
    scope_of_call,
)
from .eager import EagerExecutor, StepResult, run_step
from .window import Window, row

LARGEST_WINDOW = 64


def _is_tensor(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray))


class _Split:
    """A structure taken apart into its tensors and everything else, and put together again."""

    def __init__(self, tree: Any) -> None:
        leaves, self._treedef = jax.tree.flatten(tree)
        self.tensors = [x for x in leaves if _is_tensor(x)]
        self._rest = [None if _is_tensor(x) else (x,) for x in leaves]

    def joined(self, tensors: Sequence[Any]) -> Any:
        """Return the structure with these tensors in it."""
        following = iter(tensors)
        return self._treedef.unflatten([next(following) if x is None else x[0] for x in self._rest])


class _Pure:
    """A function whose effects on variables and losses became part of what it returns.

    `Scope` catches the effects; what is not a tensor waits outside of the trace.
    """

    def __init__(self, variables: Sequence[Variable], differentiated: bool) -> None:
        self._variables = variables
        self._differentiated = differentiated
        self.split: _Split
        self.changed: dict[int, Variable]
        self.layers_of_losses: list[list[Any]]

    def __call__(
        self, values: Sequence[Tensor], function: Callable[[], tuple[Any, Any]]
    ) -> tuple[Any, tuple[list[Tensor], list[Tensor], list[Tensor]]]:
        """Return `(first, (tensors of the second, changed values, add_loss losses))`."""
        pairs = zip(self._variables, values, strict=True)
        with Scope(pairs, differentiated=self._differentiated) as scope:
            first, second = function()
        self.split = _Split(second)
        changed = scope.changed()
        self.changed = {key: variable for key, (variable, _) in changed.items()}
        layers = context().layers
        self.layers_of_losses = [
            [layer for layer in layers if id(loss) in layer._loss_ids] for loss in scope.losses
        ]
        return first, (self.split.tensors, [value for _, value in changed.values()], scope.losses)

    def release(self, aux: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]) -> Any:
        """Hand the effects to the scope around this and return what the function returned."""
        tensors, values, losses = aux
        hand_outward(
            {
                key: (variable, value)
                for (key, variable), value in zip(self.changed.items(), values, strict=True)
            }
        )
        outer = keras.src.backend.common.stateless_scope.get_stateless_scope()
        if outer is not None:
            outer.losses[:] = losses
            for loss, layers in zip(losses, self.layers_of_losses, strict=True):
                for layer in layers:
                    layer._loss_ids.add(id(loss))
        return self.split.joined(tensors)


class JaxBackend:
    """Keras on JAX."""

    name = "jax"

    def is_native_variable(self, thing: Any) -> bool:
        """JAX has no variables of its own."""
        return False

    def native_children(self, thing: Any) -> Mapping[str, Any] | None:
        """JAX has no modules of its own."""
        return None

    def differentiate(
        self,
        function: Callable[[Sequence[Tensor]], tuple[Losses, Any]],
        variables: Sequence[Variable],
        inputs: Sequence[Tensor],
        groups: Mapping[str, Sequence[int]],
    ) -> tuple[Any, dict[str, list[Tensor | None]]]:
        """Differentiate a jaxpr of the objective, which also tells what each loss reaches."""
        pure = _Pure(variables, differentiated=True)
        leaves = [jnp.asarray(v.value) for v in variables] + [jnp.asarray(x) for x in inputs]
        count = len(variables)

        def values_to_losses(leaves: Sequence[Tensor]) -> Any:
            with deeper():
                return pure(leaves[:count], lambda: function(leaves[count:]))

        with _stateful():
            closed, shapes = jax.make_jaxpr(values_to_losses, return_shape=True)(leaves)
            names = list(shapes[0])  # as JAX orders a dict's leaves
            structure = jax.tree.structure(shapes)
            if any(isinstance(x, Tracer) for x in [*leaves, *closed.consts]):
                run: Callable[..., Any] = lambda *leaves: structure.unflatten(  # noqa: E731
                    jaxpr_as_fun(closed)(*leaves)
                )
            else:  # nothing is traced: run the Python itself again, so that values can be seen
                run = lambda *leaves: values_to_losses(leaves)  # noqa: E731
            gradients, aux = _gradients(run, leaves, names)
            result = pure.release(aux)
        reach = {name: _reached(closed.jaxpr, output) for output, name in enumerate(names)}
        return result, {
            name: [gradients[name][i] if i in reach[name] else None for i in group]
            for name, group in groups.items()
        }

    def cond(self, predicate: Tensor, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """Run `lax.cond` over the values that either branch assigns."""
        predicate = jnp.asarray(predicate, dtype=bool)
        if not isinstance(predicate, Tracer):
            return then() if predicate else otherwise()
        with _stateful():
            branches = [_Pure((), False), _Pure((), False)]
            shapes = [
                jax.eval_shape(lambda pure=pure, branch=branch: pure((), lambda: (None, branch())))
                for pure, branch in zip(branches, (then, otherwise), strict=True)
            ]
            changed = {**branches[0].changed, **branches[1].changed}
            _same_form([shape[1][0] for shape in shapes])

            def effects(branch: Callable[[], Any]) -> Any:
                with Scope() as scope:
                    tensors = _Split(branch()).tensors
                    values = [scope.get_current_value(v) for v in changed.values()]
                return tensors, [jnp.asarray(x) for x in values]

            tensors, values = jax.lax.cond(
                predicate, lambda: effects(then), lambda: effects(otherwise)
            )
            for variable, value in zip(changed.values(), values, strict=True):
                variable.assign(value)
        return branches[0].split.joined(tensors)

    def for_each(self, function: Callable[[Any], Any], inputs: Any) -> Any:
        """Run `lax.scan`, carrying the values that the function assigns."""
        inputs = jax.tree.map(jnp.asarray, inputs)
        with _stateful():
            pure = _Pure((), False)
            first = jax.tree.map(lambda x: x[0], inputs)
            jax.eval_shape(lambda: pure((), lambda: (None, function(first))))
            changed = list(pure.changed.values())

            def body(carry: Any, inputs: Any) -> Any:
                with Scope(zip(changed, carry, strict=True)) as scope:
                    tensors = _Split(function(inputs)).tensors
                    carry = [jnp.asarray(scope.get_current_value(v)) for v in changed]
                return carry, tensors

            start = [jnp.asarray(v.value) for v in changed]
            values, tensors = jax.lax.scan(body, start, inputs)
            for variable, value in zip(changed, values, strict=True):
                variable.assign(value)
        return pure.split.joined(tensors)

    def abstract_run(self, function: Callable[[Any], Any], batch: Any, step: StepContext) -> Any:
        """Trace the step for its shapes alone."""
        scope = Scope()

        def abstract(batch: Any) -> Any:
            with running(step):
                return _Split(function(batch)).tensors  # type: ignore[call-arg]

        with _keras_random(), scope:  # the scope ends outside of the trace: it makes variables then
            jax.eval_shape(abstract, _device_batch(batch))
        return scope

    def executor(self, program: Program, options: Options) -> Executor:
        """Return the jitted loop, or the eager reference."""
        if options.execution == "eager":
            return EagerExecutor(
                program, _eager_step, self.to_device, np.asarray, "eager", LARGEST_WINDOW
            )
        return JaxExecutor(program, options.window or LARGEST_WINDOW)

    def caller(self, program: Program) -> Callable[[Any, int], Any]:
        """Jit a function over the state; what it assigns is dropped."""

        @jax.jit
        def pure(state: Any, inputs: Any, stream: Any) -> Any:
            outer = Scope(zip(program.variables, state, strict=True))
            step = program.new_context(0)
            with _keras_random(), outer, scope_of_call(program, stream), running(step):
                return program.function(inputs)

        def call(inputs: Any, stream: int) -> Any:
            state = [v._value for v in program.variables]
            return jax.device_get(pure(state, _device_batch(inputs), np.int32(stream)))

        return call

    def own_random(self) -> AbstractContextManager[Any]:
        """JAX keeps no random state."""
        return nullcontext()

    def read(self, variable: Variable) -> Any:
        """Return a variable's value as a NumPy array of its own."""
        return np.array(variable._value)

    def write(self, variable: Variable, value: Any) -> None:
        """Set a variable."""
        variable._direct_assign(jnp.asarray(value, dtype=variable._dtype))

    def keep(self, variable: Variable) -> Any:
        """Return the value itself: JAX never changes an array."""
        return variable._value

    def to_numpy(self, tensor: Any) -> Any:
        """Return a tensor as a NumPy array."""
        return np.asarray(tensor)

    def to_device(self, array: Any) -> Tensor:
        """Return an array as a JAX array (64-bit types become 32-bit)."""
        return jnp.asarray(array)


class JaxOutputs:
    """Stacked results of a window, still on the device."""

    def __init__(self, results: Any, count: int, names: Sequence[str]) -> None:
        self._results, self._count, self._names = results, count, names

    def fetch(self) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        """Wait for the device once."""
        values, weights, broken = jax.device_get(self._results)
        cut = self._count
        return (
            {name: values[name][:cut] for name in self._names},
            {name: x[:cut] for name, x in weights.items()},
            [message for message, flags in broken.items() if flags[:cut].any()],
        )


class JaxExecutor:
    """A window in one jitted loop with a trip count that varies; compiled once per capacity.

    A loop whose trip count XLA does not know is compiled alike for every capacity, so all window
    sizes agree bit for bit; a `scan` of length 1 would be inlined and round differently.
    """

    def __init__(self, program: Program, largest: int) -> None:
        self._program, self.largest = program, largest
        self._steps: dict[Any, tuple[Any, Any, bool]] = {}
        self._compiled: dict[Any, Any] = {}
        self._names: list[str] = []
        self.whole = True
        self.plan = ""

    @property
    def programs(self) -> int:
        """How many programs were compiled."""
        return len(self._compiled)

    def run(self, window: Window, first_step: int) -> JaxOutputs:
        """Run the window in one call, or in one call per batch where a loop would be slower."""
        variables = self._program.variables
        state = [v._value for v in variables]
        step, single = self._step(state, row(window.batches, 0))
        if single:
            rows: list[Any] = []
            for i in range(window.count):
                batch = _device_batch(row(window.batches, i))
                state, out = step(state, batch, np.int32(first_step + i))
                rows.append(out)
            results = jax.tree.map(lambda *x: jnp.stack(x), *rows)
        else:
            # Few sizes, so few programs; never 1, where XLA would drop the slicing and fuse anew.
            capacity = max(2, 1 << (window.count - 1).bit_length())
            batches = keras.tree.map_structure(
                lambda x: None if x is None else _padded(x, capacity), window.batches
            )
            state, results = step(
                state, _device_batch(batches), np.int32(window.count), np.int32(first_step)
            )
        for variable, value in zip(variables, state, strict=True):
            variable._direct_assign(value)
        return JaxOutputs(results, window.count, self._names)

    def _step(self, state: Sequence[Tensor], batch: Any) -> tuple[Any, bool]:
        batch = _device_batch(batch)
        key = (jax.tree.structure(batch), tuple((x.shape, x.dtype) for x in jax.tree.leaves(batch)))
        if key not in self._compiled:
            specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, batch))
            closed, shapes = jax.make_jaxpr(self._pure_step, return_shape=True)(
                *specs, jax.ShapeDtypeStruct((), np.int32)
            )
            single = jax.default_backend() == "cpu" and _convolves(closed.jaxpr)
            structure = jax.tree.structure(shapes)

            def one(state: Any, batch: Any, number: Any) -> Any:
                return structure.unflatten(
                    jaxpr_as_fun(closed)(*jax.tree.leaves((state, batch, number)))
                )

            self.plan = (
                "single steps, jit (XLA runs convolutions slower in a loop on a CPU)"
                if single
                else f"windows of up to {self.largest}, jit"
            )
            self._compiled[key] = jax.jit(one if single else _looped(one, shapes[1])), single
        return self._compiled[key]

    def _pure_step(self, state: Sequence[Tensor], batch: Any, number: Any) -> Any:
        program = self._program
        with _keras_random(), Scope(zip(program.variables, state, strict=True)) as scope:
            result = run_step(program, batch, number)
            self._names = list(result.values)  # JAX would sort them
            new = [jnp.asarray(scope.get_current_value(v)) for v in program.variables]
        return new, _arrays(result)


def _looped(one: Callable[..., Any], shapes: Any) -> Callable[..., Any]:
    """Return a function that runs a step over the first `count` of stacked batches."""

    def window(state: Any, batches: Any, count: Any, first_step: Any) -> Any:
        capacity = jax.tree.leaves(batches)[0].shape[0]
        buffers = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape), x.dtype), shapes)

        def body(i: Any, carry: Any) -> Any:
            state, buffers = carry
            batch = jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), batches
            )
            state, out = one(state, batch, first_step + i)
            buffers = jax.tree.map(
                lambda buffer, x: jax.lax.dynamic_update_index_in_dim(buffer, x, i, 0), buffers, out
            )
            return state, buffers

        return jax.lax.fori_loop(0, count, body, (state, buffers))

    return window


def _padded(x: Any, capacity: int) -> Any:
    missing = capacity - x.shape[0]
    if not missing:
        return x
    return np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)])


def _device_batch(batch: Any) -> Any:
    """Return a batch as JAX takes it: NumPy arrays are passed on, which jit transfers fastest."""
    return jax.tree.map(np.asarray, batch)


def _arrays(result: StepResult) -> Any:
    return jax.tree.map(jnp.asarray, (result.values, result.weights, result.broken))


def _gradients(
    run: Callable[..., Any], leaves: Sequence[Tensor], names: Sequence[str]
) -> tuple[dict[str, Sequence[Tensor]], Any]:
    """Differentiate each loss that `run` returns; the forward pass is shared."""
    if len(names) == 1:

        def single(*leaves: Any) -> Any:
            losses, aux = run(*leaves)
            return losses[names[0]], aux

        loss, pull, aux = jax.vjp(single, *leaves, has_aux=True)
        return {names[0]: pull(jnp.ones_like(loss))}, aux
    losses, push, aux = jax.linearize(run, *leaves, has_aux=True)
    gradients: dict[str, Sequence[Tensor]] = {}
    for name in names:  # transposed one by one: an infinite other loss must not leak in as 0 * inf
        pull = jax.linear_transpose(lambda *t, name=name: push(*t)[name], *leaves)
        gradients[name] = pull(jnp.ones_like(losses[name]))
    return gradients, aux


def _reached(jaxpr: Any, output: int) -> set[int]:
    """Return which inputs one output of a jaxpr depends on differentiably.

    Integers and booleans carry no gradient, and `stop_gradient` cuts it; loops count as using all
    that goes into them.
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


def _convolves(jaxpr: Any) -> bool:
    """Say whether a convolution is anywhere in a jaxpr."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "conv_general_dilated":
            return True
        for parameter in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns") and _convolves(inner):
                return True
    return False


def _same_form(branches: Sequence[Any]) -> None:
    forms = [[(x.shape, x.dtype) for x in branch] for branch in branches]
    if forms[0] != forms[1]:
        raise TypeError(
            f"both branches of cond must return the same structure, shapes and dtypes: the first "
            f"returned {forms[0]}, the second {forms[1]}"
        )


@contextmanager
def _stateful() -> Generator[None]:
    """Make sure that a scope catches effects, and that they take effect where no step runs."""
    if keras.src.backend.common.stateless_scope.in_stateless_scope():
        yield
        return
    with _keras_random():
        with Scope() as scope:
            yield
        hand_outward(scope.changed())


@contextmanager
def _eager_step(program: Program) -> Generator[None]:
    with _stateful():
        yield


@contextmanager
def _keras_random() -> Generator[None]:
    """Let unseeded `keras.random` work while JAX traces.

    Keras refuses, because its global generator would become a constant; here the generator's state
    belongs to the step's state, so it does not.
    """
    original = seed_generator.global_seed_generator
    generator = _global_generator()
    seed_generator.global_seed_generator = lambda: generator
    try:
        yield
    finally:
        seed_generator.global_seed_generator = original


def _global_generator() -> Any:
    from keras.src.backend.common import global_state

    generator = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    if generator is None:
        generator = seed_generator.global_seed_generator()
    return generator


BACKEND = JaxBackend()
