"""Tasks of `benchmarks.agreement` that are no recipes."""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

import treadle
from treadle import data

FEATURES, CLASSES, WORDS, LENGTH = 6, 4, 11, 5


def rows(count: int) -> Any:
    """Examples with labels, in batches of 8: the last one of an epoch is short."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, FEATURES)).astype("float32")
    return data.from_arrays(x, rng.integers(0, CLASSES, count).astype("int32"), batch_size=8)


def texts(count: int) -> Any:
    """Texts of 0 to 5 words, with their lengths."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, WORDS, (count, LENGTH + 1)).astype("int32")
    lengths = rng.integers(0, LENGTH + 1, count).astype("int32")
    return data.from_arrays(words, lengths, batch_size=8)


class Reference(treadle.Supervised):
    """What is computed over a whole batch, or drawn: statistics, masks, norms, averages."""

    def __init__(self) -> None:
        model = keras.Sequential(
            [
                keras.Input((FEATURES,)),
                layers.Dense(8, activation="relu", kernel_regularizer="l2"),
                layers.BatchNormalization(),
                layers.Dropout(0.2, seed=3),
                layers.Dropout(0.1),
                layers.Dense(CLASSES),
            ]
        )
        super().__init__(
            model,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            keras.optimizers.Adam(1e-2, global_clipnorm=0.5, use_ema=True),
            metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        )


class Accumulating(Reference):
    """Updates with the mean of the gradients of three batches."""

    def __init__(self) -> None:
        super().__init__()
        self.accumulator = treadle.Accumulator(steps=3)

    def train_step(self, batch: Any) -> Any:
        """Add the gradients of a batch."""
        x, y = batch
        weights = self.model.trainable_variables
        loss, grads = treadle.gradients(lambda: self.loss(y, self.model(x, training=True)), weights)
        self.accumulator.add(grads, lambda mean: self.optimizer.apply(mean, weights))
        return {"loss": loss}


class Tokens(treadle.Task):
    """A language model whose loss is a mean over the words of all texts of a batch."""

    def __init__(self) -> None:
        self.model = keras.Sequential(
            [
                keras.Input((LENGTH,), dtype="int32"),
                layers.Embedding(WORDS, 8),
                layers.GRU(8, return_sequences=True),
                layers.Dense(WORDS),
            ]
        )
        self.optimizer = keras.optimizers.Adam(1e-2)

    def train_step(self, batch: Any) -> Any:
        """Predict each next word."""
        words, lengths = batch

        def objective() -> Any:
            logits = ops.log_softmax(self.model(words[:, :-1], training=True))
            losses = -ops.sum(ops.one_hot(words[:, 1:], WORDS) * logits, axis=-1)
            mask = ops.cast(ops.arange(LENGTH)[None] < lengths[:, None], "float32")
            count = ops.sum(mask)
            return treadle.weighted(ops.sum(losses * mask) / ops.maximum(count, 1.0), count)

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}
