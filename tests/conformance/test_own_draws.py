"""TensorFlow's own random functions in a step draw from a seed that checkpoints hold."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from executions import long_to_compile

import treadle
from tests.dying import Dying
from treadle import data
from treadle.core import keras_internals

if keras.config.backend() != "tensorflow":
    pytest.skip("TensorFlow's own random functions", allow_module_level=True)

import tensorflow as tf

ROWS, BATCH = 32, 8


def source() -> Any:
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    return data.from_arrays(x, x[:, :1], batch_size=BATCH)


def everywhere(x: Any) -> Any:
    """Draw by every function, in branches and in loops."""
    x = x + tf.random.normal(tf.shape(x)) + tf.random.uniform([4]) + tf.random.truncated_normal([1])
    x = x + tf.cast(tf.random.uniform([], maxval=9, dtype=tf.int32), tf.float32)
    x = tf.nn.dropout(tf.random.shuffle(x), 0.2)
    x = x + tf.cast(tf.random.categorical(tf.zeros([1, 5]), 4), tf.float32)
    x = x + tf.raw_ops.RandomUniform(shape=[4], dtype=tf.float32)
    x = x + tf.random.gamma([4], 2.0, seed=4) + tf.random.poisson([4], 1.5)
    x = tf.map_fn(lambda row: row + tf.random.normal([4]), x)
    x = tf.cond(tf.random.uniform([]) > 0.5, lambda: x + tf.random.normal([4]), lambda: -x)
    _, x = tf.while_loop(
        lambda i, _: i < 3, lambda i, x: (i + 1, x + tf.random.normal([4], seed=2)), (0, x)
    )
    images = tf.image.random_flip_left_right(tf.reshape(x, [-1, 2, 2, 1]))
    return tf.reshape(tf.image.random_brightness(images, 0.2), [-1, 4])


def for_xla(x: Any) -> Any:
    """Draw by functions that XLA compiles."""
    x = tf.nn.dropout(x + tf.random.normal(x.shape), 0.2)
    image = tf.image.random_flip_left_right(tf.reshape(x, [-1, 2, 2, 1]))
    return tf.reshape(image, [-1, 4]) + tf.random.uniform([4])


class Drawing(treadle.Task):
    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self.model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.SGD(1e-3)
        self.draw = draw

    def train_step(self, batch: Any) -> Any:
        x, y = batch

        def objective() -> Any:
            drawn = self.draw(x)
            error = self.model(tf.nn.dropout(drawn, 0.1)) - y
            return tf.reduce_mean(error**2), tf.reduce_sum(drawn)

        loss, drawn = treadle.minimize(objective, self.model, self.optimizer)
        return {"loss": loss, "drawn": drawn}

    def eval_step(self, batch: Any) -> Any:
        return {"drawn": tf.reduce_sum(self.draw(batch[0]))}

    def predict_step(self, batch: Any) -> Any:
        noise = tf.map_fn(lambda row: row + tf.random.normal([4]), batch)
        return self.model(tf.nn.dropout(batch, 0.5) + 0 * noise)


def run(
    draw: Callable[[Any], Any],
    directory: Path | None = None,
    hooks: Any = (),
    seed: Callable[[], None] = lambda: keras.utils.set_random_seed(3),
    trains_only: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train for two epochs, validate and predict, and return all numbers that were drawn."""
    seed()
    options = treadle.Options(**options)
    loop = treadle.Loop(Drawing(draw), directory, hooks=list(hooks), options=options, console=False)
    with loop:
        history = loop.fit(source(), validation=None if trains_only else source(), epochs=2)
        steps = {name: history.steps(name) for name in ("loss", "drawn")}
        if trains_only:
            return steps
        predicted = loop.predict(data.from_arrays(np.ones((ROWS, 4), "float32"), batch_size=BATCH))
    validated = [record["val_drawn"] for record in history.epochs]
    return {**steps, "val_drawn": validated, "predicted": predicted}


def assert_equal(a: dict[str, Any], b: dict[str, Any], exact: bool = True) -> None:
    for name, values in a.items():
        tolerance = {"rtol": 0} if exact else {"rtol": 1e-3, "atol": 1e-3}
        np.testing.assert_allclose(b[name], values, **tolerance, err_msg=name)


