"""Joining sums over processes that do not depend on one another, so that they are one message.

A message takes as long as many operations, whatever its length. Most steps sum gradients, and
after the optimizer what metrics have counted in the forward pass.
"""

import torch

from .dependencies import dependencies, memory_is_known
from .nodes import Kind, Node, aten, is_operator
from .tape import Tape


def with_joined_sums(tape: Tape, nodes: list[Node]) -> list[Node]:
    """Return nodes in which each sum is computed with the one before it, if that is possible.

    All processes must have recorded the same sums; then all join the same ones.
    """
    if not memory_is_known(tape, nodes):
        return nodes
    first: int | None = None
    position = 0
    while position < len(nodes):
        if _is_flat_sum(tape, nodes[position]):
            joined = None if first is None else _joined(tape, nodes, first, position)
            if joined is not None:
                nodes, position = joined
            first = position
        position += 1
    return nodes


def _is_flat_sum(tape: Tape, node: Node) -> bool:
    """Return whether a node sums a flat tensor over the processes."""
    adds = getattr(node.function, "adds_elements", False)
    return adds and tape.objects[node.outputs.index].dim() == 1


def _joined(
    tape: Tape, nodes: list[Node], first: int, second: int
) -> tuple[list[Node], int] | None:
    """Return nodes in which two sums are one, and its position; None if that is not possible.

    What the second sum needs is moved before the first one, unless that draws random numbers.
    """
    one, other = nodes[first], nodes[second]
    parts = [tape.objects[node.outputs.index] for node in (one, other)]
    if one.function is not other.function or parts[0].dtype != parts[1].dtype:
        return None
    needs, _ = dependencies(tape, nodes, [False] * len(nodes), {})
    moved, left = set[int](), [second]
    while left:
        new = {i for i in needs[left.pop()] if i >= first} - moved
        functions = [nodes[i].function for i in new]
        if first in new or not all(is_operator(f) and not Kind.of(f).random for f in functions):
            return None
        moved |= new
        left += new
    with torch.no_grad():
        message = torch.cat(parts)
    whole, total = tape.add(message), tape.add(message.clone())
    arguments = [*one.args, *other.args]
    sizes = [len(part) for part in parts]
    outputs = [one.outputs, other.outputs]
    made = [
        *nodes[:first],
        *(nodes[i] for i in sorted(moved)),
        Node(aten.cat.default, (arguments,), {}, whole, one.line),
        Node(one.function, (whole,), {}, total, one.line),
        Node(aten.split_with_sizes.default, (total, sizes), {}, outputs, one.line),
    ]
    rest = [nodes[i] for i in range(first + 1, second) if i not in moved]
    return [*made, *rest, *nodes[second + 1 :]], len(made) - 2
