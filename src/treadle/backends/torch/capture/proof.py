"""Capturing a PyTorch step, and proving it: its replay must equal the original step."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ....core.tracebacks import in_one_line
from ...eager import run_step
from ...plans import RefusedError
from ...program import Program
from ...types import StepResult
from .code import Captured
from .cuda_graph import GraphReplay
from .inductor import with_compiled_parts
from .nodes import Ref
from .passes import has_poolings, simplified
from .recording import recording
from .rounding import COMPILED, SUMMED
from .tape import Tape
from .trials import Around, ReplayTrials, step_number, tensors_of, undone

Made = TypeVar("Made")


class Prover:
    """Captures a step for batches of equal structure, shapes and dtypes.

    Args:
        program: The step.
        around: A function that returns the context manager for each eager step.
        compiles: Whether the step is compiled by Inductor, if possible.
        graphs: Whether it is then replayed as a CUDA graph, if possible.
    """

    def __init__(
        self, program: Program, around: Around, compiles: bool = False, graphs: bool = False
    ) -> None:
        self._program, self._around = program, around
        self._compiles, self._graphs = compiles, graphs
        self._state = [variable._value for variable in program.variables]
        self._has_loops = False

    def capture(self, batches: Sequence[Any]) -> Captured | str:
        """Return the captured step, or the reason why it cannot be; the state is restored.

        Args:
            batches: One or two batches, of tensors.
        """
        captured = self._capture(batches, rolled=True)
        if isinstance(captured, str) and self._has_loops:
            # The function of a `for_each` may pass tensors from row to row in Python: unroll it.
            captured = self._capture(batches, rolled=False)
        return captured

    def _capture(self, batches: Sequence[Any], rolled: bool) -> Captured | str:
        try:
            plain, relaid = self._recorded(batches[0], rolled, self._codes)
        except RefusedError as refused:
            return str(refused)
        except Exception as error:  # the step's own errors are raised again when it runs eagerly
            return in_one_line(error)
        trials = ReplayTrials(self._program, self._around)
        why = trials.difference(plain, batches)
        if why:
            return why
        if self._compiles:
            try:  # recorded again, since compiling takes long, and the values took memory meanwhile
                compiled, graphs = self._recorded(batches[0], rolled, self._compiled)
                refusal = _proven(compiled, graphs, trials, batches)
            except RefusedError as refused:
                refusal = str(refused)
            except Exception as error:  # the captured step is proven already
                refusal = in_one_line(error)
            else:
                if not refusal:
                    return compiled
            plain.refusal = f"not compiled by Inductor: {refusal}"
        if relaid is None:
            return plain
        relaid.refusal = plain.refusal
        return plain if trials.difference(relaid, batches, SUMMED) else relaid

    def _recorded(
        self, batch: Any, rolled: bool, make: Callable[[Tape, list[Ref], list[list[str]]], Made]
    ) -> Made:
        """Record the step, and return what a function makes of the tape and its results.

        Afterwards the tape is freed, which holds every value of a step. The state is restored.

        Raises:
            RefusedError: The step cannot be captured.
        """
        with undone(self._program) as made:
            tape, result = self._record(batch, rolled)
        if made:
            raise RefusedError("it creates variables that its dry run did not create")
        parts = result.values, result.weights, result.broken
        refs = [tape.ref_of(x) for part in parts for x in part.values()]
        return make(tape, refs, [list(part) for part in parts])

    def _codes(
        self, tape: Tape, refs: list[Ref], names: list[list[str]]
    ) -> tuple[Captured, Captured | None]:
        """Return the code of a step, and another if poolings keep their memory layout in it."""
        title = self._program.name
        plain = Captured(tape, simplified(tape, refs), names, title)
        if not has_poolings(tape.block):
            return plain, None
        relaid = Captured(tape, simplified(tape, refs, relaid=True), names, title)
        return plain, None if relaid.length == plain.length else relaid

    def _compiled(
        self, tape: Tape, refs: list[Ref], names: list[list[str]]
    ) -> tuple[Captured, list[GraphReplay] | None]:
        """Return the code with compiled parts, and the graphs that replay them."""
        graphs = list[GraphReplay]() if self._graphs else None
        block = with_compiled_parts(tape, simplified(tape, refs, in_place=False), graphs)
        compiled = Captured(tape, block, names, self._program.name)
        compiled.is_compiled = True
        return compiled, graphs

    def _record(self, batch: Any, rolled: bool) -> tuple[Tape, StepResult]:
        as_tensor = step_number(0)
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


def _proven(
    compiled: Captured,
    graphs: list[GraphReplay] | None,
    trials: ReplayTrials,
    batches: Sequence[Any],
) -> str:
    """Return how a compiled step differs, or an empty string; without graphs if these fail.

    Args:
        compiled: The step.
        graphs: The graphs that replay its parts; None if there are none.
        trials: Compares it with the uncompiled step.
        batches: The batches for that.
    """
    why = trials.difference(compiled, batches, COMPILED)
    if graphs is None:
        return why
    failed = why or next((graph.refusal for graph in graphs if graph.refusal), "")
    compiled.is_graph = not failed and all(graph.replays for graph in graphs)
    if not compiled.is_graph:
        reason = failed or "it was not captured"
        for graph in graphs:
            graph.give_up(reason)
        compiled.refusal = f"not replayed as a CUDA graph: {reason}"
        if why:
            why = trials.difference(compiled, batches, COMPILED)
    return why
