"""Capturing a PyTorch step, and proving it: its replay must equal the original step."""

from collections.abc import Sequence
from typing import Any

from ....core.error_notes import in_one_line
from ...eager import StepResult, run_step
from ...plans import RefusedError
from ...program import Program
from .code import Code
from .inductor import with_compiled_parts
from .passes import has_poolings, simplified
from .recording import recording
from .tape import Tape
from .trials import (
    COMPILED,
    SUMMED,
    Around,
    SomeBatches,
    Trials,
    step_number,
    tensors_of,
    undone,
)


class Captured:
    """A captured step: its code, and the names of its outputs.

    Attributes:
        uses_number: Whether it depends on the step's number.
        draws: Whether it draws from PyTorch's global generator, which other code shares.
        length: The number of operations.
        source: The lines of the generated function.
        is_compiled: Whether Inductor compiled operations of it.
        refusal: Why Inductor did not compile it, as a clause; empty if it was not asked to.
    """

    def __init__(
        self, code: Code, names: Sequence[Sequence[str]], is_compiled: bool = False
    ) -> None:
        self.is_compiled, self.refusal = is_compiled, ""
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
        compiles: Whether the step is compiled by Inductor, if possible.
    """

    def __init__(self, program: Program, around: Around, compiles: bool = False) -> None:
        self._program, self._around, self._compiles = program, around, compiles
        self._state = [variable._value for variable in program.variables]
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
            with undone(self._program) as made:
                tape, result = self._record(batches, rolled)
            if made:
                return "it creates variables that its dry run did not create"
        except RefusedError as refused:
            return str(refused)
        except Exception as error:  # the step's own errors are raised again when it runs eagerly
            return in_one_line(error)
        parts = result.values, result.weights, result.broken
        names = [list(part) for part in parts]
        refs = [tape.ref_of(x) for part in parts for x in part.values()]
        title = self._program.name
        plain = Captured(Code(tape, *simplified(tape, refs), title), names)
        trials = Trials(self._program, self._around)
        why = trials.difference(plain, batches)
        if why:
            return why
        refusal = ""
        if self._compiles:
            try:
                block, results = simplified(tape, refs, in_place=False)
                block = with_compiled_parts(tape, block, results)
                compiled = Captured(Code(tape, block, results, title), names, is_compiled=True)
                refusal = trials.difference(compiled, batches, COMPILED)
            except RefusedError as refused:
                refusal = str(refused)
            except Exception as error:  # the captured step is proven already
                refusal = in_one_line(error)
            else:
                if not refusal:
                    return compiled
            plain.refusal = refusal
        if not has_poolings(tape.block):
            return plain
        relaid = Captured(Code(tape, *simplified(tape, refs, relaid=True), title), names)
        relaid.refusal = refusal
        if relaid.length == plain.length:
            return plain
        return plain if trials.difference(relaid, batches, SUMMED) else relaid

    def run_and_undo(self, batches: SomeBatches) -> None:
        """Run the step eagerly, and restore the state."""
        with undone(self._program), self._around(self._program):
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
