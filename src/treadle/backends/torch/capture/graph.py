"""Making a `torch.fx` graph of recorded operations."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from .nodes import Node, Ref, aten, inputs_of, mapped
from .tape import Tape

# These change their statistics in place, which only the schema of the other operator declares.
_DECLARED = {aten.native_batch_norm.default: aten._native_batch_norm_legit.default}


def graph_of(
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
