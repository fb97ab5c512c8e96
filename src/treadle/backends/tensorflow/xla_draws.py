"""Random numbers under XLA that equal those of TensorFlow's own kernels.

Both run Philox (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) on the same
keys and counters and get the same bits, but convert them differently. For a uniform number, a
kernel uses the low 23 bits and XLA the high ones. For normal numbers, a kernel uses Box and
Muller's method ("A Note on the Generation of Random Normal Deviates", Ann. Math. Stat. 29, 1958)
and XLA the inverse distribution function. Steps for XLA are therefore traced with the kernels'
conversion, written in TensorFlow operations: a Dropout drops the same units as without XLA. Other
draws that XLA converts differently are not compiled by it.
"""

import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from .patches import INTERNALS

PHILOX = 1
# The mask of the mantissa, the bits of the number 1, and an integer type of that size. For float16
# the two conversions already agree.
UNIFORM = {
    tf.float32: (0x007FFFFF, 0x3F800000, tf.uint32),
    tf.bfloat16: (0x007F, 0x3F80, tf.uint16),
}
NORMAL = (tf.float32, tf.bfloat16, tf.float16, tf.float64)
SMALLEST = 1e-7  # the kernels' lower bound for the argument of the logarithm
# Operations that XLA compiles to other numbers. Those that the functions below replace are in a
# graph only if it was traced elsewhere, such as that of a SavedModel.
OTHER_NUMBERS = {
    "StatelessMultinomial",
    "StatelessParameterizedTruncatedNormal",
    "StatelessRandomNormal",
    "StatelessRandomNormalV2",
    "StatelessRandomUniform",
    "StatelessTruncatedNormal",
    "StatelessTruncatedNormalV2",
}

_uniform_kernel: Any = INTERNALS["uniform"].resolve()
_normal_kernel: Any = INTERNALS["normal"].resolve()
_full_int: Any = INTERNALS["full_int"].resolve()
_key_counter: Any = INTERNALS["key_counter"].resolve()


@contextmanager
def like_kernels() -> Generator[None]:
    """Trace random operations in this context with the kernels' conversion.

    The algorithm is also fixed to Philox. Otherwise TensorFlow selects it at run time, for which
    XLA compiles all algorithms: 28 times as slow.
    """
    with (
        INTERNALS["uniform"].replaced(_uniform),
        INTERNALS["normal"].replaced(_normal),
        INTERNALS["key_counter"].replaced(_named),
    ):
        yield


def _named(seed: Any, alg: Any) -> Any:
    return _key_counter(seed, "philox" if alg in (None, "auto_select") else alg)


def _uniform(
    shape: Any, key: Any, counter: Any, alg: Any, dtype: Any = tf.float32, name: Any = None
) -> Any:
    dtype = tf.as_dtype(dtype)
    if dtype not in (*UNIFORM, tf.float64) or alg != PHILOX:
        return _uniform_kernel(shape, key, counter, alg, dtype, name)
    return _unit(shape, key, counter, dtype)


def _normal(
    shape: Any, key: Any, counter: Any, alg: Any, dtype: Any = tf.float32, name: Any = None
) -> Any:
    if tf.as_dtype(dtype) not in NORMAL or alg != PHILOX:
        return _normal_kernel(shape, key, counter, alg, dtype, name)
    static = tf.get_static_value(shape)
    if static is None:  # XLA computes it while it compiles
        shape = tf.cast(shape, tf.int32)
        count = tf.reduce_prod(shape)
    else:
        shape, count = static, math.prod(static.tolist())
    computed = tf.float64 if tf.as_dtype(dtype) == tf.float64 else tf.float32
    pairs = _unit([(count + 1) // 2, 2], key, counter, computed)
    radius = tf.sqrt(-2.0 * tf.math.log(tf.maximum(pairs[:, 0], SMALLEST)))
    angle = (2.0 * math.pi) * pairs[:, 1]
    both = tf.stack([tf.sin(angle) * radius, tf.cos(angle) * radius], axis=1)
    return tf.cast(tf.reshape(tf.reshape(both, [-1])[:count], shape), dtype)


def _bits(shape: Any, key: Any, counter: Any) -> Any:
    return _full_int(shape=shape, key=key, counter=counter, alg=PHILOX, dtype=tf.uint32)


def _unit(shape: Any, key: Any, counter: Any, dtype: Any) -> Any:
    """Return numbers in [0, 1): random bits as the mantissa of a number in [1, 2), minus 1."""
    if dtype == tf.float64:  # the mantissa is 20 bits of one word, and the next word
        words = tf.cast(_bits(tf.concat([shape, [2]], 0), key, counter), tf.uint64)
        high = tf.bitwise.bitwise_and(words[..., 0], tf.constant(0xFFFFF, tf.uint64))
        high = tf.bitwise.left_shift(high, tf.constant(32, tf.uint64))
        one = tf.constant(0x3FF << 52, tf.uint64)
        return tf.bitcast(high | words[..., 1] | one, tf.float64) - tf.constant(1.0, dtype)
    mantissa, one, integer = UNIFORM[dtype]
    bits = _bits(shape, key, counter)
    number = tf.bitwise.bitwise_and(bits, tf.constant(mantissa, tf.uint32)) | one
    return tf.bitcast(tf.cast(number, integer), dtype) - tf.constant(1.0, dtype)
