"""Self-supervised contrastive learning (SimCLR) on MNIST, evaluated with a linear probe.

As in SimCLR (Chen et al. 2020, https://arxiv.org/abs/2002.05709), each image of a batch is
augmented twice, by random cropping, stretching and erasing. The two views of an image are a
positive pair; the loss has to identify the positive of each view among all views of the batch. No
labels are used.

The features are evaluated with a linear probe: a logistic regression on the frozen features,
trained on a few labelled images after each epoch; its test accuracy is logged as `probe_accuracy`.
Two baselines are logged once: the same regression on raw pixels (`pixels_accuracy`), and on the
features of the untrained encoder (`untrained_accuracy`).
"""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

import treadle
from treadle import data, datasets
from treadle.core.hook import LoopView
from treadle.core.logs import Record

SIDE = 28
DECAYS = (1e-3, 1e-2, 1e-1)  # candidates for the probe's weight decay


class SelfSupervised(treadle.Task):
    """Learn features of MNIST digits without labels, with a contrastive loss (SimCLR).

    Args:
        features: Number of features of the encoder.
        projection_size: Output size of the projection head.
        temperature: Temperature of the contrastive loss.
        min_crop_size: Minimum height and width of a crop, as a fraction of the image's.
        erase_size: Height and width of the erased rectangle, as a fraction of the image's.
        labels: Number of labelled images to train the linear probe on.
        learning_rate: Learning rate of Adam.
        batch_size: Images per step; each is compared with the views of all the others.
    """

    epochs = 4

    def __init__(
        self,
        features: int = 256,
        projection_size: int = 64,
        temperature: float = 0.2,
        min_crop_size: float = 0.6,
        erase_size: float = 0.3,
        labels: int = 1000,
        learning_rate: float = 1e-3,
        batch_size: int = 256,
    ) -> None:
        self.encoder = keras.Sequential(
            [
                keras.Input((SIDE, SIDE, 1)),
                layers.Conv2D(16, 5, strides=2, padding="same", activation="relu"),
                layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
                layers.Conv2D(64, 3, strides=2, padding="same", activation="relu"),
                layers.Flatten(),
                layers.Dense(features, activation="relu"),
            ]
        )
        # The loss is computed on the projection head, so that the encoder's features may keep
        # information that differs between views.
        self.projector = keras.Sequential(
            [
                keras.Input((features,)),
                layers.Dense(features, activation="relu"),
                layers.Dense(projection_size),
            ]
        )
        self.optimizer = keras.optimizers.Adam(learning_rate)
        self.seeds = keras.random.SeedGenerator()
        self.min_crop_size, self.erase_size = min_crop_size, erase_size
        self.temperature, self.labels, self.batch_size = temperature, labels, batch_size

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Minimize the contrastive loss of two views of each image."""
        views = ops.concatenate([self.augment(batch), self.augment(batch)])
        variables = [*self.encoder.trainable_variables, *self.projector.trainable_variables]

        def objective() -> Any:
            projections = self.projector(self.encoder(views, training=True), training=True)
            # The loss compares each view with all others, also with those in other processes.
            return nt_xent(treadle.gathered(projections), self.temperature)

        loss, accuracy = treadle.minimize(objective, variables, self.optimizer)
        return {"loss": loss, "contrastive_accuracy": accuracy}

    def augment(self, images: Any) -> Any:
        """Return a view of each image: a random crop, resized to full size, with a part erased.

        Args:
            images: (n, 28, 28, 1), from 0 to 1.
        """
        count, positions = images.shape[0], ops.arange(SIDE, dtype="float32")

        def uniform(low: float, high: float) -> Any:
            return keras.random.uniform((count, 2, 1), low, high, seed=self.seeds)

        size = uniform(self.min_crop_size, 1.0)
        start = uniform(0.0, 1.0) * (1 - size) * SIDE
        # Bilinear interpolation is separable: each row (column) of the view is a weighted mean of
        # the two nearest rows (columns) of the image.
        source = start + (positions + 0.5) * size - 0.5  # (n, 2, 28): rows and columns
        weights = ops.relu(1 - ops.abs(source[..., None] - positions))
        crops = ops.einsum("nyi,nijc,nxj->nyxc", weights[:, 0], images, weights[:, 1])
        corner = uniform(0.0, 1.0) * (1 - self.erase_size) * SIDE
        erased = (positions >= corner) & (positions < corner + self.erase_size * SIDE)
        erased = ops.cast(erased, "float32")
        return crops * (1 - erased[:, 0, :, None, None] * erased[:, 1, None, :, None])

    def encode(self, images: Any) -> Any:
        """Return the encoder's features of images, (n, features)."""
        return self.encoder(images, training=False)

    def hooks(self) -> list[Any]:
        """Evaluate the linear probe before training and after each epoch."""
        return [LinearProbe(self.labels)]

    def datasets(self) -> treadle.Datasets:
        """Return MNIST's images, (n, 28, 28, 1) from 0 to 1, without their labels."""
        images = normalized(datasets.mnist().x_train)
        return treadle.Datasets(
            train=data.from_arrays(images, batch_size=self.batch_size, drop_last=True)
        )


