"""Half precision: what a run learns and records, and what is refused."""

from typing import Any

import keras
import numpy as np
import pytest
from classifier import CLASSES, Classifier, dense, head
from executions import long_to_compile
from half_precision import (
    BATCHES,
    clean,  # noqa: F401 - a fixture that every test uses
    full,
    half,
    loop_of,
    source,
)
from keras import ops

import treadle
from treadle.errors import ConfigurationError, StateError, StepError
from treadle.testing import run_steps
from treadle.testing.trace import same_bits

BACKEND = keras.config.backend()


@long_to_compile
def test_validation_knows_nothing_of_the_scale() -> None:
    def make() -> Any:
        return Classifier([dense(), keras.layers.BatchNormalization(), head()])

    with loop_of(half(make)) as loop:
        history = loop.fit(source(), validation=source(), epochs=2)
    assert {name for name in history.names() if "scale" in name or "undone" in name} == {
        "loss_scale",
        "undone",
    }
    assert float(loop.task.loss_scale.scale.numpy()) == 2.0**15
    assert int(loop.task.loss_scale.finite_steps) == 12
    assert history.steps("loss").dtype == np.float32


@long_to_compile
def test_gradients_in_an_evaluation_leave_the_scale_alone() -> None:
    class Attacked(Classifier):
        def eval_step(self, batch: Any) -> Any:
            x, y = batch
            loss, _ = treadle.input_gradients(lambda x: 1e30 * self.loss(y, self.model(x)), x)
            return {"loss": loss}

    with loop_of(half(lambda: Attacked([dense(), head()]))) as loop:
        loop.fit(source(), steps=2)
        before = loop.state.arrays()
        loop.evaluate(source())
        assert all(same_bits(before[path], x) for path, x in loop.state.arrays().items())
    assert before["loss_scale/finite_steps"] == 2


def test_extra_losses_of_narrow_layers_are_added() -> None:
    class Activity(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            self.add_loss(ops.sum(ops.abs(inputs)))
            return inputs

    def make() -> Any:
        model = keras.Sequential([dense(), Activity(), head()])
        return treadle.Supervised(model, "sparse_categorical_crossentropy", "sgd")

    narrow, wide = (run_steps(make_(make), BATCHES[:1]) for make_ in (half, full))
    np.testing.assert_allclose(narrow.values["loss"], wide.values["loss"], rtol=1e-2)


def test_some_layers_in_float16_are_enough() -> None:
    keras.utils.set_random_seed(0)
    task = Classifier([dense(), dense(dtype="mixed_float16"), head()])
    trace = run_steps(task, BATCHES, windows=(7,))
    assert trace.values["loss_scale"].tolist() == [2.0**15] * 7
    assert (
        "loss_scale" not in run_steps(full(lambda: Classifier([dense(), head()])), BATCHES).values
    )


# Errors


def test_weights_in_float16_are_refused() -> None:
    task = Classifier([dense(dtype="float16"), keras.layers.Dense(CLASSES, dtype="float32")])
    with pytest.raises(
        ConfigurationError, match=r"keeps its weights in float16.*use mixed_float16"
    ):
        loop_of(task).fit(source(), steps=1)
    frozen = Classifier([dense(dtype="float16"), keras.layers.Dense(CLASSES, dtype="float32")])
    frozen.model.layers[0].trainable = False
    with loop_of(frozen) as loop:
        loop.fit(source(), steps=1)


@pytest.mark.skipif(BACKEND == "jax", reason="JAX has no native steps")
def test_a_native_step_in_float16_is_refused() -> None:
    class Native(Classifier):
        def train_step(self, batch: Any) -> Any:
            x, y = batch
            if BACKEND == "tensorflow":
                import tensorflow as tf

                with tf.GradientTape() as tape:
                    loss = self.loss(y, self.model(x))
                grads = tape.gradient(loss, self.model.trainable_weights)
            else:
                loss = self.loss(y, self.model(x))
                loss.backward()
                grads = [v.value.grad for v in self.model.trainable_weights]
            self.optimizer.apply(grads, self.model.trainable_weights)
            return {"loss": loss}

    why = r"computes in float16.*train_step differentiates without Treadle.*use treadle.gradients"
    with pytest.raises(ConfigurationError, match=why):
        loop_of(half(lambda: Native([dense(), head()]))).fit(source(), steps=1)


def test_names_that_loss_scaling_needs() -> None:
    task = half(lambda: Classifier([dense(), head()]))
    task.loss_scale = 1024.0
    with pytest.raises(
        StateError, match=r"'loss_scale' must be a treadle.LossScale.*1024.0.*rename"
    ):
        loop_of(task).fit(source(), steps=1)

    class Own(Classifier):
        def train_step(self, batch: Any) -> Any:
            return {"undone": super().train_step(batch)["loss"]}

    with pytest.raises(StepError, match="train_step returned 'undone', but loss scaling logs"):
        loop_of(half(lambda: Own([dense(), head()]))).fit(source(), steps=1)

    class Measured(Classifier):
        def __init__(self) -> None:
            super().__init__([dense(), head()])
            self.undone = self.accuracy
            del self.accuracy

        def train_step(self, batch: Any) -> Any:
            x, y = batch
            self.undone.update_state(y, self.model(x))
            treadle.minimize(lambda: self.loss(y, self.model(x)), self.model, self.optimizer)

    with pytest.raises(StepError, match="returns 'undone', and a metric of the task has this name"):
        loop_of(half(Measured)).fit(source(), steps=1)


@pytest.mark.parametrize(
    "wrong", [{"initial": 0.0}, {"initial": float("nan")}, {"growth_steps": 0}]
)
def test_invalid_loss_scales(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="LossScale needs a positive scale and at least 1"):
        treadle.LossScale(**wrong)
