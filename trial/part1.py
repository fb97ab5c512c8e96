"""GANs, WGANs, VAEs."""

import keras
import numpy as np
from keras import layers, ops

import treadle

from .base import wrong

rng = np.random.default_rng(0)


def ring(n=512):
    angle = rng.uniform(0, 2 * np.pi, n)
    return np.stack([np.cos(angle), np.sin(angle)], 1).astype("float32") + 0.05 * rng.normal(
        size=(n, 2)
    ).astype("float32")


def dense(*sizes, last=None):
    return keras.Sequential(
        [keras.Input((sizes[0],))]
        + [layers.Dense(s, activation="relu") for s in sizes[1:-1]]
        + [layers.Dense(sizes[-1], activation=last)]
    )


class GAN(treadle.Task):
    def __init__(self):
        self.generator = dense(4, 32, 2)
        self.discriminator = dense(2, 32, 1)
        self.g_opt = keras.optimizers.Adam(1e-3, beta_1=0.5)
        self.d_opt = keras.optimizers.Adam(1e-3, beta_1=0.5)
        self.bce = keras.losses.BinaryCrossentropy(from_logits=True)
        self.seed = keras.random.SeedGenerator(1)

    def train_step(self, real):
        n = ops.shape(real)[0]
        noise = keras.random.normal((n, 4), seed=self.seed)
        fake = self.generator(noise)

        def d_objective():
            r, f = self.discriminator(real), self.discriminator(fake)
            return self.bce(ops.ones_like(r), r) + self.bce(ops.zeros_like(f), f)

        d_loss = treadle.minimize(d_objective, self.discriminator, self.d_opt)
        g_loss = self.generator_step(keras.random.normal((n, 4), seed=self.seed))
        return {"d_loss": d_loss, "g_loss": g_loss}


@wrong(
    "the generator's update also changes the discriminator (its variables are in the list)",
    "the generator's loss trains the discriminator / two losses pull at the same variables",
)
def gan_generator_trains_discriminator():
    class Leaky(GAN):
        def generator_step(self, noise):
            def objective():
                f = self.discriminator(self.generator(noise))
                return self.bce(ops.ones_like(f), f)

            both = self.generator.trainable_variables + self.discriminator.trainable_variables
            return treadle.minimize(objective, both, self.g_opt)

    return Leaky(), treadle.data.from_arrays(ring(), batch_size=64), None, None


@wrong(
    "the generator is trained with the label 0: it learns to be recognized as fake",
    "the generator moves so that the discriminator's output for fakes falls (both want the same)",
)
def gan_generator_label():
    class Friendly(GAN):
        def generator_step(self, noise):
            def objective():
                f = self.discriminator(self.generator(noise))
                return self.bce(ops.zeros_like(f), f)

            return treadle.minimize(objective, self.generator, self.g_opt)

    return Friendly(), treadle.data.from_arrays(ring(), batch_size=64), None, None


def wgan(penalty):
    generator, critic = dense(4, 32, 2), dense(2, 32, 32, 1)
    g_opt, c_opt = (keras.optimizers.Adam(2e-4, beta_1=0.0, beta_2=0.9) for _ in "gc")
    seeds = keras.random.SeedGenerator(7)

    def train_step(real, generator, critic, g_opt, c_opt, seeds):
        n = real.shape[0]
        fake = generator(keras.random.normal((n, 4), seed=seeds))
        eps = keras.random.uniform((n, 1), seed=seeds)
        mixed = eps * real + (1 - eps) * fake

        def critic_objective():
            gp = penalty(critic, mixed)
            return ops.mean(critic(fake)) - ops.mean(critic(real)) + 10.0 * gp, gp

        (c_loss, gp) = treadle.minimize(critic_objective, critic, c_opt)
        z = keras.random.normal((n, 4), seed=seeds)
        g_loss = treadle.minimize(lambda: -ops.mean(critic(generator(z))), generator, g_opt)
        return {"critic": c_loss, "gp": gp, "generator": g_loss}

    # The critic's last bias has no gradient in this loss: leave it out.
    critic.layers[-1].bias.trainable = False
    return treadle.task(
        train_step, generator=generator, critic=critic, g_opt=g_opt, c_opt=c_opt, seeds=seeds
    )


