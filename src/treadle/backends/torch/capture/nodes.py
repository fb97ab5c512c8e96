"""PyTorch: what a tape is made of."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

aten: Any = torch.ops.aten
internals: Any = torch._C  # type: ignore[attr-defined]  # what PyTorch offers nowhere else
# These change their statistics in place, which their schemas do not tell.
BATCH_NORMS = frozenset(
    {
        aten.native_batch_norm.default,
        aten.cudnn_batch_norm.default,
        aten.miopen_batch_norm.default,
    }
)
_OPERATOR = type(aten.add.Tensor)


@dataclass(frozen=True, slots=True)
class Ref:
    """A value on a tape: the position of what it was while the tape was recorded."""

    index: int


@dataclass(slots=True)
class Operation:
    """One call.

    Attributes:
        function: An operator, or a function that stands for several.
        args: Its arguments, `Ref`s where values are meant.
        outputs: A `Ref` for each value that it returned, in their structure.
        line: The line of the user's that asked for it.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: Any
    line: str


@dataclass(slots=True)
class Branch:
    """One of two blocks, by a value that is looked at while the tape is played.

    Attributes:
        blocks: What is done where it is true, and where it is false.
        results: What each block returns.
        outputs: Under which names it is known afterwards.
    """

    predicate: Ref
    blocks: tuple["Block", "Block"]
    results: tuple[list[Ref], list[Ref]]
    outputs: list[Ref]
    line: str


@dataclass(slots=True)
class Loop:
    """A block that is played once for each row of some tensors.

    Attributes:
        count: How many rows there are.
        sources: The tensors whose rows are taken.
        rows: Under which names the block knows its row of each.
        block: What is done for a row.
        results: What the block returns.
        outputs: Under which names the results of all rows, stacked, are known afterwards.
    """

    count: int
    sources: list[Ref]
    rows: list[Ref]
    block: "Block"
    results: list[Ref]
    outputs: list[Ref]
    line: str


Node = Operation | Branch | Loop
Block = list[Node]


@dataclass(frozen=True, slots=True)
class Kind:
    """What is to be known of an operator.

    Attributes:
        writes: Which arguments it changes in place, by position and name.
        returns: It returns something.
        python: Something that is no tensor.
        views: Another look at memory that it is given.
        scales: It has a number `alpha`.
        random: It draws from a generator.
        dynamic: The shape of what it returns depends on values.
        turns: It changes the shape of what it is given.
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
            python=any("Tensor" not in str(returned.type) for returned in schema.returns),
            views=any(returned.alias_info is not None for returned in schema.returns),
            scales=any(argument.name == "alpha" for argument in schema.arguments),
            random=torch.Tag.nondeterministic_seeded in operator.tags,
            dynamic=bool(sizes & set(operator.tags)),
            turns=torch.Tag.inplace_view in operator.tags,
        )


def is_operator(function: Any) -> bool:
    """Say whether a function is an operator of PyTorch's, or one that stands for several."""
    return isinstance(function, _OPERATOR)


def refs_in(tree: Any) -> Iterator[Ref]:
    """Yield every value that a structure names."""
    if isinstance(tree, Ref):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for part in tree:
            yield from refs_in(part)
    elif isinstance(tree, Mapping):
        for part in tree.values():
            yield from refs_in(part)


def replaced(tree: Any, names: Mapping[Ref, Ref]) -> Any:
    """Return a structure with other names in it."""
    if isinstance(tree, Ref):
        while tree in names:
            tree = names[tree]
        return tree
    if isinstance(tree, (list, tuple)):
        return type(tree)(replaced(x, names) for x in tree)
    if isinstance(tree, dict):
        return {key: replaced(x, names) for key, x in tree.items()}
    return tree


def used_by(node: Node) -> set[Ref]:
    """Return all values that a node uses; for one with blocks also those that it makes inside."""
    if isinstance(node, Operation):
        return set(refs_in((node.args, node.kwargs)))
    if isinstance(node, Loop):
        return {*node.sources, *node.results}.union(*(used_by(part) for part in node.block))
    inner = [used_by(part) for block in node.blocks for part in block]
    return {node.predicate, *node.results[0], *node.results[1]}.union(*inner)
