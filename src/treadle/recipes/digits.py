"""The example to start with: a hand-written training step on data that comes with Treadle.

It reaches more than 96 % validation accuracy within seconds.
"""

from typing import Annotated, Any

import keras

import treadle
from treadle import data, datasets


class Digits(treadle.Task):
    """Classify handwritten digits of 8×8 pixels with a small network and Adam; needs no download.

    Args:
        units: Width of the hidden layer.
        learning_rate: Learning rate of Adam.
        batch_size: Examples per step.
    """

    epochs = 20

    def __init__(
        self,
        units: Annotated[int, treadle.Range(16, 512, log=True)] = 64,
        learning_rate: Annotated[float, treadle.Range(1e-3, 1e-1, log=True)] = 1e-2,
        batch_size: Annotated[int, treadle.Choice(16, 32, 64, 128)] = 64,
    ) -> None:
        self.model = keras.Sequential(
            [
                keras.Input((8, 8)),
                keras.layers.Rescaling(1 / 16),
                keras.layers.Flatten(),
                keras.layers.Dense(units, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        self.optimizer = keras.optimizers.Adam(learning_rate)
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()
        self.batch_size = batch_size

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Compute the gradients of the loss on one batch, and apply them."""
        x, y = batch

        def objective() -> Any:
            logits = self.model(x, training=True)
            return self.loss(y, logits), logits

        (loss, logits), gradients = treadle.gradients(objective, self.model.trainable_variables)
        self.optimizer.apply(gradients, self.model.trainable_variables)
        self.accuracy.update_state(y, logits)
        return {"loss": loss}

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """Evaluate one batch in inference mode."""
        x, y = batch
        logits = self.model(x, training=False)
        self.accuracy.update_state(y, logits)
        return {"loss": self.loss(y, logits)}

    def datasets(self) -> treadle.Datasets:
        """Return 1,437 training digits and 360 validation digits."""
        return digit_batches(self.batch_size)


def digit_batches(batch_size: int) -> treadle.Datasets:
    """Return batches of the digits, which are 8×8 numbers from 0 to 16 with a label each."""
    digits = datasets.digits()
    return treadle.Datasets(
        train=data.from_arrays(digits.x_train, digits.y_train, batch_size=batch_size),
        validation=data.from_arrays(
            digits.x_test, digits.y_test, batch_size=batch_size, shuffle=False
        ),
    )
