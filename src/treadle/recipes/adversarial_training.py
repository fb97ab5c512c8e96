"""Adversarial training with PGD attacks, compared with a network trained on clean images.

The attack is projected gradient descent (PGD, Madry et al. 2018, https://arxiv.org/abs/1706.06083):
a few steps along the sign of the loss gradient with respect to the pixels, within `epsilon` of the
original image. A single step of size `epsilon` is FGSM (Goodfellow et al. 2015,
https://arxiv.org/abs/1412.6572). Both networks start from the same weights and see the same
batches.
"""

from typing import Any

import keras
from keras import layers, ops

import treadle
from treadle.recipes.mnist_functional import mnist_rows


class AdversarialTraining(treadle.Task):
    """Train an MNIST classifier on adversarial examples (PGD), and a second one on clean images.

    Args:
        units: Width of the two hidden layers.
        epsilon: Maximum change of a pixel, whose values are from 0 to 1.
        attack_steps: Gradient steps of an attack.
        learning_rate: Learning rate of Adam, for both networks.
        batch_size: Examples per step.
    """

    epochs = 12

    def __init__(
        self,
        units: int = 256,
        epsilon: float = 0.1,
        attack_steps: int = 5,
        learning_rate: float = 1e-3,
        batch_size: int = 128,
    ) -> None:
        self.robust, self.plain = network(units), network(units)
        self.plain.set_weights(self.robust.get_weights())
        self.robust_optimizer = keras.optimizers.Adam(learning_rate)
        self.plain_optimizer = keras.optimizers.Adam(learning_rate)
        self.cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.metrics = {
            name: keras.metrics.SparseCategoricalAccuracy()
            for name in ("robust_clean", "robust_attacked", "plain_clean", "plain_attacked")
        }
        self.seeds = keras.random.SeedGenerator()
        self.epsilon, self.attack_steps = epsilon, attack_steps
        self.batch_size = batch_size

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Train one network on adversarial examples, and the other on the clean images."""
        x, y = batch
        adversarial = self.attack(self.robust, x, y)
        return {
            "robust_loss": treadle.minimize(
                lambda: self.cross_entropy(y, self.robust(adversarial, training=True)),
                self.robust,
                self.robust_optimizer,
            ),
            "plain_loss": treadle.minimize(
                lambda: self.cross_entropy(y, self.plain(x, training=True)),
                self.plain,
                self.plain_optimizer,
            ),
        }

    def attack(self, model: Any, x: Any, y: Any) -> Any:
        """Return adversarial images within epsilon of the originals, by PGD on the model's loss."""
        low, high = ops.maximum(x - self.epsilon, 0.0), ops.minimum(x + self.epsilon, 1.0)
        # Large enough to reach the border of the epsilon ball from any random start.
        step_size = 2.5 * self.epsilon / self.attack_steps
        image = low + (high - low) * keras.random.uniform(x.shape, seed=self.seeds)
        for _ in range(self.attack_steps):
            _, (gradient,) = treadle.input_gradients(
                lambda image: self.cross_entropy(y, model(image, training=False)), image
            )
            image = image + step_size * ops.sign(gradient)
            image = ops.minimum(ops.maximum(image, low), high)  # project onto the epsilon ball
        return image

    def eval_step(self, batch: Any) -> None:
        """Measure the accuracy of each network on clean and on adversarial images."""
        x, y = batch
        for name, model in (("robust", self.robust), ("plain", self.plain)):
            self.metrics[f"{name}_clean"].update_state(y, model(x, training=False))
            adversarial = self.attack(model, x, y)
            self.metrics[f"{name}_attacked"].update_state(y, model(adversarial, training=False))

    def datasets(self) -> treadle.Datasets:
        """Return MNIST as rows of 784 numbers from 0 to 1."""
        return mnist_rows(self.batch_size)


def network(units: int) -> Any:
    """Return a network with two hidden layers."""
    return keras.Sequential(
        [
            keras.Input((784,)),
            layers.Dense(units, activation="relu"),
            layers.Dense(units, activation="relu"),
            layers.Dense(10),
        ]
    )
