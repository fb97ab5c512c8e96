"""Windows on PyTorch: a step is captured, proven, and then replayed for each batch.

The step is recorded on a tape (`recording`, `tape`), simplified (`passes`), compiled to a Python
function (`code`) and proven (`proof`, `trials`); this module runs it. On request, parts of it are
compiled (`split`, `graph`, `inductor`) and proven again. Steps that cannot be captured run eagerly,
and the plan gives the reason.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ....core import structures
from ....core.float64 import CONVERTED
from ....core.options import Options
from ...background import Done, Running, fetched, hand_over, take_back
from ...eager import run_step
from ...plans import Facts, Plan
from ...program import Program
from ...types import StepResult
from ...window import Following, Rows, Window, row
from ..patches import get_device
from .code import Captured
from .cuda_graph import CUDA_GRAPH
from .inductor import INDUCTOR
from .proof import Prover
from .transfers import SAME_TYPE, in_this_stream, on_accelerator, start_copies
from .trials import device, step_number, tensors_of, undone

CAPTURED = "captured"
MOST_FORMS = 256  # limit of captures for batches of different shapes: each takes about 0.3 MB

# Steps whose variables have more bytes than this run as Python on a CPU: the proof copies the
# variables, and the Python code around such long operations matters little.
MOST_BYTES = 512 * 2**20

placed: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Data sets as tensors, in their structure and as a list, by owner: each is converted once, on a
CPU without a copy."""


class Batches:
    """A window's batches as tensors.

    Args:
        window: The window.
        to_device: A function that converts an array to a tensor.
        early: Whether to copy streamed batches while other steps run. Then `arrive` must be called
            before they are used.

    Attributes:
        count: The number of batches.
        arrive: Lets operations of the calling thread wait on the device for the batches.
    """

    def __init__(
        self, window: Window, to_device: Callable[[Any], Any], early: bool = False
    ) -> None:
        self.count, self._length = window.count, window.examples
        self._rows = window.rows
        self.arrive: Callable[[], None] = lambda: None
        if self._rows is None:
            if early:
                self._held, self.arrive = start_copies(window.batches, to_device)
            else:
                self._held = structures.mapped(to_device, window.batches)
            self._columns = [x.unbind() for x in tensors_of(self._held)]
        else:
            self._held, self._arrays = _on_device(self._rows, to_device)

    @cached_property
    def _indices(self) -> Sequence[Any]:
        """The rows of each batch."""
        assert self._rows is not None
        return torch.as_tensor(self._rows.indices, device=get_device()).unbind()

    def batch(self, index: int) -> Any:
        """Return a batch in its original structure."""
        if self._rows is None:
            return row(self._held, index)
        return structures.mapped(lambda x: x.index_select(0, self._indices[index]), self._held)

    def tensors(self, index: int) -> list[Any]:
        """Return a batch's tensors as a flat list."""
        if self._rows is None:
            return [column[index] for column in self._columns]
        chosen = self._indices[index]
        return [x.index_select(0, chosen) for x in self._arrays]

    def views(self) -> Iterator[list[Any]]:
        """Yield each batch's tensors, without copies if they are consecutive rows of a data set.

        They must not be changed. Sums may be rounded differently than for `tensors`, since a
        product of matrices can depend on how they are aligned in memory.
        """
        starts = self._rows and self._rows.starts
        if not starts:
            yield from map(self.tensors, range(self.count))
            return
        for start in starts:
            yield [x.narrow(0, start, self._length) for x in self._arrays]


