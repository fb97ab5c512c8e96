"""The nodes of a tape: operations, and branches and loops over blocks of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import torch

aten: Any = torch.ops.aten
# These change their statistics in place, although their schemas do not declare it.
BATCH_NORMS = frozenset(
    {aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default}
)
_OPERATOR = type(aten.add.Tensor)


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to a value on a tape: its index among the recorded values."""

    index: int


COND: Final = "cond"
"""Runs its first block if its argument is true at replay time, and its second one if not."""
EACH: Final = "for_each"
"""Runs its block for each row of its arguments after the first, which is the number of rows."""


@dataclass(slots=True)
class Node:
    """A call of an operator or a function, or a call of blocks of nodes.

    Attributes:
        function: An operator, a function that stands for several operators, `COND` or `EACH`.
        args: Its arguments, with `Ref`s for recorded values.
        kwargs: Its keyword arguments, likewise.
        outputs: A `Ref` for each returned value, in the structure of the return value.
        line: The line of user code that made the call.
        blocks: The blocks of `COND` or `EACH`, whose results its outputs are.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: Any
    line: str
    blocks: tuple["Block", ...] = ()


@dataclass(slots=True)
class Block:
    """Nodes in the order in which they run.

    Attributes:
        nodes: The nodes.
        results: The values that the block returns.
        rows: In the block of an `EACH`, the current row of each of its arguments.
    """

    nodes: list[Node] = field(default_factory=lambda: [])
    results: list[Ref] = field(default_factory=lambda: [])
    rows: list[Ref] = field(default_factory=lambda: [])


@dataclass(frozen=True, slots=True)
class Kind:
    """The properties of an operator.

    Attributes:
        writes: The arguments that it changes in place, by position and name.
        returns: Whether it returns something.
        python: Whether it returns a Python value that may depend on the values of tensors.
        views: Whether it returns a view of an argument.
        scales: Whether it has the argument `alpha`.
        random: Whether it draws from a generator.
        dynamic: Whether the shape of its result depends on values.
        turns: Whether it changes the shape of an argument in place.
    """

    writes: tuple[tuple[int, str], ...]
    returns: bool
    python: bool
    views: bool
    scales: bool
    random: bool
    dynamic: bool
    turns: bool

    @staticmethod
    @cache
    def of(operator: Any) -> "Kind":
        """Read an operator's schema."""
        schema = operator._schema
        sizes = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
        writes = tuple(
            (i, argument.name)
            for i, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        if operator in BATCH_NORMS:
            writes = (3, "running_mean"), (4, "running_var")
        return Kind(
            writes=writes,
            returns=bool(schema.returns),
            python=_returns_python(schema),
            views=any(returned.alias_info is not None for returned in schema.returns),
            scales=any(argument.name == "alpha" for argument in schema.arguments),
            random=torch.Tag.nondeterministic_seeded in operator.tags,
            dynamic=bool(sizes & set(operator.tags)),
            turns=torch.Tag.inplace_view in operator.tags,
        )


def _returns_python(schema: Any) -> bool:
    """Return whether an operator returns a Python value that may depend on the values of tensors.

    Integers returned with tensors are sizes: fused attention on CUDA returns the lengths of its
    sequences, which its backward pass takes.
    """
    types = [str(returned.type) for returned in schema.returns]
    others = [kind for kind in types if "Tensor" not in kind]
    return bool(others) and (len(others) == len(types) or not {*others} <= {"int", "SymInt"})


def is_operator(function: Any) -> bool:
    """Return whether a function is a PyTorch operator."""
    return isinstance(function, _OPERATOR)


def refs_in(tree: Any) -> Iterator[Ref]:
    """Yield every `Ref` in a structure."""
    if isinstance(tree, Ref):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for part in tree:
            yield from refs_in(part)
    elif isinstance(tree, Mapping):
        for part in tree.values():
            yield from refs_in(part)


def mapped(function: Callable[[Any], Any], tree: Any, kinds: Any) -> Any:
    """Return a structure with what is of these types replaced by what a function returns."""
    if isinstance(tree, kinds):
        return function(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)(mapped(function, x, kinds) for x in tree)
    if isinstance(tree, dict):
        return {key: mapped(function, x, kinds) for key, x in tree.items()}
    return tree


def replaced(tree: Any, names: Mapping[Ref, Ref]) -> Any:
    """Return a structure with its `Ref`s replaced by those in `names`."""

    def last(ref: Ref) -> Ref:
        while ref in names:
            ref = names[ref]
        return ref

    return mapped(last, tree, Ref)


def renamed(node: Node, names: Mapping[Ref, Ref]) -> Node:
    """Return a copy of a node with its references replaced by those in `names`."""
    blocks = [
        Block([renamed(x, names) for x in block.nodes], replaced(block.results, names), block.rows)
        for block in node.blocks
    ]
    args, kwargs = replaced(node.args, names), replaced(node.kwargs, names)
    outputs = replaced(node.outputs, names)
    return Node(node.function, args, kwargs, outputs, node.line, tuple(blocks))


def used_by(node: Node) -> set[Ref]:
    """Return all values that a node uses, including those made inside its blocks."""
    found = set(refs_in((node.args, node.kwargs)))
    for block in node.blocks:
        found.update(block.results, *map(used_by, block.nodes))
    return found


def users_of(nodes: Iterable[Node]) -> dict[Ref, list[Node]]:
    """Return the nodes that use each value."""
    users: dict[Ref, list[Node]] = {}
    for node in nodes:
        for ref in used_by(node):
            users.setdefault(ref, []).append(node)
    return users


def inputs_of(nodes: Iterable[Node]) -> list[Ref]:
    """Return all values that nodes use and that none of them has made before."""
    taken, made = dict[Ref, None](), set[Ref]()
    for node in nodes:
        new = sorted(used_by(node) - made, key=lambda ref: ref.index)
        taken |= dict.fromkeys(new)
        made |= {ref for ref in refs_in(node.outputs) if ref not in taken}
    return list(taken)