def nt_xent(projections: Any, temperature: float) -> tuple[Any, Any]:
    """Return the NT-Xent loss, and the accuracy of identifying the positive of each view.

    Args:
        projections: Projections of shape (2 n, …): the first views of n images, then the second
            views in the same order.
        temperature: Divisor of the cosine similarities.
    """
    count = projections.shape[0]
    directions = ops.normalize(projections, axis=-1)
    logits = ops.matmul(directions, ops.transpose(directions)) / temperature
    logits = logits - 1e9 * ops.eye(count)  # exclude each view itself
    positives = ops.roll(ops.arange(count), count // 2)
    loss = ops.mean(keras.losses.sparse_categorical_crossentropy(positives, logits, True))
    correct = ops.equal(ops.cast(ops.argmax(logits, axis=-1), positives.dtype), positives)
    return loss, ops.mean(ops.cast(correct, "float32"))


class LinearProbe(treadle.Hook):
    """Logs the test accuracy of a linear probe on the encoder's features.

    Args:
        labels: Number of labelled images to train the probe on.
    """

    def __init__(self, labels: int) -> None:
        mnist = datasets.mnist()
        self.images = normalized(mnist.x_train[:labels]), normalized(mnist.x_test)
        self.labels = mnist.y_train[:labels], mnist.y_test

    def start(self, loop: LoopView) -> None:
        """Log the baselines: a probe on raw pixels, and one on the untrained encoder."""
        if loop.progress.step == 0:
            pixels = [images.reshape(len(images), -1) for images in self.images]
            accuracy = probe_accuracy(pixels, self.labels)
            loop.log({"pixels_accuracy": accuracy, "untrained_accuracy": self.accuracy(loop)})

    def record(self, loop: LoopView, record: Record) -> None:
        """Log the probe's accuracy after each epoch."""
        if record.kind == "epoch":
            loop.log({"probe_accuracy": self.accuracy(loop)})

    def accuracy(self, loop: LoopView) -> float:
        """Return the accuracy of a probe on the current features."""
        features = [loop.call(loop.task.encode, images) for images in self.images]
        return probe_accuracy(features, self.labels)


def probe_accuracy(inputs: Any, labels: Any) -> float:
    """Return the test accuracy of a logistic regression.

    Its weight decay is selected on a held-out fifth of the training examples.

    Args:
        inputs: Training inputs, (n, k), and test inputs, (m, k).
        labels: Their labels, (n,) and (m,).
    """
    (x, x_test), (y, y_test) = inputs, labels
    fifth = len(x) // 5

    def held_out(decay: float) -> float:
        return logistic_regression(x[fifth:], y[fifth:], x[:fifth], y[:fifth], decay)

    return logistic_regression(x, y, x_test, y_test, max(DECAYS, key=held_out))


def logistic_regression(x: Any, y: Any, x_test: Any, y_test: Any, decay: float) -> float:
    """Train a logistic regression close to convergence, and return its test accuracy."""
    mean = x.mean(axis=0)
    deviation = (x - mean).std()
    x, x_test = (  # normalized, with a constant column for the bias
        np.pad((part - mean) / deviation, ((0, 0), (0, 1)), constant_values=1)
        for part in (x, x_test)
    )
    # The step size of Nesterov's method: the inverse of an upper bound of the loss's curvature.
    step_size = np.float32(1 / (np.linalg.norm(x, 2) ** 2 / (2 * len(x)) + decay))
    targets = np.eye(10, dtype="float32")[y]
    weights = lookahead = np.zeros((x.shape[1], 10), "float32")
    for step in range(500):
        logits = x @ lookahead
        probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        gradient = x.T @ (probabilities - targets) / len(x) + decay * lookahead
        previous, weights = weights, lookahead - step_size * gradient
        lookahead = weights + step / (step + 3) * (weights - previous)
    return float(np.mean((x_test @ weights).argmax(axis=1) == y_test))


def normalized(images: Any) -> Any:
    """Return images as (n, 28, 28, 1), float32 from 0 to 1."""
    return images[..., None].astype("float32") / 255
