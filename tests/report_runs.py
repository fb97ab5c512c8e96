"""Trains runs whose reports the documentation shows: `python -m tests.report_runs FOLDER`.

- `digits`: one run, with a learning rate that falls and with logged pictures.
- `diverging`: a run that is interrupted, resumed, and stopped by a value that is not finite.
"""

import os
import signal
import sys
from pathlib import Path

import keras
from keras import ops

import treadle

EPOCHS = 18


class Digits(treadle.Task):
    """A network for digits that logs the learning rate of each step."""

    def __init__(self, units=64, start=0.01, end=0.0001):
        layers = [keras.layers.Rescaling(1 / 16), keras.layers.Flatten()]
        layers += [keras.layers.Dense(units, "relu"), keras.layers.Dense(10)]
        self.model = keras.Sequential([keras.Input((8, 8)), *layers])
        rate = keras.optimizers.schedules.ExponentialDecay(start, 23 * EPOCHS, end / start)
        self.optimizer = self.optimizer_with(rate)
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()

    def optimizer_with(self, rate):
        return keras.optimizers.Adam(rate)

    def loss(self, y, outputs):
        losses = keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
        return ops.mean(losses)

    def train_step(self, batch):
        x, y = batch
        rate = self.optimizer.learning_rate

        def objective():
            outputs = self.model(x, training=True)
            return self.loss(y, outputs), outputs

        loss, outputs = treadle.minimize(objective, self.model, self.optimizer)
        self.accuracy.update_state(y, outputs)
        return {"loss": loss, "learning_rate": rate}

    def eval_step(self, batch):
        x, y = batch
        outputs = self.model(x, training=False)
        self.accuracy.update_state(y, outputs)
        return {"loss": self.loss(y, outputs)}


class Diverging(Digits):
    """The same with a squared error, and a learning rate that rises until training diverges."""

    def __init__(self, units=64, start=0.01, end=40.0):
        super().__init__(units, start, end)

    def optimizer_with(self, rate):
        return keras.optimizers.SGD(rate)

    def loss(self, y, outputs):
        return ops.mean((outputs - ops.one_hot(y, 10)) ** 2)


def data():
    found = treadle.datasets.digits()
    train = treadle.data.from_arrays(found.x_train, found.y_train, batch_size=64)
    test = (found.x_test, found.y_test)
    return train, treadle.data.from_arrays(*test, batch_size=64, shuffle=False)


def first_layer(loop):
    """Return the weights of 32 units of the first layer as a picture."""
    weights = ops.convert_to_numpy(loop.task.model.layers[2].kernel).T[:32].reshape(-1, 8, 8)
    low, high = weights.min(), weights.max()
    return {"first layer": treadle.Image.grid((weights - low) / (high - low), columns=8)}


def interrupt(loop):
    os.kill(os.getpid(), signal.SIGTERM)


def train_one(folder):
    keras.backend.clear_session()
    treadle.setup(seed=0)
    pictures = treadle.every("2 epochs", first_layer)
    with treadle.Loop(Digits(), folder / "digits", [pictures], console=False) as loop:
        loop.fit(*data(), epochs=EPOCHS)


def train_diverging(folder):
    for hooks in ([treadle.at("5 epochs", interrupt)], []):
        keras.backend.clear_session()
        treadle.setup(seed=0)
        checkpoints = treadle.hooks.Checkpoint("2 epochs", keep_last=3)
        hooks = [*hooks, checkpoints]
        try:
            with treadle.Loop(Diverging(), folder / "diverging", hooks, console=False) as loop:
                loop.fit(*data(), epochs=EPOCHS)
        except (treadle.errors.Terminated, treadle.errors.NonFiniteError) as error:
            print(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    train_one(Path(sys.argv[1]))
    train_diverging(Path(sys.argv[1]))
