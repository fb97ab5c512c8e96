"""The tasks of the workloads, written with Keras; `torch_models.py` has them once more."""

from typing import Any

import keras
from keras import layers, ops

import treadle
from treadle.recipes.cifar10_cnn import Cifar10CNN

from .data import LENGTH, VOCABULARY

NOISE = 64


def classifier(model_layers: list[Any], optimizer: Any) -> treadle.Supervised:
    """Return the ready task: cross-entropy from logits, accuracy."""
    return treadle.Supervised(
        keras.Sequential(model_layers),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer,
        {"accuracy": keras.metrics.SparseCategoricalAccuracy()},
    )


def mlp(optimizer: Any, width: int = 64) -> treadle.Task:
    return classifier(
        [
            keras.Input((784,)),
            layers.Dense(width, activation="relu"),
            layers.Dense(width, activation="relu"),
            layers.Dense(10),
        ],
        optimizer,
    )


def bn_dropout() -> treadle.Task:
    hidden: list[Any] = []
    for _ in range(2):
        hidden += [layers.Dense(256), layers.BatchNormalization(), layers.ReLU()]
        hidden += [layers.Dropout(0.3)]
    return classifier([keras.Input((784,)), *hidden, layers.Dense(10)], keras.optimizers.Adam(1e-3))


def cnn() -> treadle.Task:
    return Cifar10CNN()


def small_cnn() -> treadle.Task:
    return classifier(
        [
            keras.Input((32, 32, 3)),
            layers.Rescaling(1 / 255),
            layers.Conv2D(16, 3, strides=2, activation="relu"),
            layers.Conv2D(32, 3, strides=2, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ],
        keras.optimizers.Adam(1e-3),
    )


def lstm() -> treadle.Task:
    return classifier(
        [keras.Input((28, 28)), layers.LSTM(64), layers.Dense(10)], keras.optimizers.Adam(1e-3)
    )


class Positions(layers.Layer):
    """Adds a learned vector to each place of a sequence."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=shape[1:], initializer="uniform")

    def call(self, x: Any) -> Any:
        return x + self.table


def transformer(width: int = 64, heads: int = 4, depth: int = 2) -> treadle.Task:
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = Positions()(layers.Embedding(VOCABULARY, width)(inputs))
    for _ in range(depth):
        y = layers.LayerNormalization(epsilon=1e-5)(x)
        x = x + layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=True)
        y = layers.LayerNormalization(epsilon=1e-5)(x)
        x = x + layers.Dense(width)(layers.Dense(4 * width, activation="relu")(y))
    logits = layers.Dense(VOCABULARY)(layers.LayerNormalization(epsilon=1e-5)(x))
    task = classifier([layers.Identity()], keras.optimizers.Adam(1e-3))
    task.model = keras.Model(inputs, logits)
    return task


class SmallGAN(treadle.Task):
    """Two networks of two convolutions each, in turns, each with its own noise and optimizer."""

    def __init__(self) -> None:
        leaky = lambda: layers.LeakyReLU(0.2)  # noqa: E731
        self.generator = keras.Sequential(
            [
                keras.Input((NOISE,)),
                layers.Dense(7 * 7 * 32),
                layers.BatchNormalization(),
                leaky(),
                layers.Reshape((7, 7, 32)),
                layers.Conv2DTranspose(16, 4, strides=2, padding="same"),
                layers.BatchNormalization(),
                leaky(),
                layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="tanh"),
            ]
        )
        self.discriminator = keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                layers.Conv2D(16, 4, strides=2, padding="same"),
                leaky(),
                layers.Conv2D(32, 4, strides=2, padding="same"),
                leaky(),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
        self.d_optimizer = keras.optimizers.Adam(2e-4, beta_1=0.5)
        self.g_optimizer = keras.optimizers.Adam(2e-4, beta_1=0.5)
        self.seeds = keras.random.SeedGenerator(0)

    def train_step(self, batch: Any) -> dict[str, Any]:
        (real,) = batch
        fake = self.generator(self._noise(real), training=True)

        def judged() -> Any:
            return d_loss(self.discriminator(real), self.discriminator(fake))

        def fooled() -> Any:
            return g_loss(self.discriminator(self.generator(self._noise(real), training=True)))

        d = treadle.minimize(judged, self.discriminator, self.d_optimizer)
        g = treadle.minimize(fooled, self.generator, self.g_optimizer)
        return {"d_loss": d, "g_loss": g}

    def _noise(self, real: Any) -> Any:
        return keras.random.normal((real.shape[0], NOISE), seed=self.seeds)


def d_loss(real: Any, fake: Any) -> Any:
    """Return the discriminator's loss: cross-entropy of logits of real and made images."""
    return ops.mean(ops.softplus(-real)) + ops.mean(ops.softplus(fake))


def g_loss(fake: Any) -> Any:
    """Return the generator's loss: cross-entropy of its images being taken for real."""
    return ops.mean(ops.softplus(-fake))
