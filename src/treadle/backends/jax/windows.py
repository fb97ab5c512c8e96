"""Windows on JAX: a `Scope` makes a step a pure function, and a window is a loop in one jit."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import itemgetter
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ...core import structures
from ..background import Done, Results, Running, start, submit
from ..eager import run_step
from ..plans import XLA, Facts, Plan
from ..program import Program
from ..scope import Scope
from ..types import Tensor
from ..window import Following, Window, capacity, padded
from .ahead import DeferredState, Outcome, Steps
from .layouts import Layouts, active_layouts, adopt, layout_of, on_device, standard_leaves
from .patches import jaxpr_as_fun, keras_random

# A state of more bytes is in memory only once. One of fewer bytes is kept until a window has ended,
# so that its steps can run again, or be as if they had not run.
MOST_BYTES_TWICE: Final = 128 * 2**20


class JaxExecutor:
    """Runs windows in one jitted loop, or each step in one call; all batches have equal shapes.

    The loop's trip count is a runtime value, so that one program runs any number of steps, and all
    window sizes agree bit for bit. (A `scan` of length 1 would be inlined and round differently.)
    Arrays of a window that is shorter than its program allows are padded.

    A state of many bytes is donated: the step overwrites it, so that memory holds it once. Then a
    window that fails leaves no state, and no steps run ahead.

    On several devices, all programs start from the calling thread: the devices would wait for one
    another forever if two threads started programs on them in different orders. So no steps run
    ahead or in the background thread.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._layouts = active_layouts()
        self._copied: Any = _copied
        if self._layouts is not None:  # which a program that copies all arrays could change
            self._copied = lambda state: [jnp.copy(x) for x in state]
            adopt(program.seeds)
        self.plan = Plan(XLA, fused=True, largest=1)
        nbytes = sum(math.prod(v.shape) * jnp.dtype(v.dtype).itemsize for v in program.variables)
        self._donates = nbytes > MOST_BYTES_TWICE
        self.whole = not self._donates
        self._traced: _PureStep | None = None
        self._compiled: dict[Any, tuple[_PureStep, Callable[..., Any]]] = {}
        self._ready: tuple[Window, Plan, Any, Any] | None = None
        self._deferred = DeferredState(program.variables)

    @property
    def calls_python(self) -> bool:
        """Whether the step has callbacks into Python, such as `jax.pure_callback`."""
        return self._traced is not None and self._traced.calls_python

    @property
    def programs(self) -> int:
        """The number of compiled programs."""
        return len(self._compiled)

    def facts(self, window: Window) -> Facts:
        """Trace the step, and find out whether it has convolutions."""
        slow = "convolves" if convolves(self._step(window).closed.jaxpr) else ""
        return Facts(jax.default_backend(), (XLA,), slow, large=self._donates)

    def compile(self, window: Window) -> bool:
        """Compile the program for windows like this one."""
        return not self._deferred.has_results_for(window) and self._compile(window)

    def _compile(self, window: Window) -> bool:
        inputs, key = self._first_inputs(window)
        if key in self._compiled:
            return False
        step = self._step(window)
        function = (_fused if self.plan.fused else _single)(
            step, window.rows is not None, self._layouts
        )
        # Compiled here and not at the first call, so that the compile time can be reported.
        arguments = (*step.split(self._deferred.state()), inputs)
        numbers = [jax.ShapeDtypeStruct((), np.int32)] * (2 if self.plan.fused else 1)
        donated = () if self.plan.fused and not self._donates else (0,)
        if self._layouts is None:
            specs, results = _specs(arguments), None
        else:
            layouts = *step.split(step.layouts), self._layouts.of_inputs(inputs, self.plan.fused)
            specs, results = _specs(arguments, layouts), (layouts[0], self._layouts.replicated)
        jitted = jax.jit(function, donate_argnums=donated, out_shardings=results)
        self._compiled[key] = step, jitted.lower(*specs, *numbers).compile()
        return True

    def transfer(self, window: Window) -> None:
        """Put the batches of a streamed window on the device, which returns before it is done."""
        if not on_accelerator() or window.rows is not None or not self.plan.fused:
            return
        if self._traced is None or self._layouts is not None:
            return
        inputs, key = self._first_inputs(window)
        self._ready = window, self.plan, jax.device_put(inputs), key

    def run(
        self,
        window: Window,
        first_step: int,
        background: bool = True,
        following: Following | None = None,
    ) -> Running | Done:
        """Run the window in one call, or in one call per batch; the next windows may run too."""
        taken = self._deferred.take(window, first_step)
        if taken is not None:
            self._run_ahead(window.count, following)
            results, seconds = taken
            return Done(lambda: results, seconds)
        self._compile(window)
        run = self._call(window, first_step, self._deferred.state())
        background = background and self._layouts is None
        if self._donates:
            return start(lambda: self._assigned(run(window.count), window), background=background)

        def settle(outcome: Any) -> Results:
            steps = Steps(run, lambda: outcome, first_step, window)
            results = steps.take(window.count)
            self._deferred.defer(steps)
            self._run_ahead(window.count, following)
            return results

        return start(lambda: _timed(run, window.count), settle, background)

    def _assigned(self, outcome: Outcome, window: Window) -> Results:
        """Assign the new state at once, since the old one exists no longer; return the results."""
        state, (values, weights, broken) = outcome
        for variable, value in zip(self._program.variables, state, strict=True):
            variable._value = value
        violated = [message for message, flags in broken.items() if flags.any()]
        return dict(values), dict(weights), violated

    def _run_ahead(self, count: int, following: Following | None) -> None:
        """Start the next steps, which run while the loop takes those that have run."""
        if following is None or not self.plan.fused or self.plan.largest == 1:
            return
        if self._layouts is not None:
            return
        if self._traced is None or self._traced.calls_python:
            return
        next_run = self._deferred.next_to_run(count, following)
        if next_run is None or self._first_inputs(next_run[0])[1] not in self._compiled:
            return
        window, before = next_run
        state, first_step = before.final_state()
        run = self._call(window, first_step, state)
        outcome = submit(lambda: _timed(run, window.count))
        self._deferred.start(Steps(run, outcome, first_step, window))

    def _call(
        self, window: Window, first_step: int, state: Sequence[Tensor]
    ) -> Callable[[int], Outcome]:
        """Return a function that runs the first steps of a window."""
        (inputs, key), self._ready = self._first_inputs(window), None
        step, function = self._compiled[key]

        def fused(count: int) -> Outcome:
            changed, fixed = step.split(state)
            changed = _unshared(changed) if self._donates else changed
            numbers = np.int32(count), np.int32(first_step)
            new, results = function(changed, fixed, inputs, *numbers)
            return step.merged(new, fixed), step.named(_fetched(results, count))

        def singly(count: int) -> Outcome:
            # Each step donates its input state: allocating new memory costs 1 to 2 % of a
            # convolutional step. The variables' own values are copied once, so that they stay.
            changed, fixed = step.split(state)
            new, rows = _unshared(changed) if self._donates else self._copied(changed), list[Any]()
            for i in range(count):
                given = self._inputs(window, i) if i else inputs
                new, out = function(new, fixed, given, np.int32(first_step + i))
                rows.append(out)
            results = [np.stack(column) for column in zip(*jax.device_get(rows), strict=True)]
            return step.merged(new, fixed), step.named(results)

        return fused if self.plan.fused else singly

    def _first_inputs(self, window: Window) -> tuple[Any, Any]:
        """Return a window's inputs and the key of its program, cached until the window runs."""
        ready = self._ready
        if ready is None or ready[0] is not window or ready[1] != self.plan:
            inputs = self._inputs(window)
            # Batches have equal shapes, but the number of batches and the size of a data set vary.
            held, rows = inputs
            shapes = *[x.shape for x in held], None if rows is None else rows.shape
            key = shapes, self.plan.fused
            self._ready = ready = window, self.plan, inputs, key
        return ready[2:]

    def _inputs(self, window: Window, batch: int = 0) -> tuple[list[Any], Any]:
        """Return the arrays to take batches from, and the row indices or None.

        They cover the whole window, or one batch if each step is a separate call.
        """
        if not self.plan.fused:
            if window.rows is None:
                return standard_leaves(window.batch(batch)), None
            return on_device(window.rows, self._layouts), window.rows.indices[batch].astype(
                np.int32
            )
        if window.rows is not None:
            rows = window.rows.indices.astype(np.int32)
            length = capacity(window.count, self.plan.largest, ())  # rows are small: one program
            return on_device(window.rows, self._layouts), padded(rows, length)
        length = capacity(window.count, self.plan.largest)
        return [padded(x, length) for x in standard_leaves(window.batches)], None

    def _step(self, window: Window) -> "_PureStep":
        """Return the step, which is traced once."""
        if self._traced is None:
            state = self._deferred.state()
            with nullcontext() if self._layouts is None else self._layouts.splitting_draws():
                self._traced = _PureStep(self._program, state, window.batch(0))
            if self._traced.calls_python:  # it may raise an error, after which the state remains
                self._donates, self.whole = False, True
        return self._traced


