"""Proving a captured PyTorch step: its replay must equal the original step.

The proof runs a few steps both ways from the same state, and compares every variable, every
returned value and the random state. The comparison is bit for bit, since a learning rate that
became a constant would change only the last bits. Afterwards the state is restored.
"""

import random
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import keras
import numpy as np
import torch

from ...eager import StepResult, run_step
from ...plans import RefusedError
from ...program import Program
from ..patches import get_device, variables_made
from .code import Code
from .passes import has_poolings
from .recording import recording
from .tape import Tape

FAR = 1000  # the step number of the proof's last step, so that dependence on it becomes visible
# Equal operations give equal bits on a CPU. On a GPU, or with another memory layout, the order of
# summation may vary: this many units in the last place of the largest number may differ.
ROUNDING = 64

Around = Callable[[Program], AbstractContextManager[Any]]


class SomeBatches(Protocol):
    """The batches that a proof runs on."""

    count: int

    def batch(self, index: int) -> Any:
        """Return a batch in its original structure."""
        ...

    def tensors(self, index: int) -> list[Any]:
        """Return a batch's tensors as a flat list."""
        ...


class Captured:
    """A captured step: its code, and the names of its outputs.

    Attributes:
        uses_number: Whether it depends on the step's number.
        draws: Whether it draws from PyTorch's global generator, which other code shares.
        length: The number of operations.
        source: The lines of the generated function.
    """

    def __init__(self, code: Code, names: Sequence[Sequence[str]]) -> None:
        self.uses_number, self.draws = code.uses_number, code.draws
        self.length, self.source = code.length, code.source
        self._code, self._names = code, names

    def __call__(self, state: Sequence[Any], batch: Sequence[Any], number: Any) -> StepResult:
        """Run the step."""
        outputs = iter(self._code(state, batch, number))
        values, weights, broken = ({name: next(outputs) for name in names} for names in self._names)
        return StepResult(values, weights, broken)


