"""Sound programs that look suspicious."""

import keras
import numpy as np
from keras import layers, ops

import treadle

from .base import sound
from .part1 import VAE, dense, digits_x, ring, wgan
from .part2 import Contrastive, views
from .part3 import DQN, rollouts, transitions
from .part4 import Classifier, blobs, train_data


@sound("SimSiam with stop_gradient")
def simsiam():
    encoder, predictor = dense(64, 64, 16), dense(16, 8, 16)
    optimizer, seeds = keras.optimizers.SGD(0.05, momentum=0.9), keras.random.SeedGenerator(2)

    def similarity(p, z):
        p, z = ops.normalize(p, axis=-1), ops.normalize(ops.stop_gradient(z), axis=-1)
        return -ops.mean(ops.sum(p * z, axis=-1))

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


@sound("DQN whose target network is copied every 100 steps: unchanged within a few steps")
def dqn_hard_updates():
    class Hard(DQN):
        def train_step(self, batch):
            following = ops.max(self.target(batch["next_obs"]), axis=-1)
            target = batch["reward"] + self.gamma * (1 - batch["done"]) * following
            loss = treadle.minimize(
                lambda: self.huber(target, self.chosen(batch)), self.q, self.optimizer
            )
            now = ops.cast(ops.equal(treadle.step() % 100, 99), "float32")
            treadle.blend(self.target, self.q, now)
            return {"loss": loss}

    return Hard(), treadle.data.from_arrays(transitions(), batch_size=64), None, None


@sound("PPO with several updates per batch; the ratio of the first is exactly 1")
def ppo():
    class PPO(treadle.Task):
        def __init__(self, clip=0.2):
            self.policy, self.clip = dense(4, 32, 3), clip
            self.value = dense(4, 32, 1)
            self.optimizer = keras.optimizers.Adam(3e-4)

        def log_prob(self, batch):
            logp = ops.log_softmax(self.policy(batch["obs"]))
            return ops.take_along_axis(logp, batch["action"][:, None], axis=-1)[:, 0]

        def train_step(self, batch):
            old = ops.stop_gradient(self.log_prob(batch))
            variables = self.policy.trainable_variables + self.value.trainable_variables
            for _ in range(3):

                def objective():
                    ratio = ops.exp(self.log_prob(batch) - old)
                    clipped = ops.clip(ratio, 1 - self.clip, 1 + self.clip)
                    gain = ops.minimum(ratio * batch["adv"], clipped * batch["adv"])
                    error = batch["return"] - self.value(batch["obs"])[:, 0]
                    return -ops.mean(gain) + 0.5 * ops.mean(error**2), ops.mean(ratio)

                loss, ratio = treadle.minimize(objective, variables, self.optimizer)
            return {"loss": loss, "ratio": ratio}

    data = rollouts()
    del data["old_logp"]
    return PPO(), treadle.data.from_arrays(data, batch_size=128), None, None


@sound("VAE with KL annealing: the weight is 0 in the first step")
def vae_annealed():
    class Annealed(VAE):
        def train_step(self, x):
            weight = ops.minimum(ops.cast(treadle.step(), "float32") / 1000.0, 1.0)

            def objective():
                recon, kl = self.terms(x)
                return recon + weight * kl, (recon, kl)

            variables = self.encoder.trainable_variables + self.decoder.trainable_variables
            loss, (recon, kl) = treadle.minimize(objective, variables, self.optimizer)
            return {"loss": loss, "recon": recon, "kl": kl, "weight": weight}

    x = digits_x()
    validation = treadle.data.from_arrays(x[:256], batch_size=64, shuffle=False)
    return Annealed(), treadle.data.from_arrays(x, batch_size=64), validation, None


@sound("SAM: weights moved and moved back, second gradient applied")
def sam():
    class Sam(Classifier):
        def train_step(self, batch):
            variables = self.model.trainable_variables
            loss, first = treadle.gradients(self.objective(batch), variables)
            scale = 0.05 / (treadle.global_norm(first) + 1e-12)
            moved = [v + g * scale for v, g in zip(variables, first, strict=True)]
            with treadle.substituted(variables, moved):
                sharp, second = treadle.gradients(self.objective(batch), variables)
            self.optimizer.apply(second, variables)
            return {"loss": loss, "sharpness": sharp - loss}

        def eval_step(self, batch):
            return {"loss": self.objective(batch)()}

    return Sam(), train_data(), train_data(64), None


@sound("warmup from 0 and accumulation over 8 batches: the first steps change no weight")
def warmup_and_accumulation():
    class Slow(Classifier):
        def __init__(self):
            super().__init__()
            schedule = keras.optimizers.schedules.CosineDecay(
                0.0, 1000, warmup_target=0.1, warmup_steps=100
            )
            self.optimizer = keras.optimizers.Adam(schedule)
            self.accumulator = treadle.Accumulator(8)

        def train_step(self, batch):
            loss, grads = treadle.gradients(self.objective(batch), self.model)

            def update(grads):
                grads, _ = treadle.clip_by_global_norm(grads, 1.0)
                self.optimizer.apply(grads, self.model.trainable_variables)

            self.accumulator.add(grads, update)
            return {"loss": loss}

    return Slow(), train_data(), None, None


