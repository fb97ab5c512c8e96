"""Meta-learning, adversarial training, accumulation, schedules, averages, SAM."""

import keras
import numpy as np
from keras import layers, ops

import treadle

from .base import wrong
from .part1 import dense

rng = np.random.default_rng(3)


def blobs(n=768, classes=4, d=8, noise=0.7):
    centers = np.random.default_rng(9).normal(size=(classes, d)) * 1.5
    y = rng.integers(0, classes, n)
    return (centers[y] + noise * rng.normal(size=(n, d))).astype("float32"), y.astype("int32")


def sine_tasks(generator):
    amplitude = generator.uniform(0.5, 3, (8, 1, 1))
    phase = generator.uniform(0, np.pi, (8, 1, 1))
    x = generator.uniform(-3, 3, (8, 20, 1))
    y = amplitude * np.sin(x + phase)
    x, y = x.astype("float32"), y.astype("float32")
    return {"sx": x[:, :10], "sy": y[:, :10], "qx": x[:, 10:], "qy": y[:, 10:]}


@wrong(
    "MAML: the query loss is computed after the block of adapted weights: with the original ones",
    "the adapted weights have no effect on the loss; the support set is without effect",
)
def maml_not_adapted():
    class Maml(treadle.Task):
        def __init__(self, inner=0.05):
            self.net, self.inner = dense(1, 24, 24, 1), inner
            self.optimizer = keras.optimizers.Adam(1e-3)

        def error(self, x, y):
            return ops.mean((self.net(x) - y) ** 2)

        def train_step(self, batch):
            def objective():
                total, variables = 0.0, self.net.trainable_variables
                for i in range(8):
                    before, slopes = treadle.gradients(
                        lambda i=i: self.error(batch["sx"][i], batch["sy"][i]), variables
                    )
                    new = [v - self.inner * g for v, g in zip(variables, slopes, strict=True)]
                    with treadle.substituted(variables, new):
                        adapted = self.error(batch["sx"][i], batch["sy"][i])
                    total = total + self.error(batch["qx"][i], batch["qy"][i])
                return total / 8, (before, adapted)

            loss, (before, adapted) = treadle.minimize(objective, self.net, self.optimizer)
            return {"loss": loss, "before": before, "adapted": adapted}

    return Maml(), treadle.data.from_function(sine_tasks, length=20), None, None


@wrong(
    "FGSM goes against the gradient: the adversarial examples are easier than the clean ones",
    "the perturbation lowers the loss (sign)",
)
def fgsm_sign():
    class Robust(treadle.Task):
        def __init__(self, epsilon=0.3):
            self.model, self.epsilon = dense(8, 32, 4), epsilon
            self.optimizer = keras.optimizers.Adam(1e-3)
            self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def train_step(self, batch):
            x, y = batch
            clean, (slope,) = treadle.input_gradients(lambda x: self.loss(y, self.model(x)), x)
            attacked = x - self.epsilon * ops.sign(slope)
            loss = treadle.minimize(
                lambda: self.loss(y, self.model(attacked)), self.model, self.optimizer
            )
            return {"loss": loss, "clean": clean}

        def eval_step(self, batch):
            x, y = batch
            return {"loss": self.loss(y, self.model(x))}

    x, y = blobs()
    train = treadle.data.from_arrays(x[:512], y[:512], batch_size=64)
    return Robust(), train, treadle.data.from_arrays(x[512:], y[512:], batch_size=64), None


class Classifier(treadle.Task):
    def __init__(self):
        self.model = dense(8, 32, 4)
        self.optimizer = keras.optimizers.SGD(0.1)
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def objective(self, batch):
        x, y = batch
        return lambda: self.loss(y, self.model(x, training=True))


def train_data(batch_size=32):
    return treadle.data.from_arrays(*blobs(), batch_size=batch_size, drop_last=True)


@wrong(
    "accumulation by hand: the sums are not reset after the update",
    "the accumulated gradients only grow; buffers never reset",
)
def accumulation_not_reset():
    class Accumulating(Classifier):
        def __init__(self):
            super().__init__()
            self.sums = [keras.Variable(ops.zeros(v.shape)) for v in self.model.trainable_variables]

        def train_step(self, batch):
            variables = self.model.trainable_variables
            loss, grads = treadle.gradients(self.objective(batch), variables)
            for s, g in zip(self.sums, grads, strict=True):
                s.assign_add(g / 4)

            def apply():
                self.optimizer.apply([ops.convert_to_tensor(s) for s in self.sums], variables)

            treadle.cond(ops.equal(treadle.step() % 4, 3), apply, lambda: None)
            return {"loss": loss}

    return Accumulating(), train_data(), None, None


@wrong(
    "the clipped gradients are computed, but the unclipped ones are applied",
    "clipping has no effect",
)
def clipping_unused():
    class Clipped(Classifier):
        def train_step(self, batch):
            loss, grads = treadle.gradients(self.objective(batch), self.model)
            clipped, norm = treadle.clip_by_global_norm(grads, 0.05)
            self.optimizer.apply(grads, self.model.trainable_variables)
            return {"loss": loss, "norm": norm}

    return Clipped(), train_data(), None, None


@wrong(
    "warmup with an integer division: the learning rate is 0 for all of the warmup, then jumps",
    "the learning rate is 0: the updates change nothing",
)
def warmup_integer_division():
    class Warmup(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            step = ops.cast(step, "int32")
            return 0.1 * ops.cast(ops.minimum(step // 100, 1), "float32")

        def get_config(self):
            return {}

    model = keras.Sequential([layers.Dense(32, activation="relu"), layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    task = treadle.Supervised(model, loss, keras.optimizers.SGD(Warmup()), ["accuracy"])
    return task, train_data(), None, None


@wrong(
    "SAM: the second gradient, at the perturbed weights, is computed, but the first is applied",
    "the gradients of the second pass are not used",
)
def sam_first_gradient():
    class Sam(Classifier):
        def train_step(self, batch):
            variables = self.model.trainable_variables
            loss, first = treadle.gradients(self.objective(batch), variables)
            scale = 0.05 / (treadle.global_norm(first) + 1e-12)
            moves = [g * scale for g in first]
            for v, e in zip(variables, moves, strict=True):
                v.assign_add(e)
            sharp, second = treadle.gradients(self.objective(batch), variables)
            for v, e in zip(variables, moves, strict=True):
                v.assign_sub(e)
            self.optimizer.apply(first, variables)
            return {"loss": loss, "sharpness": sharp - loss}

    return Sam(), train_data(), None, None
