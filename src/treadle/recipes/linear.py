"""The smallest example: linear regression on two points, 200 steps, logging every 50 steps."""

from typing import Any

import keras
import numpy as np
from keras import ops

import treadle
from treadle.core.hook import LoopView

X = np.array([[1.0, 2.0], [3.0, 4.0]], "float32")
Y = np.array([[3.0], [7.0]], "float32")


class Linear(treadle.Task):
    """Fit y = x · w + b to two points by gradient descent; predictions approach 3 and 7.

    Args:
        learning_rate: Learning rate of gradient descent; a batch is the whole data set.
    """

    epochs = 1  # of 200 steps

    def __init__(self, learning_rate: float = 0.01) -> None:
        normal = keras.initializers.RandomNormal(stddev=1.0)
        self.model = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(1, kernel_initializer=normal)]
        )
        self.optimizer = keras.optimizers.SGD(learning_rate)

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Minimize the mean squared error."""
        x, y = batch

        def objective() -> Any:
            return ops.mean(ops.square(ops.subtract(self.model(x), y)))

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}

    def datasets(self) -> treadle.Datasets:
        """Return the same two points 200 times."""
        return treadle.Datasets(train=[(X, Y)] * 200)

    def hooks(self) -> list[Any]:
        """Report every 50 steps."""
        return [treadle.every("50 steps", self.report)]

    def report(self, loop: LoopView) -> dict[str, float]:
        """Return the latest loss and the current predictions."""
        first, second = ops.convert_to_numpy(self.model(X)).ravel().tolist()
        loss = float(loop.history.steps("loss")[-1])
        return {"step_loss": loss, "prediction_of_3": first, "prediction_of_7": second}
