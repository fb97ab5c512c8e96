"""A small classifier and its batches, which most tests vary."""

from typing import Any

import keras
import numpy as np

import treadle

FEATURES, CLASSES, ROWS = 6, 3, 8


def batches(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Stacked batches (count, rows, features) and labels (count, rows)."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, ROWS, FEATURES)).astype("float32")
    return x, rng.integers(0, CLASSES, size=(count, ROWS)).astype("int32")


def cross_entropy() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Classifier(treadle.Task):
    """A model, an optimizer, a metric: what the other cases vary."""

    def __init__(self, layers: list[Any], optimizer: Any = None) -> None:
        self.model = keras.Sequential(layers)  # not built: the first step builds it
        self.optimizer = optimizer or keras.optimizers.SGD(0.1)
        self.loss = cross_entropy()
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()

    def train_step(self, batch: Any) -> Any:
        x, y = batch

        def objective() -> Any:
            logits = self.model(x, training=True)
            return self.loss(y, logits) + sum(self.model.losses), logits

        (loss, logits), grads = treadle.gradients(objective, self.model.trainable_variables)
        self.optimizer.apply(grads, self.model.trainable_variables)
        self.accuracy.update_state(y, logits)
        return {"loss": loss}

    def eval_step(self, batch: Any) -> Any:
        x, y = batch
        logits = self.model(x, training=False)
        self.accuracy.update_state(y, logits)
        return {"loss": self.loss(y, logits)}


def dense(units: int = 5, **kwargs: Any) -> Any:
    return keras.layers.Dense(units, activation="tanh", **kwargs)


def head() -> Any:
    return keras.layers.Dense(CLASSES)


def labelled(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (count, features) and labels (count,)."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, FEATURES)).astype("float32")
    return x, rng.integers(0, CLASSES, size=count).astype("int32")
