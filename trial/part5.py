"""Averages, regularizers, feature losses, recurrence, energies."""

import keras
import numpy as np
from keras import layers, ops

import treadle

from .base import wrong
from .part1 import dense, digits_x, ring
from .part4 import Classifier, blobs, train_data

rng = np.random.default_rng(4)


@wrong(
    "the evaluated average follows only the trainable weights: BatchNormalization's statistics in "
    "it stay at their initial values",
    "the average's moving statistics never change",
)
def ema_without_statistics():
    class Averaged(treadle.Task):
        def __init__(self):
            def block(units):
                return [
                    layers.Dense(units, use_bias=False),
                    layers.BatchNormalization(),
                    layers.ReLU(),
                ]

            self.model = keras.Sequential(
                [keras.Input((8,)), *block(32), *block(32), layers.Dense(4)]
            )
            self.average = keras.models.clone_model(self.model)
            self.average.set_weights(self.model.get_weights())
            self.optimizer = keras.optimizers.Adam(1e-3)
            self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def train_step(self, batch):
            x, y = batch
            loss = treadle.minimize(
                lambda: self.loss(y, self.model(x, training=True)), self.model, self.optimizer
            )
            pairs = zip(
                self.average.trainable_variables, self.model.trainable_variables, strict=True
            )
            for a, w in pairs:
                a.assign(0.9 * a + 0.1 * w)
            return {"loss": loss}

        def eval_step(self, batch):
            x, y = batch
            return {"loss": self.loss(y, self.average(x, training=False))}

    x, y = blobs()
    validation = treadle.data.from_arrays(x[:256], y[:256], batch_size=64, shuffle=False)
    return Averaged(), train_data(64), validation, None


@wrong(
    "the sparsity penalty of the layers (activity regularizer) is not added to the loss",
    "model.losses is not part of the loss",
)
def activity_penalty_left_out():
    class Sparse(treadle.Task):
        def __init__(self):
            self.encoder = keras.Sequential(
                [
                    keras.Input((64,)),
                    layers.Dense(32, "relu", activity_regularizer=keras.regularizers.L1(1e-3)),
                ]
            )
            self.decoder = dense(32, 64)
            self.optimizer = keras.optimizers.Adam(1e-3)

        def train_step(self, x):
            def objective():
                return ops.mean(ops.sum((self.decoder(self.encoder(x)) - x) ** 2, axis=-1))

            variables = self.encoder.trainable_variables + self.decoder.trainable_variables
            return {"loss": treadle.minimize(objective, variables, self.optimizer)}

    return Sparse(), treadle.data.from_arrays(digits_x(), batch_size=64), None, None


@wrong(
    "the L2 penalty is computed outside of the objective: it is a constant, without a gradient",
    "the penalty has no gradient",
)
def l2_outside_objective():
    class Decayed(Classifier):
        def train_step(self, batch):
            kernels = [v for v in self.model.trainable_variables if v.name == "kernel"]
            penalty = 0.5 * sum(ops.sum(ops.square(k)) for k in kernels)
            task_loss = self.objective(batch)
            loss = treadle.minimize(
                lambda: task_loss() + 0.01 * penalty, self.model, self.optimizer
            )
            return {"loss": loss, "penalty": penalty}

    return Decayed(), train_data(), None, None


@wrong(
    "the feature network of the perceptual loss is trained with the generator: features go to 0",
    "the fixed feature network changes / the loss is lowered through it",
)
def feature_network_trained():
    class Perceptual(treadle.Task):
        def __init__(self):
            self.features = dense(64, 64, 32)
            self.restorer = dense(64, 64, 64)
            self.optimizer = keras.optimizers.Adam(1e-3)

        def train_step(self, batch):
            noisy, clean = batch
            everything = [*self.restorer.trainable_variables, *self.features.trainable_variables]

            def objective():
                out = self.restorer(noisy)
                return ops.mean((self.features(out) - self.features(clean)) ** 2)

            return {"loss": treadle.minimize(objective, everything, self.optimizer)}

    x = digits_x()
    noisy = (x + 0.3 * rng.normal(size=x.shape)).astype("float32")
    return Perceptual(), treadle.data.from_arrays(noisy, x, batch_size=64), None, None


def walks(n=256, length=12):
    steps = rng.choice([-1.0, 1.0], (n, length, 1)) * 0.3
    noise = 0.02 * rng.normal(size=(n, length, 1))
    return (np.cumsum(steps, axis=1) + noise).astype("float32")


@wrong(
    "teacher forcing without a shift: the decoder's input at t is its target at t",
    "the target is among the inputs / the output at t may copy the input at t",
)
def teacher_forcing_not_shifted():
    class Seq(treadle.Task):
        def __init__(self):
            self.encoder = layers.GRU(16, return_state=True)
            self.decoder = layers.GRU(16, return_sequences=True)
            self.head = layers.Dense(10)
            self.embed = layers.Embedding(10, 8)
            self.optimizer = keras.optimizers.Adam(3e-3)
            self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            for part, shape in (
                (self.embed, (None, 6)),
                (self.encoder, (None, 6, 8)),
                (self.decoder, (None, 6, 8)),
                (self.head, (None, 6, 16)),
            ):
                part.build(shape)

        def forward(self, source, decoder_input):
            _, state = self.encoder(self.embed(source))
            return self.head(self.decoder(self.embed(decoder_input), initial_state=state))

        def train_step(self, batch):
            source, target = batch["source"], batch["target"]
            parts = (self.embed, self.encoder, self.decoder, self.head)
            variables = [v for p in parts for v in p.trainable_variables]

            def objective():
                return self.loss(target, self.forward(source, target))

            return {"loss": treadle.minimize(objective, variables, self.optimizer)}

    source = rng.integers(0, 10, (512, 6)).astype("int32")
    batches = {"source": source, "target": source[:, ::-1].copy()}
    return Seq(), treadle.data.from_arrays(batches, batch_size=64), None, None


@wrong(
    "the Langevin chain of the energy-based model is not stored: the buffer stays its initial noise",
    "the buffer is read but never changed",
)
def ebm_buffer_not_stored():
    class Energy(treadle.Task):
        def __init__(self, chains=64, moves=5):
            self.energy = dense(2, 32, 32, 1)
            self.energy.layers[-1].bias.trainable = False
            self.buffer = keras.Variable(keras.random.normal((chains, 2), seed=0), trainable=False)
            self.optimizer = keras.optimizers.Adam(1e-3)
            self.seeds, self.moves = keras.random.SeedGenerator(0), moves

        def train_step(self, real):
            x = ops.convert_to_tensor(self.buffer)
            for _ in range(self.moves):
                _, (slope,) = treadle.input_gradients(lambda x: ops.sum(self.energy(x)), x)
                x = x - 0.1 * slope + 0.02 * keras.random.normal(x.shape, seed=self.seeds)
            negatives = ops.stop_gradient(x)

            def objective():
                plus, minus = self.energy(real), self.energy(negatives)
                return ops.mean(plus) - ops.mean(minus) + 0.1 * ops.mean(plus**2 + minus**2)

            return {"loss": treadle.minimize(objective, self.energy, self.optimizer)}

    return Energy(), treadle.data.from_arrays(ring(), batch_size=64), None, None
