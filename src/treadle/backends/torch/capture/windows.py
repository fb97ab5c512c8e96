"""PyTorch's windows: a step is captured for batches of one form, proven, and then played.

A tape (`_torch_tape`) is recorded, made into code (`_torch_passes`, `_torch_code`) and proven
(`_torch_proof`); here is what runs it. What cannot be captured runs as it is, and the plan says
why.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np
import torch

from ....core.options import Options
from ...background import Done, Results, Running
from ...base import Program
from ...eager import StepResult, run_step
from ...plans import Facts, Plan
from ...window import Rows, Window, row
from .proof import Captured, Prover, device, step_number, tensors_of

CAPTURED = "captured"
MOST_FORMS = 16  # of batches that are captured: each takes memory and a proof

_placed: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Data sets as tensors by their owner, each made once; on a CPU they are the arrays' own memory."""


class Batches:
    """A window's batches as tensors, one after another.

    Args:
        window: The window.
        to_device: Makes a tensor of an array.

    Attributes:
        count: How many there are.
    """

    def __init__(self, window: Window, to_device: Callable[[Any], Any]) -> None:
        self.count = window.count
        self._rows = window.rows
        if self._rows is None:
            self._held = _mapped(to_device, window.batches)
            self._columns = [x.unbind() for x in tensors_of(self._held)]
        else:
            self._held = _on_device(self._rows, to_device)
            self._arrays = tensors_of(self._held)
            self._indices = torch.as_tensor(self._rows.indices, device=device()).unbind()

    def batch(self, index: int) -> Any:
        """Return a batch in its own structure."""
        if self._rows is None:
            return row(self._held, index)
        return _mapped(lambda x: x.index_select(0, self._indices[index]), self._held)

    def tensors(self, index: int) -> list[Any]:
        """Return a batch's tensors alone."""
        if self._rows is None:
            return [column[index] for column in self._columns]
        chosen = self._indices[index]
        return [x.index_select(0, chosen) for x in self._arrays]


class CaptureExecutor:
    """Plays a captured step for each batch of a window; runs it as it is where that cannot be.

    All batches are of one form.

    Args:
        program: The step.
        options: How to execute.
        around: Entered around each step that runs as it is.
        to_device: Makes a tensor of an array.
    """

    def __init__(
        self,
        program: Program,
        options: Options,
        around: Callable[[Program], AbstractContextManager[Any]],
        to_device: Callable[[Any], Any],
    ) -> None:
        self._program, self._options, self._around = program, options, around
        self._to_device = to_device
        self._captured: Captured | str | None = None  # not tried yet
        self._ready: tuple[Window, Batches] | None = None
        self.whole = False
        self.plan = Plan(CAPTURED, fused=True, largest=1)

    @property
    def programs(self) -> int:
        """1 if the step was captured, else 0."""
        return int(isinstance(self._captured, Captured))

    def facts(self, window: Window) -> Facts:
        """Capture the step, or say why it cannot be."""
        captured = self._capture(window)
        if isinstance(captured, Captured):
            return Facts(device(), (CAPTURED,))
        if self._options.execution == "compiled":  # an error of the step's own says more
            Prover(self._program, self._around).run_and_undo(self._batches(window))
        return Facts(device(), refusal=f"the step could not be captured: {captured}")

    def compile(self, window: Window) -> bool:
        """Capture the step; False if that was tried before."""
        if not self.plan.compiler or self._captured is not None:
            return False
        return isinstance(self._capture(window), Captured)

    def run(self, window: Window, first_step: int) -> Done | Running:
        """Run the window's batches in order.

        A captured step runs in a thread of its own where reading the next window may take long,
        which a step must not that draws from the generator that the reader may draw from.
        """
        started = time.monotonic()
        self.compile(window)
        batches, self._ready = self._batches(window), None
        captured = self._captured
        if isinstance(captured, Captured) and self.plan.compiler:
            if window.rows is None and not captured.draws:
                return Running(lambda: _fetched(self._play(captured, batches, first_step)))
            results = self._play(captured, batches, first_step)
        else:
            results = [self._run(batches.batch(i), first_step + i) for i in range(window.count)]
        fetched = _fetched(results)
        return Done(lambda: fetched, time.monotonic() - started)

    def _batches(self, window: Window) -> Batches:
        """Return a window's batches, which are asked for more than once before it runs."""
        if self._ready is None or self._ready[0] is not window:
            self._ready = window, Batches(window, self._to_device)
        return self._ready[1]

    def _play(self, step: Captured, batches: Batches, first_step: int) -> list[StepResult]:
        state = [variable._value for variable in self._program.variables]
        results: list[StepResult] = []
        for i in range(batches.count):
            number = step_number(first_step + i) if step.uses_number else None
            results.append(step(state, batches.tensors(i), number))
        return results

    def _run(self, batch: Any, number: int) -> StepResult:
        with self._around(self._program):
            return run_step(self._program, batch, number)

    def _capture(self, window: Window) -> Captured | str:
        """Return the captured step, or why there is none."""
        if self._captured is None:
            if self._program.number < MOST_FORMS:
                prover = Prover(self._program, self._around)
                self._captured = prover.capture(self._batches(window))
            else:
                self._captured = f"batches come in more than {MOST_FORMS} forms"
        return self._captured


def _fetched(results: Sequence[StepResult]) -> Results:
    values = _stacked([result.values for result in results])
    weights = _stacked([result.weights for result in results])
    broken = _stacked([result.broken for result in results])
    return values, weights, [message for message, flags in broken.items() if flags.any()]


def _stacked(steps: Sequence[Any]) -> dict[str, Any]:
    return {
        name: torch.stack([step[name] for step in steps]).numpy(force=True) for name in steps[0]
    }


def _on_device(rows: Rows, to_device: Callable[[Any], Any]) -> Any:
    if rows.owner not in _placed:
        # PyTorch takes over memory only where it may be written to, though nothing is.
        _placed[rows.owner] = _mapped(
            lambda x: to_device(np.require(x, requirements=["C", "W"])), rows.arrays
        )
    return _placed[rows.owner]


def _mapped(function: Callable[[Any], Any], structure: Any) -> Any:
    return keras.tree.map_structure(lambda x: None if x is None else function(x), structure)