@sound("perceptual loss through a frozen network")
def perceptual_frozen():
    class Perceptual(treadle.Task):
        def __init__(self):
            self.features = dense(64, 64, 32)
            self.features.trainable = False
            self.restorer = dense(64, 64, 64)
            self.optimizer = keras.optimizers.Adam(1e-3)

        def objective(self, batch):
            noisy, clean = batch
            out = self.restorer(noisy)
            wanted = self.features(clean)
            return ops.mean((self.features(out) - wanted) ** 2)

        def train_step(self, batch):
            return treadle.minimize(lambda: self.objective(batch), self.restorer, self.optimizer)

        def eval_step(self, batch):
            return self.objective(batch)

    x = digits_x()
    rng = np.random.default_rng(0)
    noisy = (x + 0.3 * rng.normal(size=x.shape)).astype("float32")
    pairs = treadle.data.from_arrays(noisy, x, batch_size=64)
    return Perceptual(), pairs, pairs, None


@sound("WGAN with weight clipping instead of a penalty; the last bias without gradient")
def wgan_clipped_weights():
    class Clipped(treadle.Task):
        def __init__(self):
            self.g, self.c = dense(4, 32, 2), dense(2, 32, 1)
            self.g_opt, self.c_opt = (keras.optimizers.RMSprop(5e-5) for _ in "gc")
            self.seeds = keras.random.SeedGenerator(0)

        def train_step(self, real):
            fake = self.g(keras.random.normal((real.shape[0], 4), seed=self.seeds))
            loss, grads = treadle.gradients(
                lambda: ops.mean(self.c(fake)) - ops.mean(self.c(real)), self.c, unreached="zeros"
            )
            self.c_opt.apply(grads, self.c.trainable_variables)
            for v in self.c.trainable_variables:
                v.assign(ops.clip(v, -0.05, 0.05))
            noise = keras.random.normal((real.shape[0], 4), seed=self.seeds)
            g_loss = treadle.minimize(lambda: -ops.mean(self.c(self.g(noise))), self.g, self.g_opt)
            return {"wasserstein": -loss, "g": g_loss}

    return Clipped(), treadle.data.from_arrays(ring(), batch_size=64), None, None


@sound("VQ-VAE: straight-through estimator and two stopped terms")
def vq_vae():
    class VQ(treadle.Task):
        def __init__(self, codes=16, size=4):
            self.encoder, self.decoder = dense(64, 32, size), dense(size, 32, 64)
            self.codebook = keras.Variable(
                keras.random.uniform((codes, size), -0.5, 0.5, seed=0), name="codebook"
            )
            self.optimizer = keras.optimizers.Adam(1e-3)

        def train_step(self, x):
            def objective():
                z = self.encoder(x)
                away = ops.sum((z[:, None] - self.codebook[None]) ** 2, axis=-1)
                e = ops.take(self.codebook, ops.argmin(away, axis=-1), axis=0)
                commit = ops.mean((z - ops.stop_gradient(e)) ** 2)
                book = ops.mean((ops.stop_gradient(z) - e) ** 2)
                out = self.decoder(z + ops.stop_gradient(e - z))
                recon = ops.mean((out - x) ** 2)
                return recon + book + 0.25 * commit, (recon, commit)

            variables = [
                *self.encoder.trainable_variables,
                *self.decoder.trainable_variables,
                self.codebook,
            ]
            loss, (recon, commit) = treadle.minimize(objective, variables, self.optimizer)
            return {"loss": loss, "recon": recon, "commit": commit}

    return VQ(), treadle.data.from_arrays(digits_x(), batch_size=64), None, None


@sound("mean teacher: consistency with an average model, ramped up from 0; teacher evaluated")
def mean_teacher():
    class Mean(treadle.Task):
        def __init__(self):
            self.student = keras.Sequential(
                [
                    keras.Input((8,)),
                    layers.Dense(32, "relu"),
                    layers.Dropout(0.3),
                    layers.Dense(4),
                ]
            )
            self.teacher = treadle.frozen_copy(self.student)
            self.optimizer = keras.optimizers.Adam(1e-3)
            self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self.seeds = keras.random.SeedGenerator(0)

        def train_step(self, batch):
            x, y, unlabelled = batch["x"], batch["y"], batch["u"]
            ramp = ops.exp(-5 * (1 - ops.minimum(ops.cast(treadle.step(), "float32") / 200, 1)) ** 2)
            jitter = 0.1 * keras.random.normal(unlabelled.shape, seed=self.seeds)
            wanted = ops.softmax(self.teacher(unlabelled, training=False))

            def objective():
                guess = ops.softmax(self.student(unlabelled + jitter, training=True))
                consistency = ops.mean((guess - wanted) ** 2)
                supervised = self.loss(y, self.student(x, training=True))
                return supervised + ramp * consistency, consistency

            loss, consistency = treadle.minimize(objective, self.student, self.optimizer)
            treadle.blend(self.teacher, self.student, 0.01)
            return {"loss": loss, "consistency": consistency}

        def eval_step(self, batch):
            return {"loss": self.loss(batch["y"], self.teacher(batch["x"], training=False))}

    x, y = blobs(1024)
    train = treadle.data.from_arrays({"x": x[:384], "y": y[:384], "u": x[384:768]}, batch_size=32)
    held = treadle.data.from_arrays({"x": x[768:], "y": y[768:]}, batch_size=64)
    return Mean(), train, held, None
