"""The rows of a batch that this process computes, and sums over the rows of all processes."""

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import keras
from keras import ops
from keras.backend import standardize_dtype

from ...backends.types import Weighted
from ...backends.window import own_rows
from ...core import structures
from ...errors import StepError
from .collectives import Collectives, Total, is_float

Shape = tuple[int, ...]
_running = threading.local()

# What has a shape that may depend on the number of rows, as messages say it.
DRAW: Final = "a random draw"
MOMENTS: Final = "a tensor to compute moments of"


class Seen:
    """What a step did with the whole batch, which tells how shapes depend on the number of rows.

    Attributes:
        shapes: The shapes of its random draws, and of the tensors whose moments it computed.
        results: For each outermost call of `gradients`, its losses and the gradients.
    """

    def __init__(self) -> None:
        self.shapes: dict[str, set[Shape]] = {DRAW: set(), MOMENTS: set()}
        self.results: list[tuple[list[Any], list[Any]]] = []

    def note(self, losses: Mapping[str, Any], gradients: Mapping[str, Sequence[Any]]) -> None:
        """Note what an outermost call of `gradients` returns."""
        found = [g for name in gradients for g in gradients[name] if g is not None]
        self.results.append(([ops.stop_gradient(losses[name]) for name in gradients], found))


class OwnRows:
    """The rows of a batch that this process computes.

    Each process computes consecutive rows: some may have one more than others. A process without
    rows computes the first row, and its results are dropped: layers and losses need not work for
    empty batches.

    Args:
        processes: The processes.
        examples: The number of rows of the whole batch.
        seen: What the step did with the whole batch.

    Attributes:
        examples: The number of rows of the whole batch.
        first: The first row.
        count: The number of rows that are computed.
        part: These rows of the batch.
        is_idle: Whether their results are dropped.
        share: The share of the rows in the batch; 0 if they are dropped.
        averaged: The paths of variables of metrics that are updated once for a batch, and not with
            its examples: of their changes, the mean is taken.
        sums_nested: Whether gradients inside of an objective are means over the batch too.
        averages_applied: Whether the gradients that optimizers apply are means over the batch that
            each process has computed for its rows.
        results: The losses and gradients of each outermost call of `gradients`, if not None.
    """

    def __init__(self, processes: Collectives, examples: int, seen: Seen) -> None:
        first, count = own_rows(examples, processes.rank, processes.size)
        self.examples, self.seen = examples, seen
        self._processes = processes
        self.is_idle = count == 0
        self.first = 0 if self.is_idle else first
        self.count, self.share = max(count, 1), count / examples
        self.part = slice(self.first, self.first + self.count)
        self._total = Total(processes, 1 / self.share if count else 1.0)
        self.averaged: frozenset[str] = frozenset()
        self.sums_nested = self.averages_applied = False
        self.results: list[tuple[list[Any], list[Any]]] | None = None
        self._met: dict[tuple[str, Shape], Shape | None] = {}
        self._means: list[Any] = []

    def end_step(self) -> None:
        """Forget the means of the step, which are parts of a message with its gradients."""
        self._means.clear()

    def is_mean(self, x: Any) -> bool:
        """Return whether a tensor is a mean over the processes, which `reduced` has returned."""
        return any(x is mean for mean in self._means)

    def adapt(self, kind: str, names: Sequence[str]) -> bool:
        """Combine results in another way, and return whether there is one that was not tried.

        Args:
            kind: What differs from a step for the whole batch: `"gradients"`, `"metric"`, or
                `"values"`, for which there is no other way.
            names: The paths of the variables of the metric.
        """
        if kind == "gradients" and not (self.sums_nested and self.averages_applied):
            self.averages_applied ^= self.sums_nested
            self.sums_nested = not self.sums_nested
            return True
        if kind == "metric" and not self.averaged.issuperset(names):
            self.averaged |= set(names)
            return True
        return False

    def of_batch(self, batch: Any) -> Any:
        """Return these rows of each tensor of the batch that has one for each example."""
        return structures.mapped(self._of, batch)

    def _of(self, x: Any) -> Any:
        return x[self.part] if has_rows(x, self.examples) else x

    def for_batches_of(self, examples: int) -> "OwnRows":
        """Return the same for batches of another number of rows, which no process has computed."""
        seen = Seen()
        for (what, shape), whole in self._met.items():
            if whole is not None:
                shape = whole[0] // self.examples * examples, *whole[1:]
            seen.shapes[what].add(shape)
        other = OwnRows(self._processes, examples, seen)
        other.averaged, other.sums_nested = self.averaged, self.sums_nested
        other.averages_applied = self.averages_applied
        return other

    def whole_shape(self, what: str, shape: Shape) -> Shape | None:
        """Return the shape for the whole batch of a tensor with these rows, or None for others.

        Args:
            what: The kind of tensor: `DRAW` or `MOMENTS`.
            shape: The shape here.

        Raises:
            StepError: Both are possible, or the rows are along another axis.
        """
        found = self._met[what, shape] = self._whole_shape(what, shape, self.seen.shapes[what])
        return found

    def _whole_shape(self, what: str, shape: Shape, seen: set[Shape]) -> Shape | None:
        if shape not in seen:
            for axis, size in enumerate(shape[1:], 1):
                along = (*shape[:axis], self.examples, *shape[axis + 1 :])
                if size == self.count and along in seen:
                    raise StepError(
                        f"{what} of shape {shape} has the rows of the batch along axis {axis}, but "
                        "several processes divide the first axis only: move the rows to the first "
                        "axis, and transpose the result"
                    )
        if not shape or shape[0] % self.count:
            return None
        whole = shape[0] // self.count * self.examples, *shape[1:]
        if whole == shape:
            return whole
        if whole in seen and shape in seen:
            raise StepError(
                f"{what} of shape {shape} may be rows of the batch, of which this process has "
                f"{self.count}, or not: choose another batch size than {self.examples}"
            )
        if whole in seen or (shape not in seen and shape[0] == self.count):
            return whole
        return None

    def rows_of(self, x: Any) -> Any:
        """Return these rows of a tensor for the whole batch, or for several ones concatenated."""
        blocks, rest = x.shape[0] // self.examples, tuple(x.shape[1:])
        if blocks == 1:
            return x[self.part]
        parts = ops.reshape(x, (blocks, self.examples, *rest))[:, self.part]
        return ops.reshape(parts, (blocks * self.count, *rest))

    def gathered(self, x: Any) -> Any:
        """Return a tensor with the rows of all processes; it can be differentiated.

        Raises:
            StepError: The tensor has no rows of the batch.
        """
        if not len(x.shape) or x.shape[0] % self.count:
            raise StepError(
                f"gathered got a tensor of shape {tuple(x.shape)}, which has no rows of the batch: "
                f"its first dimension must be a multiple of {self.count}, the number of rows of "
                "this process"
            )
        wide = x if is_float(x) else ops.cast(x, "int64")
        return ops.cast(self.sum(self.padded(wide, 0)), x.dtype)

    def padded(self, x: Any, value: Any) -> Any:
        """Return rows as a tensor for the whole batch, with a value in the other rows."""
        blocks, rest = x.shape[0] // self.count, tuple(x.shape[1:])
        sizes = self.first, self.examples - self.first - self.count
        dtype = standardize_dtype(x.dtype)
        before, after = (ops.full((blocks, size, *rest), value, dtype) for size in sizes)
        parts = [before, ops.reshape(x, (blocks, self.count, *rest)), after]
        return ops.reshape(ops.concatenate(parts, 1), (blocks * self.examples, *rest))

    def sum(self, x: Any) -> Any:
        """Return the sum of a tensor over the processes with rows; it can be differentiated."""
        return self._processes.differentiable(self.total, self.is_idle, x)

    def total(self, x: Any) -> Any:
        """Return the sum of a tensor over the processes with rows."""
        x = ops.stop_gradient(x)
        if self.is_idle:
            # Zeros that depend on the tensor, which may be NaN: in all processes, the captured sums
            # must wait for the same others.
            x = ops.where(ops.zeros_like(x, dtype="bool"), x, ops.zeros_like(x))
        return self._processes.recorded(self._total, x)

    def totals(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the sums of tensors over the processes, in one message for each type."""
        found: list[Any] = [None] * len(tensors)
        kinds: dict[str, list[int]] = {}
        for i, x in enumerate(tensors):
            kinds.setdefault(_wide(x), []).append(i)
        for dtype, chosen in kinds.items():
            flat = [ops.reshape(ops.stop_gradient(tensors[i]), (-1,)) for i in chosen]
            sizes = [int(x.shape[0]) for x in flat]
            total = self.total(ops.concatenate([ops.cast(x, dtype) for x in flat]))
            parts = self._processes.split(total, sizes)
            for i, part in zip(chosen, parts, strict=True):
                shaped = ops.reshape(part, tuple(tensors[i].shape))
                found[i] = ops.cast(shaped, tensors[i].dtype)
        return found

    def shares(self, losses: Mapping[str, Any]) -> dict[str, Any]:
        """Return the shares of these rows in losses: of the examples, or of the weights.

        They are computed before the backward pass, so that gradients in float16 stay small.
        """
        weights = {name: _weight(x) for name, x in losses.items() if isinstance(x, Weighted)}
        totals = dict(zip(weights, self.totals(list(weights.values())), strict=True))
        return {name: self.share for name in losses} | {
            name: _where(totals[name] != 0, weight / totals[name])
            for name, weight in weights.items()
        }

    def reduced(
        self,
        result: Any,
        gradients: Mapping[str, Sequence[Any]],
        losses: Mapping[str, Any],
        shares: Mapping[str, Any],
    ) -> tuple[Any, dict[str, list[Any]]]:
        """Return the mean over processes of float scalars in a result, and the sum of gradients.

        Args:
            result: A structure of tensors and other objects.
            gradients: The gradients of the losses multiplied by the shares.
            losses: The losses.
            shares: The shares of these rows in the losses.
        """
        leaves: list[Any] = [
            _as_tensors(x) if isinstance(x, Weighted) else x for x in structures.flatten(result)
        ]
        scalars = [i for i, x in enumerate(leaves) if _is_float_scalar(x)]
        weighted = [
            i for i, x in enumerate(leaves) if isinstance(x, Weighted) and _is_float_scalar(x.value)
        ]
        names = list(gradients)
        places = [(n, i) for n in names for i, g in enumerate(gradients[n]) if g is not None]
        tensors = [gradients[n][i] for n, i in places]
        parts = [ops.stop_gradient(leaves[i]) * self.share for i in scalars]
        for i in weighted:
            parts += self.parts(leaves[i].value, _weight(leaves[i]))
        means = [shared(ops.stop_gradient(losses[n]), shares[n]) for n in names]
        found = iter(self.totals([*tensors, *parts, *means]))
        sums = {name: list[Any](gradients[name]) for name in names}
        for name, i in places:
            sums[name][i] = next(found)
        for i in scalars:
            leaves[i] = next(found)
            self._means.append(leaves[i])
        for i in weighted:
            value, weight = leaves[i].value, leaves[i].weight
            leaves[i] = Weighted(ops.cast(self.mean(found)[0], value.dtype), weight)
        if self.results is not None:
            self.results.append((list(found), [sums[n][i] for n, i in places]))
        return structures.pack(result, leaves), sums

    def parts(self, value: Any, weight: Any) -> list[Any]:
        """Return what is summed over the processes for `mean`.

        The products are wide: those of many items with a mean in float16 would be infinite.
        """
        wide = ops.cast(value, keras.backend.result_type(value.dtype, weight.dtype))
        product = wide * ops.cast(weight, wide.dtype)
        return [_where(weight != 0, product), weight, wide * self.share]

    def mean(self, sums: Iterator[Any]) -> tuple[Any, Any]:
        """Return a weighted mean over the processes, and the weight; without any, the plain mean.

        Args:
            sums: Gives the sums of what `parts` returned.
        """
        total, weight, mean = next(sums), next(sums), next(sums)
        return ops.where(weight != 0, total / ops.cast(weight, total.dtype), mean), weight

    def summed(self, gradients: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Return the sums of gradients over the processes, which can be differentiated."""
        return {
            name: [None if g is None else self.sum(g) for g in part]
            for name, part in gradients.items()
        }

    def averaged_gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the means of gradients over the processes."""
        chosen = [g for g in gradients if g is not None]
        found = iter(self.totals([g * self.share for g in chosen]))
        return [None if g is None else next(found) for g in gradients]


def has_rows(x: Any, examples: int) -> bool:
    """Return whether a tensor has a row for each example."""
    return len(x.shape) > 0 and x.shape[0] == examples


def rows() -> OwnRows | None:
    """Return the rows that the running step computes, or None if it computes whole batches."""
    return getattr(_running, "rows", None)


def seen() -> Seen | None:
    """Return where a step that computes the whole batch notes what it does, or None."""
    return getattr(_running, "seen", None)


@contextmanager
def computing(rows: OwnRows | None, seen: Seen | None = None) -> Generator[None]:
    """Compute these rows in this context, or note what the step does with the whole batch."""
    before = getattr(_running, "rows", None), getattr(_running, "seen", None)
    _running.rows, _running.seen = rows, seen
    try:
        yield
    finally:
        _running.rows, _running.seen = before


def unsplit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of one row, in which no batch is divided."""

    def whole(*args: Any) -> Any:
        with computing(None):
            return function(*args)

    return whole


def applied(original: Callable[..., Any], optimizer: Any, grads: Any, *more: Any) -> Any:
    """Apply the gradients of the whole batch, and note them in the first step."""
    mine, noted = rows(), seen()
    if mine is not None and mine.averages_applied:
        grads = mine.averaged_gradients(grads)
    results = mine.results if mine is not None else noted and noted.results
    if results is not None:
        results.append(([], [ops.stop_gradient(g) for g in grads if g is not None]))
    return original(optimizer, grads, *more)


def shared(loss: Any, share: Any) -> Any:
    """Return the share of these rows in a loss; a share of weights is wider than a half."""
    return ops.multiply(loss, share) if ops.is_tensor(share) else loss * share


def _weight(x: Weighted) -> Any:
    weight = ops.stop_gradient(ops.convert_to_tensor(x.weight))
    return ops.cast(weight, _wide(x.value))


def _as_tensors(x: Weighted) -> Weighted:
    """Return a weighted scalar as tensors: `Accumulator` sums a tensor over the processes."""
    value = ops.stop_gradient(ops.convert_to_tensor(x.value))
    return Weighted(value, ops.stop_gradient(ops.convert_to_tensor(x.weight)))


def _where(condition: Any, x: Any) -> Any:
    """Return the elements of a tensor where a condition holds, and zeros elsewhere."""
    return ops.where(condition, x, ops.zeros_like(x))


def _is_float_scalar(x: Any) -> bool:
    return ops.is_tensor(x) and is_float(x) and len(x.shape) == 0


def _wide(x: Any) -> str:
    """Return the type of the message in which tensors of a type are summed."""
    dtype = standardize_dtype(x.dtype)
    if dtype == "float64":
        return dtype
    return "float32" if is_float(x) else "int64"
