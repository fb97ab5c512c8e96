"""A layer that adds a loss of its own, and a step that must not forget it.

Layers keep what `add_loss` was given in `model.losses`, until the next call. A step that leaves
them out trains without an error, only without the penalty: so this one logs it on a line of its
own, where a zero would be seen.
"""

from typing import Any

import keras
from keras import layers, ops

import treadle
from treadle import data, datasets


class ActivityRegularization(layers.Layer):
    """Pass inputs through, and add `amount` times their sum to the losses.

    Args:
        amount: Weight of the penalty.
    """

    def __init__(self, amount: float = 1e-2) -> None:
        super().__init__()
        self.amount = amount

    def call(self, inputs: Any) -> Any:
        """Return the inputs as they are."""
        self.add_loss(self.amount * ops.sum(ops.cast(inputs, "float32")))
        return inputs


class Regularized(treadle.Task):
    """Classify digits with a penalty on the activity of a layer, logged on its own line.

    Args:
        learning_rate: Adam's.
        batch_size: Examples in a step. The penalty is a sum over them: more of them weigh it more.
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
        """Follow the gradient of cross-entropy and penalty together."""
        x, y = batch

        def objective() -> Any:
            logits = self.model(x, training=True)
            penalty = sum(self.model.losses)
            return self.cross_entropy(y, logits) + penalty, (penalty, logits)

        loss, (penalty, logits) = treadle.minimize(objective, self.model, self.optimizer)
        self.accuracy.update_state(y, logits)
        return {"loss": loss, "regularization": penalty}

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """Measure one batch in inference mode, without the penalty."""
        x, y = batch
        logits = self.model(x, training=False)
        self.accuracy.update_state(y, logits)
        return {"loss": self.cross_entropy(y, logits)}

    def datasets(self) -> treadle.Datasets:
        """Return 1,437 digits to train on and 360 others."""
        digits = datasets.digits()
        return treadle.Datasets(
            train=data.from_arrays(digits.x_train, digits.y_train, batch_size=self.batch_size),
            validation=data.from_arrays(
                digits.x_test, digits.y_test, batch_size=self.batch_size, shuffle=False
            ),
        )
