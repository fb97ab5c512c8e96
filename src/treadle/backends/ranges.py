"""Checks that indices and labels lie in the range that a lookup or a sparse loss allows.

Frameworks treat an index out of range differently: an error, an assertion that ends the process's
device context, NaN, or nothing at all. Here lookups in variables (`keras.layers.Embedding` is one)
and sparse cross-entropy are checked in the same way on every backend:

- In a dry run, the integers of the first batch of each form are recorded, and checked at its end.
  On JAX, whose dry run is only traced, they are computed from the trace.
- With `Options(checked=True)`, compiled steps check every batch. A step that finds a violation
  stores it in a variable of its own: assignments leave objectives, branches and mapped functions on
  every backend.

In both cases the step uses integers clipped to the range, so that no framework fails first.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy as np
from keras import ops

from ..core.keras_internals import INTERNALS
from ..errors import DataError
from .base import active
from .step_context import Limit, Ranges, context
from .types import Tensor, Variable

Call = Callable[..., Any]

NONE_FOUND = (0, 0, -1)
"""The value of a variable that stores no violation: the least, the largest, and the step."""
FAR = 2**30
"""Integers beyond it are reported as this number, which fits into 32 bits."""
INT = keras.backend.standardize_dtype("int")
"""Keras' own choice: TensorFlow keeps 32-bit integers in main memory, where XLA on a GPU fails."""


def storage(limits: Iterable[Limit]) -> dict[Limit, Variable]:
    """Return a variable for each limit, in which a step stores a violation."""
    return {
        limit: keras.Variable(
            np.array(NONE_FOUND, "int32"), dtype=INT, trainable=False, name="out_of_range"
        )
        for limit in limits
    }


def flags(variables: Mapping[Limit, Variable]) -> list[tuple[str, Tensor]]:
    """Return the violations of a step that has run, for `StepContext.violations`."""
    return [(limit.text, ops.greater_equal(v.value[2], 0)) for limit, v in variables.items()]


def raise_stored(variables: Mapping[Limit, Variable], where: str) -> None:
    """Raise an error for the first stored violation, and forget all of them.

    Args:
        variables: The variables of `storage`.
        where: Where the batch is, for the message, with `{}` for its number.

    Raises:
        DataError: There is a violation.
    """
    found = {limit: active().read(v).tolist() for limit, v in variables.items()}
    found = {limit: values for limit, values in found.items() if values[2] >= 0}
    for limit in found:
        active().write(variables[limit], np.array(NONE_FOUND, "int32"))
    if found:
        limit = min(found, key=lambda limit: found[limit][2])
        least, most, step = found[limit]
        raise DataError(_message(limit, least, most, where.format(step + 1)))


def raise_used(ranges: Ranges, where: str) -> None:
    """Raise an error if integers that a dry run has used are out of range.

    Args:
        ranges: The checks of the dry run.
        where: Where the batch is, for the message.

    Raises:
        DataError: They are out of range.
    """
    for limit, ends in ranges.used:
        least, most = (int(end) for end in active().to_numpy(ends))
        if least < limit.least or most >= limit.size:
            raise DataError(_message(limit, least, most, where))


def _message(limit: Limit, least: int, most: int, where: str) -> str:
    if limit.is_labels:
        label = most if most >= limit.size else least
        more = f"give the model {most + 1} outputs, " if most >= limit.size else ""
        return (
            f"{where}: labels must be from 0 to {limit.size - 1}, since the predictions that "
            f"{limit.name} gets have {limit.size} classes, but they are from {least} to {most}. "
            f"Number the classes from 0, {more}or pass ignore_class={label} to the loss to leave "
            "such labels out"
        )
    remedy = "Correct the data"
    if most >= limit.size:
        remedy += f", or give the layer {most + 1} rows (input_dim={most + 1} of an Embedding)"
    return (
        f"{where}: indices must be from 0 to {limit.size - 1}, since {limit.name} has "
        f"{limit.size} rows, but they are from {least} to {most}. {remedy}"
    )


@contextmanager
def watched(ranges: Ranges | None) -> Generator[None]:
    """Check the lookups and sparse losses of the running step in this context."""
    if ranges is None:
        yield
        return
    if INTERNALS["masking"].get() is None:  # a label that a mask excludes may be any number
        yield
        return
    ranges.place = active().place()
    makers = {
        "take": _take,
        "sparse_categorical_crossentropy": _crossentropy,
        "loss_call": _with_weights,
        "metric_update": _with_weights,
    }
    with ExitStack() as stack:
        for name, make in makers.items():
            internal = INTERNALS[name]
            if (original := internal.get()) is not None:
                stack.enter_context(internal.replaced(make(original)))
        yield


