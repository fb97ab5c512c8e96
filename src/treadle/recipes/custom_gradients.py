"""Gradient transformations before the optimizer: scaling, clipping and noise in one step.

The norm of each gradient is logged before any change. Then the gradients of the output layer are
halved, each gradient is clipped by norm and by value, and annealed noise is added. The optimizer is
SGD, because Adam's normalization would undo the halving.
"""

from typing import Any

import keras
from keras import layers, ops

import treadle
from treadle.recipes.digits import digit_batches


class GroupLasso(keras.regularizers.Regularizer):
    """Group lasso: penalizes the norm of each input's weights, so that whole inputs are dropped.

    Yuan & Lin 2006. Pixels at the border of the images carry no information and lose their weights.

    Args:
        amount: Weight of the penalty.
    """

    def __init__(self, amount: float) -> None:
        self.amount = amount

    def __call__(self, x: Any) -> Any:
        """Return the penalty on a kernel of shape (inputs, units)."""
        return self.amount * ops.sum(ops.sqrt(ops.sum(ops.square(x), axis=1) + 1e-12))

    def get_config(self) -> dict[str, Any]:
        """Return the constructor arguments."""
        return {"amount": self.amount}


class CustomGradients(treadle.Task):
    """Classify digits with gradient scaling, clipping, noise and logged gradient norms.

    Args:
        learning_rate: Learning rate of SGD with momentum.
        clip_norm: Maximum norm of each gradient.
        clip_value: Maximum absolute value of each element of a gradient.
        noise_variance: Variance of the gradient noise in the first step; it decreases.
        batch_size: Examples per step.
    """

    epochs = 20

    def __init__(
        self,
        learning_rate: float = 0.1,
        clip_norm: float = 1.0,
        clip_value: float = 0.2,
        noise_variance: float = 1e-4,
        batch_size: int = 32,
    ) -> None:
        regularizer = GroupLasso(1e-3)
        self.model = keras.Sequential(
            [
                keras.Input((8, 8)),
                layers.Rescaling(1 / 16),
                layers.Flatten(),
                layers.Dense(64, "relu", kernel_regularizer=regularizer, name="hidden"),
                layers.Dense(10, name="head"),
            ]
        )
        self.optimizer = keras.optimizers.SGD(learning_rate, momentum=0.9)
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()
        self.seed = keras.random.SeedGenerator(1)
        self.clip_norm, self.clip_value = clip_norm, clip_value
        self.noise_variance, self.batch_size = noise_variance, batch_size

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Compute gradients, log their norms, scale, clip, add noise and apply them."""
        x, y = batch
        variables = self.model.trainable_variables

        def objective() -> Any:
            logits = self.model(x, training=True)
            penalty = sum(self.model.losses)
            return self.loss(y, logits) + penalty, (penalty, logits)

        (loss, (penalty, logits)), grads = treadle.gradients(objective, variables)
        norms = treadle.transforms.gradient_norms(grads, variables)
        grads = treadle.transforms.scaled_by(grads, variables, {"*/head/*": 0.5})
        grads = treadle.transforms.clip_by_norm(grads, self.clip_norm)
        grads = treadle.transforms.clip_by_value(grads, self.clip_value)
        grads = treadle.transforms.with_noise(grads, eta=self.noise_variance, seed=self.seed)
        self.optimizer.apply(grads, variables)
        self.accuracy.update_state(y, logits)
        return {"loss": loss, "penalty": penalty, **norms}

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """Evaluate one batch in inference mode, without the penalty."""
        x, y = batch
        logits = self.model(x, training=False)
        self.accuracy.update_state(y, logits)
        return {"loss": self.loss(y, logits)}

    def datasets(self) -> treadle.Datasets:
        """Return 1,437 training digits and 360 validation digits."""
        return digit_batches(self.batch_size)
