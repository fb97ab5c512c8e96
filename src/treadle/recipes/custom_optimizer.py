"""A custom optimizer (Lion) and sharpness-aware minimization (SAM).

Lion (Chen et al. 2023, https://arxiv.org/abs/2302.06675) is implemented as a subclass of
`keras.optimizers.Optimizer`. The training step is SAM (Foret et al. 2021,
https://arxiv.org/abs/2010.01412): a first gradient gives the perturbation that increases the loss
most, and the gradient at the perturbed weights updates the weights.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import keras
from keras import layers, ops

import treadle
from treadle.recipes.digits import digit_batches


class Lion(keras.optimizers.Optimizer):
    """The Lion optimizer: updates by the sign of an interpolated momentum.

    Args:
        learning_rate: Change of each weight per step; typically a tenth of Adam's learning rate.
        beta_1: Weight of the momentum in the update direction; the gradient has the rest.
        beta_2: Decay rate of the momentum.
        weight_decay: Decoupled weight decay, multiplied by the learning rate.
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
        """Create a momentum variable for each weight."""
        if not self.built:
            super().build(variables)
            self.means = self.add_optimizer_variables(variables, "mean")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable, then its momentum."""
        mean = self.means[self._get_variable_index(variable)]
        direction = self.beta_1 * mean + (1 - self.beta_1) * gradient
        self.assign_sub(variable, ops.cast(learning_rate, variable.dtype) * ops.sign(direction))
        self.assign(mean, self.beta_2 * mean + (1 - self.beta_2) * gradient)


class CustomOptimizer(treadle.Task):
    """Classify digits with Lion and sharpness-aware minimization, both written in this file.

    Args:
        learning_rate: Learning rate of Lion.
        weight_decay: Weight decay of Lion.
        rho: Norm of SAM's perturbation, over all weights.
        batch_size: Examples per step.
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
        """Compute the gradient at the perturbed weights, and apply it to the original weights."""
        x, y = batch
        variables = self.model.trainable_variables

        def objective() -> Any:
            logits = self.model(x, training=True)
            return self.loss(y, logits), logits

        (loss, logits), grads = treadle.gradients(objective, variables)
        norm = treadle.transforms.global_norm(grads)
        scale = self.rho / (norm + 1e-12)
        perturbed = [v + scale * g for v, g in zip(variables, grads, strict=True)]
        with treadle.substituted(variables, perturbed):
            (perturbed_loss, _), grads = treadle.gradients(objective, variables)
        self.optimizer.apply(grads, variables)
        self.accuracy.update_state(y, logits)
        return {"loss": loss, "sharpness": perturbed_loss - loss, "gradient_norm": norm}

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """Evaluate one batch in inference mode."""
        x, y = batch
        logits = self.model(x, training=False)
        self.accuracy.update_state(y, logits)
        return {"loss": self.loss(y, logits)}

    def datasets(self) -> treadle.Datasets:
        """Return 1,437 training digits and 360 validation digits."""
        return digit_batches(self.batch_size)
