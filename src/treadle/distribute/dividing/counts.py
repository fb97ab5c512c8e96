"""Variables that each process counts in for its rows, such as those of metrics."""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
from keras import ops

from ...backends.program import Program
from ...core.internals import in_this_thread
from .agreement import value_of, variables_of
from .collectives import Collectives, is_float
from .rows import OwnRows


class Counts:
    """Variables whose values are combined after a step, as their `aggregation` says.

    Args:
        program: The step.
        mine: The rows of this process.
        processes: The operations between the processes.
        metrics: The classes of metrics.
    """

    def __init__(
        self, program: Program, mine: OwnRows, processes: Collectives, metrics: Sequence[Any]
    ) -> None:
        self._mine, self._processes, self._metrics = mine, processes, metrics
        self._variables = {
            path: v for path, v in variables_of(program).items() if v.aggregation in ("sum", "mean")
        }
        self._before = {path: ops.copy(value_of(v)) for path, v in self._variables.items()}
        self._is_changed = processes.watched(self._variables.values())
        self._is_nested = False

    @contextmanager
    def exact_results(self) -> Generator[None]:
        """Combine the variables first if a metric computes its result in this context.

        A result for some of the rows cannot be combined with those for others: it is often a ratio.
        """
        with ExitStack() as stack:
            for kind in self._metrics:
                original = vars(kind)["result"]
                stack.callback(setattr, kind, "result", original)
                kind.result = in_this_thread(self._exact(original), original)
            yield

    def changes(self) -> list[tuple[str, Any]]:
        """Return the paths of changed variables, each with what is to be summed."""
        found: list[tuple[str, Any]] = []
        for path, variable in self._variables.items():
            if not self._is_changed(variable):
                continue
            change = value_of(variable) - self._before[path]
            if variable.aggregation == "mean" or path in self._mine.averaged:
                change = change if is_float(change) else ops.cast(change, "float64")
                change = change * self._mine.share
            found.append((path, change))
        return found

    def add(self, path: str, total: Any) -> None:
        """Add the sum of the changes of all processes to the value before."""
        before = self._before[path]
        total = total if is_float(before) else ops.cast(ops.round(total), before.dtype)
        self._variables[path].assign(before + total)

    def _exact(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def result(metric: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_nested:  # `super().result()`, or a metric that has others
                self._combine()
            before, self._is_nested = self._is_nested, True
            try:
                return original(metric, *args, **kwargs)
            finally:
                self._is_nested = before

        return result

    def _combine(self) -> None:
        """Combine what has changed so far, as at the end of the step."""
        changes = self.changes()
        if not changes:
            return
        totals = self._mine.totals([change for _, change in changes])
        for (path, _), total in zip(changes, totals, strict=True):
            self.add(path, total)
            self._before[path] = ops.copy(value_of(self._variables[path]))
        self._is_changed = self._processes.watched(self._variables.values())


def metric_classes() -> Sequence[Any]:
    """Return Keras' class of metrics and those of its subclasses that define `result`."""
    found: dict[Any, None] = {keras.Metric: None}
    left: list[Any] = [*found]
    while left:
        new = [kind for kind in left.pop().__subclasses__() if kind not in found]
        found |= dict.fromkeys(new)
        left += new
    return [kind for kind in found if "result" in vars(kind)]
