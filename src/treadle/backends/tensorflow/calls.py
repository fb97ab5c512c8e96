"""Calls of compiled functions on TensorFlow, outside of windows."""

from typing import Any

import tensorflow as tf

from ...core import structures
from ..base import Caller, Fetch
from ..program import Program, scope_of_call
from ..step_context import running
from .stateful_draws import step_functions
from .windows import array, tensors


class GraphCaller(Caller):
    """A function as one graph, traced for the inputs of the first call; all have equal forms.

    Args:
        program: The function, whose assignments are discarded.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._traced: Any = None
        self._outputs: Any = None

    def start(self, inputs: Any, stream: int) -> Fetch:
        """Run the function, and return a function that returns its outputs."""
        given = tensors(inputs)
        flat = structures.flatten(given)
        if self._traced is None:
            self._traced = self._trace(given, flat)
        # The concrete function is called with a flat list: matching the inputs with the signature
        # of a `tf.function` takes longer than a small network.
        outputs = self._traced._call_flat(
            [*flat, tf.constant(stream, tf.int32)], self._traced.captured_inputs
        )
        return lambda: structures.pack(self._outputs, map(array, outputs))

    def _trace(self, inputs: Any, flat: list[Any]) -> Any:
        program = self._program
        structure = structures.outline(inputs)

        @tf.autograph.experimental.do_not_convert
        def pure(flat: list[Any], stream: Any) -> Any:
            given = structures.pack(structure, flat)
            with scope_of_call(program, stream), running(program.new_context(0)):
                outputs = program.function(given)
            self._outputs = structures.outline(outputs)
            return structures.flatten(outputs)

        specs = [tf.TensorSpec(x.shape, x.dtype) for x in flat]
        traced = tf.function(pure, autograph=False)
        with step_functions():
            return traced.get_concrete_function(specs, tf.TensorSpec([], tf.int32))
