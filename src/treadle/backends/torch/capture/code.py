"""Generating a Python function from a tape, which frees each tensor after its last use."""

import linecache
from collections.abc import Callable, Sequence
from inspect import getmro
from itertools import count
from math import isfinite
from traceback import walk_tb
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any
from weakref import finalize

import torch

from ...types import StepResult
from ..patches import C
from .nodes import COND, EACH, Block, Kind, Node, Ref, aten, is_operator, refs_in, used_by
from .tape import Tape

# Operators whose Python function takes the same arguments, and needs two thirds of the call time.
_BY_NAME = frozenset(
    """
    _adaptive_avg_pool2d _foreach_abs _foreach_add _foreach_add_ _foreach_div _foreach_maximum_
    _foreach_mul _foreach_mul_ _foreach_sqrt _foreach_sqrt_ _log_softmax _softmax _to_copy
    _unsafe_view abs add add_ addmm amax amin any argmax arange bitwise_and bitwise_not bmm cat
    clamp clone convolution copy_ cos div div_ eq exp expand fill_ full_like gather ge gt
    index_select le log logical_and logical_not logical_or lt max maximum mean min minimum mm mul
    mul_ native_layer_norm native_dropout ne neg ones_like permute pow prod reciprocal relu rsqrt
    rsub select sgn sigmoid sign sin split sqrt squeeze stack sub sub_ sum t tanh transpose tril
    triu unbind unsqueeze var var_mean view where zeros_like
    """.split()  # noqa: SIM905 - a list of strings would take a page
)
_numbers = count(1)


