"""Passes that simplify a tape.

They preserve all values bit for bit, except for `relaid`, which changes the memory layout of some
tensors, so that later sums may differ in their last bits. So may sums over three or more processes
that are joined to one message, in which the processes may be added in another order.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from .dependencies import dependencies, memory_is_known, written
from .nodes import (
    EACH,
    Block,
    Kind,
    Node,
    Ref,
    aten,
    is_operator,
    refs_in,
    renamed,
    replaced,
    used_by,
    users_of,
)
from .tape import Tape

LARGEST_CONSTANT = 2**20  # bytes; larger fixed values are recomputed in every step
# Bytes. Smaller results take less time to compute than to call for. Larger ones may be recomputed
# on purpose, to save memory.
LARGEST_KEPT = 2**12

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
    tape: Tape, outputs: Sequence[Ref], relaid: bool = False, in_place: bool = True
) -> Block:
    """Return a simplified copy of a tape's block, which returns these values.

    Args:
        tape: The recorded tape.
        outputs: The values that are needed.
        relaid: Whether poolings use the memory layout of their inputs.
        in_place: Whether sums are computed in place, and small values once. A compiler does that
            itself.
    """
    names: Names = {}
    block = _without_the_same(tape, replace(tape.block, results=list(outputs)), names)
    _drop_unused(block)
    _drop_copies(tape, block, names)
    _drop_unused(block)
    block.nodes = with_joined_sums(tape, block.nodes)
    if relaid:
        _pool_as_it_lies(tape, block, names)
    if in_place:
        known = memory_is_known(tape, block.nodes)
        if known:
            _call_once(tape, block, names)  # first: sums are computed in the memory of one part
        _sum_in_place(tape, block, names)
        if known:
            _assign_in_place(tape, block)
    return block


def _without_the_same(tape: Tape, block: Block, names: Names) -> Block:
    """Drop aliases, and turn values that are the same in every step into constants."""
    kept: list[Node] = []
    for node in block.nodes:
        blocks = tuple(_without_the_same(tape, inner, names) for inner in node.blocks)
        if node.function in _SAME and tape.turned.isdisjoint(
            {node.outputs.index, node.args[0].index}
        ):
            names[node.outputs] = replaced(node.args[0], names)
        elif not _becomes_constant(tape, node):
            kept.append(renamed(replace(node, blocks=blocks), names))
    return Block(kept, replaced(block.results, names), block.rows)


def _becomes_constant(tape: Tape, node: Node) -> bool:
    made = list(refs_in(node.outputs))
    if not made or not all(tape.is_fixed(ref) for ref in made):
        return False
    objects = [tape.objects[ref.index] for ref in made]
    if sum(x.numel() * x.element_size() for x in objects) > LARGEST_CONSTANT:
        return False
    for ref in made:
        tape.keep(ref)
    return True


def _drop_unused(block: Block) -> None:
    """Drop nodes whose results are unused and that change nothing."""
    kept: list[Node] = []
    wanted = set(block.results)  # grown in place: a new set for each operation would be quadratic
    for node in reversed(block.nodes):
        if node.blocks:
            _drop_unused_inside(node, wanted)
        if _acts(node) or not wanted.isdisjoint(refs_in(node.outputs)):
            wanted |= used_by(node)
            kept.append(node)
    block.nodes = kept[::-1]


def _drop_unused_inside(node: Node, wanted: set[Ref]) -> None:
    """Drop unused results of blocks, the nodes that make them, and rows that none of these uses."""
    chosen = [i for i, ref in enumerate(node.outputs) if ref in wanted]
    node.outputs = [node.outputs[i] for i in chosen]
    for block in node.blocks:
        block.results = [block.results[i] for i in chosen]
        _drop_unused(block)
    if node.function is EACH:
        (block,), (count, *sources) = node.blocks, node.args
        used = set(block.results).union(*map(used_by, block.nodes))
        pairs = [pair for pair in zip(sources, block.rows, strict=True) if pair[1] in used]
        node.args = count, *(source for source, _ in pairs)
        block.rows = [row for _, row in pairs]


def _acts(node: Node) -> bool:
    """Return whether a node has side effects."""
    if not is_operator(node.function):
        return getattr(node.function, "acts", False) or any(block.nodes for block in node.blocks)
    kind = Kind.of(node.function)
    return bool(kind.writes) or kind.random or not kind.returns


def _drop_copies(tape: Tape, block: Block, names: Names) -> None:
    """Drop copies that do not change the memory layout; copies of copies copy the original.

    Keras copies the input of a convolution twice: to PyTorch's axis order and back.
    """
    kept: list[Node] = []
    copied: Names = {}
    for node in block.nodes:
        node = renamed(node, names)
        kept.append(node)
        for inner in node.blocks:
            _drop_copies(tape, inner, names)
        if node.function is not aten.clone.default:
            continue
        copy, source = node.outputs, node.args[0]
        if tape.is_written(copy) or tape.is_written(source):
            continue
        if source in copied and node.kwargs.get("memory_format") in _LAYOUTS:
            source = copied[source]
            node.args = (source,)
        x, y = tape.objects[source.index], tape.objects[copy.index]
        unchanged = x.stride() == y.stride() and tape.kind_of(source) == "made"
        if unchanged and copy not in block.results:
            names[copy] = source
            kept.pop()
        else:
            copied[copy] = source
    block.nodes = kept


def _pool_as_it_lies(tape: Tape, block: Block, names: Names) -> None:
    """Run max poolings on channels-last images directly, without the copy that Keras makes.

    PyTorch pools them eight times as fast, and later operations do not have to mix two layouts.
    """
    users = users_of(block.nodes)

    def follows_any_order(ref: Ref) -> bool:
        return ref not in block.results and all(
            not user.blocks
            and user.function not in _BOUND_TO_LAYOUT
            and not (
                is_operator(user.function)
                and Kind.of(user.function).views
                and not all(map(follows_any_order, refs_in(user.outputs)))
            )
            for user in users.get(ref, [])
        )

    def is_pooled(copy: Ref, user: Node) -> bool:
        return (
            user.function in _POOLS
            and copy == user.args[_POOLS[user.function]]
            and all(follows_any_order(ref) for ref in refs_in(user.outputs))
        )

    kept: list[Node] = []
    for node in block.nodes:
        node = renamed(node, names)
        for inner in node.blocks:
            _pool_as_it_lies(tape, inner, names)
        if node.function is aten.clone.default:
            copy, source = node.outputs, node.args[0]
            image = tape.objects[source.index]
            if (
                image.dim() == 4
                and image.is_contiguous(memory_format=torch.channels_last)
                and not tape.is_written(copy)
                and not tape.is_written(source)
                and copy not in block.results
                and all(is_pooled(copy, user) for user in users.get(copy, []))
            ):
                names[copy] = source
                continue
        kept.append(node)
    block.nodes = kept


def _call_once(tape: Tape, block: Block, names: Names) -> None:
    """Reuse small results of operations that have been called with the same arguments before.

    Metrics of Keras divide safely, for which they compare each count with zero twice.
    """
    made: dict[Any, tuple[Ref, set[int]]] = {}  # results and the memory that they depend on
    kept: list[Node] = []
    for node in block.nodes:
        node = renamed(node, names)
        kept.append(node)
        if not is_operator(node.function):
            made.clear()
            continue
        if changed := written(tape, node):
            made = {key: found for key, found in made.items() if changed.isdisjoint(found[1])}
        arguments = set(refs_in((node.args, node.kwargs)))
        if arguments and _is_small_result(tape, node) and node.outputs not in block.results:
            key = node.function, _key(node.args), _key(node.kwargs)
            if key in made:
                names[node.outputs], _ = made[key]
                kept.pop()
            else:
                made[key] = node.outputs, set(map(tape.storage_of, arguments))
    block.nodes = kept
    block.results = replaced(block.results, names)


def _is_small_result(tape: Tape, node: Node) -> bool:
    """Return whether a node computes one small tensor that nothing changes in place."""
    kind = Kind.of(node.function)
    if kind.python or kind.views or _acts(node) or not isinstance(node.outputs, Ref):
        return False
    found = tape.objects[node.outputs.index]
    small = found.numel() * found.element_size() <= LARGEST_KEPT
    return small and not tape.is_written(node.outputs)


def _key(tree: Any) -> Any:
    """Return what is equal for equal arguments; 1, 1.0 and True differ."""
    if isinstance(tree, Mapping):
        return tuple((name, _key(part)) for name, part in tree.items())
    if isinstance(tree, (list, tuple)):
        return type(tree), *map(_key, tree)
    return tree if isinstance(tree, Ref) else (type(tree), repr(tree))


def _assign_in_place(tape: Tape, block: Block) -> None:
    """Replace additions whose results are copied to their first argument by additions in place."""
    uses = Counter(ref for node in block.nodes for ref in used_by(node)) + Counter(block.results)
    kept: list[Node] = []
    for node in block.nodes:
        before = kept[-1] if kept else node
        if node.function is aten.copy_.default and before.function is aten.add.Tensor:
            total, (target, part) = before.outputs, before.args
            storages = [tape.storage_of(ref) for ref in refs_in((target, part))]
            if (
                node.args == (target, total)
                and not (node.kwargs or before.kwargs)
                and uses[total] == 1
                and _alike(tape, target, total)
                and len(set(storages)) == len(storages)
            ):
                arguments = target, part
                kept[-1] = Node(aten.add_.Tensor, arguments, {}, node.outputs, node.line)
                continue
        kept.append(node)
    block.nodes = kept


def _sum_in_place(tape: Tape, block: Block, names: Names) -> None:
    """Replace the addition of a zero-padded slice by an in-place addition to that slice.

    PyTorch sums the gradients of a recurrent layer's n steps as n padded tensors of n steps each.
    """
    uses = Counter(ref for node in block.nodes for ref in used_by(node)) + Counter(block.results)
    padded: dict[Ref, Node] = {}  # values that are zero outside of a slice, and used once
    sums: set[Ref] = set()  # sums of such values that are used once too
    dropped: set[int] = set()
    kept: list[Node] = []
    for node in block.nodes:
        node = renamed(node, names)
        kept.append(node)
        for inner in node.blocks:
            _sum_in_place(tape, inner, names)
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
            Node(_SLICES[maker.function], (total, *where), {}, view, node.line),
            Node(aten.add_.Tensor, (view, gradient), {}, view, node.line),
        ]
        names[node.outputs] = total
        sums.discard(total)
        if uses[node.outputs] == 1:
            sums.add(total)
    block.nodes = [node for node in kept if id(node) not in dropped]
    block.results = replaced(block.results, names)


def has_poolings(block: Block) -> bool:
    """Return whether a block has poolings, for which `relaid` may make a difference."""
    return any(
        node.function in _POOLS or any(map(has_poolings, node.blocks)) for node in block.nodes
    )


def _alike(tape: Tape, a: Ref, b: Ref) -> bool:
    x, y = tape.objects[a.index], tape.objects[b.index]
    return x.shape == y.shape and x.dtype == y.dtype and x.device == y.device


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
