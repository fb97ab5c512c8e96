"""On TensorFlow a step draws the same random numbers whether XLA compiles it or not."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from treadle.backends.tensorflow.xla_draws import like_kernels

SHAPES = [(7,), (64, 33), (3, 5, 1), (0,), ()]


def both(*draws: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
    """Return what each draws by TensorFlow's kernels and by XLA, which compiles them together."""
    seed = tf.constant([3, 5], tf.int32)
    with like_kernels():
        compiled = tf.function(
            lambda seed: [draw(seed) for draw in draws], jit_compile=True, autograph=False
        )
        function = compiled.get_concrete_function(tf.TensorSpec([2], tf.int32))
    kernels = [draw(seed).numpy() for draw in draws]
    return list(zip(kernels, [drawn.numpy() for drawn in function(seed)], strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_uniform_numbers_dropout_and_integers_are_equal_in_every_bit(shape: Any) -> None:
    for kernels, xla in both(
        lambda seed: tf.random.stateless_uniform(shape, seed),
        lambda seed: tf.random.stateless_uniform(shape, seed, 0, 1000, tf.int32),
        lambda seed: tf.nn.experimental.stateless_dropout(tf.ones(shape), 0.3, seed),
    ):
        assert kernels.tobytes() == xla.tobytes()


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_narrow_floats_too(shape: Any, dtype: Any) -> None:
    *equal, (kernels, xla) = both(
        lambda seed: tf.random.stateless_uniform(shape, seed, dtype=dtype),
        lambda seed: tf.nn.experimental.stateless_dropout(tf.ones(shape, dtype), 0.3, seed),
        lambda seed: tf.random.stateless_normal(shape, seed, dtype=dtype),
    )
    for ours, theirs in equal:
        assert ours.tobytes() == theirs.tobytes()
    assert kernels.dtype == xla.dtype == dtype.as_numpy_dtype
    np.testing.assert_allclose(
        kernels.astype("float32"), xla.astype("float32"), rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_normal_and_scaled_numbers_are_equal_within_rounding(shape: Any) -> None:
    for kernels, xla in both(
        lambda seed: tf.random.stateless_normal(shape, seed, 1.0, 2.0),
        lambda seed: tf.random.stateless_uniform(shape, seed, -2.0, 3.0),  # scaled in one rounding
    ):
        assert kernels.shape == xla.shape == shape
        np.testing.assert_allclose(kernels, xla, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64], ids=lambda dtype: dtype.name)
def test_normal_numbers_of_a_shape_that_is_computed(dtype: Any) -> None:
    """Of the shape of the batch, also where a branch captures it."""

    def draw(seed: Any) -> Any:
        shape = [tf.shape(seed)[0] + 3, 3]
        return tf.random.stateless_normal(shape, seed, dtype=dtype)

    def captured(seed: Any) -> Any:
        size = tf.shape(seed)[0]
        normal = tf.random.stateless_normal
        return tf.cond(
            seed[0] > 0,
            lambda: normal([size, 2], seed, dtype=dtype),
            lambda: normal([size, 2], seed + 1, dtype=dtype),
        )

    for kernels, xla in both(draw, captured):
        assert kernels.shape == xla.shape
        np.testing.assert_allclose(kernels, xla, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_wide_floats_too(shape: Any) -> None:
    *equal, (kernels, xla) = both(
        lambda seed: tf.random.stateless_uniform(shape, seed, dtype=tf.float64),
        lambda seed: tf.nn.experimental.stateless_dropout(tf.ones(shape, tf.float64), 0.3, seed),
        lambda seed: tf.random.stateless_normal(shape, seed, dtype=tf.float64),
    )
    for ours, theirs in equal:
        assert ours.tobytes() == theirs.tobytes()
    assert kernels.dtype == xla.dtype == "float64"
    np.testing.assert_allclose(kernels, xla, rtol=1e-13, atol=1e-14)


def test_without_it_xla_draws_others() -> None:
    """Else there would be nothing to do here."""
    seed = tf.constant([3, 5], tf.int32)

    def draw(seed: Any) -> Any:
        return tf.random.stateless_uniform((64,), seed)

    xla = tf.function(draw, jit_compile=True, autograph=False)(seed)
    assert np.abs(draw(seed).numpy() - xla.numpy()).max() > 0.1


def test_a_named_algorithm_is_left_alone() -> None:
    seed = tf.constant([3, 5], tf.int32)
    with like_kernels():
        named = tf.random.stateless_uniform((4,), seed, alg="philox")
    assert named.numpy().tobytes() == tf.random.stateless_uniform((4,), seed).numpy().tobytes()


def test_patches_are_removed_afterwards() -> None:
    before = keras.random.uniform((3,), seed=1)
    with pytest.raises(ValueError, match="boom"), like_kernels():
        raise ValueError("boom")
    graph = tf.function(lambda: keras.random.uniform((3,), seed=1)).get_concrete_function().graph
    assert any(op.type == "StatelessRandomUniformV2" for op in graph.get_operations())
    np.testing.assert_array_equal(before, keras.random.uniform((3,), seed=1))
