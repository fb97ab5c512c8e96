"""Calls of compiled functions on JAX, outside of windows."""

from typing import Any

import jax
import numpy as np

from ..base import Fetch
from ..program import Program, scope_of_call
from ..scope import Scope
from ..step_context import running
from .patches import keras_random
from .windows import device_batch


class JitCaller:
    """A jitted function over the state; a call returns before its outputs are computed.

    Args:
        program: The function, whose assignments are discarded.
    """

    def __init__(self, program: Program) -> None:
        @jax.jit
        def pure(state: Any, inputs: Any, stream: Any) -> Any:
            outer = Scope(zip(program.variables, state, strict=True))
            step = program.new_context(0)
            with keras_random(), outer, scope_of_call(program, stream), running(step):
                return program.function(inputs)

        self._program, self._pure = program, pure

    def start(self, inputs: Any, stream: int) -> Fetch:
        """Start a call, and return a function that waits for its outputs."""
        state = [v._value for v in self._program.variables]
        outputs = self._pure(state, device_batch(inputs), np.int32(stream))
        return lambda: jax.tree.map(np.asarray, outputs)