class _PureStep:
    """A step as a jaxpr of (state, arrays of a batch, number); user code runs once, to trace it."""

    def __init__(self, program: Program, state: Sequence[Tensor], batch: Any) -> None:
        self._names: list[list[str]] = []
        structure = structures.outline(batch)
        self.layouts = [layout_of(variable) for variable in program.variables]

        def pure(state: Sequence[Tensor], leaves: Sequence[Tensor], number: Any) -> Any:
            with keras_random(), Scope(zip(program.variables, state, strict=True)) as scope:
                result = run_step(program, structures.pack(structure, leaves), number)
                new = [jnp.asarray(scope.get_current_value(v)) for v in program.variables]
            parts = result.values, result.weights, result.broken
            self._names = [list(part) for part in parts]
            return new, [jnp.asarray(x) for part in parts for x in part.values()]

        specs = _specs((state, standard_leaves(batch)))
        self.closed, shapes = jax.make_jaxpr(pure, return_shape=True)(
            *specs, jax.ShapeDtypeStruct((), np.int32)
        )
        self.results = shapes[1]
        # Such calls can be noticed, and may read variables.
        self.calls_python = bool(self.closed.effects) or any(
            "callback" in name for name in primitives(self.closed.jaxpr)
        )
        jaxpr, count = self.closed.jaxpr, len(state)
        pairs = zip(jaxpr.outvars[:count], jaxpr.invars[:count], strict=True)
        changes = [new is not old for new, old in pairs]
        changed = [i for i in range(count) if changes[i]]
        fixed = [i for i in range(count) if not changes[i]]
        self._changed, self._fixed = _taking(changed), _taking(fixed)
        self._merged = _taking(np.argsort([*changed, *fixed]).tolist())

    def __call__(self, changed: Any, fixed: Any, batch: Any, number: Any) -> Any:
        """Return the new values of variables that change, and the step's outputs."""
        state = self.merged(changed, fixed)
        outputs = jaxpr_as_fun(self.closed)(*state, *batch, number)
        return self.split(outputs[: len(state)])[0], outputs[len(state) :]

    def split(self, state: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the values of variables that the step changes, and those of the others."""
        return self._changed(state), self._fixed(state)

    def merged(self, changed: Sequence[Any], fixed: Sequence[Any]) -> list[Any]:
        """Return the state whose parts `split` returned."""
        return self._merged([*changed, *fixed])

    def named(self, results: Sequence[Any]) -> list[dict[str, Any]]:
        """Return values, explicit weights and violations by name, in the order of the step."""
        following = iter(results)
        # Names come first, so that `zip` ends before it takes a result too many.
        return [dict(zip(names, following, strict=False)) for names in self._names]


def _taking(positions: Sequence[int]) -> Callable[[Sequence[Any]], list[Any]]:
    """Return a function that takes items of a list, without a Python loop over hundreds of them."""
    if len(positions) < 2:  # of one item, `itemgetter` returns no tuple
        return lambda items: [items[i] for i in positions]
    take = itemgetter(*positions)
    return lambda items: list(take(items))


def _fused(step: _PureStep, resident: bool, layouts: Layouts | None) -> Callable[..., Any]:
    """Return a function that runs a step over the first `count` batches."""

    def window(changed: Any, fixed: Any, inputs: Any, count: Any, first_step: Any) -> Any:
        held, rows = inputs
        length = (rows if resident else held[0]).shape[0]
        buffers = [jnp.zeros((length, *x.shape), x.dtype) for x in step.results]

        def body(i: Any, carry: Any) -> Any:
            changed, buffers = carry
            batch = batch_at(held, rows, i)
            if layouts is not None:  # otherwise the compiler would choose them
                batch = layouts.split(batch)
                changed = jax.lax.with_sharding_constraint(changed, step.split(step.layouts)[0])
            changed, out = step(changed, fixed, batch, first_step + i)
            return changed, with_row(buffers, out, i)

        return jax.lax.fori_loop(0, count, body, (changed, buffers))

    return window


def _single(step: _PureStep, resident: bool, layouts: Layouts | None) -> Callable[..., Any]:
    """Return a function that runs a step on one batch."""

    def single(changed: Any, fixed: Any, inputs: Any, number: Any) -> Any:
        held, rows = inputs
        batch = _gathered(held, rows) if resident else held
        return step(changed, fixed, batch if layouts is None else layouts.split(batch), number)

    return single


def on_accelerator() -> bool:
    """Return whether programs run on a device with memory of its own.

    On a CPU, they read NumPy arrays where they are.
    """
    return jax.default_backend() != "cpu"


def batch_at(held: Sequence[Any], rows: Any, i: Any) -> list[Any]:
    """Return batch `i` inside a trace: rows of the data set, or one of the stacked batches."""
    if rows is None:
        return [jax.lax.dynamic_index_in_dim(x, i, keepdims=False) for x in held]
    return _gathered(held, jax.lax.dynamic_index_in_dim(rows, i, keepdims=False))


def with_row(buffers: Sequence[Any], outputs: Sequence[Any], i: Any) -> list[Any]:
    """Return buffers of stacked outputs, with these as their row `i`."""
    return [
        jax.lax.dynamic_update_index_in_dim(buffer, x, i, 0)
        for buffer, x in zip(buffers, outputs, strict=True)
    ]


def _gathered(held: Sequence[Any], rows: Any) -> list[Any]:
    return [x.at[rows].get(mode="promise_in_bounds") for x in held]


def _fetched(results: Sequence[Any], count: int) -> list[Any]:
    """Return the first `count` rows of results as NumPy arrays, copied to the host together.

    `jax.device_get` does the same for any structure and takes several times as long.
    """
    for x in results:
        x.copy_to_host_async()
    return [np.asarray(x)[:count] for x in results]


def _timed(run: Callable[[int], Outcome], count: int) -> tuple[Outcome, float]:
    started = time.monotonic()
    return run(count), time.monotonic() - started


def _unshared(arrays: Sequence[Any]) -> list[Any]:
    """Return arrays that may be donated: copies of those that other objects hold."""
    return [
        jnp.copy(x) if holders > _HOLDERS else x
        for x, holders in zip(arrays, _references(arrays), strict=True)
    ]


def _references(arrays: Sequence[Any]) -> list[int]:
    return [sys.getrefcount(x) for x in arrays]


# A list of the state, another one of the part that changes, and the variable hold an array that
# may be donated; the second one is part of what `_references` counts here.
_HOLDERS: Final = _references([object()])[0] + 2


@jax.jit
def _copied(state: Any) -> Any:
    return jax.tree.map(jnp.copy, state)


def _specs(tree: Any, layouts: Any = None) -> Any:
    if layouts is None:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    return jax.tree.map(
        lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), tree, layouts
    )


def convolves(jaxpr: Any) -> bool:
    """Return whether a jaxpr has convolutions, which take up to 50 times as long in a loop."""
    return "conv_general_dilated" in primitives(jaxpr)


def primitives(jaxpr: Any) -> set[str]:
    """Return the names of all operations in a jaxpr."""
    found = {equation.primitive.name for equation in jaxpr.eqns}
    for equation in jaxpr.eqns:
        for parameter in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                found |= primitives(inner)
    return found
