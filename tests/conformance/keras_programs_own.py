"""Keras programs with steps, losses and metrics of their own; see `keras_programs`."""

from pathlib import Path
from typing import Any

import keras
from keras import layers, ops

from tests.conformance.keras_programs import BACKEND, LABELS, Case, X, Y

HALF = X[:32], Y[:32]


class Distiller(keras.Model):
    """A student that learns from a teacher by its own `compute_loss` and `compile`."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
        self.student = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
        self.teacher.trainable = False

    def compile(self, optimizer: Any, temperature: float, **more: Any) -> None:  # pyright: ignore
        super().compile(optimizer=optimizer, **more)
        self.temperature = temperature

    def call(self, x: Any) -> Any:
        return self.student(x)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **_: Any
    ) -> Any:
        soft = ops.softmax(self.teacher(x, training=False) / self.temperature)
        near = ops.softmax(y_pred / self.temperature)
        hard = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        return ops.mean(hard) + ops.mean(keras.losses.kl_divergence(soft, near))


def distillation(folder: Path) -> Case:
    """A frozen teacher in `compute_loss`, and a `compile` with one argument more."""
    model = Distiller()
    model.compile(keras.optimizers.Adam(0.01), 2.0, metrics=["accuracy"])
    return Case(model, {"x": X, "y": LABELS, "validation_data": (X[:32], LABELS[:32])})


class Contrastive(keras.Model):
    """Two encoders of dict batches without labels, whose loss compares all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.of_text, self.of_image = layers.Dense(4), layers.Dense(4)
        self.temperature = self.add_weight(shape=(), initializer="ones", name="temperature")
        self.hits = keras.metrics.Mean(name="hits")

    def call(self, x: Any) -> Any:
        text = ops.normalize(self.of_text(x["text"]))
        return ops.matmul(text, ops.transpose(ops.normalize(self.of_image(x["image"]))))

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **_: Any
    ) -> Any:
        truth = ops.arange(ops.shape(y_pred)[0])
        self.hits.update_state(ops.equal(ops.argmax(y_pred, axis=-1), ops.cast(truth, "int32")))
        scores = y_pred * self.temperature
        found = keras.losses.sparse_categorical_crossentropy(truth, scores, from_logits=True)
        return ops.mean(found)


def contrastive(folder: Path) -> Case:
    """Dict batches, two encoders, a weight of the model itself, a tracker in `compute_loss`."""
    model = Contrastive()
    model.compile(keras.optimizers.Adam(0.01))
    return Case(model, {"x": {"text": X[:64, :3], "image": X[:64]}})


class Scheduled(keras.Sequential):
    """A `train_step` that calls Keras' own and returns one value more."""

    def train_step(self, *arguments: Any) -> Any:
        found = super().train_step(*arguments)
        logs, rest = (found[0], found[1:]) if isinstance(found, tuple) else (found, ())
        logs = {**logs, "doubled": logs["loss"] * 2}
        return (logs, *rest) if rest else logs


def own_step_calls_super(folder: Path) -> Case:
    """`super().train_step`, an added value, and a schedule of the learning rate."""
    model = Scheduled([keras.Input((6,)), layers.Dense(4, activation="relu"), layers.Dense(1)])
    rate = keras.optimizers.schedules.CosineDecay(0.05, 10)
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse", metrics=["mae"])
    return Case(model, {"x": X, "y": Y})


class Renamed(keras.Model):
    """Returns the results of trackers under other names than theirs, as old examples do."""

    def __init__(self) -> None:
        super().__init__()
        self.network = layers.Dense(1)
        self.total = keras.metrics.Mean(name="total_loss")
        self.penalty = keras.metrics.Mean(name="penalty")

    def call(self, x: Any) -> Any:
        return self.network(x)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **_: Any
    ) -> Any:
        error, penalty = ops.mean(ops.square(y - y_pred)), ops.mean(ops.abs(y_pred))
        self.total.update_state(error + penalty)
        self.penalty.update_state(penalty)
        return error + penalty

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return {"loss": self.total.result(), "penalty": self.penalty.result()}


def renamed_trackers(folder: Path) -> Case:
    """Names of the step's logs that differ from those of the metrics: the step's names win."""
    model = Renamed()
    model.compile(keras.optimizers.SGD(0.05))
    return Case(model, {"x": X, "y": Y, "validation_data": HALF})


class Subset(Renamed):
    """Returns some of its metrics only."""

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return {"penalty": self.penalty.result()}


def subset_of_metrics(folder: Path) -> Case:
    """A step whose logs name some of the metrics."""
    model = Subset()
    model.compile(keras.optimizers.SGD(0.05))
    return Case(model, {"x": X, "y": Y, "validation_data": HALF})


