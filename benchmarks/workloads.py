"""What the loops are timed on: one task and its data for each workload.

Every contestant of a workload trains the same architecture on the same arrays with the same
optimizer and batch size, and counts the same metrics. The tasks are written with Keras;
`torch_models.py` has them once more.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import treadle
from treadle import datasets
from treadle.recipes.cifar10_cnn import Cifar10CNN

Arrays = tuple[np.ndarray, ...]

LENGTH, VOCABULARY = 64, 64


NOISE = 64


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
        metrics: Makes the metrics that everybody counts in addition to the mean loss, by name.
    """

    what: str
    make: Callable[[], Any]
    arrays: Callable[[int], Arrays]
    steps: Mapping[str, int]
    batch_size: int = 64
    kind: str = "supervised"
    convolves: bool = False
    metrics: Callable[[], dict[str, Any]] = lambda: {
        "accuracy": keras.metrics.SparseCategoricalAccuracy()
    }


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

    def metrics(self) -> dict[str, Any]:
        """Return new metrics: those of a Supervised task exist only once it has seen a batch."""
        return self.workload.metrics()

    def order(self) -> np.ndarray:
        """Return the order of an epoch: indices of shape (steps, batch_size)."""
        return np.random.permutation(len(self.arrays[0])).reshape(self.steps, self.batch_size)


def job(name: str, steps: int | None = None) -> Job:
    """Return a workload with the data of an epoch, whose length can be set."""
    workload = WORKLOADS[name]
    steps = steps or workload.steps[keras.config.backend()]
    return Job(name, workload, steps, workload.arrays(steps * workload.batch_size))


# The data, as arrays of so many examples


def cut(arrays: Arrays, examples: int) -> Arrays:
    """Return the first examples, copied; the data are repeated where there are too few."""
    rows = np.arange(examples) % len(arrays[0])
    return tuple(array[rows] for array in arrays)


def digit_rows(examples: int) -> Arrays:
    """MNIST as rows of 784 numbers from 0 to 1, and labels."""
    mnist = datasets.mnist()
    x = mnist.x_train.reshape(-1, 784).astype("float32") / 255
    return cut((x, mnist.y_train.astype("int32")), examples)


def digit_images_in_rows(examples: int) -> Arrays:
    """MNIST as sequences of 28 rows of 28 numbers, and labels."""
    x, y = digit_rows(examples)
    return x.reshape(-1, 28, 28), y


def digit_images(examples: int) -> Arrays:
    """MNIST as images of shape (28, 28, 1) from -1 to 1, no labels."""
    return ((digit_rows(examples)[0].reshape(-1, 28, 28, 1) * 2 - 1),)


def photographs(examples: int) -> Arrays:
    """CIFAR-10 as images of bytes, and labels."""
    cifar10 = datasets.cifar10()
    return cut((cifar10.x_train, cifar10.y_train.astype("int32")), examples)


def tokens(examples: int) -> Arrays:
    """Sequences in which a token mostly determines the next one, and the same shifted by one."""
    rng = np.random.default_rng(0)
    follower = rng.permutation(VOCABULARY)
    found = np.empty((examples, LENGTH + 1), "int32")
    found[:, 0] = rng.integers(VOCABULARY, size=examples)
    for i in range(LENGTH):
        surprise = rng.random(examples) < 0.2
        drawn = rng.integers(VOCABULARY, size=examples)
        found[:, i + 1] = np.where(surprise, drawn, follower[found[:, i]])
    return np.ascontiguousarray(found[:, :-1]), np.ascontiguousarray(found[:, 1:])