@wrong(
    "the gradient penalty takes one norm over the whole batch, and not one per example",
    "the penalty depends on the batch size / couples the examples",
)
def wgan_penalty_over_batch():
    def penalty(critic, mixed):
        _, (slope,) = treadle.input_gradients(lambda x: ops.sum(critic(x)), mixed)
        return (ops.sqrt(ops.sum(ops.square(slope)) + 1e-12) - 1.0) ** 2

    return wgan(penalty), treadle.data.from_arrays(ring(), batch_size=64), None, None


@wrong(
    "the gradient of the penalty is stopped: the penalty trains nothing",
    "the penalty (gp) has no gradient, though it is part of the loss",
)
def wgan_penalty_stopped():
    def penalty(critic, mixed):
        _, (slope,) = treadle.input_gradients(lambda x: ops.sum(critic(x)), mixed)
        slope = ops.stop_gradient(slope)
        return ops.mean((ops.sqrt(ops.sum(slope**2, axis=-1) + 1e-12) - 1.0) ** 2)

    return wgan(penalty), treadle.data.from_arrays(ring(), batch_size=64), None, None


def digits_x():
    return (treadle.datasets.digits().x_train.reshape(-1, 64) / 16).astype("float32")


class VAE(treadle.Task):
    def __init__(self, latent=4):
        self.latent = latent
        inputs = keras.Input((64,))
        h = layers.Dense(32, activation="relu")(inputs)
        self.encoder = keras.Model(inputs, [layers.Dense(latent)(h), layers.Dense(latent)(h)])
        self.decoder = dense(latent, 32, 64, last="sigmoid")
        self.optimizer = keras.optimizers.Adam(1e-3)
        self.seeds = keras.random.SeedGenerator(3)

    def terms(self, x):
        mean, log_var = self.encoder(x)
        z = self.sample(mean, log_var)
        out = self.decoder(z)
        recon = ops.mean(ops.sum(keras.losses.binary_crossentropy(x[..., None], out[..., None]), -1))
        kl = -0.5 * ops.mean(ops.sum(1 + log_var - mean**2 - ops.exp(log_var), axis=-1))
        return recon, kl

    def sample(self, mean, log_var):
        eps = keras.random.normal(ops.shape(mean), seed=self.seeds)
        return mean + ops.exp(0.5 * log_var) * eps

    def train_step(self, x):
        def objective():
            recon, kl = self.terms(x)
            return recon + kl, (recon, kl)

        variables = self.encoder.trainable_variables + self.decoder.trainable_variables
        loss, (recon, kl) = treadle.minimize(objective, variables, self.optimizer)
        return {"loss": loss, "recon": recon, "kl": kl}

    def eval_step(self, x):
        recon, kl = self.terms(x)
        return {"loss": recon + kl, "recon": recon, "kl": kl}


@wrong(
    "the noise of the reparametrization is drawn once in __init__: every step has the same noise",
    "no randomness / the same constant noise in each step",
)
def vae_constant_noise():
    class Constant(VAE):
        def __init__(self):
            super().__init__()
            self.eps = keras.random.normal((64, 4))

        def sample(self, mean, log_var):
            return mean + ops.exp(0.5 * log_var) * self.eps

    data = treadle.data.from_arrays(digits_x(), batch_size=64, drop_last=True)
    return Constant(), data, None, None


@wrong(
    "the KL term is subtracted: the code is driven away from the prior",
    "the logged kl, a part of the loss, rises with training / its sign",
)
def vae_kl_sign():
    class Away(VAE):
        def train_step(self, x):
            def objective():
                mean, log_var = self.encoder(x)
                out = self.decoder(self.sample(mean, log_var))
                recon = ops.mean(ops.sum((x - out) ** 2, axis=-1))
                kl = 0.5 * ops.sum(1 + log_var - mean**2 - ops.exp(log_var), axis=-1)
                return recon + 0.1 * ops.mean(kl), recon

            variables = self.encoder.trainable_variables + self.decoder.trainable_variables
            loss, recon = treadle.minimize(objective, variables, self.optimizer)
            return {"loss": loss, "recon": recon}

    x = digits_x()
    data = treadle.data.from_arrays(x[:1024], batch_size=64)
    return Away(), data, treadle.data.from_arrays(x[1024:], batch_size=64, shuffle=False), None