class Prover:
    """Captures a step for batches of equal structure, shapes and dtypes.

    Args:
        program: The step.
        around: A function that returns the context manager for each eager step.
    """

    def __init__(self, program: Program, around: Around) -> None:
        self._program, self._around = program, around
        self._state = [variable._value for variable in program.variables]
        self._paths = list(program.new_context(0).variables)
        self._has_loops = False

    def capture(self, batches: SomeBatches) -> Captured | str:
        """Return the captured step, or the reason why it cannot be; the state is restored."""
        captured = self._capture(batches, rolled=True)
        if isinstance(captured, str) and self._has_loops:
            # The function of a `for_each` may pass tensors from row to row in Python: unroll it.
            captured = self._capture(batches, rolled=False)
        return captured

    def _capture(self, batches: SomeBatches, rolled: bool) -> Captured | str:
        try:
            with self._undone() as made:
                tape, result = self._record(batches, rolled)
            if made:
                return "it creates variables that its dry run did not create"
        except RefusedError as refused:
            return str(refused)
        except Exception as error:  # the step's own errors are raised again when it runs eagerly
            return _in_one_line(error)
        parts = result.values, result.weights, result.broken
        names = [list(part) for part in parts]
        refs = [tape.ref_of(x) for part in parts for x in part.values()]
        plain = Captured(Code(tape, refs, self._program.name, relaid=False), names)
        with self._undone():
            why = self._difference(plain, batches, exact=device() == "cpu")
        if why or not has_poolings(tape.block):
            return why or plain
        relaid = Captured(Code(tape, refs, self._program.name, relaid=True), names)
        if relaid.length == plain.length:
            return plain
        with self._undone():
            return plain if self._difference(relaid, batches, exact=False) else relaid

    def run_and_undo(self, batches: SomeBatches) -> None:
        """Run the step eagerly, and restore the state."""
        with self._undone(), self._around(self._program):
            run_step(self._program, batches.batch(0), 0)

    def _record(self, batches: SomeBatches, rolled: bool) -> tuple[Tape, StepResult]:
        as_tensor = step_number(0)
        batch = batches.batch(0)
        with (
            self._around(self._program),
            recording(self._state, tensors_of(batch), as_tensor, rolled) as tape,
        ):
            try:
                result = run_step(self._program, batch, as_tensor)
            finally:
                self._has_loops = tape.loops > 0
        if any(
            v._value is not x for v, x in zip(self._program.variables, self._state, strict=True)
        ):
            raise RefusedError("it replaces the tensor of a variable")
        return tape, result

    def _difference(self, captured: Captured, batches: SomeBatches, exact: bool) -> str:
        """Run some steps both ways; return the first difference, or an empty string."""
        for trial, number in enumerate((0, 1, FAR)):
            if number == FAR:
                self._go_far()
            index = trial % batches.count
            with self._undone():
                drawn = _RandomStates()
                try:
                    with self._around(self._program):
                        expected = run_step(self._program, batches.batch(index), number)
                except Exception:  # training may never reach this later batch or step number
                    return "" if trial else "it fails when it runs eagerly"
                wanted = [tensor.detach().clone() for tensor in self._state]
                generator = torch.get_rng_state()
                if moved := drawn.moved():
                    return f"it draws from {moved}, which a captured step would do only once"
            with self._undone():
                try:
                    found = captured(self._state, batches.tensors(index), step_number(number))
                except Exception as error:
                    return _in_one_line(error)
                differs = self._compared(expected, found, wanted, exact)
                if not torch.equal(torch.get_rng_state(), generator):
                    differs = differs or "when replayed, it draws different random numbers"
                if differs:
                    return f"{differs}, in step {trial + 1} of the proof"
            _set(self._state, wanted)
        return ""

    def _go_far(self) -> None:
        """Advance the optimizers' iteration counters."""
        for variable, tensor in zip(self._program.variables, self._state, strict=True):
            if variable.name == "iteration":
                _set([tensor], [tensor + FAR])

    def _compared(
        self, expected: StepResult, found: StepResult, wanted: Sequence[Any], exact: bool
    ) -> str:
        for path, old, new in zip(self._paths, wanted, self._state, strict=True):
            if not _agree(new, old, exact):
                return f"when replayed, it computes a different {path}"
        pairs: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = [
            (expected.values, found.values),
            (expected.weights, found.weights),
            (expected.broken, found.broken),
        ]
        for old, new in pairs:
            if list(old) != list(new):
                return f"it returns {list(new)} first and then {list(old)}"
            for name in old:
                if not _agree(new[name], old[name], exact):
                    return f"when replayed, it returns a different {name!r}"
        return ""

    @contextmanager
    def _undone(self) -> Generator[list[tuple[Any, Any]]]:
        """Restore every variable and every random state afterwards.

        Variables that are created inside are reset to their initial values: Python code that
        depends on values may take a branch that the dry run did not, and build an optimizer in it.
        """
        before = [tensor.detach().clone() for tensor in self._state]
        states = _RandomStates()
        with variables_made() as made:
            try:
                with torch.random.fork_rng():
                    yield made
            finally:
                states.put_back()
                _set(self._state, before)
                _set([variable._value for variable, _ in made], [value for _, value in made])


class _RandomStates:
    """The random states of Python and NumPy."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def moved(self) -> str:
        """Return the generator whose state has changed, or an empty string."""
        if random.getstate() != self._python:
            return "Python's random"
        if repr(np.random.get_state()) != repr(self._numpy):
            return "numpy.random"
        return ""

    def put_back(self) -> None:
        """Restore both states."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def device() -> str:
    """Return the type of the device of Keras' variables, such as `"cpu"` or `"cuda"`."""
    return str(get_device()).partition(":")[0]


def step_number(step: int) -> Any:
    """Return a step's number as a tensor."""
    return torch.tensor(step, dtype=torch.int32, device=get_device())


def tensors_of(batch: Any) -> list[Any]:
    """Return the tensors of a batch as a flat list, without None."""
    return [x for x in keras.tree.flatten(batch) if x is not None]


def _set(tensors: Sequence[Any], values: Sequence[Any]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


def _agree(a: Any, b: Any, exact: bool) -> bool:
    """Return whether two tensors are equal, bit for bit or within the rounding of sums."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    equal = (a == b) | (a.isnan() & b.isnan())
    if exact or not a.dtype.is_floating_point or not a.numel():
        return bool(equal.all())
    x, y = a.double(), b.double()
    limit = ROUNDING * torch.finfo(a.dtype).eps * y.nan_to_num(0.0, 0.0, 0.0).abs().max()
    return bool((((x - y).abs() <= limit) | equal).all())


def _in_one_line(error: Exception) -> str:
    """Format an exception as one line, without the color codes that Keras' layers add."""
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())
    return f"{type(error).__name__}: {text[:200]}"