def _take(original: Call) -> Call:
    """Return `keras.ops.take` of a backend with a check of lookups in variables."""

    def take(x: Any, indices: Any, axis: int | None = None) -> Any:
        if context().ranges is not None and isinstance(x, keras.Variable):
            shape = tuple(x.shape)
            size = int(np.prod(shape)) if axis is None else shape[axis]
            # Of TensorFlow and JAX, some tensors are not arrays.
            if not any(x in type(indices).__name__ for x in ("Sparse", "Ragged", "BCOO")):
                indices = _checked(Limit(context().path_of(x), size, False), indices)
        return original(x, indices, axis=axis)

    return take


def _crossentropy(original: Call) -> Call:
    """Return the sparse cross-entropy of a backend with a check of its labels."""

    def crossentropy(target: Any, output: Any, from_logits: bool = False, axis: int = -1) -> Any:
        ranges = context().ranges
        shape = getattr(output, "shape", ())
        if ranges is not None and shape and shape[axis]:
            name, weights = "sparse_categorical_crossentropy", ()
            if ranges.owners:
                owner, weights = ranges.owners[-1]
                path = ranges.name_of(owner)
                name = f"{path} ({owner.name})" if path and path != owner.name else owner.name
            target = _checked(Limit(name, shape[axis], True), target, weights)
        return original(target, output, from_logits=from_logits, axis=axis)

    return crossentropy


def _with_weights(original: Call) -> Call:
    """Return a method of losses or metrics that tells the check the weights of its labels."""

    def call(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        ranges = context().ranges
        if ranges is None:
            return original(self, y_true, y_pred, sample_weight)
        mask = INTERNALS["masking"].resolve().get_keras_mask(y_pred)
        weights = [x for x in (mask, sample_weight) if x is not None]
        ranges.owners.append((self, weights))
        try:
            return original(self, y_true, y_pred, sample_weight)
        finally:
            ranges.owners.pop()

    return call


def _checked(limit: Limit, integers: Any, weights: Iterable[Any] = ()) -> Any:
    """Check integers, and return those to use.

    Args:
        limit: The range.
        integers: The indices or labels.
        weights: Masks and sample weights: integers whose weight is zero have no effect.
    """
    step = context()
    ranges: Ranges = step.ranges  # type: ignore[assignment]
    integers = ops.convert_to_tensor(integers)
    dtype = keras.backend.standardize_dtype(integers.dtype)
    # In a transformation of the framework that Treadle does not know of (a loop of a recurrent
    # layer, `vectorized_map`), a value could not leave it.
    if dtype == "bool" or 0 in integers.shape or ranges.place != active().place():
        return integers
    counted = _counted(integers, weights)
    if counted is None:
        return integers
    ends = ops.stack([_as_int(ops.min(counted), dtype), _as_int(ops.max(counted), dtype)])
    if step.build is not None:
        ranges.limits[limit] = None
        if not ranges.raises:
            return integers
        if not ranges.unsure:
            ranges.used.append((limit, ends))
        # Clipped, since an error raised here would be wrapped by Keras, and one of the framework
        # would come first.
        return _clipped(integers, limit.least, limit.size - 1, dtype)
    variable = ranges.variables.get(limit)
    if variable is None:  # a branch that the dry run did not take
        return integers
    stored, number = variable.value, ops.cast(ops.convert_to_tensor(step.number), INT)
    outside = ops.logical_or(ends[0] < limit.least, ends[1] >= limit.size)
    first = ops.logical_and(outside, stored[2] < 0)
    variable.assign(ops.where(first, ops.stack([ends[0], ends[1], number]), stored))
    return _clipped(integers, limit.least, limit.size - 1, dtype)


def _counted(integers: Tensor, weights: Iterable[Any]) -> Tensor | None:
    """Return integers with 0 where a weight is zero; None if the weights do not fit."""
    shape = tuple(integers.shape)
    for weight in weights:
        weight = ops.convert_to_tensor(weight)
        own = tuple(weight.shape)
        while len(own) > len(shape) and own[-1] == 1:
            own = own[:-1]
        if own != shape[: len(own)] or None in own:
            return None
        used = ops.reshape(ops.cast(weight, "bool"), own + (1,) * (len(shape) - len(own)))
        integers = ops.where(used, integers, ops.zeros_like(integers))
    return integers


def _as_int(number: Tensor, dtype: str) -> Tensor:
    if dtype in ("int64", "uint32", "uint64") or "float" in dtype:
        number = _clipped(number, -FAR, FAR, dtype)
    return ops.cast(number, INT)


def _clipped(x: Tensor, least: int, most: int, dtype: str) -> Tensor:
    """Clip a tensor to a range, of which its dtype may represent a part."""
    if "float" not in dtype:
        limits = np.iinfo(dtype)
        least, most = max(least, int(limits.min)), min(most, int(limits.max))
    return ops.clip(x, least, most)