class Captured:
    """A captured step: the function of a tape, which changes the state in place.

    Args:
        tape: The recorded tape.
        block: Its operations, simplified.
        names: The names of its results: values, explicit weights, and violations.
        title: The function's name in tracebacks.

    Attributes:
        source: The lines of the function.
        uses_number: Whether it depends on the step's number.
        draws: Whether it draws from PyTorch's global generator, which other code shares.
        length: The number of operations.
        messages: The forms of the tensors that are summed over processes, in order.
        is_compiled: Whether Inductor compiled operations of it.
        is_graph: Whether these are replayed as CUDA graphs.
        refusal: Why it is less than what was asked for, as a clause; empty if it is not.
    """

    def __init__(
        self, tape: Tape, block: Block, names: Sequence[Sequence[str]], title: str
    ) -> None:
        self.source: list[str] = []
        self.messages: list[str] = []
        self.length = 0
        self.uses_number = self.draws = self.is_compiled = self.is_graph = False
        self.refusal = ""
        self._tape, self._names_of_results = tape, names
        self._space: dict[str, Any] = {}
        self._names: dict[int, str] = {}  # names of the objects in `_space`, by id
        self._origins: dict[int, str] = {}  # lines of user code, by line number in `source`
        self._file = f"<{title} captured, {next(_numbers)}>"
        self._write(block)
        source = "\n".join(self.source) + "\n"
        exec(compile(source, self._file, "exec"), self._space)
        self._step: Callable[..., Any] = self._space["step"]
        linecache.cache[self._file] = len(source), None, self.source, self._file  # for tracebacks
        finalize(self, linecache.cache.pop, self._file, None)
        del self._tape  # frees all values of the recorded step

    def __call__(self, state: Sequence[Any], batch: Sequence[Any], number: Any) -> StepResult:
        """Run the step below automatic differentiation, the level at which it was recorded."""
        try:
            with C._AutoDispatchBelowAutograd():
                results = iter(self._step(state, batch, number))
        except Exception as error:
            for frame, line in walk_tb(error.__traceback__):
                if frame.f_code.co_filename == self._file and self._origins.get(line):
                    error.add_note(f"at {self._origins[line]}")
            raise
        # Names come first, so that `zip` ends before it takes a result too many.
        values, weights, broken = [
            dict(zip(names, results, strict=False)) for names in self._names_of_results
        ]
        return StepResult(values, weights, broken)

    def _write(self, block: Block) -> None:
        self.source.append("def step(state, batch, number):")
        used = set(block.results).union(*map(used_by, block.nodes))
        for ref in sorted(used, key=lambda ref: ref.index):
            kind = self._tape.kind_of(ref)
            if kind == "number":
                self.uses_number = True
                self.source.append(f"    {self._text(ref)} = number")
            elif kind in ("state", "batch"):
                self.source.append(f"    {self._text(ref)} = {kind}[{self._tape.position_of(ref)}]")
        self._write_block(block, "    ")
        self.source.append(f"    return {self._tuple(block.results)}")

    def _write_block(self, block: Block, indent: str) -> None:
        """Write a block; each value that it makes is deleted after its last use."""
        made = {ref for node in block.nodes for ref in refs_in(node.outputs)} - {*block.results}
        last: dict[Ref, int] = {}
        for i, node in enumerate(block.nodes):
            last |= dict.fromkeys(made & (used_by(node) | set(refs_in(node.outputs))), i)
        done: dict[int, list[str]] = {}
        for ref, i in last.items():
            if self._tape.kind_of(ref) == "made":
                done.setdefault(i, []).append(self._text(ref))
        write = {COND: self._write_branch, EACH: self._write_loop}
        for i, node in enumerate(block.nodes):
            self._origins[len(self.source) + 1] = node.line
            write.get(node.function, self._write_operation)(node, indent)
            if i in done:
                self.source.append(f"{indent}del {', '.join(sorted(done[i]))}")

    def _write_branch(self, node: Node, indent: str) -> None:
        heads = f"if {self._text(node.args[0])}:", "else:"
        for head, block in zip(heads, node.blocks, strict=True):
            self.source.append(indent + head)
            self._write_block(block, indent + "    ")
            given = f"{self._tuple(node.outputs)} = {self._tuple(block.results)}"
            self.source.append(f"{indent}    {given if node.outputs else 'pass'}")

    def _write_loop(self, node: Node, indent: str) -> None:
        """Write a loop over the rows; the results of all rows are stacked after it."""
        select, stack = (self._bound(_callable(x)) for x in (aten.select.int, aten.stack.default))
        outputs, inner = [self._text(ref) for ref in node.outputs], indent + "    "
        (block,), (count, *sources) = node.blocks, node.args
        number = f"i{len(self.source)}"
        self.source += [f"{indent}{output} = []" for output in outputs]
        self.source.append(f"{indent}for {number} in range({count}):")
        for source, row in zip(sources, block.rows, strict=True):
            call = f"{select}({self._text(source)}, 0, {number})"
            self.source.append(f"{inner}{self._text(row)} = {call}")
        self._write_block(block, inner)
        for output, result in zip(outputs, block.results, strict=True):
            self.source.append(f"{inner}{output}.append({self._text(result)})")
        self.source += [f"{indent}{output} = {stack}({output})" for output in outputs]

    def _write_operation(self, node: Node, indent: str) -> None:
        self.length += 1
        if getattr(node.function, "adds_elements", False):
            x = self._tape.objects[node.outputs.index]
            self.messages.append(f"{x.dtype} {tuple(x.shape)}")
        self.draws = self.draws or self._is_drawn(node)
        arguments = [self._text(x) for x in node.args]
        arguments += [f"{name}={self._text(x)}" for name, x in node.kwargs.items()]
        call = f"{self._bound(_callable(node.function))}({', '.join(arguments)})"
        if not set(refs_in(node.outputs)) <= set(refs_in(node.args)):  # not changed in place
            call = f"{self._target(node.outputs)} = {call}"
        self.source.append(indent + call)

    def _is_drawn(self, node: Node) -> bool:
        if not is_operator(node.function):
            return getattr(node.function, "draws", False)
        given = [self._tape.objects[ref.index] for ref in refs_in((node.args, node.kwargs))]
        return Kind.of(node.function).random and not any(
            isinstance(x, torch.Generator) for x in given
        )

    def _target(self, outputs: Any) -> str:
        if isinstance(outputs, (list, tuple)):
            return f"({''.join(f'{self._target(x)}, ' for x in outputs)})"
        return "_" if outputs is None else self._text(outputs)

    def _tuple(self, refs: Sequence[Ref]) -> str:
        return f"({''.join(f'{self._text(ref)}, ' for ref in refs)})"

    def _text(self, x: Any) -> str:
        if isinstance(x, Ref):
            found = self._tape.kind_of(x) == "found"
            return self._bound(self._tape.objects[x.index]) if found else f"t{x.index}"
        if isinstance(x, (list, tuple)):
            return f"[{', '.join(self._text(y) for y in x)}]"
        if x is None or isinstance(x, (bool, int, str)):
            return repr(x)
        if isinstance(x, float) and isfinite(x):
            return repr(x)
        return self._bound(x)

    def _bound(self, thing: Any) -> str:
        """Return the name of an object in the function's namespace, adding it if needed."""
        name = self._names.get(id(thing))
        if name is None:
            name = self._names[id(thing)] = f"c{len(self._space)}"
            self._space[name] = thing
        return name


def _callable(function: Any) -> Any:
    """Return the fastest callable for an operator."""
    if not is_operator(function):
        return function
    space, name = function._schema.name.split("::")
    if space == "aten" and name in _BY_NAME:
        for place in (torch, getmro(torch.Tensor)[1]):
            found = getattr(place, name, None)
            if isinstance(found, (BuiltinFunctionType, MethodDescriptorType)):  # no Python of it
                return found
    return function._op
