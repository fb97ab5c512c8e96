"""PyTorch: what a step does to tensors, written down operation by operation while it runs as it is.

A `Tape` watches below automatic differentiation, so the operations of gradients are on it like all
others, and assignments to variables are what they are: changes in place. Playing the tape again is
therefore the same operations in the same order on the same tensors, without the Python around them.

What would not be the same the next time is refused by name: Python that looks at a tensor's value,
tensors whose shapes depend on values, changes of tensors that are not part of the state.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...plans import RefusedError
from .nodes import BATCH_NORMS, Block, Branch, Kind, Loop, Operation, Ref, aten, internals
from .place import place

LONGEST = 20_000  # operations: Python takes seconds to compile more of them

_SHAPED_ALONE = frozenset(  # what they return depends on the shape of what they are given
    {
        *("empty_like", "ones_like", "zeros_like", "full_like"),
        *("new_empty", "new_empty_strided", "new_ones", "new_zeros", "new_full"),
    }
)


class Tape(TorchDispatchMode):
    """Records one run of a step; `recording` makes one.

    Args:
        state: The variables' own tensors, which the step may change.
        batch: Tensors that are others in every step.
        number: The step's number.
        rolled: Record a mapped function for one row, as a loop over all rows, where that can be.

    Attributes:
        rolled: The same.
        loops: How many loops were recorded.
        block: What was done, in order.
        objects: Every value by its `Ref`'s index.
        turned: Indices of values that changed their shape in place.
        idle: Nothing is written down at the moment.
    """

    def __init__(
        self, state: Sequence[Any], batch: Sequence[Any], number: Any, rolled: bool = False
    ) -> None:
        super().__init__()
        self.rolled, self.loops = rolled, 0
        self.block: Block = []
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
        self._homes: list[int] = []  # the block that each value is known in
        self._blocks = [id(self.block)]  # those that are open
        self._length = 0
        self._refusal = ""
        self._alpha: Ref | None = None  # of the operator that comes next
        self._state = list(state)
        for kind, tensors in (("state", state), ("batch", batch), ("number", [number])):
            for position, tensor in enumerate(tensors):
                self._inputs.setdefault(self._known(tensor, kind), (kind, position))

    # What is asked when the step has run

    def check(self) -> None:
        """Raise what was refused while the step ran, also where the step caught it."""
        if self._refusal:
            raise RefusedError(self._refusal)

    def ref_of(self, tensor: Any) -> Ref:
        """Return where a tensor that the step returned is found."""
        return self._ref(tensor)

    def kind_of(self, ref: Ref) -> str:
        """Return what a value is: of the `state`, the `batch`, the `number`, `found` or `made`."""
        if ref.index in self._inputs:
            return self._inputs[ref.index][0]
        return "found" if ref.index in self._found else "made"

    def position_of(self, ref: Ref) -> int:
        """Return which variable, or which of the batch's tensors, a value is."""
        return self._inputs[ref.index][1]

    def is_fixed(self, ref: Ref) -> bool:
        """Say whether a value is the same in every run of the tape."""
        return ref.index in self._fixed and not self.is_written(ref)

    def is_written(self, ref: Ref) -> bool:
        """Say whether the tape changes a value's memory in place."""
        return self._storages[ref.index] in self._written

    def keep(self, ref: Ref) -> None:
        """Take a value from this recording into every run of the tape."""
        self._found.add(ref.index)

    def add(self, value: Any) -> Ref:
        """Give a name to a value that no operation returned."""
        self.objects.append(value)
        self._storages.append(_storage(value))
        self._homes.append(self._blocks[-1])
        return Ref(len(self.objects) - 1)

    # What is called while the step runs

    @contextmanager
    def paused(self) -> Generator[None]:
        """Let tensors be looked at without a word of it on the tape."""
        before, self.idle = self.idle, True
        try:
            yield
        finally:
            self.idle = before

    def refuse(self, why: str) -> None:
        """Give up; even where the step catches the exception.

        Raises:
            RefusedError: Always.
        """
        line = place()
        self._refusal = self._refusal or (f"{why}, at {line}" if line else why)
        raise RefusedError(self._refusal)

    def is_seen(self, tensor: Any) -> bool:
        """Say whether a value may be another the next time, so must not be looked at."""
        index = self._index.get(_key(tensor))
        return index is None or not self.is_fixed(Ref(index))

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function whose result is not differentiated as one operation."""
        with self.paused():
            result = function(*args)
        self._write_down(function, self._refs(args), {}, self._made(result))
        return result

    @contextmanager
    def scale_of(self, tensor: Any) -> Generator[Any]:
        """Let one operator take a tensor's value at its time as its number `alpha`."""
        if torch.is_grad_enabled():
            self.refuse("it scales by a number made of a tensor, inside an objective")
        with self.paused():
            value = tensor.item()
        self._alpha = self.add(value)
        self._write_down(torch.Tensor.item, (self._ref(tensor),), {}, self._alpha)
        yield value
        if self._alpha_is_left():
            self.refuse("it scales by a number made of a tensor")

    def _alpha_is_left(self) -> bool:
        return self._alpha is not None

    def cond(self, predicate: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """Record both branches, the one that is not taken on a state that is put back."""
        with self.paused():
            taken = bool(predicate)
        if not isinstance(predicate, torch.Tensor) or not self.is_seen(predicate):
            return then() if taken else otherwise()
        with self.paused():
            before = [tensor.detach().clone() for tensor in self._state]
            random = torch.get_rng_state()
        ref = self._ref(predicate)
        branches = {True: then, False: otherwise}
        blocks: dict[bool, Block] = {}
        results: dict[bool, Any] = {}
        for which in (not taken, taken):
            blocks[which], results[which] = self._recorded(branches[which])
            if which is not taken:
                with self.paused(), torch.no_grad():
                    torch.set_rng_state(random)
                    for tensor, value in zip(self._state, before, strict=True):
                        if not torch.equal(tensor, value):  # autograd counts all changes
                            tensor.copy_(value)
        flat = {which: keras.tree.flatten(results[which]) for which in (True, False)}
        forms = [[_form(x) for x in flat[which]] for which in (True, False)]
        if forms[0] != forms[1]:
            self.refuse(f"the branches of cond return {forms[0]} and {forms[1]}")
        refs = {
            which: [self._known_as(x) for x in flat[which] if isinstance(x, torch.Tensor)]
            for which in (True, False)
        }
        outputs = [self._merged(*pair) for pair in zip(refs[taken], refs[not taken], strict=True)]
        self.block.append(
            Branch(
                ref,
                (blocks[True], blocks[False]),
                (refs[True], refs[False]),
                outputs,
                place(),
            )
        )
        return results[taken]

    def for_each(self, function: Callable[[Any], Any], inputs: Any) -> Any:
        """Record a function for the first row, to be played for each; return its results, stacked.

        Only outside of differentiation: the gradients of each row would have to be kept for later.
        The results have the right shapes; the values are those of the first row, which matters as
        little as the values of any recorded step.
        """
        tensors = keras.tree.flatten(inputs)
        sources, count = [self._ref(x) for x in tensors], tensors[0].shape[0]
        self.loops += 1
        outer, self.block = self.block, []
        self._blocks.append(id(self.block))
        try:
            with self.paused():
                firsts = [x[0] for x in tensors]
            rows = [Ref(self._known(x, self._blocks[-1])) for x in firsts]
            result = function(keras.tree.pack_sequence_as(inputs, firsts))
            result = keras.tree.map_structure(keras.ops.convert_to_tensor, result)
            made = keras.tree.flatten(result)
            results = [self._ref(x) for x in made]
            block = self.block
        finally:
            self._blocks.pop()
            self.block = outer
        with self.paused():
            stacks = [torch.stack([x] * count) for x in made]
        outputs = [Ref(self._known(x, self._blocks[-1])) for x in stacks]
        self.block.append(Loop(count, sources, rows, block, results, outputs, place()))
        return keras.tree.pack_sequence_as(result, stacks)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator and write it down."""
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
        self._check_generators(func, (args, kwargs))
        refs, named = self._refs(args), self._refs(kwargs)
        if self._alpha is not None:
            if not kind.scales:
                self.refuse(f"{func} takes a number made of a tensor")
            named["alpha"], self._alpha = self._alpha, None
        result = func(*args, **kwargs)
        if not all(isinstance(x, torch.Tensor) or x is None for x in _leaves(result)):
            return result  # a Python value, of fixed ones
        first = len(self.objects)
        outputs = self._made(result)
        name = func._schema.name.removeprefix("aten::")
        if not kind.writes and not kind.random and (fixed or name in _SHAPED_ALONE):
            self._fixed.update(range(first, len(self.objects)))
        self._write_down(func, refs, named, outputs)
        return result

    def _literal(self, tensor: Any) -> Any:
        """Know a tensor that was just made of numbers: new, and the same, in every run."""
        pristine = Ref(self._known(tensor.clone(), "found"))
        literal = self._made(tensor)
        self._fixed |= {pristine.index, literal.index}
        self._write_down(aten.clone.default, (pristine,), {}, literal)
        return tensor

    # What would be another the next time

    def _check_sizes(self, func: Any, kind: Kind, args: Sequence[Any]) -> None:
        if kind.python:
            self.refuse("it makes a Python value of a tensor")
        if kind.dynamic and not (func is aten.index.Tensor and not _masked(args[1])):
            self.refuse(f"{func} returns a tensor whose shape depends on values")

    def _check_writes(self, func: Any, kind: Kind, args: Any, kwargs: Any) -> None:
        """Refuse changes that would outlive the step, before they are made."""
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

    def _check_generators(self, func: Any, arguments: Any) -> None:
        for x in _leaves(arguments):
            if isinstance(x, torch.Generator) and _key(x) not in self._index:
                self.refuse(f"{func} draws from a torch.Generator that is not part of the state")

    # Names

    def _known(self, thing: Any, owner: Any) -> int:
        """Take a value in, and keep it, so that nothing else gets its id."""
        index = self._index.get(_key(thing))
        if index is None:
            index = self._index[_key(thing)] = self.add(thing).index
            self._owners.setdefault(self._storages[index], owner)
            if owner == "found":
                self._found.add(index)
                self._homes[index] = self._blocks[0]
        return index

    def _known_as(self, thing: Any) -> Ref:
        return Ref(self._index[_key(thing)])

    def _ref(self, thing: Any) -> Ref:
        index = self._known(thing, "found")
        if self._homes[index] not in self._blocks:
            self.refuse("a tensor made in a branch of cond or in a row of for_each is used outside")
        return Ref(index)

    def _refs(self, tree: Any) -> Any:
        if isinstance(tree, (torch.Tensor, torch.Generator)):
            return self._ref(tree)
        if isinstance(tree, (list, tuple)):
            return type(tree)(self._refs(x) for x in tree)
        if isinstance(tree, dict):
            return {key: self._refs(x) for key, x in tree.items()}
        return tree

    def _made(self, tree: Any) -> Any:
        """Return refs for what was returned: new ones, or those of what was changed in place."""
        if isinstance(tree, (torch.Tensor, torch.Generator)):
            return Ref(self._known(tree, self._blocks[-1]))
        if isinstance(tree, (list, tuple)):
            return [self._made(x) for x in tree]
        return None

    def _write_down(self, function: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        self._length += 1
        if self._length > LONGEST:
            self.refuse(f"it has more than {LONGEST:,} operations")
        self.block.append(Operation(function, args, kwargs, outputs, place()))

    # Branches

    def _recorded(self, branch: Callable[[], Any]) -> tuple[Block, Any]:
        """Run a branch in a block of its own; its tensors come out under names of their own."""
        outer, self.block = self.block, []
        self._blocks.append(id(self.block))
        try:
            result = keras.tree.map_structure(self._outward, branch())
            return self.block, result
        finally:
            self._blocks.pop()
            self.block = outer

    def _outward(self, x: Any) -> Any:
        x = x.value if isinstance(x, keras.Variable) else x
        return _Result.apply(x, self) if isinstance(x, torch.Tensor) else x

    def _merged(self, taken: Ref, other: Ref) -> Ref:
        """Know a tensor from here on as what either block may have made."""
        self._written |= {self._storages[taken.index], self._storages[other.index]}
        tensor = self.objects[taken.index]
        merged = self.add(tensor)
        self._index[id(tensor)] = merged.index
        return merged


class _Result(torch.autograd.Function):
    """What a branch returned, under a name of its own.

    A gradient would have to go back through the branch that is taken then, not through this one.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Any, tape: Tape) -> Any:
        """Return an alias."""
        ctx.tape = tape
        return aten.alias(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Refuse."""
        ctx.tape.refuse("the result of a cond is differentiated")


_OTHERS: dict[Any, str] = {
    "batch": "its batch",
    "number": "the step's number",
    None: "a tensor that is part of neither the state nor its branch of cond",
}


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
    """Return by what a value is known: PyTorch makes a new object for a generator each time."""
    if isinstance(thing, torch.Generator):
        return "generator", getattr(thing, "_cdata")  # noqa: B009 - no stub knows it
    return id(thing)


def _storage(value: Any) -> int:
    """Return what is equal for tensors that share memory."""
    if not isinstance(value, torch.Tensor):
        return 0
    with internals.DisableTorchFunction():
        storage: Any = value.untyped_storage()
        return storage._cdata


def _form(x: Any) -> Any:
    return (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x
