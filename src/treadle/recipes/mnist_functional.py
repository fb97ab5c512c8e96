"""A functional model on MNIST with plain SGD, logging every 200 batches.

The learning rate is low on purpose: validation accuracy is about 0.63 after 2 epochs, as in a
hand-written loop.
"""

from typing import Any

import keras

import treadle
from treadle import data, datasets
from treadle.core.hook import LoopView


class MnistFunctional(treadle.Task):
    """Classify MNIST with a functional model and SGD, logging the loss every 200 batches.

    Args:
        learning_rate: Learning rate of SGD.
        batch_size: Examples per step.
    """

    epochs = 2

    def __init__(self, learning_rate: float = 1e-3, batch_size: int = 64) -> None:
        inputs = keras.Input((784,), name="digits")
        x = keras.layers.Dense(64, activation="relu")(inputs)
        x = keras.layers.Dense(64, activation="relu")(x)
        outputs = keras.layers.Dense(10, name="predictions")(x)
        self.model = keras.Model(inputs, outputs)
        self.optimizer = keras.optimizers.SGD(learning_rate)
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()
        self.batch_size = batch_size

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Minimize the loss on one batch."""
        x, y = batch

        def objective() -> Any:
            logits = self.model(x, training=True)
            return self.loss(y, logits), logits

        loss, logits = treadle.minimize(objective, self.model, self.optimizer)
        self.accuracy.update_state(y, logits)
        return {"loss": loss}

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """Evaluate one batch in inference mode."""
        x, y = batch
        logits = self.model(x, training=False)
        self.accuracy.update_state(y, logits)
        return {"loss": self.loss(y, logits)}

    def datasets(self) -> treadle.Datasets:
        """Return MNIST as rows of 784 numbers from 0 to 1."""
        return mnist_rows(self.batch_size)

    def hooks(self) -> list[Any]:
        """Report every 200 batches."""
        return [treadle.every("200 steps", self.report)]

    def report(self, loop: LoopView) -> dict[str, float]:
        """Return the loss of the latest batch and the number of examples so far."""
        loss = float(loop.history.steps("loss")[-1])
        return {"batch_loss": loss, "samples_seen": loop.progress.examples}


def mnist_rows(batch_size: int) -> treadle.Datasets:
    """Return batches of MNIST as rows of 784 numbers from 0 to 1, with numbers as labels."""
    mnist = datasets.mnist()
    x_train = mnist.x_train.reshape(-1, 784).astype("float32") / 255
    x_test = mnist.x_test.reshape(-1, 784).astype("float32") / 255
    return treadle.Datasets(
        train=data.from_arrays(x_train, mnist.y_train, batch_size=batch_size),
        validation=data.from_arrays(x_test, mnist.y_test, batch_size=batch_size, shuffle=False),
    )
