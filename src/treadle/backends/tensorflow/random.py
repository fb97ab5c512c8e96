"""Random numbers under XLA that equal those of TensorFlow's own kernels.

Both run Philox (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) on the same
keys and counters and get the same bits, but convert them differently. For a uniform number, a
kernel uses the low 23 bits and XLA the high ones. For normal numbers, a kernel uses Box and
Muller's method ("A Note on the Generation of Random Normal Deviates", Ann. Math. Stat. 29, 1958)
and XLA the inverse distribution function. Steps for XLA are therefore traced with the kernels'
conversion, written in TensorFlow operations: a Dropout drops the same units as without XLA.
"""

import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import gen_stateless_random_ops_v2, random_ops_util

PHILOX = 1
# The mask of the mantissa, the bits of the number 1, and an integer type of that size. For float16
# the two conversions already agree.
UNIFORM = {
    tf.float32: (0x007FFFFF, 0x3F800000, tf.uint32),
    tf.bfloat16: (0x007F, 0x3F80, tf.uint16),
}
NORMAL = (tf.float32, tf.bfloat16, tf.float16)
SMALLEST = 1e-7  # the kernels' lower bound for the argument of the logarithm

_kernels = gen_stateless_random_ops_v2
_uniform_kernel = _kernels.stateless_random_uniform_v2
_normal_kernel = _kernels.stateless_random_normal_v2
_key_counter_alg = random_ops_util.get_key_counter_alg


@contextmanager
def like_kernels() -> Generator[None]:
    """Trace random operations in this context with the kernels' conversion.

    The algorithm is also fixed to Philox. Otherwise TensorFlow selects it at run time, for which
    XLA compiles all algorithms: 28 times as slow.
    """
    _kernels.stateless_random_uniform_v2 = _uniform
    _kernels.stateless_random_normal_v2 = _normal
    random_ops_util.get_key_counter_alg = _named
    try:
        yield
    finally:
        _kernels.stateless_random_uniform_v2 = _uniform_kernel
        _kernels.stateless_random_normal_v2 = _normal_kernel
        random_ops_util.get_key_counter_alg = _key_counter_alg


def _named(seed: Any, alg: Any) -> Any:
    return _key_counter_alg(seed, "philox" if alg in (None, "auto_select") else alg)


def _uniform(
    shape: Any, key: Any, counter: Any, alg: Any, dtype: Any = tf.float32, name: Any = None
) -> Any:
    if tf.as_dtype(dtype) not in UNIFORM or alg != PHILOX:
        return _uniform_kernel(shape, key, counter, alg, dtype, name)
    return _to_unit(_bits(shape, key, counter), tf.as_dtype(dtype))


def _normal(
    shape: Any, key: Any, counter: Any, alg: Any, dtype: Any = tf.float32, name: Any = None
) -> Any:
    static = tf.get_static_value(shape)
    if tf.as_dtype(dtype) not in NORMAL or alg != PHILOX or static is None:
        return _normal_kernel(shape, key, counter, alg, dtype, name)
    count = math.prod(static.tolist())
    pairs = _to_unit(_bits([(count + 1) // 2, 2], key, counter), tf.float32)
    radius = tf.sqrt(-2.0 * tf.math.log(tf.maximum(pairs[:, 0], SMALLEST)))
    angle = (2.0 * math.pi) * pairs[:, 1]
    both = tf.stack([tf.sin(angle) * radius, tf.cos(angle) * radius], axis=1)
    return tf.cast(tf.reshape(tf.reshape(both, [-1])[:count], static), dtype)


def _bits(shape: Any, key: Any, counter: Any) -> Any:
    draw = _kernels.stateless_random_uniform_full_int_v2
    return draw(shape=shape, key=key, counter=counter, alg=PHILOX, dtype=tf.uint32)


def _to_unit(bits: Any, dtype: Any) -> Any:
    """Convert bits to numbers in [0, 1): the mantissa of a number in [1, 2), minus 1."""
    mantissa, one, integer = UNIFORM[dtype]
    number = tf.bitwise.bitwise_and(bits, tf.constant(mantissa, tf.uint32)) | one
    return tf.bitcast(tf.cast(number, integer), dtype) - tf.constant(1.0, dtype)
