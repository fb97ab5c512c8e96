"""An MLP on MNIST with custom initial weights, drawn from a normal distribution of variance 1.

This initialization is far too wide on purpose: the loss starts at about 17 and is about 0.8 after
10 epochs. `mnist-mlp-native` is the same program in native TensorFlow, with equal initial weights.
"""

from typing import Annotated, Any

import keras
import numpy as np

import treadle
from treadle import data, datasets


class MnistMLP(treadle.Task):
    """Classify MNIST with a 784-128-10 MLP, one-hot labels, Adam and wide initial weights.

    Args:
        units: Width of the hidden layer.
        learning_rate: Learning rate of Adam.
        batch_size: Examples per step.
    """

    epochs = 10

    def __init__(
        self,
        units: Annotated[int, treadle.Range(32, 512, log=True)] = 128,
        learning_rate: Annotated[float, treadle.Range(1e-4, 1e-1, log=True)] = 1e-3,
        batch_size: int = 128,
    ) -> None:
        self.model = keras.Sequential(
            [
                keras.Input((784,)),
                keras.layers.Dense(units, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        hidden, output = normal_weights(units)
        self.model.set_weights([hidden, np.zeros(units), output, np.zeros(10)])
        self.optimizer = keras.optimizers.Adam(learning_rate)
        self.loss = keras.losses.CategoricalCrossentropy(from_logits=True)
        self.accuracy = keras.metrics.CategoricalAccuracy()
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
        """Return MNIST with one-hot labels."""
        return one_hot_mnist(self.batch_size)


def normal_weights(units: int) -> tuple[Any, Any]:
    """Draw both kernels, of shapes (784, units) and (units, 10).

    They come from NumPy's global generator, which the run's seed sets on every backend.
    """
    return np.random.normal(size=(784, units)), np.random.normal(size=(units, 10))


def one_hot_mnist(batch_size: int) -> treadle.Datasets:
    """Return MNIST as rows of 784 numbers from 0 to 1, with one-hot labels of shape (10,)."""
    mnist = datasets.mnist()
    x_train = mnist.x_train.reshape(-1, 784).astype("float32") / 255
    x_test = mnist.x_test.reshape(-1, 784).astype("float32") / 255
    y_train = keras.utils.to_categorical(mnist.y_train, 10).astype("float32")
    y_test = keras.utils.to_categorical(mnist.y_test, 10).astype("float32")
    return treadle.Datasets(
        train=data.from_arrays(x_train, y_train, batch_size=batch_size),
        validation=data.from_arrays(x_test, y_test, batch_size=batch_size, shuffle=False),
    )
