"""The tape, on which a step's tensor operations are recorded while it runs eagerly.

A `Tape` records below automatic differentiation. It therefore contains the operations of gradients
like all others, and assignments to variables as in-place changes. Replaying it runs the same
operations in the same order on the same tensors, without the Python code around them.

Anything that could differ in the next step is refused with a reason: Python code that reads a
tensor's value, shapes that depend on values, in-place changes of tensors that are not in the state.

The file is longer than others, because every operation passes through one object, `Tape`: what it
records and what it refuses depend on the same tables of known tensors.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import torch

from ....core import structures
from ...plans import RefusedError
from ...user_code import numpy_function, running_line
from ..patches import C, TorchDispatchMode
from .nodes import BATCH_NORMS, COND, EACH, Block, Kind, Node, Ref, aten, mapped

LONGEST = 20_000  # operations: Python takes seconds to compile longer functions

_SHAPED_ALONE = frozenset(  # their results depend only on the shapes of their arguments
    {
        *("empty_like", "ones_like", "zeros_like", "full_like"),
        *("new_empty", "new_empty_strided", "new_ones", "new_zeros", "new_full"),
    }
)


class Tape(TorchDispatchMode):
    """Records one run of a step; created by `recording`.

    Args:
        state: The variables' own tensors, which the step may change.
        batch: The batch's tensors, which differ in every step.
        number: The step's number.
        rolled: Whether to record a mapped function for one row, as a loop over all rows, if
            possible.

    Attributes:
        rolled: The same.
        loops: The number of recorded loops.
        block: The block that is being recorded; after the step, all of it.
        objects: Every value, by its `Ref`'s index.
        turned: Indices of values whose shape was changed in place.
        idle: Whether recording is paused.
    """

    def __init__(
        self, state: Sequence[Any], batch: Sequence[Any], number: Any, rolled: bool = False
    ) -> None:
        super().__init__()
        self.rolled, self.loops = rolled, 0
        self.block = Block()
        self.objects: list[Any] = []
        self.turned: set[int] = set()
        self.idle = False
        self._index: dict[Any, int] = {}
        self._inputs: dict[int, tuple[str, int]] = {}  # kind and position
        self._found: set[int] = set()
        self._fixed: set[int] = set()
        self._storages: list[int] = []
        self._written: set[int] = set()  # storages
        self._owners: dict[int, Any] = {}  # of storages: a kind, or the block that made it
        self._homes: list[int] = []  # the block in which each value is defined
        self._blocks = [id(self.block)]  # the open blocks, outermost first
        self._length = 0
        self._refusal = ""
        self._alpha: Ref | None = None  # the argument `alpha` of the next operator
        self._state = list(state)
        for kind, tensors in (("state", state), ("batch", batch), ("number", [number])):
            for position, tensor in enumerate(tensors):
                self._inputs.setdefault(self._known(tensor, kind), (kind, position))

    # Used after the step has run

    def check(self) -> None:
        """Raise the refusal of the recording, if there was one, even if the step caught it."""
        if self._refusal:
            raise RefusedError(self._refusal)

    def kind_of(self, ref: Ref) -> str:
        """Return a value's kind: `"state"`, `"batch"`, `"number"`, `"found"` or `"made"`."""
        if ref.index in self._inputs:
            return self._inputs[ref.index][0]
        return "found" if ref.index in self._found else "made"

    def position_of(self, ref: Ref) -> int:
        """Return a value's position among the variables, or among the batch's tensors."""
        return self._inputs[ref.index][1]

    def storage_of(self, ref: Ref) -> int:
        """Return a key that is equal for values that share memory, or 0 for other values."""
        return self._storages[ref.index]

    def is_fixed(self, ref: Ref) -> bool:
        """Return whether a value is the same in every replay."""
        return ref.index in self._fixed and not self.is_written(ref)

    def is_written(self, ref: Ref) -> bool:
        """Return whether the tape changes a value's memory in place."""
        return self._storages[ref.index] in self._written

    def keep(self, ref: Ref) -> None:
        """Use a value of this recording as a constant in every replay."""
        self._found.add(ref.index)

    def add(self, value: Any) -> Ref:
        """Register a value that no operation returned, and return its reference."""
        self.objects.append(value)
        self._storages.append(_storage(value))
        self._homes.append(self._blocks[-1])
        return Ref(len(self.objects) - 1)

    # Called while the step runs

    @contextmanager
    def paused(self) -> Generator[None]:
        """Pause recording in this context."""
        before, self.idle = self.idle, True
        try:
            yield
        finally:
            self.idle = before

    def refuse(self, why: str) -> None:
        """Refuse the step; the refusal stays in effect if the step catches the exception.

        Raises:
            RefusedError: Always.
        """
        line = running_line()
        self._refusal = self._refusal or (f"{why}, at {line}" if line else why)
        raise RefusedError(self._refusal)

    def refuse_value(self) -> None:
        """Refuse the step, because it converts a tensor to a Python value or to a NumPy array.

        Raises:
            RefusedError: Always.
        """
        name, instead = numpy_function(running_line())
        self.refuse(
            f"it passes a tensor to {name} (use {instead})"
            if name
            else "it converts a tensor to a Python value"
        )

    def is_seen(self, tensor: Any) -> bool:
        """Return whether a value may differ in the next step, so that it must not be read."""
        index = self._index.get(_key(tensor))
        return index is None or not self.is_fixed(Ref(index))

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function, and record it as one operation; its result is not differentiated."""
        with self.paused():
            result = function(*args)
        self._write_down(function, self._refs(args), {}, self._made(result))
        return result

    @contextmanager
    def scale_of(self, tensor: Any) -> Generator[Any]:
        """Pass a tensor's value, read at replay time, to one operator as its `alpha` argument."""
        if torch.is_grad_enabled():
            self.refuse("it uses a tensor as a scaling factor (alpha) inside an objective")
        with self.paused():
            value = tensor.item()
        self._alpha = self.add(value)
        self._write_down(torch.Tensor.item, (self.ref_of(tensor),), {}, self._alpha)
        yield value
        if self._alpha_is_left():
            self.refuse("it uses a tensor as a scaling factor (alpha)")

    def _alpha_is_left(self) -> bool:
        return self._alpha is not None

    def cond(self, predicate: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """Record both branches; the state is restored after the one that is not taken."""
        with self.paused():
            taken = bool(predicate)
        if not isinstance(predicate, torch.Tensor) or not self.is_seen(predicate):
            return then() if taken else otherwise()
        with self.paused():
            before = [tensor.detach().clone() for tensor in self._state]
            random = torch.get_rng_state()
        ref = self.ref_of(predicate)
        branches = {True: then, False: otherwise}
        blocks: dict[bool, Block] = {}
        results: dict[bool, Any] = {}
        for which in (not taken, taken):
            with self._inside() as blocks[which]:
                results[which] = structures.mapped(self._outward, branches[which]())
            if which is not taken:
                with self.paused(), torch.no_grad():
                    torch.set_rng_state(random)
                    for tensor, value in zip(self._state, before, strict=True):
                        if not torch.equal(tensor, value):  # autograd counts all changes
                            tensor.copy_(value)
        try:
            pair = (
                structures.flatten(results[True]),
                structures.aligned(results[False], results[True]),
            )
        except ValueError as error:
            self.refuse(f"the branches of cond return other structures: {error}")
            raise
        flat = dict(zip((True, False), pair, strict=True))
        forms = [[_form(x) for x in flat[which]] for which in (True, False)]
        if forms[0] != forms[1]:
            self.refuse(f"the branches of cond return {forms[0]} and {forms[1]}")
        if _requiring_gradients(flat[True]) != _requiring_gradients(flat[False]):
            self.refuse(_DIFFERENTIATED)  # the gradient of one branch is zero: no backward shows it
        for which, block in blocks.items():
            block.results = [Ref(self._index[_key(x)]) for x in _tensors(flat[which])]
        pairs = zip(blocks[taken].results, blocks[not taken].results, strict=True)
        outputs = [self._merged(*pair) for pair in pairs]
        both = blocks[True], blocks[False]
        self.block.nodes.append(Node(COND, (ref,), {}, outputs, _place(), both))
        return results[taken]

    def for_each(
        self, function: Callable[[list[Any]], list[Any]], inputs: Sequence[Any]
    ) -> list[Any]:
        """Record a function for the first row, to be replayed for each row; return stacked results.

        This only works outside of differentiation, which would need the gradients of each row.
        The results have the right shapes, but all values are those of the first row. This does not
        matter, since the values of a recorded step are discarded.
        """
        sources, count = [self.ref_of(x) for x in inputs], inputs[0].shape[0]
        self.loops += 1
        with self._inside() as block:
            with self.paused():
                firsts = [x[0] for x in inputs]
            block.rows = [Ref(self._known(x, self._blocks[-1])) for x in firsts]
            made = function(firsts)
            block.results = [self.ref_of(x) for x in made]
        with self.paused():
            stacks = [torch.stack([x] * count) for x in made]
        outputs = [Ref(self._known(x, self._blocks[-1])) for x in stacks]
        self.block.nodes.append(Node(EACH, (count, *sources), {}, outputs, _place(), (block,)))
        return stacks

    @contextmanager
    def _inside(self) -> Generator[Block]:
        """Record operations in a new block in this context."""
        outer, self.block = self.block, Block()
        self._blocks.append(id(self.block))
        try:
            yield self.block
        finally:
            self._blocks.pop()
            self.block = outer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and record it."""
        kwargs = kwargs or {}
        if self.idle:
            return func(*args, **kwargs)
        self.check()
        if func is aten.lift_fresh.default and id(args[0]) not in self._index:
            return self._literal(args[0])
        kind = Kind.of(func)
        fixed = not kind.random and not any(self.is_seen(x) for x in _tensors((args, kwargs)))
        if not fixed:
            self._check_sizes(func, kind, args)
        self._check_writes(func, kind, args, kwargs)
        for x in _leaves((args, kwargs)):
            if isinstance(x, torch.Generator) and _key(x) not in self._index:
                self.refuse(f"{func} draws from a torch.Generator that is not part of the state")
        refs, named = self._refs(args), self._refs(kwargs)
        if self._alpha is not None:
            if not kind.scales:
                self.refuse(f"{func} takes a number that was converted from a tensor")
            named["alpha"], self._alpha = self._alpha, None
        result = func(*args, **kwargs)
        if not any(isinstance(x, torch.Tensor) for x in _leaves(result)) and kind.returns:
            return result  # a Python value, computed from fixed values
        first = len(self.objects)
        outputs = self._made(result)
        name = func._schema.name.removeprefix("aten::")
        if not kind.writes and not kind.random and (fixed or name in _SHAPED_ALONE):
            self._fixed.update(range(first, len(self.objects)))
        self._write_down(func, refs, named, outputs)
        return result

    def _literal(self, tensor: Any) -> Any:
        """Register a tensor that was just created from numbers: each replay gets a fresh copy."""
        pristine = Ref(self._known(tensor.clone(), "found"))
        literal = self._made(tensor)
        self._fixed |= {pristine.index, literal.index}
        self._write_down(aten.clone.default, (pristine,), {}, literal)
        return tensor

    # Checks for operations whose results could differ in the next step

    def _check_sizes(self, func: Any, kind: Kind, args: Sequence[Any]) -> None:
        if kind.python:
            self.refuse_value()
        if kind.dynamic and not (func is aten.index.Tensor and not _masked(args[1])):
            self.refuse(f"{func} returns a tensor whose shape depends on values")

    def _check_writes(self, func: Any, kind: Kind, args: Any, kwargs: Any) -> None:
        """Refuse changes that would outlive the step, before they take effect."""
        if func in BATCH_NORMS and not args[5]:  # not training
            return
        for position, name in kind.writes:
            target = args[position] if position < len(args) else kwargs.get(name)
            for tensor in _tensors(target):
                storage = _storage(tensor)
                owner = self._owners.get(storage)
                if owner not in ("state", self._blocks[-1]):
                    self.refuse(f"{func} changes {_OTHERS.get(owner, _OTHERS[None])} in place")
                self._written.add(storage)
                if kind.turns:
                    self.turned.add(self._index[id(tensor)])

    # References

    def _known(self, thing: Any, owner: Any) -> int:
        """Return a value's index; registering keeps it alive, so that its id is not reused."""
        index = self._index.get(_key(thing))
        if index is None:
            index = self._index[_key(thing)] = self.add(thing).index
            self._owners.setdefault(self._storages[index], owner)
            if owner == "found":
                self._found.add(index)
                self._homes[index] = self._blocks[0]
        return index

    def ref_of(self, thing: Any) -> Ref:
        """Return the reference of a value, which is an input if the step has not made it."""
        index = self._known(thing, "found")
        if self._homes[index] not in self._blocks:
            self.refuse("a tensor made in a branch of cond or in a row of for_each is used outside")
        return Ref(index)

    def _refs(self, tree: Any) -> Any:
        return mapped(self.ref_of, tree, (torch.Tensor, torch.Generator))

    def _made(self, tree: Any) -> Any:
        """Return references of returned values; values changed in place keep theirs."""
        if isinstance(tree, (torch.Tensor, torch.Generator)):
            return Ref(self._known(tree, self._blocks[-1]))
        if isinstance(tree, (list, tuple)):
            return [self._made(x) for x in tree]
        return None

    def _write_down(self, function: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        self._length += 1
        if self._length > LONGEST:
            self.refuse(f"it has more than {LONGEST:,} operations")
        self.block.nodes.append(Node(function, args, kwargs, outputs, _place()))

    # Branches

    def _outward(self, x: Any) -> Any:
        x = x.value if isinstance(x, keras.Variable) else x
        return _Result.apply(x, self) if isinstance(x, torch.Tensor) else x

    def _merged(self, taken: Ref, other: Ref) -> Ref:
        """Register a new reference for a tensor that either block may have made."""
        self._written |= {self._storages[taken.index], self._storages[other.index]}
        tensor = self.objects[taken.index]
        merged = self.add(tensor)
        self._index[id(tensor)] = merged.index
        return merged


class _Result(torch.autograd.Function):
    """Gives a branch's result a new reference, and refuses to differentiate it.

    A gradient would have to flow through the branch taken at replay time, not the recorded one.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Any, tape: Tape) -> Any:
        """Return an alias."""
        ctx.tape = tape
        return aten.alias(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Refuse."""
        ctx.tape.refuse(_DIFFERENTIATED)


_DIFFERENTIATED = "the result of a cond is differentiated"
_OTHERS: dict[Any, str] = {
    "batch": "its batch",
    "number": "the step's number",
    None: "a tensor that is part of neither the state nor its branch of cond",
}


def _requiring_gradients(leaves: Sequence[Any]) -> list[bool]:
    """Return for each leaf whether it depends on what the enclosing objective differentiates."""
    return [isinstance(x, torch.Tensor) and x.requires_grad for x in leaves]


def _masked(indices: Sequence[Any]) -> bool:
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indices)


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, (list, tuple)):
        return [leaf for part in tree for leaf in _leaves(part)]
    if isinstance(tree, dict):
        return [leaf for part in tree.values() for leaf in _leaves(part)]
    return [tree]


def _tensors(tree: Any) -> list[Any]:
    return [x for x in _leaves(tree) if isinstance(x, torch.Tensor)]


def _key(thing: Any) -> Any:
    """Return a value's key: its id, but for generators, as PyTorch creates new wrapper objects."""
    if isinstance(thing, torch.Generator):
        return "generator", getattr(thing, "_cdata")  # noqa: B009 - no stub knows it
    return id(thing)


def _storage(value: Any) -> int:
    """Return a key that is equal for tensors that share memory."""
    if not isinstance(value, torch.Tensor):
        return 0
    with C.DisableTorchFunction():  # tensors of a recording are of a class that records this
        storage: Any = value.untyped_storage()
        return storage._cdata


def _form(x: Any) -> Any:
    return (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x


def _place() -> str:
    """Return file, number and text of the running line of user code, or an empty string."""
    line = running_line()
    return str(line) if line else ""
