"""Branches and loops on PyTorch: those of Python, unless a tape records them."""

from collections.abc import Sequence
from typing import Any

import torch

from ...core.keras_internals import stateless_scope
from ..base import Step
from ..types import Branch, Condition, IndexedBody, LoopBody, Tensor
from .capture.recording import current


class TorchControlFlow:
    """The branches and loops of a step."""

    def cond(self, predicate: Tensor, then: Branch, otherwise: Branch) -> list[Tensor]:
        """Run the branch that the predicate selects, or record both branches."""
        if tape := current():
            return tape.cond(predicate, then, otherwise)
        return then() if bool(predicate) else otherwise()

    def switch(self, index: Tensor, branches: Sequence[Branch]) -> list[Tensor]:
        """Run the branch that the index selects, or record all of them, as halves of halves."""
        if len(branches) == 1:
            return branches[0]()
        if current() is None:
            return branches[min(max(int(index), 0), len(branches) - 1)]()
        half = len(branches) // 2
        lower, upper = branches[:half], branches[half:]
        return self.cond(
            index < half,
            lambda: self.switch(index, lower),
            lambda: self.switch(index - half, upper),
        )

    def scan(
        self,
        function: Step,
        carry: list[Tensor],
        inputs: list[Tensor],
        count: int,
        reverse: bool = False,
        unroll: int | bool = 1,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run a Python loop, or record one if nothing is carried or differentiated through it."""
        tape = current()
        differentiated = torch.is_grad_enabled() or stateless_scope() is not None
        if tape is not None and tape.rolled and inputs and not (carry or reverse or differentiated):
            return [], tape.for_each(lambda row: function([], row)[1], inputs)
        found: dict[int, list[Tensor]] = {}
        for i in range(count)[::-1] if reverse else range(count):
            carry, found[i] = function(carry, [x[i] for x in inputs])
        columns = zip(*(found[i] for i in range(count)), strict=True)
        return carry, [torch.stack(column) for column in columns]

    def while_loop(
        self, condition: Condition, body: LoopBody, values: list[Tensor], maximum: int | None
    ) -> list[Tensor]:
        """Run a Python loop; a step whose condition depends on values is not captured."""
        number = 0
        while (maximum is None or number < maximum) and bool(condition(values)):
            values, number = body(values), number + 1
        return values

    def fori_loop(
        self, lower: Any, upper: Any, body: IndexedBody, values: list[Tensor]
    ) -> list[Tensor]:
        """Run a Python loop; a step whose number of iterations is a tensor is not captured."""
        for i in range(int(lower), int(upper)):
            values = body(i, values)
        return values
