"""What the loops are timed on: one task and its data for each workload.

Every contestant of a workload trains the same architecture on the same arrays with the same
optimizer and batch size, and counts the same metrics.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import layers

import treadle
from treadle import datasets

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Workload:
    """A task with its data.

    Attributes:
        make: Makes the task: a model, a loss, an optimizer, an accuracy.
        arrays: Returns the data, by the number of examples.
        steps: Steps in an epoch, per backend: about half a second for the usual contestant.
        batch_size: Examples in a step.
        kind: Which hand-written step it takes: "supervised" or "gan".
        input_form: What tf.data does to an example, or None.
    """

    make: Callable[[], Any]
    arrays: Callable[[int], Arrays]
    steps: Mapping[str, int]
    batch_size: int = 64
    kind: str = "supervised"


@dataclass(frozen=True)
class Job:
    """A workload on one backend, at one size.

    Attributes:
        steps: Steps in an epoch.
        arrays: The data of one epoch: `steps * batch_size` examples, so no batch is short.
    """

    name: str
    workload: Workload
    steps: int
    arrays: Arrays = field(repr=False)

    @property
    def batch_size(self) -> int:
        return self.workload.batch_size

    def make(self) -> Any:
        """Return a new task, from the same seed each time."""
        keras.utils.set_random_seed(0)
        return self.workload.make()

    def order(self) -> np.ndarray:
        """Return the order of an epoch: indices of shape (steps, batch_size)."""
        return np.random.permutation(len(self.arrays[0])).reshape(self.steps, self.batch_size)


def job(name: str, steps: int | None = None) -> Job:
    """Return a workload with the data of an epoch, which may be told to be shorter or longer."""
    workload = WORKLOADS[name]
    steps = steps or workload.steps[keras.config.backend()]
    return Job(name, workload, steps, workload.arrays(steps * workload.batch_size))


def cut(arrays: Arrays, examples: int) -> Arrays:
    """Return the first examples, copied; the data are repeated where there are too few."""
    rows = np.arange(examples) % len(arrays[0])
    return tuple(array[rows] for array in arrays)


def digit_rows(examples: int) -> Arrays:
    """MNIST as rows of 784 numbers from 0 to 1, and labels."""
    mnist = datasets.mnist()
    x = mnist.x_train.reshape(-1, 784).astype("float32") / 255
    return cut((x, mnist.y_train.astype("int32")), examples)


def classifier(model: Any, optimizer: Any) -> treadle.Supervised:
    """Return the ready task: cross-entropy from logits, accuracy."""
    return treadle.Supervised(
        model,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer,
        {"accuracy": keras.metrics.SparseCategoricalAccuracy()},
    )


def mlp(optimizer: Callable[[], Any]) -> Callable[[], Any]:
    """784-64-64-10, as the tutorials have it."""

    def make() -> Any:
        model = keras.Sequential(
            [
                keras.Input((784,)),
                layers.Dense(64, activation="relu"),
                layers.Dense(64, activation="relu"),
                layers.Dense(10),
            ]
        )
        return classifier(model, optimizer())

    return make


WORKLOADS: dict[str, Workload] = {
    "mlp-sgd": Workload(
        mlp(lambda: keras.optimizers.SGD(1e-2)),
        digit_rows,
        {"tensorflow": 937, "jax": 937, "torch": 400},
    ),
    "mlp-adam": Workload(
        mlp(lambda: keras.optimizers.Adam(1e-3)),
        digit_rows,
        {"tensorflow": 937, "jax": 937, "torch": 400},
    ),
}
