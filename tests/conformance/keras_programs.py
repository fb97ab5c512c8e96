"""Keras programs of public kinds: each makes a compiled model, and the arguments of its `fit`.

`fit` and `treadle.fit` train one model each, from the same seed and without shuffling.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers, ops

BACKEND = keras.config.backend()
rng = np.random.default_rng(0)
X = rng.normal(size=(70, 6)).astype("float32")
Y = (X[:, :1] + 0.3 * rng.normal(size=(70, 1)) > 0).astype("float32")
LABELS = rng.integers(0, 3, size=70)
WEIGHTS = rng.uniform(0.5, 2.0, size=70).astype("float32")


@dataclass
class Case:
    """A compiled model and the arguments of its `fit`."""

    model: Any
    arguments: dict[str, Any] = field(default_factory=dict)


def compiled(folder: Path) -> Case:
    """Weight decay, normalization, dropout, class weights and a validation split."""
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="relu", kernel_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Dropout(0.3, seed=4),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    metrics = ["accuracy", keras.metrics.AUC(name="auc")]
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=metrics)
    weights = {0: 1.0, 1: 3.0}
    return Case(model, {"x": X, "y": Y, "class_weight": weights, "validation_split": 0.3})


def several_outputs(folder: Path) -> Case:
    """Two outputs with loss weights, weighted metrics and sample weights."""
    inputs = keras.Input((6,))
    hidden = layers.Dense(8, activation="tanh")(inputs)
    outputs = {
        "kind": layers.Dense(3, name="kind")(hidden),
        "size": layers.Dense(1, name="size")(hidden),
    }
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.RMSprop(0.01),
        loss={"kind": keras.losses.SparseCategoricalCrossentropy(True), "size": "mse"},
        loss_weights={"kind": 1.0, "size": 0.3},
        metrics={"kind": ["accuracy"]},
        weighted_metrics={"size": ["mae"]},
    )
    y = {"kind": LABELS, "size": Y}
    weights = {"kind": WEIGHTS, "size": WEIGHTS[::-1].copy()}
    full = {"x": X[:64], "y": {k: v[:64] for k, v in y.items()}}
    full["sample_weight"] = {k: v[:64] for k, v in weights.items()}
    return Case(model, {**full, "validation_data": (X[:32], {k: v[:32] for k, v in y.items()})})


class Autoencoder(keras.Model):
    """A variational autoencoder whose losses are `add_loss` and trackers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = layers.Dense(4)
        self.decoder = layers.Dense(6)
        self.seeds = keras.random.SeedGenerator(5)
        self.divergence = keras.metrics.Mean(name="divergence")

    def call(self, x: Any) -> Any:
        mean, spread = ops.split(self.encoder(x), 2, axis=-1)
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        kl = -0.5 * ops.mean(1 + spread - ops.square(mean) - ops.exp(spread))
        self.add_loss(0.1 * kl)
        return self.decoder(mean + ops.exp(0.5 * spread) * noise)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **_: Any
    ) -> Any:
        error = ops.mean(ops.square(x - y_pred))
        self.divergence.update_state(sum(self.losses))
        return error + sum(self.losses)


def autoencoder(folder: Path) -> Case:
    """A model with `add_loss`, its own `compute_loss`, a tracker and random numbers."""
    model = Autoencoder()
    model.compile(keras.optimizers.Adam(0.01))
    return Case(model, {"x": X})


