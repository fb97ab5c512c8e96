"""Passes that simplify a tape.

They preserve all values bit for bit, except for `relaid`, which changes the memory layout of some
tensors, so that later sums may differ in their last bits. So may sums over three or more processes
that are joined to one message, in which the processes may be added in another order.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from .messages import with_joined_sums
from .nodes import (
    Block,
    Branch,
    Kind,
    LoopNode,
    Node,
    Operation,
    Ref,
    aten,
    is_operator,
    refs_in,
    replaced,
    used_by,
)
from .tape import Tape

LARGEST_CONSTANT = 2**20  # bytes; larger fixed values are recomputed in every step

Names = dict[Ref, Ref]  # replaced references, and what replaces them
_SAME = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh.default})
_SLICES: dict[Any, Any] = {
    aten.select_backward.default: aten.select.int,
    aten.slice_backward.default: aten.slice.Tensor,
}
_LAYOUTS = (torch.contiguous_format, torch.channels_last)
_POOLS: dict[Any, int] = {  # with the position of the image argument
    aten.max_pool2d_with_indices.default: 0,
    aten.max_pool2d_with_indices_backward.default: 1,
}
_BOUND_TO_LAYOUT = frozenset(
    {aten.view.default, aten._unsafe_view.default, aten.view.dtype, aten.as_strided.default}
)


def simplified(
    tape: Tape, outputs: list[Ref], relaid: bool = False, in_place: bool = True
) -> tuple[Block, list[Ref]]:
    """Return a simplified copy of a tape's block, and the references of its outputs there.

    Args:
        tape: The recorded tape.
        outputs: The values that are needed.
        relaid: Whether poolings use the memory layout of their inputs.
        in_place: Whether gradients are summed in place. A compiler fuses such sums itself.
    """
    names: Names = {}
    block = _without_the_same(tape, tape.block, names)
    outputs = replaced(outputs, names)
    block = _needed(block, set(outputs))
    block = _needed(_without_copies(tape, block, outputs, names), set(outputs))
    block = with_joined_sums(tape, block)
    if relaid:
        block = _pooled_as_it_lies(tape, block, outputs, names)
    if in_place:
        block = _summed_in_place(tape, block, outputs, names)
    return block, replaced(outputs, names)


def _without_the_same(tape: Tape, block: Block, names: Names) -> Block:
    """Drop aliases, and turn values that are the same in every step into constants."""
    kept: Block = []
    for node in block:
        if isinstance(node, Branch):
            inner = [_without_the_same(tape, part, names) for part in node.blocks]
            kept.append(renamed(replace(node, blocks=(inner[0], inner[1])), names))
        elif isinstance(node, LoopNode):
            inner = _without_the_same(tape, node.block, names)
            kept.append(renamed(replace(node, block=inner), names))
        elif node.function in _SAME and not _turns(tape, node):
            names[node.outputs] = replaced(node.args[0], names)
        elif not _becomes_constant(tape, node):
            kept.append(renamed(node, names))
    return kept


def _turns(tape: Tape, node: Operation) -> bool:
    return not tape.turned.isdisjoint({node.outputs.index, node.args[0].index})


def _becomes_constant(tape: Tape, node: Operation) -> bool:
    made = list(refs_in(node.outputs))
    if not made or not all(tape.is_fixed(ref) for ref in made):
        return False
    objects = [tape.objects[ref.index] for ref in made]
    if sum(x.numel() * x.element_size() for x in objects) > LARGEST_CONSTANT:
        return False
    for ref in made:
        tape.keep(ref)
    return True


def _needed(block: Block, wanted: set[Ref]) -> Block:
    """Drop operations whose results are unused and that change nothing."""
    kept: Block = []
    wanted = set(wanted)  # grown in place: a new set for each operation would be quadratic
    for node in reversed(block):
        if isinstance(node, Branch):
            inner = [
                _needed(part, set(refs))
                for part, refs in zip(node.blocks, node.results, strict=True)
            ]
            node.blocks = inner[0], inner[1]
        elif isinstance(node, LoopNode):
            _need_of_rows(node, wanted)
            if not node.block and not node.outputs:
                continue
        elif not _acts(node) and wanted.isdisjoint(refs_in(node.outputs)):
            continue
        wanted |= used_by(node)
        kept.append(node)
    return kept[::-1]


def _need_of_rows(node: LoopNode, wanted: set[Ref]) -> None:
    """Drop unused results, operations and rows from a loop."""
    pairs = zip(node.results, node.outputs, strict=True)
    chosen = [(result, output) for result, output in pairs if output in wanted]
    node.results, node.outputs = [r for r, _ in chosen], [o for _, o in chosen]
    node.block = _needed(node.block, set(node.results))
    used = set(node.results).union(*(used_by(part) for part in node.block))
    rows = [pair for pair in zip(node.sources, node.rows, strict=True) if pair[1] in used]
    node.sources, node.rows = [source for source, _ in rows], [row for _, row in rows]


def _acts(node: Operation) -> bool:
    """Return whether an operation has side effects."""
    if not is_operator(node.function):
        return getattr(node.function, "acts", False)
    kind = Kind.of(node.function)
    return bool(kind.writes) or kind.random or not kind.returns


def _without_copies(tape: Tape, block: Block, outputs: list[Ref], names: Names) -> Block:
    """Drop copies that do not change the memory layout; copies of copies copy the original.

    Keras copies the input of a convolution twice: to PyTorch's axis order and back.
    """
    kept: Block = []
    copied: Names = {}
    for node in block:
        node = renamed(node, names)
        kept.append(node)
        if isinstance(node, LoopNode):
            node.block = _without_copies(tape, node.block, node.results, names)
        if not isinstance(node, Operation) or node.function is not aten.clone.default:
            continue
        copy, source = node.outputs, node.args[0]
        if tape.is_written(copy) or tape.is_written(source):
            continue
        if source in copied and node.kwargs.get("memory_format") in _LAYOUTS:
            source = copied[source]
            node.args = (source,)
        x, y = tape.objects[source.index], tape.objects[copy.index]
        if x.stride() == y.stride() and copy not in outputs and tape.kind_of(source) == "made":
            names[copy] = source
            kept.pop()
        else:
            copied[copy] = source
    return kept


def _pooled_as_it_lies(tape: Tape, block: Block, outputs: list[Ref], names: Names) -> Block:
    """Run max poolings on channels-last images directly, without the copy that Keras makes.

    PyTorch pools them eight times as fast, and later operations do not have to mix two layouts.
    """
    users: dict[Ref, list[Node]] = {}
    for node in block:
        for ref in used_by(node):
            users.setdefault(ref, []).append(node)

    def follows_any_order(ref: Ref) -> bool:
        return ref not in outputs and all(
            isinstance(user, Operation)
            and user.function not in _BOUND_TO_LAYOUT
            and (not _is_view(user) or all(map(follows_any_order, refs_in(user.outputs))))
            for user in users.get(ref, [])
        )

    def is_pooled(copy: Ref, user: Node) -> bool:
        return (
            isinstance(user, Operation)
            and user.function in _POOLS
            and copy == user.args[_POOLS[user.function]]
            and all(follows_any_order(ref) for ref in refs_in(user.outputs))
        )

    kept: Block = []
    for node in block:
        node = renamed(node, names)
        if isinstance(node, LoopNode):
            node.block = _pooled_as_it_lies(tape, node.block, node.results, names)
        if isinstance(node, Operation) and node.function is aten.clone.default:
            copy, source = node.outputs, node.args[0]
            image = tape.objects[source.index]
            if (
                image.dim() == 4
                and image.is_contiguous(memory_format=torch.channels_last)
                and not tape.is_written(copy)
                and not tape.is_written(source)
                and copy not in outputs
                and all(is_pooled(copy, user) for user in users.get(copy, []))
            ):
                names[copy] = source
                continue
        kept.append(node)
    return kept


def _summed_in_place(tape: Tape, block: Block, outputs: list[Ref], names: Names) -> Block:
    """Replace the addition of a zero-padded slice by an in-place addition to that slice.

    PyTorch sums the gradients of a recurrent layer's n steps as n padded tensors of n steps each.
    """
    uses = Counter(ref for node in block for ref in used_by(node)) + Counter(outputs)
    padded: dict[Ref, Operation] = {}  # values that are zero outside of a slice, and used once
    sums: set[Ref] = set()  # sums of such values that are used once too
    dropped: set[int] = set()
    kept: Block = []
    for node in block:
        node = renamed(node, names)
        kept.append(node)
        if isinstance(node, LoopNode):
            node.block = _summed_in_place(tape, node.block, node.results, names)
        if not isinstance(node, Operation):
            continue
        if node.function in _SLICES and uses[node.outputs] == 1:
            padded[node.outputs] = node
        if node.function is not aten.add.Tensor or node.kwargs:
            continue
        total = next((x for x in node.args if x in sums), None)
        total = total or next((x for x in node.args if x in padded), None)
        part = next((x for x in node.args if x in padded and x != total), None)
        if total is None or part is None or not _alike(tape, total, part):
            continue
        maker = padded[part]
        gradient, _, *where = maker.args
        if tape.is_written(gradient):
            continue
        dropped.add(id(maker))
        padded.pop(total, None)
        view = tape.add(None)
        kept[-1:] = [
            Operation(_SLICES[maker.function], (total, *where), {}, view, node.line),
            Operation(aten.add_.Tensor, (view, gradient), {}, view, node.line),
        ]
        names[node.outputs] = total
        sums.discard(total)
        if uses[node.outputs] == 1:
            sums.add(total)
    return [node for node in kept if id(node) not in dropped]


def has_poolings(block: Block) -> bool:
    """Return whether a block has poolings, for which `relaid` may make a difference."""

    def pools(node: Node) -> bool:
        if isinstance(node, Branch):
            return any(map(has_poolings, node.blocks))
        if isinstance(node, LoopNode):
            return has_poolings(node.block)
        return node.function in _POOLS

    return any(map(pools, block))


def _is_view(node: Operation) -> bool:
    """Return whether an operation returns a view of an argument."""
    return is_operator(node.function) and Kind.of(node.function).views


def _alike(tape: Tape, a: Ref, b: Ref) -> bool:
    x, y = tape.objects[a.index], tape.objects[b.index]
    return x.shape == y.shape and x.dtype == y.dtype


def renamed(node: Any, names: Names) -> Any:
    """Return a node with its references replaced by those in `names`."""
    if isinstance(node, Operation):
        args, kwargs = replaced(node.args, names), replaced(node.kwargs, names)
        return Operation(node.function, args, kwargs, replaced(node.outputs, names), node.line)
    if isinstance(node, LoopNode):
        return replace(
            node,
            sources=replaced(node.sources, names),
            block=[renamed(part, names) for part in node.block],
            results=replaced(node.results, names),
        )
    blocks = [[renamed(part, names) for part in inner] for inner in node.blocks]
    results = [replaced(refs, names) for refs in node.results]
    return Branch(
        replaced(node.predicate, names),
        (blocks[0], blocks[1]),
        (results[0], results[1]),
        node.outputs,
        node.line,
    )
