"""Steps on several processes: each computes its rows of every batch, with the same results."""

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from keras import ops

from ...backends.base import Outputs
from ...backends.eager import StepResult, run_step
from ...backends.plans import Facts
from ...backends.program import Program
from ...backends.step_context import context
from ...backends.window import Following, Window
from ...core import structures
from ...core.options import Options
from ...core.tracebacks import in_one_line
from ...errors import StepError, TreadleWarning
from .agreement import (
    AT,
    check_batch,
    completed,
    digests_of,
    first_rows,
    lacking_memory,
    rows_to_compare,
    share_state,
    value_of,
    variables_of,
)
from .collectives import Collectives, is_float
from .counts import Counts, metric_classes
from .rows import OwnRows, Seen, computing

# By how much a step on several processes may differ from a step for the whole batch when it runs
# for the first time. Rounding differs less; a loss that is no mean over examples differs more.
CLOSE_VALUES, CLOSE_GRADIENTS, SMALL = 1e-2, 5e-2, 1e-4

_REMEDY: Final = (
    "Each process computes its rows, and the mean over processes is weighted by their number: "
    "compute losses and values as means over the examples, combine examples only with "
    "treadle.gathered, or train with one process"
)


class SharedExecutor:
    """Runs a step on several processes, with the results of one.

    The first time, the step runs for the whole batch too, and both must agree; the state is
    restored. If a process has too little memory for the whole batch, the first rows are compared,
    as many as one process computes, with the same rows divided among all.

    Args:
        program: The step for whole batches.
        options: The options of the loop.
        processes: The operations between the processes.
    """

    def __init__(self, program: Program, options: Options, processes: Collectives) -> None:
        self._program, self._processes, self._around = program, processes, processes.around
        self._rows: OwnRows | None = None
        self._is_ready = False
        self._metrics = metric_classes()
        self._shared = replace(program, function=self._function)
        self._executor = processes.made(self._shared, options)
        self.plan, self.whole = self._executor.plan, self._executor.whole

    @property
    def calls_python(self) -> bool:
        """Whether each run calls Python functions, whose effects cannot be undone."""
        return self._executor.calls_python

    @property
    def programs(self) -> int:
        """The number of programs compiled so far."""
        return self._executor.programs

    def facts(self, window: Window) -> Facts:
        """Check the step on several processes, and return the facts that determine its plan."""
        self._prepare(window)
        with self._processes.preparing():
            return self._executor.facts(self._own(window))

    def compile(self, window: Window) -> bool:
        """Capture the step if it is not captured yet."""
        self._prepare(window)
        self._executor.plan = self.plan
        with self._processes.preparing():
            return self._executor.compile(self._own(window))

    def transfer(self, window: Window) -> None:
        """Do nothing: the rows of this process are taken when the step runs."""

    def run(
        self,
        window: Window,
        first_step: int,
        background: bool = True,
        following: Following | None = None,
    ) -> Outputs:
        """Run the window's batches in order."""
        self.compile(window)
        after = following and (lambda most: self._own(following(most)))
        return self._executor.run(self._own(window), first_step, background, after)

    def _own(self, window: Any) -> Any:
        """Return the rows of this process of each batch; only these are gathered and copied."""
        mine = self._rows
        return window if mine is None or window is None else window.of_each(mine.part)

    def _function(self, batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Run the step for these rows, and reduce what it returns and what metrics count."""
        mine = self._rows
        if mine is None:
            return self._program.function(batch)
        processes = self._processes
        processes.begin_step()
        context().examples = mine.examples
        counts = Counts(self._program, mine, processes, self._metrics)
        try:
            with computing(mine), processes.patched(), counts.exact_results():
                values, weights = self._program.function(mine.of_batch(batch))
            return _reduced(mine, values, weights, counts)
        finally:
            mine.end_step()

    def _prepare(self, window: Window) -> None:
        """Check, the first time, that the processes agree, and that the step gives equal results.

        Raises:
            ConfigurationError: The processes have different variables.
            DataError: They have different batches.
            StepError: The step gives other results on several processes.
        """
        if self._is_ready:
            return
        self._is_ready = True
        program, name = self._program, self._program.name
        if program.native and name == "train_step":
            raise StepError(
                f"{name} computes no gradients with treadle.gradients or treadle.minimize, so "
                f"{self._processes.size} processes would train apart: use these, or train with one "
                "process"
            )
        first, examples = window.batch(0), window.examples
        if window.shares is None or window.shares.whole:
            check_batch(first, name, self._processes)
        share_state(program, self._processes)
        if not any(len(x.shape) for x in structures.flatten(first)):
            return  # no rows to divide: all processes compute the same
        whole = completed(window.split(1)[0], self._processes.group).batch(0)
        self._rows = self._compared(whole, examples, lacking_memory())
        if self._rows is not None:
            return
        few = rows_to_compare(examples, self._processes.size)
        if self._processes.rank == 0:
            warnings.warn(
                f"{name}: a process has too little memory for a batch of {examples} examples, so "
                f"only the first {few} are compared with the results of one process. To compare "
                "all examples of a batch, train once with a smaller batch size",
                TreadleWarning,
                stacklevel=2,
            )
        compared = self._compared(first_rows(whole, examples, few), few, nullcontext())
        assert compared is not None  # otherwise the error that there is too little memory is raised
        self._rows = compared.for_batches_of(examples)
        own = self._rows.of_batch(first)
        self._check_sums(structures.mapped(self._processes.own.to_device, own))

    def _compared(self, batch: Any, examples: int, lacking: Any) -> OwnRows | None:
        """Return how the rows of batches are computed such that results are those of one process.

        Args:
            batch: A batch of NumPy arrays, the same in all processes.
            examples: The number of its rows.
            lacking: A context that ends early if a process has too little memory for the batch.

        Returns:
            None if it has ended early in a process.

        Raises:
            StepError: There is no way.
        """
        program, processes = self._program, self._processes
        self._rows, noted, found = None, Seen(), list[StepResult]()
        with processes.undone(program), self._around(program), processes.patched():
            with lacking, computing(None, noted):
                batch = structures.mapped(processes.own.to_device, batch)
                found.append(_copied(run_step(program, batch, 0)))
            counted = {path: _array(value_of(v)) for path, v in _summed(program).items()}
        if not all(processes.group.exchange(bool(found), AT)):
            return None
        self._rows = mine = OwnRows(processes, examples, noted)
        reasons: dict[str, _Difference] = {}
        while why := self._difference(mine, batch, found[0], counted):
            reasons.setdefault(why.kind, why)
            if not mine.adapt(why.kind, why.names):
                text = reasons[why.kind].text
                raise StepError(f"{program.name} on {processes.size} processes: {text}. {_REMEDY}")
        return mine

    def _difference(
        self, mine: OwnRows, batch: Any, expected: StepResult, counted: Mapping[str, Any]
    ) -> "_Difference | None":
        """Run a step on all processes, and return how it differs from one for the whole batch.

        Raises:
            StepError: The processes do different things.
        """
        program, processes = self._program, self._processes
        self._check_sums(batch)
        mine.results = []
        with processes.undone(program), self._around(program):
            found = run_step(self._shared, batch, 0)
            why = (
                _different_gradients(mine)
                or _different_count(program, counted)  # which values may be computed from
                or _different_value(expected, found)
            )
            digests = digests_of(program)
        mine.results = None
        result = [why and [why.kind, why.text, why.names], digests]
        everyone = processes.group.exchange(result, AT)
        for why, _ in everyone:
            if why:
                return _Difference(*why)
        for path in digests:
            if any(others[path] != digests[path] for _, others in everyone):
                text = (
                    f"each has another value of {path} after the step, which is not computed from "
                    "gradients and is no variable with aggregation='mean' or 'sum'"
                )
                return _Difference("gradients", text)
        return None

    def _check_sums(self, batch: Any) -> None:
        """Check that all processes would sum the same tensors: otherwise they wait forever.

        Raises:
            StepError: They would not, or the step fails in one of them.
        """
        program, processes = self._program, self._processes
        failure: Exception | None = None
        undone = processes.undone(program)
        with processes.alone() as sums, undone, self._around(program):
            try:
                run_step(self._shared, batch, 0)
            except Exception as error:
                failure = error
        mine = ["" if failure is None else in_one_line(failure), sums]
        everyone = processes.group.exchange(mine, AT)
        if failure is not None:
            raise failure
        for rank, (failed, others) in enumerate(everyone):
            if failed:
                raise StepError(f"{program.name} fails for the rows of process {rank}: {failed}")
            if others != sums:
                raise StepError(
                    f"{program.name}: process {rank} sums {len(others)} messages in a step, and "
                    f"process {processes.rank} {len(sums)} or others: what is differentiated must "
                    "not depend on the number of rows or their values. Use treadle.for_each or "
                    "keras.ops.vectorized_map for functions of single examples"
                )


@dataclass(frozen=True)
class _Difference:
    """How a step on several processes differs from one for the whole batch.

    Attributes:
        kind: What differs: `"gradients"` or `"metric"`.
        text: The difference, as a clause.
        names: The paths of the variables of the metric.
    """

    kind: str
    text: str
    names: Sequence[str] = ()


def _reduced(
    mine: OwnRows, values: Mapping[str, Any], weights: Mapping[str, Any], counts: Counts
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the means of values over all processes, and add up what metrics have counted."""
    changes = counts.changes()
    parts: list[Any] = []
    for name, value in values.items():
        wide = value if is_float(value) else ops.cast(value, "float64")
        if name in weights:
            parts += mine.parts(wide, weights[name])
        else:
            # Of a mean, zeros: sums have the same forms whichever values Python returns, and need
            # not wait for the mean.
            parts.append(ops.zeros_like(wide) if mine.is_mean(value) else wide * mine.share)
    found = iter(mine.totals([*parts, *(change for _, change in changes)]))
    means: dict[str, Any] = {}
    totals: dict[str, Any] = {}
    for name, value in values.items():
        if name in weights:
            mean, weight = mine.mean(found)
            totals[name] = ops.copy(weight)
            mean = ops.cast(mean, value.dtype) if is_float(value) else mean
        else:
            total = next(found)
            # A part of a message would keep all of it, with the gradients, until it is fetched.
            mean = ops.copy(value if mine.is_mean(value) else total)
        means[name] = mean if is_float(value) else ops.cast(ops.round(mean), value.dtype)
    for path, _ in changes:
        counts.add(path, next(found))
    return means, totals


def _summed(program: Program) -> dict[str, Any]:
    return {path: v for path, v in variables_of(program).items() if v.aggregation == "sum"}


def _copied(result: StepResult) -> StepResult:
    parts = (result.values, result.weights, result.broken)
    return StepResult(*({name: _array(x) for name, x in part.items()} for part in parts))


def _different_gradients(mine: OwnRows) -> _Difference | None:
    """Return which loss or gradient several processes compute differently than one."""
    one, several = mine.seen.results, mine.results or []
    if len(one) != len(several):
        return None
    for (losses, gradients), (others, sums) in zip(one, several, strict=True):
        for a, b in zip(losses, others, strict=True):
            if not _close(a, b):
                text = f"a loss is {float(b):.6g}, but {float(a):.6g} for the whole batch"
                return _Difference("gradients", text)
        apart = _distance(gradients, sums)
        if apart > CLOSE_GRADIENTS:
            text = f"gradients differ by {apart:.0%} from those of the whole batch"
            return _Difference("gradients", text)
    return None


def _different_value(expected: StepResult, found: StepResult) -> _Difference | None:
    """Return which value of a step several processes compute differently than one."""
    for name, a in expected.values.items():
        b = found.values.get(name)
        if b is not None and not _close(a, b):
            text = f"{name!r} is {float(b):.6g}, but {float(a):.6g} for the whole batch"
            return _Difference("values", text)
    return None


def _different_count(program: Program, expected: Mapping[str, Any]) -> _Difference | None:
    """Return which variable of a metric has another value than for the whole batch."""
    named = variables_of(program)
    for path, value in expected.items():
        if _distance([value], [value_of(named[path])]) > CLOSE_VALUES:
            owner = path.rpartition("/")[0]
            names = [other for other in expected if other.rpartition("/")[0] == owner]
            text = f"{path}, a variable of a metric, is no sum or mean over the examples"
            return _Difference("metric", text, names)
    return None


def _array(x: Any) -> np.ndarray:
    """Return a copy of a tensor as an array of wide floats."""
    return np.array(ops.convert_to_numpy(x), "float64")


def _close(a: Any, b: Any) -> bool:
    one, other = float(_array(a)), float(_array(b))
    limit = CLOSE_VALUES * max(abs(one), abs(other)) + SMALL
    return abs(one - other) <= limit or not math.isfinite(one)


def _distance(a: Sequence[Any], b: Sequence[Any]) -> float:
    """Return the distance of tensors, relative to their size; 0 if they are small or not finite."""
    pairs = [(_array(x), _array(y)) for x, y in zip(a, b, strict=True)]
    norm = sum(float(np.square(x).sum()) for x, _ in pairs) ** 0.5
    apart = sum(float(np.square(x - y).sum()) for x, y in pairs) ** 0.5
    size = norm + SMALL
    return apart / size if apart == apart and norm == norm and norm < float("inf") else 0.0
