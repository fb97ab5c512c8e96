"""A network that is trained on the images that fool it most, beside one that never saw such.

The attack follows the gradient of the loss by the pixels, in a few steps of its sign, within
`epsilon` of each (projected gradient descent, Madry et al. 2018, https://arxiv.org/abs/1706.06083;
one step of the size of `epsilon` is FGSM, Goodfellow et al. 2015,
https://arxiv.org/abs/1412.6572). Both networks have the same start and see the same batches.
"""

from typing import Any

import keras
from keras import layers, ops

import treadle
from treadle import data, datasets


class AdversarialTraining(treadle.Task):
    """Train an MNIST classifier against attacks on its inputs (PGD), beside a plain one.

    Args:
        units: Width of the two hidden layers.
        epsilon: How far an attack may change a pixel, of 1.
        attack_steps: Gradients that an attack follows.
        learning_rate: Adam's, for both networks.
        batch_size: Examples in a step.
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
        """Attack one network and train it on the result; train the other one on the images."""
        x, y = batch
        attacked = self.attacked(self.robust, x, y)
        return {
            "robust_loss": treadle.minimize(
                lambda: self.cross_entropy(y, self.robust(attacked, training=True)),
                self.robust,
                self.robust_optimizer,
            ),
            "plain_loss": treadle.minimize(
                lambda: self.cross_entropy(y, self.plain(x, training=True)),
                self.plain,
                self.plain_optimizer,
            ),
        }

    def attacked(self, model: Any, x: Any, y: Any) -> Any:
        """Return the images, changed within epsilon such that the model's loss is large."""
        low, high = ops.maximum(x - self.epsilon, 0.0), ops.minimum(x + self.epsilon, 1.0)
        size = 2.5 * self.epsilon / self.attack_steps  # enough to reach any border from any start
        image = low + (high - low) * keras.random.uniform(x.shape, seed=self.seeds)
        for _ in range(self.attack_steps):
            _, (slope,) = treadle.input_gradients(
                lambda image: self.cross_entropy(y, model(image, training=False)), image
            )
            image = ops.minimum(ops.maximum(image + size * ops.sign(slope), low), high)
        return image

    def eval_step(self, batch: Any) -> None:
        """Count how often each is right, on the images and on those made to fool it."""
        x, y = batch
        for name, model in (("robust", self.robust), ("plain", self.plain)):
            self.metrics[f"{name}_clean"].update_state(y, model(x, training=False))
            attacked = self.attacked(model, x, y)
            self.metrics[f"{name}_attacked"].update_state(y, model(attacked, training=False))

    def datasets(self) -> treadle.Datasets:
        """Return MNIST as rows of 784 numbers from 0 to 1."""
        mnist = datasets.mnist()
        train, test = (
            x.reshape(-1, 784).astype("float32") / 255 for x in (mnist.x_train, mnist.x_test)
        )
        return treadle.Datasets(
            train=data.from_arrays(train, mnist.y_train, batch_size=self.batch_size),
            validation=data.from_arrays(
                test, mnist.y_test, batch_size=self.batch_size, shuffle=False
            ),
        )


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