@cache
def in_windows() -> dict[str, Any]:
    return run(everywhere, jit=False)


@long_to_compile
def test_windows_single_steps_and_eager_steps_draw_the_same_numbers() -> None:
    windows = in_windows()
    assert len(set(windows["drawn"])) == 8
    assert np.std(windows["predicted"]) > 0
    trained = {name: windows[name] for name in ("loss", "drawn")}
    assert_equal(trained, run(everywhere, jit=False, window=3, trains_only=True))
    assert_equal(windows, run(everywhere, jit=False, fused=False))
    assert_equal(trained, run(everywhere, execution="eager", trains_only=True), exact=False)


def test_xla_draws_the_same_numbers() -> None:
    assert_equal(run(for_xla, jit=False), run(for_xla, jit=True), exact=False)


@pytest.mark.parametrize("at", [4, *(pytest.param(x, marks=pytest.mark.long) for x in (2, 7))])
def test_a_killed_run_resumes_with_the_numbers_that_it_would_have_drawn(
    tmp_path: Path, at: int
) -> None:
    every_step = treadle.hooks.Checkpoint("1 step")
    with pytest.raises(OSError, match="killed"):
        run(everywhere, tmp_path, [every_step, Dying(at)], jit=False)
    resumed = run(everywhere, tmp_path, [every_step], seed=lambda: None, jit=False)
    whole = in_windows()
    assert_equal({name: whole[name] for name in ("loss", "drawn")}, resumed)


def test_each_iteration_and_each_draw_gets_other_numbers() -> None:
    def drawn(x: Any) -> Any:
        rows = tf.map_fn(lambda row: tf.random.normal([]), x)
        both = tf.stack([tf.random.normal([]), tf.random.normal([])])
        seeded = tf.stack([tf.random.normal([], seed=1), tf.random.normal([], seed=1)])
        numbers = tf.concat([rows, both, seeded], 0)
        unique = tf.size(tf.unique(numbers)[0])
        return tf.zeros_like(x) + tf.cast(unique, tf.float32)

    assert set(run(drawn, trains_only=True, jit=False)["drawn"]) == {12.0 * BATCH * 4}


@long_to_compile
@pytest.mark.parametrize("seeded_by", ["tf.random.set_seed", "operations"])
def test_the_seeds_of_tensorflow_make_a_run_repeatable(seeded_by: str) -> None:
    def seed() -> None:
        set_attribute = keras_internals.global_state.set_global_attribute
        set_attribute("global_random_seed", None)
        set_attribute("global_seed_generator", None)
        tf.random.set_seed(None if seeded_by == "operations" else 5)

    def draw(x: Any) -> Any:
        return x * 0 + tf.random.normal([4], seed=7 if seeded_by == "operations" else None)

    first, again = (run(draw, seed=seed, trains_only=True) for _ in range(2))
    assert_equal({"drawn": first["drawn"]}, again)
    assert len(set(first["drawn"])) == 8
    other = run(draw, seed=lambda: keras.utils.set_random_seed(9), trains_only=True)
    assert not np.array_equal(other["drawn"], first["drawn"])


@pytest.mark.parametrize("execution", ["auto", "eager"])
def test_operations_that_count_in_the_kernel_draw_different_numbers(execution: str) -> None:
    def sampled() -> Any:
        classes = tf.constant([[1]], tf.int64)
        found = tf.random.log_uniform_candidate_sampler(classes, 1, 5, True, 99)
        return tf.cast(found.sampled_candidates, tf.float32)

    def draw(x: Any) -> Any:
        normal = tf.vectorized_map(lambda row: tf.random.normal([4]) - tf.random.normal([4]), x)
        samples = sampled() - sampled()
        distinct = tf.reduce_any(normal != 0) & tf.reduce_any(samples != 0)
        return tf.zeros_like(x) + tf.cast(distinct, tf.float32)

    assert set(run(draw, trains_only=True, execution=execution)["drawn"]) == {BATCH * 4.0}


def test_a_function_of_vectorized_map_may_draw() -> None:
    def draw(x: Any) -> Any:
        return tf.vectorized_map(lambda row: row + tf.random.normal([4]), x)

    assert len(set(run(draw, trains_only=True, jit=False)["drawn"])) == 8