class Accumulating(keras.Model):
    """Sums gradients of two batches in variables of its own; not on JAX, whose state it lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.network = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
        self.sums = [self.add_weight(shape=v.shape, trainable=False) for v in self.weights_of()]
        self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)
        self.built = True

    def weights_of(self) -> list[Any]:
        return self.network.trainable_variables

    def call(self, x: Any) -> Any:
        return self.network(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        if BACKEND == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(self(x, training=True) - y))
            grads = tape.gradient(loss, self.weights_of())
        else:
            self.zero_grad()
            loss = ops.mean(ops.square(self(x, training=True) - y))
            loss.backward()
            grads = [v.value.grad for v in self.weights_of()]
            loss = loss.detach()
        self.count.assign_add(1)
        full = ops.cast(self.count % 2 == 0, "float32")
        sums = [total + grad for total, grad in zip(self.sums, grads, strict=True)]
        for variable, total in zip(self.weights_of(), sums, strict=True):
            variable.assign_sub(0.05 * full * total)
        for held, total in zip(self.sums, sums, strict=True):
            held.assign(total * (1 - full))
        return {"loss": loss}


def accumulation_by_hand(folder: Path) -> Case:
    """Gradients summed in variables over two batches."""
    model = Accumulating()
    model.compile("sgd")
    return Case(model, {"x": X[:64], "y": Y[:64], "batch_size": 8})


class Penalized(keras.Model):
    """A critic with a penalty on gradients of its inputs; not on JAX."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = keras.Sequential(
            [keras.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(1)]
        )
        self.tracker = keras.metrics.Mean(name="loss")
        self.built = True

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def train_step(self, x: Any) -> Any:
        weights = self.critic.trainable_variables
        if BACKEND == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    score = self.critic(x, training=True)
                slopes = inner.gradient(score, x)
                loss = ops.mean(score) + ops.mean((ops.norm(slopes, axis=-1) - 1.0) ** 2)
            grads = tape.gradient(loss, weights)
            self.optimizer.apply(grads, weights)
        else:
            import torch

            self.zero_grad()
            x = x.detach().requires_grad_(True)
            score = self.critic(x, training=True)
            (slopes,) = torch.autograd.grad(score.sum(), x, create_graph=True)
            loss = ops.mean(score) + ops.mean((ops.norm(slopes, axis=-1) - 1.0) ** 2)
            loss.backward()
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in weights], weights)
            loss = loss.detach()
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def gradient_penalty(folder: Path) -> Case:
    """Gradients of gradients in the model's own step."""
    model = Penalized()
    model.compile(keras.optimizers.Adam(0.01))
    return Case(model, {"x": X[:64]})


class PythonState(keras.Sequential):
    """A step that changes a Python attribute, which only works where it runs as Python."""

    calls = 0

    def train_step(self, *arguments: Any) -> Any:
        self.calls += 1
        found = super().train_step(*arguments)
        logs, rest = (found[0], found[1:]) if isinstance(found, tuple) else (found, ())
        logs = {**logs, "calls": ops.convert_to_tensor(float(self.calls))}
        return (logs, *rest) if rest else logs


def eager_with_python_state(folder: Path) -> Case:
    """`run_eagerly=True`, and a number of Python that each step changes."""
    model = PythonState([keras.Input((6,)), layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    return Case(model, {"x": X, "y": Y})


class Sampled(keras.layers.Layer):
    """Adds the mean of its activations to the loss, and noise in training."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = layers.GaussianNoise(0.1, seed=9)

    def call(self, x: Any, training: bool | None = None) -> Any:
        self.add_loss(0.01 * ops.mean(ops.abs(x)))
        return self.noise(x, training=training)


def lazily_built(folder: Path) -> Case:
    """A subclass whose layers are built by the first batch, with losses of layers."""

    class Lazy(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            regularizer = keras.regularizers.L1(0.001)
            self.hidden = layers.Dense(8, "relu", activity_regularizer=regularizer)
            self.sampled, self.last = Sampled(), layers.Dense(1)

        def call(self, x: Any, training: bool | None = None) -> Any:
            return self.last(self.sampled(self.hidden(x), training=training))

    model = Lazy()
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return Case(model, {"x": X, "y": Y, "validation_data": HALF})


CASES = {
    make.__name__: make
    for make in (
        *(distillation, contrastive, own_step_calls_super, renamed_trackers, subset_of_metrics),
        *(accumulation_by_hand, gradient_penalty, eager_with_python_state, lazily_built),
    )
}
