"""An optimizer of one's own, and a step that looks uphill before it goes down.

The optimizer is Lion (Chen et al. 2023, https://arxiv.org/abs/2302.06675), written as Keras asks
its users to. The step is SAM (Foret et al. 2021, https://arxiv.org/abs/2010.01412): one gradient
leads to the worst point nearby, and another one, taken there, is followed.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import keras
from keras import layers, ops

import treadle
from treadle import data, datasets


class Lion(keras.optimizers.Optimizer):
    """Follow the sign of a mean of gradients, each weight by the same amount.

    Args:
        learning_rate: How far each weight moves in a step; about a tenth of Adam's.
        beta_1: Share of the mean in the direction that is taken.
        beta_2: Share of the mean that is kept.
        weight_decay: Times the learning rate: the share of each weight that is lost in a step.
    """

    def __init__(
        self,
        learning_rate: Any = 1e-4,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        weight_decay: float | None = None,
    ) -> None:
        super().__init__(learning_rate, weight_decay=weight_decay)
        self.beta_1, self.beta_2 = beta_1, beta_2

    def build(self, variables: Sequence[Any]) -> None:
        """Make a mean for each variable."""
        if not self.built:
            super().build(variables)
            self.means = self.add_optimizer_variables(variables, "mean")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Move one variable, and its mean afterwards."""
        mean = self.means[self._get_variable_index(variable)]
        direction = self.beta_1 * mean + (1 - self.beta_1) * gradient
        self.assign_sub(variable, ops.cast(learning_rate, variable.dtype) * ops.sign(direction))
        self.assign(mean, self.beta_2 * mean + (1 - self.beta_2) * gradient)


class CustomOptimizer(treadle.Task):
    """Classify digits with Lion and sharpness-aware minimization, both written in this file.

    Args:
        learning_rate: Lion's.
        weight_decay: Lion's.
        rho: How far away, in the norm of all weights, the worst point is looked for.
        batch_size: Examples in a step.
    """

    epochs = 20

    def __init__(
        self,
        learning_rate: Annotated[float, treadle.Range(3e-5, 3e-3, log=True)] = 3e-4,
        weight_decay: Annotated[float, treadle.Range(0.0, 0.5)] = 0.1,
        rho: Annotated[float, treadle.Range(0.0, 0.2)] = 0.05,
        batch_size: int = 32,
    ) -> None:
        self.model = keras.Sequential(
            [
                keras.Input((8, 8)),
                layers.Rescaling(1 / 16),
                layers.Flatten(),
                layers.Dense(64, activation="relu"),
                layers.Dense(10),
            ]
        )
        self.optimizer = Lion(learning_rate, weight_decay=weight_decay)
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()
        self.rho, self.batch_size = rho, batch_size

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Climb to the worst point nearby, and apply the gradient found there to the weights."""
        x, y = batch
        variables = self.model.trainable_variables

        def objective() -> Any:
            logits = self.model(x, training=True)
            return self.loss(y, logits), logits

        (loss, logits), grads = treadle.gradients(objective, variables)
        norm = treadle.global_norm(grads)
        climb = self.rho / (norm + 1e-12)
        uphill = [v + climb * g for v, g in zip(variables, grads, strict=True)]
        with treadle.substituted(variables, uphill):
            (worst, _), grads = treadle.gradients(objective, variables)
        self.optimizer.apply(grads, variables)
        self.accuracy.update_state(y, logits)
        return {"loss": loss, "sharpness": worst - loss, "norm": norm}

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """Measure one batch in inference mode."""
        x, y = batch
        logits = self.model(x, training=False)
        self.accuracy.update_state(y, logits)
        return {"loss": self.loss(y, logits)}

    def datasets(self) -> treadle.Datasets:
        """Return 1,437 digits to train on and 360 others."""
        digits = datasets.digits()
        return treadle.Datasets(
            train=data.from_arrays(digits.x_train, digits.y_train, batch_size=self.batch_size),
            validation=data.from_arrays(
                digits.x_test, digits.y_test, batch_size=self.batch_size, shuffle=False
            ),
        )
