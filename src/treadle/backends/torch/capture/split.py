"""Splitting a recorded step into parts that PyTorch's compiler takes, and operations outside.

An operation stays outside if the compiler cannot take it, or would compute other values than the
recorded step: draws of random numbers, branches, mapped functions, and calls of Python. Such
operations run as captured, in their recorded order. All others are moved as early as their inputs
allow, so that there are few parts: a network with many dropout layers draws all its masks first,
and the rest is one part.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from ...plans import RefusedError
from .dependencies import check_branches, dependencies, uses, written
from .nodes import (
    COND,
    EACH,
    Block,
    Kind,
    Node,
    Ref,
    aten,
    is_operator,
    refs_in,
    renamed,
    used_by,
    users_of,
)
from .tape import Tape

# Each part takes seconds to compile; what would need more of them gains little.
MOST_PARTS: Final = 4
# A part of fewer operations runs as captured: calling a compiled part takes as long as several.
FEWEST_OPERATIONS: Final = 8
# Operations on so few numbers run outside if an operation outside needs their results.
FEW_NUMBERS: Final = 64

SCALED: Final = frozenset(  # operators whose `alpha` can be written as a product
    {
        *(aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor),
        *(aten._foreach_add.List, aten._foreach_add_.List),
        *(aten._foreach_sub.List, aten._foreach_sub_.List),
    }
)
_FILLED: Final = {  # operators that only take the shape of their argument, and what they fill in
    aten.full_like.default: None,
    aten.ones_like.default: 1,
    aten.zeros_like.default: 0,
    aten.empty_like.default: 0,  # overwritten by what follows
}


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive operations.

    Attributes:
        nodes: The operations.
        reason: Why they run as captured, as a clause; empty if they are compiled.
    """

    nodes: list[Node]
    reason: str


def split(tape: Tape, block: Block) -> list[Part]:
    """Split a block into parts to compile and parts outside, in the order in which they run.

    Args:
        tape: The tape on which the block was recorded.
        block: The operations; they are not changed.

    Raises:
        RefusedError: Nothing can be compiled, or there would be too many parts.
    """
    nodes = _with_state_itself(tape, [_without_shape_source(tape, node) for node in block.nodes])
    check_branches(tape, nodes)
    attached = _attached(tape, nodes, block.results)
    repeated = {id(node) for node in attached.values()}
    nodes = [node for node in nodes if id(node) not in repeated]
    reasons = _reasons(tape, nodes)
    needs, reads = dependencies(tape, nodes, map(bool, reasons), attached)
    _move_out(tape, nodes, reasons, reads)
    parts = [_with_attached(part, attached) for part in _parts(nodes, reasons, needs)]
    compiled = [part for part in parts if not part.reason]
    why = next((reason for reason in reasons if reason), "it has too few operations")
    if not compiled:
        raise RefusedError(f"no part of it can be compiled: {why}")
    if len(compiled) > MOST_PARTS:
        raise RefusedError(f"it has {len(compiled)} parts, and {MOST_PARTS} at most pay: {why}")
    _check_shared_memory(tape, parts, attached)
    return parts


def _without_shape_source(tape: Tape, node: Node) -> Node:
    """Return a node that fills a tensor of a shape without the tensor that it takes the shape of.

    Otherwise a mask of Dropout would wait for the activations that it is applied to.
    """
    if node.function not in _FILLED:
        return node
    made = tape.objects[node.outputs.index]
    if not made.is_contiguous():
        return node
    kwargs = {"dtype": made.dtype, "device": made.device}
    number = _FILLED[node.function]
    args = (list(made.shape), node.args[1] if number is None else number)
    return Node(aten.full.default, args, kwargs, node.outputs, node.line)


def _with_state_itself(tape: Tape, nodes: Sequence[Node]) -> list[Node]:
    """Replace other tensors for the whole memory of a variable, such as `x.data`, by the variable.

    A compiled part would take them for memory of their own.
    """
    forms: dict[Any, Ref] = {}
    for index, thing in enumerate(tape.objects):
        if tape.kind_of(Ref(index)) == "state":
            forms.setdefault(_form(tape, Ref(index), thing), Ref(index))
    names: dict[Ref, Ref] = {}
    for index, thing in enumerate(tape.objects):
        if tape.kind_of(Ref(index)) == "found" and isinstance(thing, torch.Tensor):
            same = forms.get(_form(tape, Ref(index), thing))
            if same is not None:
                names[Ref(index)] = same
    return [renamed(node, names) for node in nodes]


def _form(tape: Tape, ref: Ref, tensor: Any) -> Any:
    layout = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
    return tape.storage_of(ref), *layout


def _attached(tape: Tape, nodes: Sequence[Node], results: Collection[Ref]) -> dict[Ref, Node]:
    """Return operations that each part repeats where it uses them, by what they return.

    They are views of variables, since a compiled part must not get memory twice, and numbers read
    from tensors for `alpha`, which a compiled part takes as tensors.
    """
    users = users_of(nodes)
    found: dict[Ref, Node] = {}
    for node in nodes:
        if not isinstance(node.outputs, Ref):
            continue
        ref = node.outputs
        if node.function is torch.Tensor.item:
            if all(x.function in SCALED for x in users.get(ref, [])):
                found[ref] = node
        elif is_operator(node.function) and ref not in results:
            kind = Kind.of(node.function)
            of_state = all(tape.kind_of(x) == "state" or x in found for x in used_by(node))
            if kind.views and not kind.writes and of_state:
                found[ref] = node
    return found


