"""What the loops are timed on: one task and its data for each workload.

Every contestant of a workload trains the same architecture on the same arrays with the same
optimizer and batch size, and counts the same metrics.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from . import data, models

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Workload:
    """A task with its data.

    Attributes:
        what: In a few words, for the page.
        make: Makes the task.
        arrays: Returns data by the number of examples.
        steps: Steps in an epoch, per backend: half a second or more for the usual contestant.
        batch_size: Examples in a step.
        kind: Which hand-written step it takes, and who takes part.
        convolves: It has convolutions.
    """

    what: str
    make: Callable[[], Any]
    arrays: Callable[[int], Arrays]
    steps: Mapping[str, int]
    batch_size: int = 64
    kind: str = "supervised"
    convolves: bool = False


@dataclass(frozen=True)
class Job:
    """A workload at one size.

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
    """Return a workload with the data of an epoch, whose length can be set."""
    workload = WORKLOADS[name]
    steps = steps or workload.steps[keras.config.backend()]
    return Job(name, workload, steps, workload.arrays(steps * workload.batch_size))


WORKLOADS: dict[str, Workload] = {
    "mlp-sgd": Workload(
        "784-64-64-10, SGD, MNIST",
        lambda: models.mlp(keras.optimizers.SGD(1e-2)),
        data.digit_rows,
        {"tensorflow": 937, "jax": 937, "torch": 400},
    ),
    "mlp-adam": Workload(
        "784-64-64-10, Adam, MNIST",
        lambda: models.mlp(keras.optimizers.Adam(1e-3)),
        data.digit_rows,
        {"tensorflow": 937, "jax": 937, "torch": 400},
    ),
    "bn-dropout": Workload(
        "784-256-256-10 with BatchNorm and Dropout, Adam, MNIST",
        models.bn_dropout,
        data.digit_rows,
        {"tensorflow": 400, "jax": 400, "torch": 200},
    ),
    "cifar10-cnn": Workload(
        "the recipe `cifar10-cnn`: three convolutions, Adam, CIFAR-10",
        models.cnn,
        data.photographs,
        {"tensorflow": 32, "jax": 40, "torch": 32},
        convolves=True,
    ),
    "gan": Workload(
        "a small DCGAN with BatchNorm, two Adams, MNIST",
        models.SmallGAN,
        data.digit_images,
        {"tensorflow": 64, "jax": 64, "torch": 64},
        kind="gan",
        convolves=True,
    ),
    "transformer": Workload(
        "a causal transformer: 2 layers of width 64 with 4 heads, 64 tokens, Adam, batch 32",
        models.transformer,
        data.tokens,
        {"tensorflow": 48, "jax": 48, "torch": 48},
        batch_size=32,
    ),
    "lstm": Workload(
        "an LSTM of 64 units over the 28 rows of a digit, Adam, MNIST",
        models.lstm,
        data.digit_images_in_rows,
        {"tensorflow": 96, "jax": 96, "torch": 32},
    ),
    "streaming": Workload(
        "tf.data with shuffle, random flip and crop of CIFAR-10, a small convolutional network",
        models.small_cnn,
        data.photographs,
        {"tensorflow": 128, "jax": 64, "torch": 64},
        kind="streaming",
        convolves=True,
    ),
}
