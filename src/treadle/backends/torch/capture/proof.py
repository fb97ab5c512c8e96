"""Capturing a PyTorch step, and proving it: its replay must equal the original step."""

from collections.abc import Sequence
from typing import Any

from ...eager import StepResult, run_step
from ...plans import RefusedError
from ...program import Program
from .code import Code
from .passes import has_poolings
from .recording import recording
from .tape import Tape
from .trials import Around, SomeBatches, Trials, in_one_line, step_number, tensors_of, undone


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
        plain = Captured(Code(tape, refs, self._program.name, relaid=False), names)
        trials = Trials(self._program, self._around)
        why = trials.difference(plain, batches)
        if why or not has_poolings(tape.block):
            return why or plain
        relaid = Captured(Code(tape, refs, self._program.name, relaid=True), names)
        if relaid.length == plain.length:
            return plain
        return plain if trials.difference(relaid, batches, exact=False) else relaid

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
