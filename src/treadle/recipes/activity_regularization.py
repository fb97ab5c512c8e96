"""A layer with `add_loss`, and a training step that includes `model.losses`.

The losses added by layers are kept in `model.losses` until the next call. A step that ignores them
trains without an error, but also without the penalty. This step logs the penalty as a separate
value, so that a zero would be noticed.
"""

from typing import Any

import keras
from keras import layers, ops

import treadle
from treadle.recipes.digits import digit_batches


class ActivityRegularization(layers.Layer):
    """Passes inputs through, and adds `amount` times their sum to the losses.

    Args:
        amount: Weight of the penalty.
    """

    def __init__(self, amount: float = 1e-2) -> None:
        super().__init__()
        self.amount = amount

    def call(self, inputs: Any) -> Any:
        """Return the inputs unchanged."""
        self.add_loss(self.amount * ops.sum(ops.cast(inputs, "float32")))
        return inputs


class Regularized(treadle.Task):
    """Classify digits with an activity penalty from `add_loss`, logged as a separate value.

    Args:
        learning_rate: Learning rate of Adam.
        batch_size: Examples per step. The penalty is a sum over the batch, so it grows with the
            batch size.
    """

    epochs = 20

    def __init__(self, learning_rate: float = 1e-3, batch_size: int = 16) -> None:
        self.model = keras.Sequential(
            [
                keras.Input((8, 8)),
                layers.Rescaling(1 / 16),
                layers.Flatten(),
                layers.Dense(64, activation="relu"),
                ActivityRegularization(),
                layers.Dense(64, activation="relu"),
                layers.Dense(10),
            ]
        )
        self.optimizer = keras.optimizers.Adam(learning_rate)
        self.cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()
        self.batch_size = batch_size

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Minimize the sum of cross-entropy and penalty."""
        x, y = batch

        def objective() -> Any:
            logits = self.model(x, training=True)
            penalty = sum(self.model.losses)
            return self.cross_entropy(y, logits) + penalty, (penalty, logits)

        loss, (penalty, logits) = treadle.minimize(objective, self.model, self.optimizer)
        self.accuracy.update_state(y, logits)
        return {"loss": loss, "regularization": penalty}

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """Evaluate one batch in inference mode, without the penalty."""
        x, y = batch
        logits = self.model(x, training=False)
        self.accuracy.update_state(y, logits)
        return {"loss": self.cross_entropy(y, logits)}

    def datasets(self) -> treadle.Datasets:
        """Return 1,437 training digits and 360 validation digits."""
        return digit_batches(self.batch_size)
