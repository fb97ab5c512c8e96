"""A task whose step is a function of the test's own."""

from collections.abc import Callable
from typing import Any

import keras
from classifier import FEATURES, Classifier, dense, head

import treadle

CAPTURED = "windows of up to 256, captured"
"""The plan of a step that PyTorch's backend has captured."""


class Steps(Classifier):
    """A classifier whose step is `step(task, x, y)`."""

    def __init__(self, step: Callable[[Any, Any, Any], Any], *layers: Any, **state: Any) -> None:
        super().__init__([keras.Input((FEATURES,)), *(layers or (dense(),)), head()])
        vars(self).update(state)
        self.step = step

    def train_step(self, batch: Any) -> Any:
        return self.step(self, *batch)


def learn(task: Any, x: Any, y: Any) -> Any:
    return treadle.minimize(
        lambda: task.loss(y, task.model(x, training=True)), task.model, task.optimizer
    )
