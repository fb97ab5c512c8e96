"""What replaces random draws and moments while a process computes its rows of a batch.

Random draws: each process has the numbers that its rows have in a draw for the whole batch, from a
seed that is equal in all. It draws only these if they are uniform, and otherwise for the whole
batch. Draws that do not depend on the number of rows are equal in all processes.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import tensorflow as tf
from keras import ops

from ...backends.tensorflow.patches import INTERNALS
from ...backends.tensorflow.xla_draws import is_philox
from ...core.internals import Internal
from ...core.keras_internals import INTERNALS as KERAS_INTERNALS
from ...errors import StepError
from ..dividing.moments import Call, combined, masked_moments, moments_with
from ..dividing.rows import DRAW, OwnRows, applied, rows, seen


def uniform(original: Call, shape: Any, counter: Any, alg: Any, **kwargs: Any) -> Any:
    """Draw uniform numbers, for these rows only.

    Philox (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) makes 128 random
    bits from each value of its counter, in TensorFlow's kernels and in XLA. Which bits a normal
    number needs differs between these two.
    """
    mine, whole = _whole(_static(shape))
    if mine is None or whole is None:
        return original(shape=shape, counter=counter, alg=alg, **kwargs)
    kwargs["alg"] = alg
    if whole[0] != mine.examples or not is_philox(alg):  # several parts with rows of the batch
        return mine.rows_of(original(shape=list(whole), counter=counter, **kwargs))
    row = math.prod(whole[1:])
    dtype = tf.as_dtype(kwargs["dtype"] if "dtype" in kwargs else kwargs["minval"].dtype)
    values, rest = divmod(mine.first * row, 16 // max(dtype.size, 4))
    low, high = tf.unstack(tf.bitcast(counter, tf.int64))
    begin = low + values
    high += tf.cast(begin + tf.int64.min < low + tf.int64.min, tf.int64)  # the carry
    begin = tf.bitcast(tf.stack([begin, high]), tf.uint64)
    found = original(shape=[rest + mine.count * row], counter=begin, **kwargs)
    return tf.reshape(found[rest:], [mine.count, *whole[1:]])


def of_parameters(**fills: float) -> Call:
    """Return a function that draws for the whole batch, with parameters for each number.

    Parameters have the last axes of the shape. Which numbers a kernel draws depends on how many
    axes these are, so only parameters with rows of the batch are padded with other rows.

    Args:
        fills: A valid value of each parameter, for the rows of other processes.
    """

    def draw(original: Call, shape: Any, **kwargs: Any) -> Any:
        own = _static(shape)
        mine, whole = _whole(own)
        if mine is None or whole is None:
            return original(shape=shape, **kwargs)
        for name, value in fills.items():
            given = tf.convert_to_tensor(kwargs[name])
            if not given.shape.is_fully_defined():
                given = tf.broadcast_to(given, own)
            if len(given.shape) == len(own) and given.shape[0] == own[0]:
                kwargs[name] = mine.padded(given, value)
        return mine.rows_of(original(shape=list(whole), **kwargs))

    return draw


def of_logits(original: Call, logits: Any, **kwargs: Any) -> Any:
    """Draw categories, for each row of logits."""
    logits = ops.convert_to_tensor(logits)
    mine, whole = _whole(tuple(logits.shape))
    if mine is None or whole is None:
        return original(logits=logits, **kwargs)
    return mine.rows_of(original(logits=mine.padded(logits, 0), **kwargs))


def advanced(original: Call, generator: Any, shape: Any) -> Any:
    """Advance a `tf.random.Generator` by the numbers of all processes, before it draws."""
    _, whole = _whole(_static(shape))
    return original(generator, shape if whole is None else list(whole))


def shuffled(original: Call, x: Any, axis: int = 0, seed: Any = None) -> Any:
    """Shuffle a tensor, unless it has the rows of a batch.

    Raises:
        StepError: Its elements are rows, of which the new places depend on all others.
    """
    mine, whole = _whole((x.shape[axis],))
    if mine is not None and whole is not None and whole[0] != x.shape[axis]:
        raise StepError(_TOGETHER.format("keras.random.shuffle", mine.examples))
    return original(x, axis, seed)


_TOGETHER: Final = (
    "{} draws for the {} rows of a batch together, which several processes cannot divide: draw "
    "uniform or normal numbers, or train with one process"
)


def refused(original: Call, **kwargs: Any) -> Any:
    """Reject a draw that several processes cannot divide.

    Raises:
        StepError: They share a batch.
    """
    if rows() is not None:
        raise StepError(
            "the step draws with a function of tf.random that several processes cannot divide: "
            "draw with keras.random, or train with one process"
        )
    return original(**kwargs)


def _moments(x: Any, axes: list[int], mine: OwnRows) -> tuple[Any, Any]:
    """Return the mean and the variance of the rows of all processes, with one message.

    The variance of these rows is a mean of squared distances from their mean, as `tf.nn.moments`
    computes it: a difference of squares would lose digits of float32.
    """
    mean = ops.mean(x, axes, keepdims=True)
    squares = ops.mean(ops.square(x - mean), axes, keepdims=True)
    return combined(ops.full_like(mean, mine.count), mean, squares, mine)


DRAWS: Final[Mapping[str, Call]] = {
    **dict.fromkeys(
        (
            "StatelessRandomUniformV2",
            "StatelessRandomUniformFullIntV2",
            "StatelessRandomUniformIntV2",
        ),
        uniform,
    ),
    "StatelessRandomNormalV2": of_parameters(),
    "StatelessTruncatedNormalV2": of_parameters(),
    "StatelessRandomGammaV3": of_parameters(alpha=1),
    "StatelessRandomBinomial": of_parameters(counts=1, probs=0.5),
    "StatelessRandomPoisson": of_parameters(lam=1),
    "StatelessMultinomial": of_logits,
    "RandomPoissonV2": refused,
    "RandomShuffle": refused,
    "StatefulRandomBinomial": refused,
    "StatelessParameterizedTruncatedNormal": refused,
    "StatelessShuffle": refused,
}
"""What replaces an operation that draws while a step runs."""

REPLACEMENTS: Final[Mapping[Internal, Call]] = {
    INTERNALS["shuffle"]: shuffled,
    INTERNALS["advance_generator"]: advanced,
    KERAS_INTERNALS["moments"]: moments_with(_moments, ("float16", "bfloat16"), tf.clip_by_value),
    KERAS_INTERNALS["masked_moments"]: masked_moments,
    KERAS_INTERNALS["apply"]: applied,
}
"""What replaces a function of the register."""


def _static(shape: Any) -> tuple[int, ...]:
    """Return a shape as numbers.

    Raises:
        StepError: It is not known before the step runs.
    """
    if isinstance(shape, (list, tuple)):  # of numbers and tensors
        shape = tf.convert_to_tensor(shape, tf.int32)
    found: Any = tf.get_static_value(shape)
    if found is None:  # of `[tf.shape(x)[0], 3]`: the shape of an operation's result is inferred
        found = tf.broadcast_to(0, shape).shape
        found = np.array(found) if found.is_fully_defined() else None
    if found is None:
        raise StepError(
            "the shape of a random draw depends on values, so that several processes cannot divide "
            "it: draw for a shape that follows from the shapes of the batch"
        )
    return tuple(int(size) for size in found.flat)


def _whole(shape: tuple[int, ...]) -> tuple[OwnRows | None, tuple[int, ...] | None]:
    """Return the rows of this process if it takes them of a draw, and the shape of all of it."""
    mine, noted = rows(), seen()
    if noted is not None:
        noted.shapes[DRAW].add(shape)
    if mine is None:
        return None, None
    return mine, mine.whole_shape(DRAW, shape)
