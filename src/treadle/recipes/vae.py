"""A variational autoencoder (VAE) on MNIST with KL annealing.

The loss (Kingma & Welling 2014, https://arxiv.org/abs/1312.6114) is the sum of the reconstruction
error (`reconstruction`) and the KL divergence of the code (`kl`), both in nats per image. With full
KL weight it is the negative evidence lower bound; `elbo` is logged. The weight of the KL term grows
from 0 to 1 over the first steps (Bowman et al. 2016, https://arxiv.org/abs/1511.06349), which
avoids posterior collapse.
"""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

import treadle
from treadle import data, datasets
from treadle.core.hook import LoopView


class VariationalAutoencoder(treadle.Task):
    """Train a variational autoencoder on MNIST with an annealed KL weight.

    Args:
        latent_size: Dimension of the latent code.
        units: Width of the hidden layers.
        annealing_steps: Steps after which the KL term has full weight.
        learning_rate: Learning rate of Adam.
        batch_size: Examples per step.
    """

    epochs = 20

    def __init__(
        self,
        latent_size: int = 16,
        units: int = 400,
        annealing_steps: int = 2000,
        learning_rate: float = 1e-3,
        batch_size: int = 128,
    ) -> None:
        self.encoder = keras.Sequential(
            [
                keras.Input((784,)),
                layers.Dense(units, activation="relu"),
                layers.Dense(2 * latent_size),
            ]
        )
        self.decoder = keras.Sequential(
            [keras.Input((latent_size,)), layers.Dense(units, activation="relu"), layers.Dense(784)]
        )
        self.optimizer = keras.optimizers.Adam(learning_rate)
        self.seeds = keras.random.SeedGenerator()
        fixed = np.random.default_rng(0).normal(size=(64, latent_size))
        self.fixed_codes = fixed.astype("float32")
        self.annealing_steps, self.batch_size = annealing_steps, batch_size

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Minimize the reconstruction error plus the weighted KL term."""
        weight = ops.minimum(ops.cast(treadle.step(), "float32") / self.annealing_steps, 1.0)

        def objective() -> Any:
            reconstruction, kl = self.elbo_terms(batch)
            return reconstruction + weight * kl, (reconstruction, kl)

        variables = [*self.encoder.trainable_variables, *self.decoder.trainable_variables]
        loss, (reconstruction, kl) = treadle.minimize(objective, variables, self.optimizer)
        terms = {"reconstruction": reconstruction, "kl": kl, "kl_weight": weight}
        return {"loss": loss, "elbo": -reconstruction - kl, **terms}

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """Evaluate both terms with full weight."""
        reconstruction, kl = self.elbo_terms(batch)
        return {"elbo": -reconstruction - kl, "reconstruction": reconstruction, "kl": kl}

    def elbo_terms(self, x: Any) -> tuple[Any, Any]:
        """Return reconstruction error and KL divergence: batch means, in nats per image."""
        mean, log_variance = ops.split(self.encoder(x), 2, axis=-1)
        noise = keras.random.normal(mean.shape, seed=self.seeds)
        logits = self.decoder(mean + ops.exp(0.5 * log_variance) * noise)
        pixels = ops.softplus(logits) - x * logits  # binary cross-entropy per pixel
        kl = 0.5 * ops.sum(mean**2 + ops.exp(log_variance) - log_variance - 1, axis=-1)
        return ops.mean(ops.sum(pixels, axis=-1)), ops.mean(kl)

    def predict_step(self, batch: Any) -> Any:
        """Return images of shape (n, 28, 28), from 0 to 1, for codes of shape (n, latent_size)."""
        return self.generate(batch)

    def generate(self, codes: Any) -> Any:
        """Return images of shape (n, 28, 28), from 0 to 1, for codes of shape (n, latent_size)."""
        return ops.reshape(ops.sigmoid(self.decoder(codes)), (-1, 28, 28))

    def hooks(self) -> list[Any]:
        """Log samples after each epoch."""
        return [treadle.every("1 epoch", self.samples)]

    def samples(self, loop: LoopView) -> dict[str, Any]:
        """Return a grid of images decoded from fixed random codes."""
        images = loop.call(self.generate, self.fixed_codes)
        return {"samples": treadle.Image.grid(images, columns=8)}

    def datasets(self) -> treadle.Datasets:
        """Return MNIST's digits as rows of 784 numbers from 0 to 1."""
        mnist = datasets.mnist()
        train, test = (
            x.reshape(-1, 784).astype("float32") / 255 for x in (mnist.x_train, mnist.x_test)
        )
        return treadle.Datasets(
            train=data.from_arrays(train, batch_size=self.batch_size, drop_last=True),
            validation=data.from_arrays(test, batch_size=self.batch_size, shuffle=False),
            predict=data.from_arrays(self.fixed_codes, batch_size=64, shuffle=False),
        )
