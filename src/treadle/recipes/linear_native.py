"""Fit y = x · w + b with two tf.Variables and a function (TensorFlow only).

The smallest example in native TensorFlow, without a class.
The code up to `train_step` is the same as in a TensorFlow script; the last line makes it a task.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import treadle

backend = "tensorflow"
epochs = 1  # of 200 steps

X = np.array([[1.0, 2.0], [3.0, 4.0]], "float32")
Y = np.array([[3.0], [7.0]], "float32")

weights = tf.Variable(tf.random.normal((2, 1), seed=1))
bias = tf.Variable(tf.zeros((1,)))
optimizer = keras.optimizers.SGD(0.01)


@tf.function
def train_step(x: Any, y: Any) -> Any:
    """Minimize the mean squared error."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(x @ weights + bias - y))
    optimizer.apply(tape.gradient(loss, [weights, bias]), [weights, bias])
    return loss


def datasets() -> treadle.Datasets:
    """Return the same two points 200 times."""
    return treadle.Datasets(train=[(X, Y)] * 200)


def hooks() -> list[Any]:
    """Report every 50 steps."""
    return [treadle.every("50 steps", report)]


def report(loop: Any) -> dict[str, float]:
    """Return the latest loss and the current predictions."""
    first, second = (X @ weights.numpy() + bias.numpy()).ravel().tolist()
    loss = float(loop.history.steps("loss")[-1])
    return {"step_loss": loss, "prediction_of_3": first, "prediction_of_7": second}


linear = treadle.task(train_step, weights=weights, bias=bias, optimizer=optimizer)
