"""What a framework does differently if each of several processes computes its rows of a batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...backends.base import Executor, Step
from ...backends.program import Program
from ...backends.step_context import context
from ...backends.types import Losses, Tensor, Variable, unweighted
from ...core.options import Options
from .collectives import Collectives
from .executor import SharedExecutor
from .rows import rows, seen, shared, unsplit


class DividedBackend(Collectives):
    """Divides batches among processes, each of which holds all variables."""

    def divides(self) -> bool:
        """Return whether gradients that are computed now are of a batch, and not of one row."""
        return True

    def executor(self, program: Program, options: Options) -> Executor:
        """Return an executor with which each process computes its rows."""
        return SharedExecutor(program, options, self)

    def differentiate(
        self,
        function: Callable[[Sequence[Tensor]], tuple[Losses, Any]],
        variables: Sequence[Variable],
        inputs: Sequence[Tensor],
        groups: Mapping[str, Sequence[int]],
    ) -> tuple[Any, dict[str, list[Tensor | None]]]:
        """Differentiate the losses of these rows, and sum the gradients over the processes."""
        mine, whole, nested = rows(), seen(), context().depth > 0
        if not variables or not self.divides() or (nested and not (mine and mine.sums_nested)):
            mine = None
        own: dict[str, Any] = {}
        shares: dict[str, Any] = {}

        def divided(inputs: Sequence[Tensor]) -> tuple[Losses, Any]:
            weighted, result = function(inputs)
            own.update({name: unweighted(loss) for name, loss in weighted.items()})
            if mine is None:
                return weighted, result
            shares.update(mine.shares(weighted))
            return {name: shared(loss, shares[name]) for name, loss in own.items()}, result

        result, gradients = self.own.differentiate(divided, variables, inputs, groups)
        if mine is not None and nested:
            return result, mine.summed(gradients)
        if mine is not None:
            return mine.reduced(result, gradients, own, shares)
        if whole is not None and variables and not nested and self.divides():
            whole.note(own, gradients)
        return result, gradients

    def gathered(self, x: Tensor) -> Tensor:
        """Return the rows of all processes."""
        mine = rows()
        return x if mine is None else mine.gathered(x)

    def total(self, x: Tensor) -> Tensor:
        """Return the sum over the processes."""
        mine = rows()
        return x if mine is None else mine.total(x)

    def scan(self, function: Step, *args: Any, **kwargs: Any) -> Any:
        """Run a function of one row, in which no batch is divided."""
        return self.own.scan(unsplit(function), *args, **kwargs)

    def computes_on(self) -> dict[str, Any]:
        """Return the devices of all processes and the number of threads."""
        found = self.own.computes_on()
        return {**found, "devices": f"{found['devices']} ({self.size} processes)"}

    def summed(self, array: Any) -> Any:
        """Return the sum of an array of int32 over all processes; outside of steps."""
        self.begin_step()
        return self.own.to_numpy(self.sum(self.own.to_device(array)))

    def computes_own_rows(self, examples: int) -> bool:
        """Return True: each process takes its rows of every batch."""
        return True