class Clipped(keras.Model):
    """Its own `train_step` on each backend, with a tracker and a `metrics` property."""

    def __init__(self) -> None:
        super().__init__()
        self.network = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(1)])
        self.tracker = keras.metrics.Mean(name="loss")
        self.error = keras.metrics.MeanAbsoluteError(name="mae")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker, self.error]

    def call(self, x: Any) -> Any:
        return self.network(x)

    if BACKEND == "jax":

        def train_step(self, state: Any, data: Any) -> Any:  # pyright: ignore
            import jax

            x, y = data
            weights, others, slots, metrics = state

            def objective(weights: Any, others: Any) -> Any:
                predicted, others = self.stateless_call(weights, others, x)
                return ops.mean(ops.square(predicted - y)), (predicted, others)

            run = jax.value_and_grad(objective, has_aux=True)
            (loss, (predicted, others)), grads = run(weights, others)
            grads = [ops.clip(g, -0.1, 0.1) for g in grads]
            weights, slots = self.optimizer.stateless_apply(slots, grads, weights)
            first = len(self.tracker.variables)
            tracked = self.tracker.stateless_update_state(metrics[:first], loss)
            errors = self.error.stateless_update_state(metrics[first:], y, predicted)
            logs = {
                "loss": self.tracker.stateless_result(tracked),
                "mae": self.error.stateless_result(errors),
                "largest": ops.max(ops.abs(predicted)),
            }
            return logs, (weights, others, slots, [*tracked, *errors])

        def test_step(self, state: Any, data: Any) -> Any:  # pyright: ignore
            x, y = data
            weights, others, metrics = state
            predicted, others = self.stateless_call(weights, others, x)
            first = len(self.tracker.variables)
            errors = self.error.stateless_update_state(metrics[first:], y, predicted)
            logs = {"mae": self.error.stateless_result(errors)}
            return logs, (weights, others, [*metrics[:first], *errors])

    elif BACKEND == "tensorflow":

        def train_step(self, data: Any) -> Any:
            import tensorflow as tf

            x, y = data
            with tf.GradientTape() as tape:
                predicted = self(x, training=True)
                loss = ops.mean(ops.square(predicted - y))
            grads = tape.gradient(loss, self.trainable_variables)
            grads = [ops.clip(g, -0.1, 0.1) for g in grads]
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
            return self.logged(loss, predicted, y)

    else:

        def train_step(self, data: Any) -> Any:
            import torch

            x, y = data
            self.zero_grad()
            predicted = self(x, training=True)
            loss = ops.mean(ops.square(predicted - y))
            loss.backward()
            grads = [ops.clip(v.value.grad, -0.1, 0.1) for v in self.trainable_weights]
            with torch.no_grad():
                self.optimizer.apply(grads, self.trainable_weights)
            return self.logged(loss, predicted, y)

    def logged(self, loss: Any, predicted: Any, y: Any) -> Any:
        self.tracker.update_state(loss)
        self.error.update_state(y, predicted)
        found = {metric.name: metric.result() for metric in self.metrics}
        return {**found, "largest": ops.max(ops.abs(predicted))}

    if BACKEND != "jax":

        def test_step(self, data: Any) -> Any:
            x, y = data
            self.error.update_state(y, self(x, training=False))
            return {"mae": self.error.result()}


def own_steps(folder: Path) -> Case:
    """Its own `train_step` and `test_step`, whose values are not only those of its metrics."""
    model = Clipped()
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9))
    return Case(model, {"x": X, "y": Y, "validation_data": (X[:32], Y[:32])})


