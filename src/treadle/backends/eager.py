"""The reference: a window is a Python loop over its batches. Slow, and easy to look into."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from .background import Done, Results
from .base import Program, Tensor, running
from .plans import Facts, Plan
from .window import Window, examples_of


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step returned, as tensors.

    Attributes:
        values: Per name a scalar.
        weights: Per name a scalar, for values that `weighted` made.
        broken: Per broken promise's message a scalar boolean.
    """

    values: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    broken: Mapping[str, Tensor]


def run_step(program: Program, batch: Any, number: Any) -> StepResult:
    """Run a program's function once, in a context of its own."""
    with running(program.new_context(number)) as step:
        step.examples = examples_of(batch)
        values, weights = program.function(batch)
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
        around: Entered around each step: what the backend needs there.
        to_device: Makes a tensor of an array.
        to_numpy: Makes an array of a tensor.
        device: Where it runs.
        refusal: Why nothing is compiled, where that was not asked for.
    """

    def __init__(
        self,
        program: Program,
        around: Callable[[Program], AbstractContextManager[Any]],
        to_device: Callable[[Any], Tensor],
        to_numpy: Callable[[Any], Any],
        device: str = "cpu",
        refusal: str = "",
    ) -> None:
        self._program, self._around = program, around
        self._to_device, self._to_numpy = to_device, to_numpy
        self._facts = Facts(device, refusal=refusal)
        self.whole = False
        self.plan = Plan("", fused=False, largest=1)

    @property
    def programs(self) -> int:
        """Nothing is compiled."""
        return 0

    def facts(self, window: Window) -> Facts:
        """Return that nothing can be compiled."""
        return self._facts

    def compile(self, window: Window) -> bool:
        """Do nothing."""
        return False

    def run(self, window: Window, first_step: int) -> Done:
        """Run the window's batches in order."""
        started = time.monotonic()
        results: list[StepResult] = []
        for i in range(window.count):
            batch = keras.tree.map_structure(
                lambda x: None if x is None else self._to_device(x), window.batch(i)
            )
            with self._around(self._program):
                results.append(run_step(self._program, batch, first_step + i))
        fetched = self._fetched(results)
        return Done(lambda: fetched, time.monotonic() - started)

    def _fetched(self, results: Sequence[StepResult]) -> Results:
        first = results[0]
        broken = [m for r in results for m, flag in r.broken.items() if self._to_numpy(flag)]
        return (
            self._stacked(results, first.values, "values"),
            self._stacked(results, first.weights, "weights"),
            broken,
        )

    def _stacked(
        self, results: Sequence[StepResult], names: Mapping[str, Tensor], which: str
    ) -> dict[str, Any]:
        return {
            name: np.stack([self._to_numpy(getattr(r, which)[name]) for r in results])
            for name in names
        }
