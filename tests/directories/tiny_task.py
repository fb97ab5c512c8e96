"""The task whose run directories are damaged: it leaves every kind of file that a run can have."""

import os
import time

import keras
import numpy as np
from keras import ops

import treadle

DIES = "TREADLE_TEST_DIES"  # "killed" or "failed", after step 19


class Tiny(treadle.Task):
    """A regression with images, validation, a schedule and Dropout: 4 epochs of 6 steps."""

    epochs = 4

    def __init__(self, units: int = 3):
        self.model = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(units), keras.layers.Dropout(0.2, seed=1)]
        )
        self.head = keras.Sequential([keras.Input((units,)), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.Adam(0.05)

    def train_step(self, batch):
        x, y = batch

        def objective():
            predicted = self.head(self.model(x, training=True))
            return ops.mean(ops.square(ops.subtract(predicted, y)))

        variables = self.model.trainable_variables + self.head.trainable_variables
        return {"loss": treadle.minimize(objective, variables, self.optimizer)}

    def eval_step(self, batch):
        x, y = batch
        return {"loss": ops.mean(ops.square(ops.subtract(self.head(self.model(x)), y)))}

    def datasets(self):
        x = np.random.default_rng(0).normal(size=(24, 2)).astype("float32")
        train = treadle.data.from_arrays(x, x[:, :1], batch_size=4)
        return treadle.Datasets(train=train, validation=train, test=train)

    def hooks(self):
        """Save an image every epoch; end the process if the environment says so."""
        return [
            treadle.every("1 epoch", lambda loop: {"picture": treadle.Image(np.zeros((2, 2)))}),
            treadle.hooks.Checkpoint("7 steps"),
            treadle.at("19 steps", self.dies),
        ]

    def dies(self, loop):
        if os.environ.get(DIES) == "killed":
            # Of step 14, or of 15 if the one before was still being written.
            while not list((loop.directory / "checkpoints").glob("*1?")):
                time.sleep(0.01)  # it is written by another thread
            os._exit(9)
        if os.environ.get(DIES) == "failed":
            raise OSError("a disk that fails")
