"""`mnist-mlp` in native TensorFlow: a tf.Module, tf.Variables and a tf.GradientTape.

The training step is the same as in a hand-written loop; Treadle replaces only the loop.
"""

from typing import Any

import keras
import tensorflow as tf

import treadle
from treadle.recipes.mnist_mlp import normal_weights, one_hot_mnist


class MLP(tf.Module):
    """An MLP with one hidden layer.

    Args:
        units: Width of the hidden layer.
    """

    def __init__(self, units: int) -> None:
        super().__init__()
        hidden, output = normal_weights(units)
        self.hidden = tf.Variable(hidden, dtype=tf.float32)
        self.hidden_bias = tf.Variable(tf.zeros(units))
        self.output = tf.Variable(output, dtype=tf.float32)
        self.output_bias = tf.Variable(tf.zeros(10))

    def __call__(self, x: Any) -> Any:
        """Return logits of shape (batch, 10) for images of shape (batch, 784)."""
        return tf.nn.relu(x @ self.hidden + self.hidden_bias) @ self.output + self.output_bias


class MnistMLPNative(treadle.Task):
    """The mnist-mlp recipe written with tf.Module and tf.GradientTape (TensorFlow only).

    Args:
        units: Width of the hidden layer.
        learning_rate: Learning rate of Adam.
        batch_size: Examples per step.
    """

    backend = "tensorflow"
    epochs = 10

    def __init__(
        self, units: int = 128, learning_rate: float = 1e-3, batch_size: int = 128
    ) -> None:
        self.model = MLP(units)
        self.optimizer = keras.optimizers.Adam(learning_rate)
        self.accuracy = keras.metrics.CategoricalAccuracy()
        self.batch_size = batch_size

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Compute the gradients of the loss on one batch, and apply them."""
        x, y = batch
        with tf.GradientTape() as tape:
            logits = self.model(x)
            loss = self.loss(y, logits)
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.accuracy.update_state(y, logits)
        return {"loss": loss}

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """Evaluate one batch."""
        x, y = batch
        logits = self.model(x)
        self.accuracy.update_state(y, logits)
        return {"loss": self.loss(y, logits)}

    def loss(self, y: Any, logits: Any) -> Any:
        """Return the mean softmax cross-entropy."""
        return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(y, logits))

    def datasets(self) -> treadle.Datasets:
        """Return MNIST with one-hot labels."""
        return one_hot_mnist(self.batch_size)
