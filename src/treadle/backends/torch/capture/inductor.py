"""Compiling a recorded step with Inductor, PyTorch's compiler.

A step is compiled once, for single steps and windows alike, so that both compute the same bits. The
compiler keeps its programs in a cache directory of its own (`TORCHINDUCTOR_CACHE_DIR`), from which
a second process reads them.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import fx

from ....core.tracebacks import in_one_line
from ...plans import RefusedError
from ..patches import INTERNALS
from .cuda_graph import GraphReplay, check_devices, like
from .nodes import Block, Node, Ref, aten, inputs_of, mapped
from .split import Part, split, written
from .tape import Tape
from .trials import repeatable

INDUCTOR: Final = "inductor"

# By default, a call that trains for fewer steps runs as captured: compiling takes about a minute,
# which a gain of 2 ms a step repays after so many steps. Not measured on a GPU.
STEPS_THAT_PAY: Final = 30_000

_SETTINGS: Final = {
    "fallback_random": True,  # draws are outside; should one be decomposed, it is PyTorch's own
    "deterministic": True,  # choose no kernel by timing
}

# These change their statistics in place, which only the schema of the other operator declares.
_DECLARED = {aten.native_batch_norm.default: aten._native_batch_norm_legit.default}


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


def with_compiled_parts(tape: Tape, block: Block, graphs: list[GraphReplay] | None = None) -> Block:
    """Return a block with the operations compiled that the compiler takes.

    Args:
        tape: The tape on which the block was recorded.
        block: The operations; they are not changed.
        graphs: A list that gets the CUDA graphs as which the parts are replayed; None if they are
            not.

    Raises:
        RefusedError: Nothing can be compiled, or the compiler fails; the reason names the operation
            and its line.
    """
    parts = split(tape, block)
    made: list[Node] = []
    for i, part in enumerate(parts):
        if part.reason:
            made += part.nodes
            continue
        wanted = set(block.results).union(*(inputs_of(x.nodes) for x in parts[i + 1 :]))
        made.append(_compiled(tape, part, wanted, graphs))
    return Block(made, block.results)


def _compiled(tape: Tape, part: Part, wanted: set[Ref], graphs: list[GraphReplay] | None) -> Node:
    """Compile a part, and return the call of it."""
    names = "standalone_compile", "FakeTensorMode", "ShapeEnv"
    compile_module, mode_of, shapes = (INTERNALS[name].get() for name in names)
    if compile_module is None or mode_of is None or shapes is None:
        raise RefusedError(next(text for name in names if (text := INTERNALS[name].missing())))
    try:
        module, inputs, outputs = _graph_of(tape, part.nodes, wanted)
        mode = mode_of(shape_env=shapes(), allow_non_fake_inputs=True)
        with mode:
            examples = [like(tape.objects[ref.index]) for ref in inputs]
        with repeatable(), torch.no_grad():
            function = compile_module(
                module,
                examples,
                dynamic_shapes="from_example_inputs",
                options={"config_patches": _SETTINGS},
                donate_graph_module=True,
                fake_mode=mode,
            )
    except Exception as error:  # of many types, which the compiler's versions wrap differently
        raise RefusedError(_why(error, part)) from error
    if graphs is not None:
        changed = set[int]().union(*(written(tape, node) for node in part.nodes))
        function = GraphReplay(
            function,
            [tape.kind_of(ref) == "state" for ref in inputs],
            [tape.storage_of(ref) in changed for ref in inputs],
        )
        try:
            check_devices([tape.objects[ref.index] for ref in (*inputs, *outputs)])
        except RefusedError as refused:
            function.give_up(str(refused))
        graphs.append(function)
    return Node(function, tuple(inputs), {}, outputs, "")


def _why(error: Exception, part: Part) -> str:
    """Return why a part could not be compiled, with the operation that the compiler names."""
    text = str(error)
    if "InvalidCxxCompiler" in f"{type(error).__name__}: {text}":
        return "there is no C++ compiler: install g++, or name one in the environment variable CXX"
    for node in part.nodes:
        function = str(node.function)
        if function.startswith("aten.") and function in text:
            at = f", at {node.line}" if node.line else ""
            return f"{function} failed{at}: {in_one_line(error)}"
    return in_one_line(error)


def _graph_of(
    tape: Tape, nodes: Sequence[Node], wanted: set[Ref]
) -> tuple[fx.GraphModule, list[Ref], list[Ref]]:
    """Return a graph of some operations.

    Args:
        tape: The tape on which they were recorded.
        nodes: The operations, as `split` chose them.
        wanted: The values that are used after them.

    Returns:
        The graph, a function that returns a tuple; the values that it takes, of which it changes
        variables in place; and those that it returns.
    """
    maker = _Maker(tape, nodes)
    for node in nodes:
        maker.add(node)
    return maker.graph([ref for ref in maker.made if ref in wanted])


class _Maker:
    def __init__(self, tape: Tape, nodes: Sequence[Node]) -> None:
        self._tape, self._graph = tape, fx.Graph()
        self._values: dict[Ref, Any] = {}
        self._inputs: list[Ref] = []
        taken = inputs_of(nodes)
        for ref in taken:
            if not self._is_constant(ref):
                self._inputs.append(ref)
                self._values[ref] = self._graph.placeholder(f"t{ref.index}")
        for ref in taken:  # placeholders come first
            if self._is_constant(ref):
                x = tape.objects[ref.index]
                named = {"dtype": x.dtype, "device": x.device}
                self._values[ref] = self._call(aten.full.default, (list(x.shape), x.item()), named)
        self.made: list[Ref] = []

    def add(self, node: Node) -> None:
        """Add an operation."""
        if node.function is torch.Tensor.item:
            self._values[node.outputs] = self._values[node.args[0]]
            return
        args, kwargs = self._filled(node.args), self._filled(dict(node.kwargs))
        alpha = node.kwargs.get("alpha")
        if isinstance(alpha, Ref):
            del kwargs["alpha"]
            args = (args[0], self._scaled(args[1], self._values[alpha]), *args[2:])
        result = self._call(_DECLARED.get(node.function, node.function), args, kwargs)
        if isinstance(node.outputs, Ref):
            self._define(node.outputs, result)
        elif isinstance(node.outputs, (list, tuple)):
            for i, ref in enumerate(node.outputs):
                if isinstance(ref, Ref):
                    self._define(ref, self._call(operator.getitem, (result, i)))

    def graph(self, outputs: list[Ref]) -> tuple[fx.GraphModule, list[Ref], list[Ref]]:
        """Return the graph that returns these values, and what it takes and returns."""
        self._graph.output(tuple(self._values[ref] for ref in outputs))
        return fx.GraphModule(torch.nn.Module(), self._graph), self._inputs, outputs

    def _is_constant(self, ref: Ref) -> bool:
        x = self._tape.objects[ref.index]
        return (
            self._tape.kind_of(ref) == "found"
            and isinstance(x, torch.Tensor)
            and x.numel() == 1
            and self._tape.is_fixed(ref)  # a tensor of the task may change between steps
        )

    def _define(self, ref: Ref, value: Any) -> None:
        if ref not in self._values:  # else it was changed in place
            self._values[ref] = value
            self.made.append(ref)

    def _scaled(self, value: Any, alpha: Any) -> Any:
        """Return the product of a tensor, a list of tensors or a number with a tensor."""
        if isinstance(value, (list, tuple)):
            return [self._scaled(x, alpha) for x in value]
        number = self._call(aten.reshape.default, (alpha, []))
        pair = (value, number) if isinstance(value, fx.Node) else (number, value)
        return self._call(aten.mul.Tensor, pair)

    def _call(self, function: Any, args: Iterable[Any], kwargs: Any = None) -> Any:
        return self._graph.call_function(function, tuple(args), kwargs)

    def _filled(self, tree: Any) -> Any:
        return mapped(self._values.__getitem__, tree, Ref)
