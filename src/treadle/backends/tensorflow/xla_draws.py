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
from contextlib import AbstractContextManager
from typing import Any, Final

import tensorflow as tf

from .operations import can_replace, replaced

PHILOX = tf.random.Algorithm.PHILOX.value
AUTOMATIC = tf.random.Algorithm.AUTO_SELECT.value
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


def other_numbers() -> set[str]:
    """Return the operations that XLA compiles to other numbers than the kernels draw."""
    return (
        OTHER_NUMBERS
        if can_replace()
        else OTHER_NUMBERS.union(("StatelessRandomUniformV2", "StatelessRandomNormalV2"))
    )


def like_kernels() -> AbstractContextManager[Any]:
    """Trace random operations in this context with the kernels' conversion.

    The algorithm is also fixed to Philox. Otherwise TensorFlow selects it at run time, for which
    XLA compiles all algorithms: 28 times as slow.
    """
    return replaced(_REPLACEMENTS)


def _key_and_counter(original: Any, seed: Any) -> Any:
    """Return the key and the counter that the kernels derive from a seed for Philox."""
    # The constant key with which TensorFlow's kernels scramble a seed (GenerateKey in
    # core/kernels/stateless_random_ops.cc).
    key = tf.constant([0x02461E293EC8F720], tf.uint64)
    bits = _bits([4], key, tf.cast(seed, tf.uint64))
    halves = tf.bitcast(tf.reshape(bits, [2, 2]), tf.uint64)
    return halves[:1], tf.stack([tf.constant(0, tf.uint64), halves[1]])


def _fixed(original: Any, alg: Any, **given: Any) -> Any:
    return original(alg=PHILOX if is_philox(alg) else alg, **given)


def is_philox(alg: Any) -> bool:
    """Return whether an algorithm is Philox, also since it is the only one on this device."""
    return tf.get_static_value(alg) in (PHILOX, AUTOMATIC)


def _uniform(original: Any, shape: Any, key: Any, counter: Any, alg: Any, dtype: Any) -> Any:
    if dtype not in (*UNIFORM, tf.float64) or not is_philox(alg):
        return _fixed(original, alg, shape=shape, key=key, counter=counter, dtype=dtype)
    return _unit(shape, key, counter, dtype)


def _normal(original: Any, shape: Any, key: Any, counter: Any, alg: Any, dtype: Any) -> Any:
    if dtype not in NORMAL or not is_philox(alg):
        return _fixed(original, alg, shape=shape, key=key, counter=counter, dtype=dtype)
    static = tf.get_static_value(shape)
    if static is None:  # XLA computes it while it compiles
        shape = tf.cast(shape, tf.int32)
        count = tf.reduce_prod(shape)
    else:
        shape, count = static, math.prod(static.tolist())
    computed = tf.float64 if dtype == tf.float64 else tf.float32
    pairs = _unit([(count + 1) // 2, 2], key, counter, computed)
    radius = tf.sqrt(-2.0 * tf.math.log(tf.maximum(pairs[:, 0], SMALLEST)))
    angle = (2.0 * math.pi) * pairs[:, 1]
    both = tf.stack([tf.sin(angle) * radius, tf.cos(angle) * radius], axis=1)
    return tf.cast(tf.reshape(tf.reshape(both, [-1])[:count], shape), dtype)


_REPLACEMENTS: Final = {
    "StatelessRandomGetKeyCounter": _key_and_counter,
    "StatelessRandomUniformV2": _uniform,
    "StatelessRandomNormalV2": _normal,
    **dict.fromkeys(
        (
            *("StatelessTruncatedNormalV2", "StatelessRandomUniformFullIntV2"),
            *("StatelessRandomUniformIntV2", "StatelessRandomGammaV3", "StatelessShuffle"),
        ),
        _fixed,
    ),
}


def _bits(shape: Any, key: Any, counter: Any) -> Any:
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=shape, key=key, counter=counter, alg=PHILOX, dtype=tf.uint32
    )


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
