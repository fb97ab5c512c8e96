"""Moments over the rows of all processes, as Keras computes them on TensorFlow."""

from typing import Any

import tensorflow as tf
from keras import ops
from keras.backend import standardize_dtype

from ...processes.moments import Call, number_of, rows_with_moments


def moments(
    original: Call, x: Any, axes: Any, keepdims: bool = False, synchronized: bool = False
) -> Any:
    """Compute what `keras.ops.moments` does, but over the rows of all processes.

    The variance is a mean of squared distances from the mean, as `tf.nn.moments` computes it, which
    needs a second message: a difference of means would lose the digits that they have in common.
    """
    x = ops.convert_to_tensor(x)
    over = [axes] if isinstance(axes, int) else list(axes)
    mine = rows_with_moments(x, over)
    if mine is None:
        return original(x, axes, keepdims, synchronized)
    dtype = standardize_dtype(x.dtype)
    x = ops.cast(x, "float32") if dtype in ("float16", "bfloat16") else x
    number = number_of(x, over, mine)
    mean = mine.sum(ops.sum(x, over, keepdims=True)) / number
    variance = mine.sum(ops.sum(ops.square(x - mean), over, keepdims=True)) / number
    found = [mean, variance]
    if not keepdims:
        found = [ops.squeeze(m, tuple(over)) for m in found]
    if dtype in ("float16", "bfloat16"):
        limits = tf.float16.min, tf.float16.max
        found = [ops.cast(tf.clip_by_value(m, *limits), dtype) for m in found]
    return found[0], found[1]