def _with_attached(part: Part, attached: Mapping[Ref, Node]) -> Part:
    """Return a part with the attached operations before their first use."""
    nodes: list[Node] = []
    left = dict(attached)
    for node in part.nodes:
        used = uses(node, attached)
        nodes += [left.pop(ref) for ref in attached if ref in used and ref in left]
        nodes.append(node)
    return replace(part, nodes=nodes)


def _reasons(tape: Tape, nodes: Sequence[Node]) -> list[str]:
    """Return why each node stays outside, as a clause with its line; empty if it does not."""
    found: list[str] = []
    numbers: set[Ref] = set()  # read from tensors, for other operations than `attached`
    for node in nodes:
        why = _reason(tape, node)
        if not why and not numbers.isdisjoint(used_by(node)):
            why = "a tensor is read as a number"
        if node.function is torch.Tensor.item:
            numbers |= set(refs_in(node.outputs))
        found.append(f"{why}, at {node.line}" if why and node.line else why)
    return found


def _reason(tape: Tape, node: Node) -> str:
    function = node.function
    if function is COND:
        return "cond runs one of two branches"
    if function is EACH:
        return "for_each runs for each row"
    if function is torch.Tensor.item:
        return "a tensor is read as a number"
    if not is_operator(function):
        name = getattr(function, "__name__", type(function).__name__.lstrip("_"))
        return f"{name} is a Python function"
    kind = Kind.of(function)
    if kind.random and not _drops_nothing(node):
        return f"{function} draws random numbers"
    if function.namespace != "aten":
        return f"{function} is not an operator of PyTorch itself"
    if function in _OTHER_BATCH_NORMS and node.args[5]:
        return f"{function} changes its statistics in place"
    refs = [*refs_in((node.args, node.kwargs)), *refs_in(node.outputs)]
    if kind.turns or any(ref.index in tape.turned for ref in refs):
        return f"{function} changes the shape of a tensor in place"
    for ref in refs:
        thing = tape.objects[ref.index]
        if isinstance(thing, torch.Generator):
            return f"{function} draws random numbers"
        if isinstance(thing, torch.Tensor) and thing.layout is not torch.strided:
            return f"{function} takes a sparse tensor"
    return ""


def _drops_nothing(node: Node) -> bool:
    """Return whether an operation, such as fused attention, has a Dropout of rate 0."""
    for position, argument in enumerate(node.function._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[position : position + 1] or (argument.default_value,)
            return node.kwargs.get("dropout_p", given[0]) == 0
    return False


_OTHER_BATCH_NORMS = frozenset({aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default})


def _move_out(tape: Tape, nodes: Sequence[Node], reasons: list[str], reads: list[set[int]]) -> None:
    """Move operations on few numbers outside if a node outside needs them, such as seeds.

    So are tensors of constant numbers, such as those that a mask is drawn into.
    """
    cheap: list[bool] = []
    for node, before in zip(nodes, reads, strict=True):
        refs = {*used_by(node), *refs_in(node.outputs)}
        sizes = [getattr(tape.objects[ref.index], "nbytes", 0) for ref in refs]
        small = not node.blocks and max(sizes, default=0) <= 8 * FEW_NUMBERS
        small = small and not any(tape.kind_of(ref) == "batch" for ref in refs)
        small = small or not used_by(node)
        cheap.append(small and all(cheap[i] for i in before))
    for i in reversed(range(len(nodes))):
        if reasons[i]:
            for j in reads[i]:
                if not reasons[j] and cheap[j]:
                    reasons[j] = reasons[i]


def _parts(nodes: Sequence[Node], reasons: list[str], needs: list[set[int]]) -> list[Part]:
    """Run each node in the first part that its inputs allow; odd parts are compiled."""
    number: list[int] = []
    parts: dict[int, list[Node]] = {}
    why: dict[int, str] = {}
    for node, reason, before in zip(nodes, reasons, needs, strict=True):
        first = max((number[i] for i in before), default=0)
        is_inside = not reason
        chosen = first if first % 2 == is_inside else first + 1
        number.append(chosen)
        parts.setdefault(chosen, []).append(node)
        if reason:
            why.setdefault(chosen, reason)
    found: list[Part] = []
    for i in sorted(parts):
        few = len(parts[i]) < FEWEST_OPERATIONS
        found.append(Part(parts[i], why.get(i, "few operations" if few else "")))
    return found


def _check_shared_memory(tape: Tape, parts: list[Part], attached: Collection[Ref]) -> None:
    """Refuse parts that change memory which other parts know as another tensor.

    A compiled part returns new tensors, and changes its inputs one by one.

    Raises:
        RefusedError: There are such parts.
    """
    users: dict[Ref, set[int]] = {}
    names: dict[int, set[Ref]] = {}
    for i, part in enumerate(parts):
        for node in part.nodes:
            for ref in {*used_by(node), *refs_in(node.outputs)} - set(attached):
                users.setdefault(ref, set()).add(i)
                names.setdefault(tape.storage_of(ref), set()).add(ref)
    for part in parts:
        for node in part.nodes:
            for storage in written(tape, node):
                crossing = [
                    x for x in names[storage] if tape.kind_of(x) != "made" or len(users[x]) > 1
                ]
                where = set[int]().union(*(users[x] for x in crossing))
                if len(crossing) > 1 and not all(parts[i].reason for i in where):
                    at = f", at {node.line}" if node.line else ""
                    raise RefusedError(
                        f"{node.function} changes a tensor of which there are views{at}"
                    )
