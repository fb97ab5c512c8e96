"""The order in which nodes must run."""

from collections.abc import Iterable, Mapping, Sequence

import torch

from ...plans import RefusedError
from .nodes import COND, Kind, Node, Ref, is_operator, refs_in, used_by
from .tape import Tape


def dependencies(
    tape: Tape, nodes: Sequence[Node], outside: Iterable[bool], attached: Mapping[Ref, Node]
) -> tuple[list[set[int]], list[set[int]]]:
    """Return for each node the positions of the nodes that must run before it.

    Those are the makers of its inputs, and, of nodes that share memory, those before a write and
    the write before those after it. Nodes outside keep their order: random numbers depend on it.

    Args:
        tape: The tape on which the nodes were recorded.
        nodes: The nodes.
        outside: Whether each node is outside.
        attached: Operations that each node repeats where it uses them, by what they return.

    Returns:
        All these nodes, and those among them whose results it uses.
    """
    makers: dict[Ref, int] = {}
    writer: dict[int, int] = {}  # of each storage, the last node that wrote to it
    readers: dict[int, list[int]] = {}  # and those that used it since
    needs: list[set[int]] = []
    reads: list[set[int]] = []
    last_outside: int | None = None
    for i, (node, is_outside) in enumerate(zip(nodes, outside, strict=True)):
        used = uses(node, attached)
        found = {makers[ref] for ref in used if ref in makers}
        changed = written(tape, node)
        storages = {tape.storage_of(ref) for ref in {*used, *refs_in(node.outputs)}} - {0}
        for storage in storages:
            if storage in writer:
                found.add(writer[storage])
        reads.append(found - {i})
        found = set(found)
        for storage in storages:
            if storage in changed:
                found.update(readers.pop(storage, []))
                writer[storage] = i
            else:
                readers.setdefault(storage, []).append(i)
        if is_outside:
            if last_outside is not None:
                found.add(last_outside)
            last_outside = i
        makers.update(dict.fromkeys(refs_in(node.outputs), i))
        found.discard(i)
        needs.append(found)
    return needs, reads


def uses(node: Node, attached: Mapping[Ref, Node]) -> set[Ref]:
    """Return the values that a node uses, including those of attached operations."""
    found = used_by(node)
    for ref in list(found):
        if ref in attached:
            found |= uses(attached[ref], attached)
    return found


def written(tape: Tape, node: Node) -> set[int]:
    """Return the memory that a node changes in place."""
    if node.blocks:
        inner = [part for block in node.blocks for part in block.nodes]
        return set[int]().union(*(written(tape, part) for part in inner))
    if not is_operator(node.function):
        return set()
    targets = [
        node.args[position] if position < len(node.args) else node.kwargs.get(name)
        for position, name in Kind.of(node.function).writes
    ]
    return {tape.storage_of(ref) for ref in refs_in(targets)} - {0}


def check_branches(tape: Tape, nodes: Sequence[Node]) -> None:
    """Refuse branches that return the memory of a variable, or of a tensor that is written.

    The tape knows the memory of the branch that ran while it recorded: operations could be moved
    before those that they depend on if the other one runs.

    Raises:
        RefusedError: There are such branches.
    """
    changed = set[int]().union(*(written(tape, node) for node in nodes))
    for i, thing in enumerate(tape.objects):
        if tape.kind_of(Ref(i)) == "state" and isinstance(thing, torch.Tensor):
            changed.add(tape.storage_of(Ref(i)))
    for node in nodes:
        if node.function is COND:
            refs = [ref for block in node.blocks for ref in block.results]
            if changed & {tape.storage_of(ref) for ref in refs} - {0}:
                at = f", at {node.line}" if node.line else ""
                raise RefusedError(f"cond returns the memory of a variable{at}")


def memory_is_known(tape: Tape, nodes: Sequence[Node]) -> bool:
    """Return whether `check_branches` accepts the nodes: it is known what each write changes."""
    try:
        check_branches(tape, nodes)
    except RefusedError:
        return False
    return True
