"""A generative adversarial network (GAN) on MNIST: two losses and two optimizers in one step.

Both losses (Goodfellow et al. 2014, https://arxiv.org/abs/1406.2661) come from a single forward
pass of the two networks. Each is differentiated with respect to the weights of its own network,
which has its own optimizer. After each epoch, a grid of samples from fixed noise is logged.
"""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

import treadle
from treadle import data, datasets
from treadle.core.hook import LoopView

NOISE = 100


class MnistGAN(treadle.Task):
    """Generate MNIST digits with a GAN, with both gradients from one forward pass.

    Args:
        learning_rate: Learning rate of Adam, for both networks.
        batch_size: Real digits per step; the same number is generated.
    """

    epochs = 100

    def __init__(self, learning_rate: float = 2e-4, batch_size: int = 128) -> None:
        self.generator = keras.Sequential(
            [
                keras.Input((NOISE,)),
                layers.Dense(128, activation="relu"),
                layers.Dense(784, activation="tanh"),
            ]
        )
        self.discriminator = keras.Sequential(
            [keras.Input((784,)), layers.Dense(128, activation="relu"), layers.Dense(1)]
        )
        self.g_optimizer = keras.optimizers.Adam(learning_rate)
        self.d_optimizer = keras.optimizers.Adam(learning_rate)
        self.cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)
        self.seeds = keras.random.SeedGenerator()
        self.fixed_noise = np.random.default_rng(0).normal(size=(64, NOISE)).astype("float32")
        self.batch_size = batch_size

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Run both networks once, then update each with the gradient of its own loss."""
        noise = keras.random.normal((batch.shape[0], NOISE), seed=self.seeds)

        def objective() -> Any:
            fake = self.generator(noise, training=True)
            real_logits = self.discriminator(batch, training=True)
            fake_logits = self.discriminator(fake, training=True)
            ones, zeros = ops.ones_like(fake_logits), ops.zeros_like(fake_logits)
            real_loss = self.cross_entropy(ones, real_logits)
            fake_loss = self.cross_entropy(zeros, fake_logits)
            return {"d": real_loss + fake_loss, "g": self.cross_entropy(ones, fake_logits)}

        losses, gradients = treadle.gradients(
            objective, {"d": self.discriminator, "g": self.generator}
        )
        with treadle.phase("discriminator", owns=[self.discriminator, self.d_optimizer]):
            self.d_optimizer.apply(gradients["d"], self.discriminator.trainable_variables)
        with treadle.phase("generator", owns=[self.generator, self.g_optimizer]):
            self.g_optimizer.apply(gradients["g"], self.generator.trainable_variables)
        return {"d_loss": losses["d"], "g_loss": losses["g"]}

    def predict_step(self, batch: Any) -> Any:
        """Return images of shape (n, 28, 28), from 0 to 1, for noise of shape (n, 100)."""
        return self.generate(batch)

    def generate(self, noise: Any) -> Any:
        """Return images of shape (n, 28, 28), from 0 to 1, for noise of shape (n, 100)."""
        return (ops.reshape(self.generator(noise, training=False), (-1, 28, 28)) + 1) / 2

    def hooks(self) -> list[Any]:
        """Log samples after each epoch."""
        return [treadle.every("1 epoch", self.samples)]

    def samples(self, loop: LoopView) -> dict[str, Any]:
        """Return a grid of images generated from fixed noise."""
        images = loop.call(self.generate, self.fixed_noise)
        return {"samples": treadle.Image.grid(images, columns=8)}

    def datasets(self) -> treadle.Datasets:
        """Return MNIST's training digits as rows of 784 numbers from -1 to 1."""
        rows = datasets.mnist().x_train.reshape(-1, 784).astype("float32") / 127.5 - 1
        return treadle.Datasets(
            train=data.from_arrays(rows, batch_size=self.batch_size, drop_last=True),
            predict=data.from_arrays(self.fixed_noise, batch_size=64, shuffle=False),
        )
