"""The task of tests that look at run directories: a small model with a step of its own."""

from typing import Any

import keras

import treadle


class Line(treadle.Task):
    """Makes the outputs of a linear model smaller."""

    def __init__(self) -> None:
        self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.SGD(0.01)

    def train_step(self, batch: Any) -> Any:
        def objective() -> Any:
            return keras.ops.mean(self.model(batch) ** 2)

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}
