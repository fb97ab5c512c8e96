"""A whole pass over the data as one compiled call: one for training, one for validation.

By hand this takes a compiled function around the loop over the batches, another one in inference
mode, and sums that stay on the device. Here it is an ordinary step: many of them run as one call
anyway, and the losses are summed up by metrics, whose two numbers are all that is fetched.

`treadle run whole-loop --window 23` has all 23 batches of an epoch in one call from the first
epoch on, `--window 1` a call for each batch: both do the same, bit for bit. Without it, windows
grow until they hold the epoch. Batches are all of one form, since a window ends at another one.
Dropout and BatchNormalization show that each pass has its mode.
"""

from typing import Any

import keras
from keras import layers

import treadle
from treadle import data, datasets


class WholeLoop(treadle.Task):
    """Classify digits, a whole pass over the data in one compiled call.

    Args:
        learning_rate: Adam's.
        batch_size: Examples in a step.
    """

    epochs = 10

    def __init__(self, learning_rate: float = 1e-3, batch_size: int = 60) -> None:
        self.model = keras.Sequential(
            [
                keras.Input((8, 8)),
                layers.Rescaling(1 / 16),
                layers.Flatten(),
                layers.Dense(64, activation="relu"),
                layers.BatchNormalization(momentum=0.9),
                layers.Dropout(0.3, seed=1),
                layers.Dense(10),
            ]
        )
        self.optimizer = keras.optimizers.Adam(learning_rate)
        self.cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.loss = keras.metrics.Mean()
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()
        self.batch_size = batch_size

    def train_step(self, batch: Any) -> None:
        """Learn from one batch in training mode; the loss stays on the device."""
        x, y = batch

        def objective() -> Any:
            logits = self.model(x, training=True)
            return self.cross_entropy(y, logits), logits

        loss, logits = treadle.minimize(objective, self.model, self.optimizer)
        self.count(y, logits, loss)

    def eval_step(self, batch: Any) -> None:
        """Measure one batch in inference mode; the loss stays on the device."""
        x, y = batch
        logits = self.model(x, training=False)
        self.count(y, logits, self.cross_entropy(y, logits))

    def count(self, y: Any, logits: Any, loss: Any) -> None:
        """Add a batch to the sums, by its examples."""
        self.loss.update_state(loss, sample_weight=y.shape[0])
        self.accuracy.update_state(y, logits)

    def datasets(self) -> treadle.Datasets:
        """Return 1,437 digits to train on, less than a batch apart, and 360 others."""
        digits = datasets.digits()
        return treadle.Datasets(
            train=data.from_arrays(
                digits.x_train, digits.y_train, batch_size=self.batch_size, drop_last=True
            ),
            validation=data.from_arrays(
                digits.x_test, digits.y_test, batch_size=self.batch_size, shuffle=False
            ),
        )
