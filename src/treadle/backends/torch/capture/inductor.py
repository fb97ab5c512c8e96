"""Compiling a recorded step with Inductor, PyTorch's compiler.

A step is compiled once, for single steps and windows alike, so that both compute the same bits. The
compiler keeps its programs in a cache directory of its own (`TORCHINDUCTOR_CACHE_DIR`), from which
a second process reads them.
"""

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

import torch

from ....core.error_notes import in_one_line
from ...plans import RefusedError
from ..patches import INTERNALS
from .cuda_graph import GraphReplay, check_devices
from .graph import Graph, graph_of
from .nodes import Block, Operation, Ref, inputs_of
from .split import Part, split, written
from .tape import Tape

INDUCTOR: Final = "inductor"

# By default, a call that trains for fewer steps runs as captured: compiling takes about a minute,
# which a gain of 2 ms a step repays after so many steps. Not measured on a GPU.
STEPS_THAT_PAY: Final = 30_000

_SETTINGS: Final = {
    "fallback_random": True,  # draws are outside; should one be decomposed, it is PyTorch's own
    "deterministic": True,  # choose no kernel by timing
}


def pays(device: str, steps: int | None) -> bool:
    """Return whether `Options(compiler="auto")` compiles a step.

    On a CPU it does not: there captured steps start at once, and equal runs of any length agree in
    every bit.

    Args:
        device: The device that steps run on.
        steps: How many steps the call trains for, or None if unknown.

    Example:
        >>> pays("cuda", 100_000), pays("cuda", 100), pays("cuda", None), pays("cpu", 100_000)
        (True, False, False, False)
    """
    return device != "cpu" and steps is not None and steps >= STEPS_THAT_PAY


def with_compiled_parts(
    tape: Tape, block: Block, results: list[Ref], graphs: list[GraphReplay] | None = None
) -> Block:
    """Return a block with the operations compiled that the compiler takes.

    Args:
        tape: The tape on which the block was recorded.
        block: The operations; they are not changed.
        results: The values that the step returns.
        graphs: A list that gets the CUDA graphs as which the parts are replayed; None if they are
            not.

    Raises:
        RefusedError: Nothing can be compiled, or the compiler fails; the reason names the operation
            and its line.
    """
    parts = split(tape, block, results)
    made: Block = []
    for i, part in enumerate(parts):
        if part.reason:
            made += part.block
            continue
        wanted = set(results).union(*(inputs_of(other.block) for other in parts[i + 1 :]))
        made.append(_compiled(tape, part, wanted, graphs))
    return made


def _compiled(
    tape: Tape, part: Part, wanted: set[Ref], graphs: list[GraphReplay] | None
) -> Operation:
    """Compile a part, and return the call of it."""
    try:
        graph = graph_of(tape, part.block, wanted)
        mode = INTERNALS["FakeTensorMode"].resolve()(
            shape_env=INTERNALS["ShapeEnv"].resolve()(), allow_non_fake_inputs=True
        )
        with mode:
            inputs = [_empty(tape.objects[ref.index]) for ref in graph.inputs]
        with _repeatable(), torch.no_grad():
            function = INTERNALS["standalone_compile"].resolve()(
                graph.module,
                inputs,
                dynamic_shapes="from_example_inputs",
                options={"config_patches": _SETTINGS},
                donate_graph_module=True,
                fake_mode=mode,
            )
    except Exception as error:  # of many types, which the compiler's versions wrap differently
        raise RefusedError(_why(error, part)) from error
    if graphs is not None:
        function = _replayed(tape, part, graph, function)
        graphs.append(function)
    return Operation(function, tuple(graph.inputs), {}, list(graph.outputs), "")


def _replayed(tape: Tape, part: Part, graph: Graph, function: Any) -> GraphReplay:
    """Return the replay of a compiled part, which gives up at once if it cannot be a graph."""
    changed = set[int]().union(*(written(tape, node) for node in part.block))
    found = GraphReplay(
        function,
        [tape.kind_of(ref) == "state" for ref in graph.inputs],
        [tape.storage_of(ref) in changed for ref in graph.inputs],
    )
    try:
        check_devices([tape.objects[ref.index] for ref in (*graph.inputs, *graph.outputs)])
    except RefusedError as refused:
        found.give_up(str(refused))
    return found


def _empty(x: Any) -> Any:
    """Return a tensor of the same form, in the compiler's mode without memory."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _why(error: Exception, part: Part) -> str:
    """Return why a part could not be compiled, with the operation that the compiler names."""
    text = str(error)
    if "InvalidCxxCompiler" in f"{type(error).__name__}: {text}":
        return "there is no C++ compiler: install g++, or name one in the environment variable CXX"
    for node in part.block:
        function = str(getattr(node, "function", ""))
        if function.startswith("aten.") and function in text:
            at = f", at {node.line}" if node.line else ""
            return f"{function} failed{at}: {in_one_line(error)}"
    return in_one_line(error)


@contextmanager
def _repeatable() -> Generator[None]:
    """Compile such that sums do not depend on the order in which threads finish."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=not before or only_warns)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)
