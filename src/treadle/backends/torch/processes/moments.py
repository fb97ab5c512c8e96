"""Moments over the rows of all processes, for BatchNormalization and `keras.ops.moments`."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch
from keras import ops

from .rows import Rows, rows, seen

Call = Callable[..., Any]


def moments(
    original: Call, x: Any, axes: Any, keepdims: bool = False, synchronized: bool = False
) -> Any:
    """Compute what `keras.ops.moments` does, but over the rows of all processes."""
    x = ops.convert_to_tensor(x)
    over = [axes] if isinstance(axes, int) else list(axes)
    mine = _rows_in(x, over)
    if mine is None:
        return original(x, axes, keepdims, synchronized)
    over = [axis % x.ndim for axis in over]
    dtype = x.dtype
    x = x.float() if dtype == torch.float16 else x
    sums = torch.stack([x.sum(over, keepdim=True), x.square().sum(over, keepdim=True)])
    total = mine.sum(sums) / (_number(x, over) * mine.examples / mine.count)
    mean = total[0]
    variance = total[1] - mean.square()
    if not keepdims:
        mean, variance = mean.squeeze(over), variance.squeeze(over)
    if dtype == torch.float16:
        limits = torch.finfo(dtype)
        mean, variance = (v.clip(limits.min, limits.max).to(dtype) for v in (mean, variance))
    return mean, variance


def _number(x: Any, axes: Sequence[int]) -> int:
    """Return how many numbers each moment is computed over."""
    number = 1
    for axis in axes:
        number *= x.shape[axis]
    return number


def masked_moments(original: Call, layer: Any, inputs: Any, mask: Any) -> Any:
    """Compute what BatchNormalization does with a mask, but over the rows of all processes."""
    axes = list(layer._reduction_axes)
    mine = None if mask is None else _rows_in(inputs, axes)
    if mine is None:
        return original(layer, inputs, mask)
    chosen = ops.broadcast_to(ops.expand_dims(ops.cast(mask, "bool"), -1), inputs.shape)
    weights = chosen.to(inputs.dtype)
    zero = torch.zeros_like(inputs)
    sums = [torch.where(chosen, inputs, zero).sum(axes), weights.sum(axes)]
    total, number = mine.sum(torch.stack(sums)).unbind()
    number = number + keras.config.epsilon()
    mean = total / number
    shape = [1 if axis in axes else size for axis, size in enumerate(inputs.shape)]
    squares = torch.where(chosen, inputs - mean.reshape(shape), zero).square()
    return mean, mine.sum(squares.sum(axes)) / number


def _rows_in(x: Any, axes: Sequence[int]) -> Rows | None:
    """Return the rows of this process if the moments of a tensor are over rows of the batch."""
    if x.ndim == 0 or 0 not in [axis % x.ndim for axis in axes]:
        return None
    mine, noted, shape = rows(), seen(), tuple(x.shape)
    if noted is not None:
        noted.moments.add(shape)
    if mine is None:
        return None
    whole = mine.whole_shape(shape, mine.seen.moments, "a tensor to compute moments of")
    return None if whole is None else mine
