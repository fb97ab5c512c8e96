"""Calls of compiled functions on JAX, outside of windows."""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ...core import structures
from ..base import Fetch, start_each
from ..program import Program, scope_of_call
from ..scope import Scope
from ..step_context import running
from ..types import Variable
from ..window import Window, capacity, padded
from .layouts import active_layouts, adopt, on_device, several, standard_leaves
from .patches import keras_random
from .windows import batch_at, convolves, with_row

# The number of batches in one call, which saves the Python code around a call for each of them.
# That pays for small networks only: limit of the bytes of variables, and of the outputs of a call.
MOST_BATCHES: Final = 16
MOST_BYTES: Final = 16 * 2**20


class JitCaller:
    """A jitted function over the state; a call returns before its outputs are computed.

    Args:
        program: The function, whose assignments are discarded.
        reads: The variables that it reads, if it assigns none and draws no random numbers. Then
            several batches run in one call.
    """

    def __init__(self, program: Program, reads: Sequence[Variable] | None = None) -> None:
        variables = program.variables if reads is None else reads
        self._layouts = active_layouts()
        if self._layouts is not None:
            adopt(program.seeds)

        # The results of several processes must be whole in each of them.
        whole = self._layouts.replicated if self._layouts is not None and several() else None

        @partial(jax.jit, out_shardings=whole)
        def pure(state: Any, leaves: Sequence[Any], stream: Any) -> Any:
            inputs = structures.pack(self._inputs, leaves)
            outer = Scope(zip(variables, state, strict=True))
            step = program.new_context(0)
            with keras_random(), outer, scope_of_call(program, stream), running(step):
                outputs = program.function(inputs)
            self._outputs = structures.outline(outputs)
            return structures.flatten(outputs)

        self._variables, self._pure = variables, pure
        self._inputs: Any = None
        self._outputs: Any = None
        small = reads is not None and sum(v._value.nbytes for v in reads) <= MOST_BYTES
        self._joins: bool | None = None if small else False  # None: unknown until it is traced
        self._joined = jax.jit(self._join, out_shardings=whole)

    def start(self, inputs: Any, stream: int) -> Fetch:
        """Start a call, and return a function that waits for its outputs."""
        leaves = self._leaves(inputs)
        if self._layouts is not None:
            leaves = [self._layouts.put(x) for x in leaves]
        outputs = self._pure(self._state(), leaves, np.int32(stream))
        return lambda: structures.pack(self._outputs, map(np.asarray, outputs))

    def start_window(self, window: Window) -> Callable[[], list[Any]]:
        """Start one call for all batches, or a call for each one."""
        if self._joins is None:
            self._joins = self._pays(self._leaves([window.batch(0)]))
        if not self._joins or window.rows is None:
            return start_each(self.start, window)
        count, indices = window.count, window.rows.indices.astype(np.int32)
        rows = padded(indices, capacity(count, MOST_BATCHES, ()))
        if self._layouts is not None:
            rows = self._layouts.put(rows, axis=1)
        held = on_device(window.rows, self._layouts)
        outputs = self._joined(self._state(), held, rows, np.int32(count))

        def fetch() -> list[Any]:
            fetched = [np.asarray(x) for x in outputs]
            return [structures.pack(self._outputs, [x[i] for x in fetched]) for i in range(count)]

        return fetch

    def _leaves(self, inputs: Any) -> list[Any]:
        """Return the arrays of inputs, all of which have the same structure."""
        if self._inputs is None:
            self._inputs = structures.outline(inputs)
        return standard_leaves(inputs)

    def _state(self) -> list[Any]:
        return [v._value for v in self._variables]

    def _pays(self, inputs: Any) -> bool:
        """Return whether several batches run faster in one call than in several calls."""
        traced = self._pure.trace(self._state(), inputs, np.int32(0))
        nbytes = sum(prod(x.shape) * x.dtype.itemsize for x in traced.out_info)
        return not convolves(traced.jaxpr.jaxpr) and nbytes * MOST_BATCHES <= MOST_BYTES

    def _join(self, state: Any, held: Any, rows: Any, count: Any) -> Any:
        """Return the outputs of the first `count` batches, stacked."""

        def call(i: Any) -> Any:
            return self._pure(state, batch_at(held, rows, i), jnp.int32(0))

        shapes = jax.eval_shape(call, jnp.int32(0))
        stacked = [jnp.zeros((len(rows), *x.shape), x.dtype) for x in shapes]
        return jax.lax.fori_loop(0, count, lambda i, found: with_row(found, call(i), i), stacked)