def augmented(arrays: Arrays, batch_size: int) -> Any:
    """Return a `tf.data` pipeline: shuffled, randomly flipped and cropped, batched, prefetched."""
    import tensorflow as tf

    def augment(image: Any, label: Any) -> Any:
        image = tf.image.random_flip_left_right(image)
        image = tf.pad(image, [[4, 4], [4, 4], [0, 0]])
        return tf.image.random_crop(image, [32, 32, 3]), label

    dataset = tf.data.Dataset.from_tensor_slices(arrays).shuffle(1024)
    dataset = dataset.map(augment, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


# The tasks


def classifier(model_layers: list[Any], optimizer: Any) -> treadle.Supervised:
    """Return the ready task: cross-entropy from logits, accuracy."""
    return treadle.Supervised(
        keras.Sequential(model_layers),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer,
        {"accuracy": keras.metrics.SparseCategoricalAccuracy()},
    )


def mlp(optimizer: Any, width: int = 64) -> treadle.Task:
    return classifier(
        [
            keras.Input((784,)),
            layers.Dense(width, activation="relu"),
            layers.Dense(width, activation="relu"),
            layers.Dense(10),
        ],
        optimizer,
    )


def bn_dropout() -> treadle.Task:
    hidden: list[Any] = []
    for _ in range(2):
        hidden += [layers.Dense(256), layers.BatchNormalization(), layers.ReLU()]
        hidden += [layers.Dropout(0.3)]
    return classifier([keras.Input((784,)), *hidden, layers.Dense(10)], keras.optimizers.Adam(1e-3))


def cnn() -> treadle.Task:
    return Cifar10CNN()


def small_cnn() -> treadle.Task:
    return classifier(
        [
            keras.Input((32, 32, 3)),
            layers.Rescaling(1 / 255),
            layers.Conv2D(16, 3, strides=2, activation="relu"),
            layers.Conv2D(32, 3, strides=2, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ],
        keras.optimizers.Adam(1e-3),
    )


def lstm() -> treadle.Task:
    return classifier(
        [keras.Input((28, 28)), layers.LSTM(64), layers.Dense(10)], keras.optimizers.Adam(1e-3)
    )


class Positions(layers.Layer):
    """Adds a learned vector to each place of a sequence."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=shape[1:], initializer="uniform")

    def call(self, x: Any) -> Any:
        return x + ops.cast(self.table, x.dtype)


def transformer(width: int = 64, heads: int = 4, depth: int = 2) -> treadle.Task:
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = Positions()(layers.Embedding(VOCABULARY, width)(inputs))
    for _ in range(depth):
        y = layers.LayerNormalization(epsilon=1e-5)(x)
        x = x + layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=True)
        y = layers.LayerNormalization(epsilon=1e-5)(x)
        x = x + layers.Dense(width)(layers.Dense(4 * width, activation="relu")(y))
    logits = layers.Dense(VOCABULARY)(layers.LayerNormalization(epsilon=1e-5)(x))
    task = classifier([layers.Identity()], keras.optimizers.Adam(1e-3))
    task.model = keras.Model(inputs, logits)
    return task


class SmallGAN(treadle.Task):
    """Two networks of two convolutions each, in turns, each with its own noise and optimizer."""

    def __init__(self) -> None:
        leaky = lambda: layers.LeakyReLU(0.2)  # noqa: E731
        self.generator = keras.Sequential(
            [
                keras.Input((NOISE,)),
                layers.Dense(7 * 7 * 32),
                layers.BatchNormalization(),
                leaky(),
                layers.Reshape((7, 7, 32)),
                layers.Conv2DTranspose(16, 4, strides=2, padding="same"),
                layers.BatchNormalization(),
                leaky(),
                layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="tanh"),
            ]
        )
        self.discriminator = keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                layers.Conv2D(16, 4, strides=2, padding="same"),
                leaky(),
                layers.Conv2D(32, 4, strides=2, padding="same"),
                leaky(),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
        self.d_optimizer = keras.optimizers.Adam(2e-4, beta_1=0.5)
        self.g_optimizer = keras.optimizers.Adam(2e-4, beta_1=0.5)
        self.seeds = keras.random.SeedGenerator(0)

    def train_step(self, batch: Any) -> dict[str, Any]:
        (real,) = batch
        fake = self.generator(self._noise(real), training=True)

        def judged() -> Any:
            return d_loss(self.discriminator(real), self.discriminator(fake))

        def fooled() -> Any:
            return g_loss(self.discriminator(self.generator(self._noise(real), training=True)))

        d = treadle.minimize(judged, self.discriminator, self.d_optimizer)
        g = treadle.minimize(fooled, self.generator, self.g_optimizer)
        return {"d_loss": d, "g_loss": g}

    def _noise(self, real: Any) -> Any:
        return keras.random.normal((real.shape[0], NOISE), seed=self.seeds)


def d_loss(real: Any, fake: Any) -> Any:
    """Return the discriminator's loss: cross-entropy of logits of real and made images."""
    return ops.mean(ops.softplus(-real)) + ops.mean(ops.softplus(fake))


def g_loss(fake: Any) -> Any:
    """Return the generator's loss: cross-entropy of its images being taken for real."""
    return ops.mean(ops.softplus(-fake))


WORKLOADS: dict[str, Workload] = {
    "mlp-sgd": Workload(
        "784-64-64-10, SGD, MNIST",
        lambda: mlp(keras.optimizers.SGD(1e-2)),
        digit_rows,
        {"tensorflow": 937, "jax": 937, "torch": 400},
    ),
    "mlp-adam": Workload(
        "784-64-64-10, Adam, MNIST",
        lambda: mlp(keras.optimizers.Adam(1e-3)),
        digit_rows,
        {"tensorflow": 937, "jax": 937, "torch": 400},
    ),
    "bn-dropout": Workload(
        "784-256-256-10 with BatchNorm and Dropout, Adam, MNIST",
        bn_dropout,
        digit_rows,
        {"tensorflow": 400, "jax": 400, "torch": 200},
    ),
    "cifar10-cnn": Workload(
        "the recipe `cifar10-cnn`: three convolutions, Adam, CIFAR-10",
        cnn,
        photographs,
        {"tensorflow": 32, "jax": 40, "torch": 32},
        convolves=True,
    ),
    "gan": Workload(
        "a small DCGAN with BatchNorm, two Adams, MNIST",
        SmallGAN,
        digit_images,
        {"tensorflow": 64, "jax": 64, "torch": 64},
        kind="gan",
        convolves=True,
        metrics=dict,
    ),
    "transformer": Workload(
        "a causal transformer: 2 layers of width 64 with 4 heads, 64 tokens, Adam, batch 32",
        transformer,
        tokens,
        {"tensorflow": 48, "jax": 48, "torch": 48},
        batch_size=32,
    ),
    "lstm": Workload(
        "an LSTM of 64 units over the 28 rows of a digit, Adam, MNIST",
        lstm,
        digit_images_in_rows,
        {"tensorflow": 96, "jax": 96, "torch": 32},
    ),
    "streaming": Workload(
        "tf.data with shuffle, random flip and crop of CIFAR-10, a small convolutional network",
        small_cnn,
        photographs,
        {"tensorflow": 128, "jax": 64, "torch": 64},
        kind="streaming",
        convolves=True,
    ),
}
