"""Wasserstein GAN with gradient penalty (WGAN-GP) on MNIST: several critic updates per step.

The method is that of Gulrajani et al. 2017 (https://arxiv.org/abs/1704.00028); the gradient penalty
is differentiated, so it needs second-order gradients. A step is several updates of the critic and
one of the generator; `treadle.data.groups` provides one batch of real digits per critic update. The
difference of the mean scores, `wasserstein`, estimates the Wasserstein distance between generated
and real digits, and decreases in training.
"""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

import treadle
from treadle import data, datasets
from treadle.core.hook import LoopView

NOISE = 64


class WassersteinGAN(treadle.Task):
    """Generate MNIST digits with a Wasserstein GAN with gradient penalty (WGAN-GP).

    Args:
        learning_rate: Learning rate of Adam, for both networks.
        batch_size: Real digits per critic update.
        critic_steps: Critic updates per step.
        penalty_weight: Weight of the gradient penalty (lambda).
    """

    epochs = 60

    def __init__(
        self,
        learning_rate: float = 2e-4,
        batch_size: int = 64,
        critic_steps: int = 5,
        penalty_weight: float = 10.0,
    ) -> None:
        self.generator = keras.Sequential(
            [
                keras.Input((NOISE,)),
                layers.Dense(256, activation="relu"),
                layers.Dense(512, activation="relu"),
                layers.Dense(784, activation="sigmoid"),
            ]
        )
        # No bias in the last layer: a constant added to every score would not change the loss.
        self.critic = keras.Sequential(
            [
                keras.Input((784,)),
                layers.Dense(512, activation="leaky_relu"),
                layers.Dense(256, activation="leaky_relu"),
                layers.Dense(1, use_bias=False),
            ]
        )
        self.g_optimizer = keras.optimizers.Adam(learning_rate, beta_1=0.5, beta_2=0.9)
        self.c_optimizer = keras.optimizers.Adam(learning_rate, beta_1=0.5, beta_2=0.9)
        self.seeds = keras.random.SeedGenerator()
        self.fixed_noise = np.random.default_rng(0).normal(size=(64, NOISE)).astype("float32")
        self.batch_size, self.critic_steps = batch_size, critic_steps
        self.penalty_weight = penalty_weight

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Update the critic on each batch of the group, then the generator once."""
        with treadle.phase("critic", owns=[self.critic, self.c_optimizer]):
            updates = [self.update_critic(real) for real in batch]
        noise = self.noise(batch[0].shape[0])

        def objective() -> Any:
            return -ops.mean(self.critic(self.generator(noise, training=True)))

        with treadle.phase("generator", owns=[self.generator, self.g_optimizer]):
            g_loss = treadle.minimize(objective, self.generator, self.g_optimizer)
        means = [sum(values) / len(updates) for values in zip(*updates, strict=True)]
        names = ("wasserstein", "gradient_penalty", "gradient_norm")
        return {**dict(zip(names, means, strict=True)), "g_loss": g_loss}

    def update_critic(self, real: Any) -> Any:
        """Update the critic; return distance estimate, penalty and mean gradient norm."""
        fake = self.generator(self.noise(real.shape[0]), training=True)
        weight = keras.random.uniform((real.shape[0], 1), seed=self.seeds)
        interpolated = weight * real + (1 - weight) * fake

        def objective() -> Any:
            wasserstein = ops.mean(self.critic(real)) - ops.mean(self.critic(fake))
            _, (gradients,) = treadle.input_gradients(
                lambda x: ops.sum(self.critic(x)), interpolated
            )
            norms = ops.sqrt(ops.sum(gradients**2, axis=1) + 1e-12)
            penalty = ops.mean((norms - 1) ** 2)
            loss = self.penalty_weight * penalty - wasserstein
            return loss, (wasserstein, penalty, ops.mean(norms))

        _, values = treadle.minimize(objective, self.critic, self.c_optimizer)
        return values

    def noise(self, count: int) -> Any:
        """Return random noise for `count` digits."""
        return keras.random.normal((count, NOISE), seed=self.seeds)

    def predict_step(self, batch: Any) -> Any:
        """Return images of shape (n, 28, 28), from 0 to 1, for noise of shape (n, 64)."""
        return self.generate(batch)

    def generate(self, noise: Any) -> Any:
        """Return images of shape (n, 28, 28), from 0 to 1, for noise of shape (n, 64)."""
        return ops.reshape(self.generator(noise, training=False), (-1, 28, 28))

    def hooks(self) -> list[Any]:
        """Log samples after each epoch."""
        return [treadle.every("1 epoch", self.samples)]

    def samples(self, loop: LoopView) -> dict[str, Any]:
        """Return a grid of images generated from fixed noise."""
        images = loop.call(self.generate, self.fixed_noise)
        return {"samples": treadle.Image.grid(images, columns=8)}

    def datasets(self) -> treadle.Datasets:
        """Return groups of batches of MNIST digits, as rows of 784 numbers from 0 to 1."""
        rows = datasets.mnist().x_train.reshape(-1, 784).astype("float32") / 255
        batches = data.from_arrays(rows, batch_size=self.batch_size, drop_last=True)
        return treadle.Datasets(
            train=data.groups(batches, self.critic_steps),
            predict=data.from_arrays(self.fixed_noise, batch_size=64, shuffle=False),
        )
