"""What a program in TensorFlow holds and returns: odd values work, or are named before training."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import treadle
from treadle.errors import ConfigurationError, StateError

if keras.config.backend() != "tensorflow":
    pytest.skip("programs written in TensorFlow", allow_module_level=True)

import tensorflow as tf
from by_hand import BATCHES, Program, equals_by_hand, values
from test_tensorflow_programs import accumulation


@pytest.mark.parametrize(
    "draw",
    [
        lambda size, seed: tf.random.stateless_truncated_normal([size, 2], seed),
        lambda size, seed: tf.random.stateless_categorical(tf.zeros([size, 5]), 2, seed),
    ],
    ids=["truncated", "categorical"],
)
def test_draws_for_which_xla_has_other_methods_are_not_compiled_by_it(draw: Any) -> None:
    def step(x: Any, y: Any) -> Any:
        return tf.reduce_sum(draw(tf.shape(x)[0], tf.stack([y[0], 3])))

    with treadle.Loop(treadle.task(step), console=False) as loop:
        history = loop.fit(BATCHES, epochs=1)
    by_hand = [step(tf.constant(x), tf.constant(y)) for x, y in BATCHES]
    np.testing.assert_allclose(history.steps("loss"), by_hand, rtol=1e-6)
    assert "XLA draws other numbers for Stateless" in loop.plan


def test_a_branch_that_builds_its_optimizer_resumes(tmp_path: Path) -> None:
    """The dry run finds the slots, so that they can be restored before the first step."""

    def trained(directory: Path, stop: int = 0) -> dict[str, Any]:
        step, state = accumulation()
        with treadle.Loop(treadle.task(step, **state), directory, console=False) as loop:
            for _ in loop.epochs(1):
                for logs in loop.steps(BATCHES, every="1 step"):
                    if logs.step == stop:
                        loop.save()
                        raise OSError("killed")
        return values(step, state)

    straight = trained(tmp_path / "straight")
    assert any(path.startswith("optimizer/velocities/model/") for path in straight)
    with pytest.raises(OSError, match="killed"):
        trained(tmp_path / "cut", stop=1)
    resumed = trained(tmp_path / "cut")
    for path, value in straight.items():
        assert resumed[path].tobytes() == value.tobytes(), path


def refused(error: type[Exception], step: Any, directory: Any = None, **state: Any) -> str:
    with pytest.raises(error) as caught:
        treadle.Loop(treadle.task(step, **state), directory, console=False).fit(BATCHES, epochs=1)
    return str(caught.value)


def test_a_variable_that_a_branch_creates_is_named() -> None:
    module, count = tf.Module(), tf.Variable(0, trainable=False)
    module.w = None

    def late() -> Any:
        if module.w is None:
            module.w = tf.Variable(1.0, name="late")
        return module.w + 0.0

    def step(x: Any, y: Any) -> Any:
        return tf.cond(tf.equal(count.assign_add(1) % 2, 0), late, lambda: 0.0)

    assert refused(StateError, step, module=module, count=count) == (
        "train_step creates cond/late:0 in a branch that the first batch did not take: create "
        "variables before the first step"
    )


def test_a_variable_of_a_strategy_is_named() -> None:
    with tf.distribute.MirroredStrategy(["cpu:0"]).scope():
        w = tf.Variable(1.0)
    assert refused(ConfigurationError, lambda x, y: w.assign_add(1.0) + 0.0, w=w) == (
        "w was created under tf.distribute.MirroredStrategy, but a loop trains on one device: "
        "create the task, and train, outside of strategy.scope(). Several devices train with "
        "treadle.setup(devices=…) on JAX, or in several processes (treadle launch)"
    )


def test_a_variable_of_strings_is_refused_where_there_is_a_directory(tmp_path: Path) -> None:
    word = tf.Variable("a")

    def step(x: Any, y: Any) -> Any:
        word.assign(word + "b")
        return tf.reduce_sum(x)

    assert refused(StateError, step, tmp_path / "run", word=word) == (
        "word is a variable of dtype string, and a run directory can only hold numbers, so that "
        "the run could not resume: keep the number of a string in a list that is an attribute of "
        "the task, or train without a directory"
    )
    assert not (tmp_path / "run").exists()
    treadle.Loop(treadle.task(step, word=word), console=False).fit(BATCHES, epochs=1)
    assert word.numpy() == b"abbbbb"


def test_a_scalar_of_unknown_rank_and_a_single_bfloat16(tmp_path: Path) -> None:
    scale = tf.Variable(tf.constant(1.0, tf.bfloat16))

    def make() -> Program:
        def step(x: Any, y: Any) -> Any:
            scale.assign_add(1.0)
            return tf.py_function(tf.reduce_sum, [x * tf.cast(scale, x.dtype)], tf.float32)

        scale.assign(1.0)
        return step, {"scale": scale}

    equals_by_hand(make)
    step, state = make()
    with treadle.Loop(treadle.task(step, **state), tmp_path, console=False) as loop:
        loop.fit(BATCHES, epochs=1)
    assert treadle.load_run(tmp_path).variables()["scale"] == 6.0
