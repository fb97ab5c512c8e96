"""A `tf.function` that a step calls is compiled with the step, and trains as the step does."""

from pathlib import Path
from typing import Any

import keras
import pytest
from classifier import CLASSES, FEATURES, Classifier, batches, dense
from keras import layers, ops

import treadle
from treadle.testing import Trace, agree, run_steps

pytestmark = pytest.mark.skipif(keras.config.backend() != "tensorflow", reason="of TensorFlow")

BATCHES = [*zip(*batches(5), strict=True)]


class Plain(Classifier):
    def __init__(self) -> None:
        super().__init__(
            [dense(), layers.Dropout(0.3, seed=1), layers.Dense(CLASSES)], keras.optimizers.Adam()
        )

    def update(self, x: Any, y: Any) -> Any:
        return super().train_step((x, y))["loss"] + ops.cast(treadle.step(), "float32")

    def train_step(self, batch: Any) -> Any:
        return {"loss": self.update(*batch)}


class Traced(Plain):
    def __init__(self) -> None:
        super().__init__()
        import tensorflow as tf

        self.update = tf.function(self.update)


class Branching(Plain):
    """Branches by a value, which TensorFlow converts in a `tf.function`."""

    def __init__(self) -> None:
        super().__init__()
        import tensorflow as tf

        def update(x: Any, y: Any) -> Any:
            if ops.sum(y) < 0:  # never, which TensorFlow does not know
                x = -x
            return Plain.update(self, x, y)

        self.update = tf.function(update)


class Declared(Plain):
    """Declares tensors for numbers, and returns a number."""

    def __init__(self) -> None:
        super().__init__()
        import tensorflow as tf

        def scaled(x: Any, factor: Any) -> Any:
            return x * tf.cast(factor, factor.dtype)

        number = tf.TensorSpec([], tf.float32)
        self.scaled = tf.function(scaled, [tf.TensorSpec([None, FEATURES]), number])
        self.one = tf.function(lambda: 1.0)

    def update(self, x: Any, y: Any) -> Any:
        return super().update(self.scaled(x, 2), y) * ops.cast(self.one(), self.one().dtype)


class Doubled(Plain):
    def update(self, x: Any, y: Any) -> Any:
        return super().update(2 * x, y)


class TracedModel(Plain):
    """Calls a model of Keras by a function, which draws a new mask in each step."""

    def __init__(self) -> None:
        super().__init__()
        import tensorflow as tf

        called = tf.function(self.model)
        self.call = lambda x: called(x, training=True)

    def update(self, x: Any, y: Any) -> Any:
        ops.sum(self.call(x))  # a draw of the Dropout
        return super().update(x, y)


class PlainModel(TracedModel):
    def __init__(self) -> None:
        super().__init__()
        self.call = lambda x: self.model(x, training=True)


def trained(make: type[Plain], execution: Any, data: Any = BATCHES) -> Trace:
    return run_steps(make(), data, treadle.Options(execution=execution), (3, 1, 1), start=0)


@pytest.mark.parametrize("execution", ["eager", "auto"])
def test_a_step_trains_in_a_function_of_its_own(execution: Any) -> None:
    expected, found = (trained(make, execution) for make in (Plain, Traced))
    assert "model/layers/0/kernel" in found.changed
    agree(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("execution", ["eager", pytest.param("auto", marks=pytest.mark.long)])
@pytest.mark.parametrize("make, same", [(Declared, Doubled), (TracedModel, PlainModel)])
def test_a_function_gets_and_returns_tensors_and_draws_anew(
    make: type[Plain], same: type[Plain], execution: Any
) -> None:
    agree(trained(make, execution), trained(same, execution), rtol=0, atol=0)


@pytest.mark.long
def test_branches_of_a_function_are_those_of_a_graph() -> None:
    agree(trained(Branching, "auto"), trained(Plain, "auto"))


@pytest.mark.long
def test_a_step_calls_a_function_of_a_saved_model(tmp_path: Path) -> None:
    import tensorflow as tf

    module = tf.Module()
    module.halved = tf.function(lambda x: x / 2, input_signature=[tf.TensorSpec([None, FEATURES])])
    tf.saved_model.save(module, str(tmp_path))
    halved = tf.saved_model.load(str(tmp_path)).halved

    class Halved(Plain):
        def train_step(self, batch: Any) -> Any:
            return super().train_step((halved(batch[0]), batch[1]))

    halves = [(x / 2, y) for x, y in BATCHES]
    agree(trained(Halved, "auto"), trained(Plain, "auto", halves), rtol=0, atol=0)
