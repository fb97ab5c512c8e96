"""Moments over the rows of all processes, as Keras computes them on PyTorch."""

from typing import Any

import torch
from keras import ops

from ...processes.moments import Call, number_of, rows_with_moments


def moments(
    original: Call, x: Any, axes: Any, keepdims: bool = False, synchronized: bool = False
) -> Any:
    """Compute what `keras.ops.moments` does, but over the rows of all processes."""
    x = ops.convert_to_tensor(x)
    over = [axes] if isinstance(axes, int) else list(axes)
    mine = rows_with_moments(x, over)
    if mine is None:
        return original(x, axes, keepdims, synchronized)
    over = [axis % x.ndim for axis in over]
    dtype = x.dtype
    x = x.float() if dtype == torch.float16 else x
    sums = torch.stack([x.sum(over, keepdim=True), x.square().sum(over, keepdim=True)])
    total = mine.sum(sums) / number_of(x, over, mine)
    mean = total[0]
    variance = total[1] - mean.square()
    if not keepdims:
        mean, variance = mean.squeeze(over), variance.squeeze(over)
    if dtype == torch.float16:
        limits = torch.finfo(dtype)
        mean, variance = (v.clip(limits.min, limits.max).to(dtype) for v in (mean, variance))
    return mean, variance
