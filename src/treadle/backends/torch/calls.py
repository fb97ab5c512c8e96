"""Calls of functions on PyTorch, outside of windows: run eagerly, or captured for many batches."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import keras
import numpy as np
import torch

from ...core import structures
from ..background import take_back
from ..base import Caller, Fetch, start_each
from ..plans import RefusedError
from ..program import Program, scope_of_call
from ..step_context import running
from ..types import Variable
from ..window import Window
from .capture.code import Captured
from .capture.proof import Prover
from .capture.trials import Around, step_number, tensors_of
from .capture.windows import Batches, shared

# The proof of a captured function copies the variables. Networks with more bytes than this take so
# long for a batch that the Python code around their operations does not matter.
MOST_BYTES: Final = 256 * 2**20

# How often a function runs eagerly that may not be called many times, before it is captured.
CALLS_ALONE: Final = 16


class EagerCaller(Caller):
    """Runs a function eagerly.

    Args:
        program: The function, whose assignments are discarded.
        to_device: A function that converts an array to a tensor, which may share its memory.
    """

    def __init__(self, program: Program, to_device: Callable[[Any], Any]) -> None:
        self._program, self._to_device = program, to_device

    def start(self, inputs: Any, stream: int) -> Fetch:
        """Run the function on copies of the inputs, which it may change in place."""
        take_back()
        program = self._program
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(torch.initial_seed() + stream + 1)
            with scope_of_call(program, stream), running(program.new_context(0)):
                outputs = program.function(_copied(inputs, self._to_device))
        return lambda: structures.mapped(keras.ops.convert_to_numpy, outputs)


class CapturingCaller:
    """Runs a function that only reads variables: the first times eagerly, and then captured.

    Capturing takes as long as several calls, and uses the inputs of two of them. A function that
    cannot be captured runs eagerly.

    Args:
        program: The function.
        reads: The variables that it reads.
        to_device: A function that converts an array to a tensor, which may share its memory.
        around: A function that returns the context manager for each eager run.
        first: The number of calls that run eagerly.
    """

    def __init__(
        self,
        program: Program,
        reads: Sequence[Variable],
        to_device: Callable[[Any], Any],
        around: Around,
        first: int,
    ) -> None:
        self._eager = EagerCaller(program, to_device)
        self._reads, self._to_device, self._around = reads, to_device, around
        self._outline: Any = None
        self._captured: Captured | None = None
        self._first: Any = None
        self._calls_left = first
        self._program: Program | None = None  # None: it runs eagerly
        if sum(v._value.nbytes for v in reads) <= MOST_BYTES:
            self._program = replace(
                program,
                function=lambda inputs: self._values(program.function(inputs)),
                variables=reads,
                new_context=lambda number: _context_of(program, number, reads),
            )

    def start(self, inputs: Any, stream: int) -> Fetch:
        """Run the function, and return a function that returns its outputs."""
        if self._captured is None and self._program is not None:
            self._calls_left -= 1
            if self._calls_left == 0:
                self._first = _copied(inputs, self._to_device)
            elif self._calls_left < 0:
                two = [self._first, _copied(inputs, self._to_device)]
                found = Prover(self._program, self._around).capture(two)
                self._captured = found if isinstance(found, Captured) else None
                self._program, self._first = None, None
        if self._captured is None:
            return self._eager.start(inputs, stream)
        run = self._replay(self._captured)
        outputs = run([shared(x, self._to_device) for x in tensors_of(inputs)])
        return lambda: outputs

    def start_window(self, window: Window) -> Callable[[], list[Any]]:
        """Run the function on each batch."""
        if self._captured is None:
            return start_each(self.start, window)
        outputs = list(map(self._replay(self._captured), Batches(window, self._to_device).views()))
        return lambda: outputs

    def _replay(self, captured: Captured) -> Callable[[list[Any]], Any]:
        """Return a function that runs the captured function on the tensors of its inputs."""
        take_back()
        state = [v._value for v in self._reads]
        number = step_number(0) if captured.uses_number else None

        def run(tensors: list[Any]) -> Any:
            outputs = captured(state, tensors, number).values
            return structures.pack(self._outline, map(_to_numpy, outputs.values()))

        return run

    def _values(self, outputs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return outputs as the values of a step, and keep their structure."""
        leaves = structures.flatten(outputs)
        if not all(isinstance(x, torch.Tensor) for x in leaves):
            raise RefusedError("it returns something that is not a tensor")
        self._outline = structures.outline(outputs)
        return {str(i): x for i, x in enumerate(leaves)}, {}


def _to_numpy(tensor: Any) -> Any:
    """Return a tensor as an array; NumPy itself has no bfloat16, and Keras' function is slower."""
    if tensor.dtype is torch.bfloat16:
        return keras.ops.convert_to_numpy(tensor)
    return tensor.numpy(force=True)


def _context_of(program: Program, number: Any, variables: Sequence[Variable]) -> Any:
    """Return the context of a program over these variables only."""
    context = program.new_context(number)
    known = {id(v) for v in variables}
    context.variables = {path: v for path, v in context.variables.items() if id(v) in known}
    return context


def _copied(inputs: Any, to_device: Callable[[Any], Any]) -> Any:
    return structures.mapped(lambda x: to_device(np.array(x)), inputs)
