"""Diffusion, contrastive and self-supervised learning."""

import keras
import numpy as np
from keras import layers, ops

import treadle

from .base import wrong
from .part1 import dense, digits_x, ring

rng = np.random.default_rng(1)


class Diffusion(treadle.Task):
    def __init__(self, T=50):
        self.T = T
        betas = np.linspace(1e-4, 0.1, T)
        self.alpha_bar = np.cumprod(1 - betas).astype("float32")
        x, t = keras.Input((2,)), keras.Input((1,))
        h = layers.Concatenate()([x, t])
        for _ in range(2):
            h = layers.Dense(32, activation="silu")(h)
        self.net = keras.Model([x, t], layers.Dense(2)(h))
        self.optimizer = keras.optimizers.Adam(1e-3)
        self.seeds = keras.random.SeedGenerator(0)

    def noised(self, x0, noise, t):
        bar = ops.take(ops.convert_to_tensor(self.alpha_bar), t)
        return ops.sqrt(bar) * x0 + ops.sqrt(1 - bar) * noise


@wrong(
    "t and the noise are drawn with integer seeds: they are the same in every step",
    "the random numbers are the same in every step / integer seed",
)
def diffusion_integer_seed():
    class SameNoise(Diffusion):
        def train_step(self, x0):
            n = x0.shape[0]
            t = keras.random.randint((n, 1), 0, self.T, seed=1337)
            noise = keras.random.normal((n, 2), seed=1338)

            def objective():
                time = ops.cast(t, "float32") / self.T
                predicted = self.net([self.noised(x0, noise, t), time])
                return ops.mean((predicted - noise) ** 2)

            return {"loss": treadle.minimize(objective, self.net, self.optimizer)}

    return SameNoise(), treadle.data.from_arrays(ring(), batch_size=64), None, None


@wrong(
    "the network gets the clean example instead of the noised one",
    "the loss does not depend on the noised input / the noise cannot be predicted from the inputs",
)
def diffusion_clean_input():
    class Clean(Diffusion):
        def train_step(self, x0):
            n = x0.shape[0]
            t = keras.random.randint((n, 1), 0, self.T, seed=self.seeds)
            noise = keras.random.normal((n, 2), seed=self.seeds)
            xt = self.noised(x0, noise, t)

            def objective():
                predicted = self.net([x0, ops.cast(t, "float32") / self.T])
                return ops.mean((predicted - noise) ** 2), ops.mean(xt**2)

            loss, power = treadle.minimize(objective, self.net, self.optimizer)
            return {"loss": loss, "power": power}

    return Clean(), treadle.data.from_arrays(ring(), batch_size=64), None, None


def views(x, seeds):
    keep = ops.cast(keras.random.uniform(ops.shape(x), seed=seeds) > 0.2, "float32")
    return x * keep + 0.1 * keras.random.normal(ops.shape(x), seed=seeds)


class Contrastive(treadle.Task):
    axis = -1

    def __init__(self):
        self.encoder = dense(64, 64, 16)
        self.optimizer = keras.optimizers.Adam(1e-3)
        self.seeds = keras.random.SeedGenerator(5)

    def train_step(self, x):
        a, b = views(x, self.seeds), views(x, self.seeds)

        def objective():
            za = ops.normalize(self.encoder(a, training=True), axis=self.axis)
            zb = ops.normalize(self.encoder(b, training=True), axis=self.axis)
            return self.loss(za, zb)

        return {"loss": treadle.minimize(objective, self.encoder, self.optimizer)}


@wrong(
    "NT-Xent without a mask: each view's logit with itself stays among the negatives",
    "the similarity of an example with itself is among the candidates",
)
def simclr_no_self_mask():
    class Unmasked(Contrastive):
        def loss(self, za, zb):
            n = za.shape[0]
            z = ops.concatenate([za, zb])
            logits = ops.matmul(z, ops.transpose(z)) / 0.1
            labels = ops.concatenate([ops.arange(n) + n, ops.arange(n)])
            return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, True))

    data = treadle.data.from_arrays(digits_x(), batch_size=64, drop_last=True)
    return Unmasked(), data, None, None


@wrong(
    "the embeddings are normalized over the batch (axis 0) and not per example",
    "an example's embedding depends on the other examples in an unintended way; axis 0",
)
def contrastive_normalized_over_batch():
    class Axis(Contrastive):
        axis = 0

        def loss(self, za, zb):
            logits = ops.matmul(za, ops.transpose(zb)) / 0.1
            labels = ops.arange(za.shape[0])
            return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, True))

    data = treadle.data.from_arrays(digits_x(), batch_size=64, drop_last=True)
    return Axis(), data, None, None


@wrong(
    "SimSiam without stop_gradient: the representation collapses",
    "the gradient flows through both branches / the outputs collapse to a constant",
)
def simsiam_no_stop():
    encoder, predictor = dense(64, 64, 16), dense(16, 8, 16)
    optimizer, seeds = keras.optimizers.SGD(0.05, momentum=0.9), keras.random.SeedGenerator(2)

    def similarity(p, z):
        return -ops.mean(ops.sum(ops.normalize(p, axis=-1) * ops.normalize(z, axis=-1), axis=-1))

    def step(x):
        a, b = views(x, seeds), views(x, seeds)

        def objective():
            za, zb = encoder(a, training=True), encoder(b, training=True)
            return 0.5 * (similarity(predictor(za), zb) + similarity(predictor(zb), za))

        variables = [*encoder.trainable_variables, *predictor.trainable_variables]
        return {"loss": treadle.minimize(objective, variables, optimizer)}

    task = treadle.task(
        step, encoder=encoder, predictor=predictor, optimizer=optimizer, seeds=seeds
    )
    return task, treadle.data.from_arrays(digits_x(), batch_size=128, drop_last=True), None, None


@wrong(
    "the momentum encoder is updated with 0.99 as its rate: it is nearly the online network",
    "the average follows its source at once (rate 0.99): momentum and rate are swapped",
)
def momentum_encoder_swapped():
    class Byol(treadle.Task):
        def __init__(self, momentum=0.99):
            self.online, self.predictor = dense(64, 64, 16), dense(16, 16, 16)
            self.momentum_encoder = treadle.frozen_copy(self.online)
            self.optimizer = keras.optimizers.Adam(3e-4)
            self.seeds = keras.random.SeedGenerator(4)
            self.momentum = momentum

        def train_step(self, x):
            a, b = views(x, self.seeds), views(x, self.seeds)
            ta = ops.normalize(self.momentum_encoder(a), axis=-1)
            tb = ops.normalize(self.momentum_encoder(b), axis=-1)

            def objective():
                pa = ops.normalize(self.predictor(self.online(a)), axis=-1)
                pb = ops.normalize(self.predictor(self.online(b)), axis=-1)
                return 2 - ops.mean(ops.sum(pa * tb + pb * ta, axis=-1))

            variables = self.online.trainable_variables + self.predictor.trainable_variables
            loss = treadle.minimize(objective, variables, self.optimizer)
            treadle.blend(self.momentum_encoder, self.online, self.momentum)
            return {"loss": loss}

    data = treadle.data.from_arrays(digits_x(), batch_size=64, drop_last=True)
    return Byol(), data, None, None