class CaptureExecutor:
    """Replays a captured step for each batch of a window; runs it eagerly if it is not captured.

    All batches have equal structure, shapes and dtypes.

    Args:
        program: The step.
        options: Execution options.
        around: A function that returns the context manager for each eager step.
        to_device: A function that converts an array to a tensor.
        agreed: A function that returns the captured step, or the reason why it cannot be captured
            here or in another process.
    """

    def __init__(
        self,
        program: Program,
        options: Options,
        around: Callable[[Program], AbstractContextManager[Any]],
        to_device: Callable[[Any], Any],
        agreed: Callable[[Captured | str], Captured | str] = lambda captured: captured,
    ) -> None:
        self._program, self._options, self._around = program, options, around
        self._to_device, self._agreed = to_device, agreed
        self._captured: Captured | str | None = None  # not tried yet
        self._ready: tuple[Window, Batches] | None = None
        self.whole = False
        self.plan = Plan(CAPTURED, fused=True, largest=1)

    @property
    def calls_python(self) -> bool:
        """Whether the step is not captured: a captured one only replays operators."""
        return not isinstance(self._captured, Captured)

    @property
    def programs(self) -> int:
        """1 if the step was captured, else 0."""
        return int(isinstance(self._captured, Captured))

    def facts(self, window: Window) -> Facts:
        """Capture the step, or return facts with the reason why it cannot be captured."""
        captured = self._capture(window)
        if isinstance(captured, Captured):
            compiler = INDUCTOR if captured.is_compiled else CAPTURED
            compiler = CUDA_GRAPH if captured.is_graph else compiler
            return Facts(device(), (compiler,), refusal=captured.refusal)
        if self._options.execution == "compiled":  # raises the step's own error if there is one
            with undone(self._program):
                self._run(self._batches(window).batch(0), 0)
        return Facts(device(), refusal=f"the step could not be captured: {captured}")

    def compile(self, window: Window) -> bool:
        """Capture the step; return False if this was tried before, or if it failed."""
        if not self.plan.compiler or self._captured is not None:
            return False
        return isinstance(self._capture(window), Captured)

    def transfer(self, window: Window) -> None:
        """Start to copy the batches of a streamed window from pinned memory."""
        if on_accelerator() and window.rows is None and isinstance(self._captured, Captured):
            self._ready = window, Batches(window, self._to_device, early=True)

    def run(
        self,
        window: Window,
        first_step: int,
        background: bool = True,
        following: Following | None = None,
    ) -> Done | Running:
        """Run the window's batches in order.

        If reading the next window may take long, a captured step runs in a background thread,
        unless it draws from the global generator, from which the reader may draw too.
        """
        started = time.monotonic()
        self.compile(window)
        batches, self._ready = self._batches(window), None
        captured = self._captured
        if isinstance(captured, Captured) and self.plan.compiler:
            if background and window.rows is None and not captured.draws:
                if not on_accelerator():
                    hand_over()
                return Running(
                    in_this_stream(
                        lambda: fetched(self._play(captured, batches, first_step), _stacked)
                    )
                )
            take_back()
            results = self._play(captured, batches, first_step)
        else:
            batches.arrive()
            results = [self._run(batches.batch(i), first_step + i) for i in range(window.count)]
        found = fetched(results, _stacked)
        return Done(lambda: found, time.monotonic() - started)

    def _batches(self, window: Window) -> Batches:
        """Return a window's batches, cached since they are used several times before it runs."""
        if self._ready is None or self._ready[0] is not window:
            self._ready = window, Batches(window, self._to_device)
        return self._ready[1]

    def _play(self, step: Captured, batches: Batches, first_step: int) -> list[StepResult]:
        batches.arrive()
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
        """Return the captured step, or the reason why it cannot be captured."""
        if self._captured is None:
            nbytes = sum(v._value.nbytes for v in self._program.variables)
            if nbytes > MOST_BYTES and device() == "cpu" and self._options.execution != "compiled":
                self._captured = (
                    f"its variables have {nbytes / 2**30:.1f} GiB, and to verify the captured step "
                    "takes four times that memory"
                )
            elif self._program.number < MOST_FORMS:
                graphs = self._options.compiler == CUDA_GRAPH
                compiles = graphs or self._options.compiler == INDUCTOR
                prover = Prover(self._program, self._around, compiles, graphs)
                batches = self._batches(window)
                two = [batches.batch(i) for i in range(min(2, window.count))]
                self._captured = self._agreed(prover.capture(two))
            else:
                self._captured = f"batches have more than {MOST_FORMS} different shapes"
        return self._captured


def _stacked(tensors: list[Any]) -> Any:
    return torch.stack(tensors).numpy(force=True)


def _on_device(rows: Rows, to_device: Callable[[Any], Any]) -> tuple[Any, list[Any]]:
    """Return a data set as tensors, which must not be changed: on a CPU they share its memory.

    Returns:
        Its structure, and its tensors as a list: to list them takes 70 calls of Python.
    """
    if rows.owner not in placed:
        held = structures.mapped(lambda x: shared(x, to_device), rows.arrays)
        placed[rows.owner] = held, tensors_of(held)
    return placed[rows.owner]


def is_shareable(array: Any) -> bool:
    """Return whether a tensor can share the memory of an array, and has the same type in Keras."""
    kept = array.dtype in SAME_TYPE and array.dtype not in CONVERTED
    return kept and device() == "cpu"


def shared(array: Any, to_device: Callable[[Any], Any]) -> Any:
    """Return an array as a tensor, which shares its memory where that is possible.

    Keras copies each array that it converts, which takes half as long as a small network.
    """
    if not is_shareable(array):
        return to_device(array)
    # PyTorch shares memory only with writable arrays, although it does not write to them.
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))
