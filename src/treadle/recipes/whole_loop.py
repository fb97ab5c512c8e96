"""A whole epoch in one compiled call, for training and for validation.

In a hand-written loop, this needs a compiled function around the loop over batches, a second one in
inference mode, and sums that stay on the device. In Treadle it is an ordinary step: several steps
run in one compiled call (a window), and metrics accumulate the loss on the device, so that only two
numbers per epoch are fetched.

With `treadle run whole-loop --window 23`, each call runs all 23 batches of an epoch from the first
epoch on; with `--window 1`, each call runs one batch. The results are equal bit for bit. Without
the option, windows grow until they contain a whole epoch. All batches must have the same shape,
since a batch of another shape ends a window. Dropout and BatchNormalization show that training and
validation use the right mode.
"""

from typing import Any

import keras
from keras import layers

import treadle
from treadle import data, datasets


class WholeLoop(treadle.Task):
    """Classify digits with a whole epoch in one compiled call.

    Args:
        learning_rate: Learning rate of Adam.
        batch_size: Examples per step.
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
        """Minimize the loss on one batch in training mode; the loss stays on the device."""
        x, y = batch

        def objective() -> Any:
            logits = self.model(x, training=True)
            return self.cross_entropy(y, logits), logits

        loss, logits = treadle.minimize(objective, self.model, self.optimizer)
        self.update_metrics(y, logits, loss)

    def eval_step(self, batch: Any) -> None:
        """Evaluate one batch in inference mode; the loss stays on the device."""
        x, y = batch
        logits = self.model(x, training=False)
        self.update_metrics(y, logits, self.cross_entropy(y, logits))

    def update_metrics(self, y: Any, logits: Any, loss: Any) -> None:
        """Add a batch to the metrics; the loss is weighted by the number of examples."""
        self.loss.update_state(loss, sample_weight=y.shape[0])
        self.accuracy.update_state(y, logits)

    def datasets(self) -> treadle.Datasets:
        """Return 1,437 training digits without an incomplete last batch, and 360 for validation."""
        digits = datasets.digits()
        return treadle.Datasets(
            train=data.from_arrays(
                digits.x_train, digits.y_train, batch_size=self.batch_size, drop_last=True
            ),
            validation=data.from_arrays(
                digits.x_test, digits.y_test, batch_size=self.batch_size, shuffle=False
            ),
        )
