"""The eager reference: a Python loop over a window's batches, slow but easy to debug."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from keras import ops

from ..core import structures
from .background import Done, fetched
from .plans import Facts, Plan
from .program import Program
from .ranges import flags, watched
from .step_context import running
from .types import StepResult, Tensor
from .window import Following, Window, examples_of


def run_step(program: Program, batch: Any, number: Any) -> StepResult:
    """Run a program's function once, in a new step context."""
    with running(program.new_context(number)) as step, watched(step.ranges):
        step.examples = examples_of(batch)
        values, weights = program.function(batch)
        if step.ranges is not None:
            step.violations += flags(step.ranges.variables)
    broken: dict[str, Tensor] = {}
    for message, flag in step.violations:
        broken[message] = ops.logical_or(broken[message], flag) if message in broken else flag
    # A step may return a variable's own value, which the next step would change in place.
    values = {name: ops.copy(value) for name, value in values.items()}
    weights = {name: ops.copy(value) for name, value in weights.items()}
    return StepResult(values, weights, broken)


class EagerExecutor:
    """Runs a program's batches one after another, uncompiled.

    Args:
        program: The step.
        around: A function that returns the backend's context manager for each step.
        to_device: A function that converts an array to a tensor.
        to_numpy: A function that converts a tensor to an array.
        device: The device that the step runs on.
    """

    def __init__(
        self,
        program: Program,
        around: Callable[[Program], AbstractContextManager[Any]],
        to_device: Callable[[Any], Tensor],
        to_numpy: Callable[[Any], Any],
        device: str = "cpu",
    ) -> None:
        self._program, self._around = program, around
        self._to_device, self._to_numpy = to_device, to_numpy
        self._facts = Facts(device)
        self.whole = False
        self.plan = Plan("", fused=False, largest=1)

    @property
    def calls_python(self) -> bool:
        """True: all of the step is Python."""
        return True

    @property
    def programs(self) -> int:
        """0: nothing is compiled."""
        return 0

    def facts(self, window: Window) -> Facts:
        """Return facts without a compiler."""
        return self._facts

    def compile(self, window: Window) -> bool:
        """Return False: nothing is compiled."""
        return False

    def transfer(self, window: Window) -> None:
        """Do nothing: each batch is copied when its step runs."""

    def run(
        self,
        window: Window,
        first_step: int,
        background: bool = True,
        following: Following | None = None,
    ) -> Done:
        """Run the window's batches in order."""
        started = time.monotonic()
        results: list[StepResult] = []
        for i in range(window.count):
            batch = structures.mapped(self._to_device, window.batch(i))
            with self._around(self._program):
                results.append(run_step(self._program, batch, first_step + i))
        found = fetched(results, lambda tensors: np.stack([*map(self._to_numpy, tensors)]))
        return Done(lambda: found, time.monotonic() - started)
