"""Steps written against TensorFlow or PyTorch themselves work as they stand."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from classifier import CLASSES, FEATURES, ROWS, Classifier, batches, cross_entropy, dense, head
from executions import long_to_compile

import treadle
from treadle.errors import StateError
from treadle.testing import agree, compiled_equals_eager, fused_equals_unfused, run_steps

BACKEND = keras.config.backend()
on_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="written in TensorFlow")
on_torch = pytest.mark.skipif(BACKEND != "torch", reason="written in PyTorch")
on_both = pytest.mark.skipif(BACKEND == "jax", reason="JAX has no variables of its own")

X, Y = batches(5)
BATCHES = list(zip(X, Y, strict=True))

if BACKEND == "tensorflow":
    import tensorflow as tf

    class Perceptron(tf.Module):
        """Weights as a tutorial writes them: bare variables, found at the first call."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = [DenseModule(FEATURES, 5), DenseModule(5, CLASSES)]
            self.scale = tf.Variable(1.0, name="scale")

        def __call__(self, x: Any) -> Any:
            return self.layers[1](tf.tanh(self.layers[0](x))) * self.scale

    class DenseModule(tf.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            rng = np.random.default_rng(inputs)
            self.w = tf.Variable(rng.normal(size=(inputs, outputs)).astype("float32"))
            self.b = tf.Variable(tf.zeros([outputs]))

        def __call__(self, x: Any) -> Any:
            return x @ self.w + self.b

    class LazyModule(tf.Module):
        """Makes its variable at the first call."""

        def __init__(self) -> None:
            super().__init__()
            self.w = None

        def __call__(self, x: Any) -> Any:
            if self.w is None:
                self.w = tf.Variable(tf.ones([x.shape[-1], CLASSES]))
            return x @ self.w

    class Modules(treadle.Task):
        """`tf.Module`, `tf.GradientTape`, and a Keras optimizer."""

        def __init__(self, model: Any = None, optimizer: Any = None) -> None:
            self.model = model or Perceptron()
            self.optimizer = optimizer or keras.optimizers.Adam(1e-2)
            self.seen = tf.Variable(0, dtype=tf.int64, trainable=False)

        def train_step(self, batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(
                    tf.nn.sparse_softmax_cross_entropy_with_logits(y, self.model(x))
                )
            variables = self.model.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            self.seen.assign_add(tf.shape(x, out_type=tf.int64)[0])
            return {"loss": loss}

    class Bare(treadle.Task):
        """Two bare variables and a function; descent by hand."""

        def __init__(self) -> None:
            self.w = tf.Variable(tf.zeros([FEATURES, CLASSES]))
            self.b = tf.Variable(tf.zeros([CLASSES]))

        def train_step(self, batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                logits = x @ self.w + self.b
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
            for variable, slope in zip(
                (self.w, self.b), tape.gradient(loss, (self.w, self.b)), strict=True
            ):
                variable.assign_sub(0.1 * slope)
            return {"loss": loss}

    class Failing(Bare):
        def train_step(self, batch: Any) -> Any:
            super().train_step(batch)
            raise OSError("no camera")

        def left(self) -> list[str]:
            """Return the variables that were changed."""
            return [name for name in ("w", "b") if getattr(self, name).numpy().any()]


if BACKEND == "torch":
    import torch

    class Backward(Classifier):
        """`loss.backward()` and a Keras optimizer, as Keras' guide for PyTorch writes them."""

        def __init__(self, optimizer: Any = None) -> None:
            layers = [dense(), keras.layers.BatchNormalization(), head()]
            super().__init__(layers, optimizer or keras.optimizers.Adam(1e-2))

        def train_step(self, batch: Any) -> Any:
            x, y = batch
            logits = self.model(x, training=True)
            loss = self.loss(y, logits)
            self.model.zero_grad()
            loss.backward()
            variables = list(self.model.trainable_weights)
            gradients = [v.value.grad for v in variables]
            with torch.no_grad():
                self.optimizer.apply(gradients, variables)
            self.accuracy.update_state(y, logits)
            return {"loss": loss}

    class Failing(Backward):
        def __init__(self) -> None:
            super().__init__()
            self.model(X[0])  # has its weights before the step fails

        def train_step(self, batch: Any) -> Any:
            super().train_step(batch)
            raise OSError("no camera")

        def left(self) -> list[str]:
            """Return the variables that have gradients, and the layers that keep parameters."""
            weights = [v.path for v in self.model.variables if v.value.grad is not None]
            layers = [self.model, *self.model.layers]
            return weights + [x.name for x in layers if "_torch_params" in x._modules]


def native_tasks() -> list[Callable[[], treadle.Task]]:
    if BACKEND == "tensorflow":
        return [Modules, Bare, lambda: Modules(LazyModule())]
    return [Backward] if BACKEND == "torch" else []


@long_to_compile
@on_both
@pytest.mark.parametrize("make", native_tasks(), ids=lambda make: make.__name__)
def test_native_steps_keep_treadles_guarantees(make: Any) -> None:
    compiled_equals_eager(make, BATCHES)
    fused_equals_unfused(make, BATCHES)


@on_tensorflow
def test_state_of_modules_is_found_and_named() -> None:
    trace = run_steps(Modules(), BATCHES)
    assert set(trace.state) == {
        "model/layers/0/w",
        "model/layers/0/b",
        "model/layers/1/w",
        "model/layers/1/b",
        "model/scale",
        "seen",
        "optimizer/iterations",
        "optimizer/learning_rate",
        *(
            f"optimizer/{slot}/model/{name}"
            for slot in ("momentums", "velocities")
            for name in ("layers/0/w", "layers/0/b", "layers/1/w", "layers/1/b", "scale")
        ),
        "random/keras",
    }
    assert set(trace.state) - trace.changed == {"optimizer/learning_rate", "random/keras"}
    assert trace.state["seen"] == len(BATCHES) * ROWS
    assert trace.state["seen"].dtype == np.int64


@on_tensorflow
def test_a_lazy_module_is_built_and_starts_where_it_was_made() -> None:
    trace = run_steps(Modules(LazyModule()), BATCHES)
    assert (trace.start["model/w"] == 1).all()
    assert "model/w" in trace.changed


@on_tensorflow
def test_a_native_step_equals_its_portable_form() -> None:
    class Portable(Modules):
        def train_step(self, batch: Any) -> Any:
            x, y = batch

            def objective() -> Any:
                return cross_entropy()(y, self.model(x))

            variables = self.model.trainable_variables
            loss, grads = treadle.gradients(objective, variables)
            self.optimizer.apply(grads, variables)
            self.seen.assign_add(tf.shape(x, out_type=tf.int64)[0])
            return {"loss": loss}

    agree(run_steps(Portable(), BATCHES), run_steps(Modules(), BATCHES), rtol=1e-5)


@on_tensorflow
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("execution", ["compiled", "eager"])
def test_a_hidden_tf_variable_is_named(execution: str, traced: bool) -> None:
    hidden = tf.Variable(1.0, name="hidden")
    read = tf.function(lambda: hidden + 0.0).get_concrete_function() if traced else lambda: hidden

    class Hides(Bare):
        def train_step(self, batch: Any) -> Any:
            logs = super().train_step(batch)
            return {"loss": logs["loss"] * read()}

    with pytest.raises(StateError, match=r"train_step uses hidden.*no attribute of the task reach"):
        run_steps(Hides(), BATCHES, treadle.Options(execution=execution))


@on_torch
def test_backward_equals_its_portable_form() -> None:
    def portable() -> Classifier:
        layers = [dense(), keras.layers.BatchNormalization(), head()]
        return Classifier(layers, keras.optimizers.Adam(1e-2))

    traces = [run_steps(make(), BATCHES, start=0) for make in (Backward, portable)]
    agree(*traces, rtol=1e-6)
    assert traces[0].changed == traces[1].changed


@on_both
def test_a_native_step_that_fails_while_it_is_built_leaves_nothing_behind() -> None:
    task = Failing()
    with pytest.raises(OSError, match="no camera"):
        treadle.Loop(task, console=False).fit(BATCHES, epochs=1)
    assert task.left() == []
