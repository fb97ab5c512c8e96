"""Joining sums over processes that do not depend on one another, so that they are one message.

A message takes as long as many operations, whatever its length. Most steps sum gradients, and
after the optimizer what metrics have counted in the forward pass.
"""

from typing import Any

import torch

from ...plans import RefusedError
from .dependencies import check_branches, dependencies
from .nodes import Block, Kind, Node, Operation, aten, is_operator
from .tape import Tape


def with_joined_sums(tape: Tape, block: Block) -> Block:
    """Return a block in which each sum is computed with the one before it, if that is possible.

    All processes must have recorded the same sums; then all join the same ones.
    """
    try:
        check_branches(tape, block)
    except RefusedError:
        return block
    first: int | None = None
    position = 0
    while position < len(block):
        if _is_flat_sum(tape, block[position]):
            joined = None if first is None else _joined(tape, block, first, position)
            if joined is not None:
                block, position = joined
            first = position
        position += 1
    return block


def _is_flat_sum(tape: Tape, node: Node) -> bool:
    """Return whether a node sums a flat tensor over the processes."""
    return (
        isinstance(node, Operation)
        and getattr(node.function, "adds_elements", False)
        and tape.objects[node.outputs.index].dim() == 1
    )


def _joined(tape: Tape, block: Block, first: int, second: int) -> tuple[Block, int] | None:
    """Return a block in which two sums are one, and its position; None if that is not possible.

    What the second sum needs is moved before the first one, unless that draws random numbers.
    """
    one: Any = block[first]
    other: Any = block[second]
    parts = [tape.objects[node.outputs.index] for node in (one, other)]
    if one.function is not other.function or parts[0].dtype != parts[1].dtype:
        return None
    needs, _ = dependencies(tape, block, [False] * len(block), {})
    moved, left = set[int](), [second]
    while left:
        new = {i for i in needs[left.pop()] if i >= first} - moved
        if first in new or not all(_is_movable(block[i]) for i in new):
            return None
        moved |= new
        left += new
    with torch.no_grad():
        message = torch.cat(parts)
    whole, total = tape.add(message), tape.add(message.clone())
    arguments = [*one.args, *other.args]
    sizes = [len(part) for part in parts]
    outputs = [one.outputs, other.outputs]
    made: Block = [
        *block[:first],
        *(block[i] for i in sorted(moved)),
        Operation(aten.cat.default, (arguments,), {}, whole, one.line),
        Operation(one.function, (whole,), {}, total, one.line),
        Operation(aten.split_with_sizes.default, (total, sizes), {}, outputs, one.line),
    ]
    rest = [block[i] for i in range(first + 1, second) if i not in moved]
    return [*made, *rest, *block[second + 1 :]], len(made) - 2


def _is_movable(node: Node) -> bool:
    return (
        isinstance(node, Operation)
        and is_operator(node.function)
        and not Kind.of(node.function).random
    )
