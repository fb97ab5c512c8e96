"""Moments over the rows of all processes, for BatchNormalization and `keras.ops.moments`."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops
from keras.backend import standardize_dtype

from .rows import MOMENTS, OwnRows, rows, seen

Call = Callable[..., Any]
_LIMITS = (-65504.0, 65504.0)  # of float16


def moments_with(
    compute: Callable[..., tuple[Any, Any]], narrow: tuple[str, ...], clip: Call
) -> Call:
    """Return what replaces `keras.ops.moments`: the same over the rows of all processes.

    Args:
        compute: Returns the mean and the variance of a tensor over axes of all processes' rows,
            with these axes.
        narrow: The dtypes of which the moments are computed in float32, as Keras does.
        clip: The framework's function that limits a tensor to a range.
    """

    def moments(
        original: Call, x: Any, axes: Any, keepdims: bool = False, synchronized: bool = False
    ) -> Any:
        x = ops.convert_to_tensor(x)
        over = [axes] if isinstance(axes, int) else list(axes)
        mine = rows_with_moments(x, over)
        if mine is None:
            return original(x, axes, keepdims, synchronized)
        dtype = standardize_dtype(x.dtype)
        found = compute(ops.cast(x, "float32") if dtype in narrow else x, over, mine)
        if not keepdims:
            found = [ops.squeeze(m, tuple(over)) for m in found]
        if dtype in narrow:
            found = [ops.cast(clip(m, *_LIMITS), dtype) for m in found]
        return found[0], found[1]

    return moments


def masked_moments(original: Call, layer: Any, inputs: Any, mask: Any) -> Any:
    """Compute what BatchNormalization does with a mask, but over the rows of all processes."""
    axes = [i for i in range(len(inputs.shape)) if i != layer.axis % len(inputs.shape)]
    mine = None if mask is None else rows_with_moments(inputs, axes)
    if mine is None:
        return original(layer, inputs, mask)
    chosen = ops.broadcast_to(ops.expand_dims(ops.cast(mask, "bool"), -1), inputs.shape)
    weights = ops.cast(chosen, inputs.dtype)
    zero = ops.zeros_like(inputs)
    sums = [ops.sum(ops.where(chosen, inputs, zero), axes), ops.sum(weights, axes)]
    both = mine.sum(ops.stack(sums))
    total, number = both[0], both[1] + keras.config.epsilon()
    mean = total / number
    shape = [1 if axis in axes else size for axis, size in enumerate(inputs.shape)]
    squares = ops.square(ops.where(chosen, inputs - ops.reshape(mean, shape), zero))
    return mean, mine.sum(ops.sum(squares, axes)) / number


def rows_with_moments(x: Any, axes: Sequence[int]) -> OwnRows | None:
    """Return the rows of this process if the moments of a tensor are over rows of the batch."""
    dimensions = len(x.shape)
    if dimensions == 0 or 0 not in [axis % dimensions for axis in axes]:
        return None
    mine, noted, shape = rows(), seen(), tuple(x.shape)
    if noted is not None:
        noted.shapes[MOMENTS].add(shape)
    if mine is None:
        return None
    whole = mine.whole_shape(MOMENTS, shape)
    return None if whole is None else mine


def number_of(x: Any, axes: Sequence[int], mine: OwnRows) -> float:
    """Return over how many numbers of the whole batch each moment is computed."""
    number = 1
    for axis in axes:
        number *= x.shape[axis]
    return number * mine.examples / mine.count
