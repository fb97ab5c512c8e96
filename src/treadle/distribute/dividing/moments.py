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
    number, zero = ops.sum(weights, axes, keepdims=True), ops.zeros_like(inputs)
    own = ops.maximum(number, 1.0)
    mean = ops.sum(ops.where(chosen, inputs, zero), axes, keepdims=True) / own
    distances = ops.where(chosen, inputs - mean, zero)
    squares = ops.sum(ops.square(distances), axes, keepdims=True) / own
    found = combined(number, mean, squares, mine, keras.config.epsilon())
    return ops.squeeze(found[0], tuple(axes)), ops.squeeze(found[1], tuple(axes))


def combined(
    number: Any, mean: Any, variance: Any, mine: OwnRows, epsilon: float = 0.0
) -> tuple[Any, Any]:
    """Return the mean and the variance of all processes from those of each, with one message.

    They are combined in float64: differences of squares would lose digits in float32.

    Args:
        number: The number of values of this process, or of its rows.
        mean: Their mean.
        variance: Their variance.
        mine: The rows of this process.
        epsilon: What is added to the number of all values.
    """
    n, m, v = (ops.cast(x, "float64") for x in (number, mean, variance))
    sums = mine.sum(ops.stack([n, n * m, n * (v + ops.square(m))]))
    together = sums[0] + epsilon
    center = sums[1] / together
    squares = sums[2] - 2 * center * sums[1] + ops.square(center) * sums[0]
    spread = ops.maximum(squares / together, 0.0)  # rounding may leave a negative one
    return ops.cast(center, mean.dtype), ops.cast(spread, mean.dtype)


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