class Adversarial(keras.Model):
    """A GAN with two optimizers, passed to its own `compile`; not on JAX, where `fit` takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = keras.Sequential(
            [keras.Input((6,)), layers.Dense(8, activation="relu"), layers.Dense(1)]
        )
        self.maker = keras.Sequential(
            [keras.Input((3,)), layers.Dense(8, activation="relu"), layers.Dense(6)]
        )
        self.seeds = keras.random.SeedGenerator(7)
        self.judged = keras.metrics.Mean(name="judge_loss")
        self.made = keras.metrics.Mean(name="maker_loss")
        self.built = True

    def compile(self, judge_optimizer: Any, maker_optimizer: Any, loss: Any) -> None:  # pyright: ignore
        super().compile()
        self.judge_optimizer, self.maker_optimizer = judge_optimizer, maker_optimizer
        self.error = loss

    @property
    def metrics(self) -> list[Any]:
        return [self.judged, self.made]

    def losses_of(self, real: Any) -> tuple[Any, Any]:
        count = ops.shape(real)[0]
        made = self.maker(keras.random.normal((count, 3), seed=self.seeds))
        answers = self.judge(ops.concatenate([made, real], axis=0))
        truth = ops.concatenate([ops.ones((count, 1)), ops.zeros((count, 1))], axis=0)
        return self.error(truth, answers), self.error(ops.zeros((count, 1)), answers[:count])

    def train_step(self, data: Any) -> Any:
        if BACKEND == "tensorflow":
            judge_loss, maker_loss = self.step_of_tensorflow(data)
        else:
            judge_loss, maker_loss = self.step_of_torch(data)
        self.judged.update_state(judge_loss)
        self.made.update_state(maker_loss)
        return {"judge_loss": self.judged.result(), "maker_loss": self.made.result()}

    def step_of_tensorflow(self, real: Any) -> tuple[Any, Any]:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            judge_loss, _ = self.losses_of(real)
        weights = self.judge.trainable_weights
        self.judge_optimizer.apply(tape.gradient(judge_loss, weights), weights)
        with tf.GradientTape() as tape:
            _, maker_loss = self.losses_of(real)
        weights = self.maker.trainable_weights
        self.maker_optimizer.apply(tape.gradient(maker_loss, weights), weights)
        return judge_loss, maker_loss

    def step_of_torch(self, real: Any) -> tuple[Any, Any]:
        import torch

        self.zero_grad()
        judge_loss, _ = self.losses_of(real)
        judge_loss.backward()
        weights = self.judge.trainable_weights
        with torch.no_grad():
            self.judge_optimizer.apply([v.value.grad for v in weights], weights)
        self.zero_grad()
        _, maker_loss = self.losses_of(real)
        maker_loss.backward()
        weights = self.maker.trainable_weights
        with torch.no_grad():
            self.maker_optimizer.apply([v.value.grad for v in weights], weights)
        return judge_loss, maker_loss


def adversarial(folder: Path) -> Case:
    """Two optimizers, and a `compile` with another signature."""
    model = Adversarial()
    rates = keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02)
    model.compile(*rates, keras.losses.BinaryCrossentropy(from_logits=True))
    return Case(model, {"x": X})


def nested_logs(folder: Path) -> Case:
    """The idiom of Keras' guide: results of all metrics by name, one of which is a dict."""

    class Nested(keras.Model):
        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            super().compute_metrics(x, y, y_pred, sample_weight)
            return {metric.name: metric.result() for metric in self.metrics}

    inputs = keras.Input((6,))
    model = Nested(inputs, layers.Dense(1)(inputs))
    model.compile("sgd", "mse", metrics=["mae"])
    return Case(model, {"x": X, "y": Y, "validation_data": (X[:32], Y[:32])})


def callbacks(folder: Path) -> Case:
    """Callbacks that change learning rates and weights, stop training and write files."""
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.3), "mse", metrics=["mae"])
    kinds = keras.callbacks
    given = [
        kinds.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        kinds.ReduceLROnPlateau("val_loss", patience=1, min_delta=0.05),
        kinds.CSVLogger(str(folder / "log.csv")),
        kinds.ModelCheckpoint(str(folder / "best.keras"), "val_loss", save_best_only=True),
        kinds.EarlyStopping("val_loss", patience=3, restore_best_weights=True, min_delta=0.001),
    ]
    arguments = {"x": X, "y": Y, "validation_data": (X[:32], -Y[:32]), "callbacks": given}
    return Case(model, {**arguments, "epochs": 8})


def steps_per_epoch(folder: Path) -> Case:
    """Batches of a repeated data set, of which each epoch takes some, and frequent validation."""
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    if BACKEND == "tensorflow":
        import tensorflow as tf

        data: Any = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16).repeat()
        return Case(model, {"x": data, "steps_per_epoch": 3, "validation_data": (X, Y)})
    more = {"validation_steps": 2, "validation_freq": [2, 3]}
    return Case(model, {"x": X, "y": Y, "batch_size": 10, "steps_per_epoch": 3, **more})


CASES: dict[str, Callable[[Path], Case]] = {
    make.__name__: make
    for make in (
        *(compiled, several_outputs, autoencoder, own_steps, adversarial),
        *(nested_logs, callbacks, steps_per_epoch),
    )
}
