"""Self-supervised contrastive learning (SimCLR) on MNIST, evaluated with a linear probe.

As in SimCLR (Chen et al. 2020, https://arxiv.org/abs/2002.05709), each image of a batch is
augmented twice, by random cropping, stretching and erasing. The two views of an image are a
positive pair; the loss has to identify the positive of each view among all views of the batch. No
labels are used.

The features are evaluated with a linear probe: a logistic regression on the frozen features,
trained on a few labelled images after each epoch, logged as `probe`. Two baselines are logged once:
the same regression on raw pixels (`pixels`), and on the untrained encoder (`untrained`).
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
        projected: Output size of the projection head.
        temperature: Temperature of the contrastive loss.
        smallest: Minimum height and width of a crop, as a fraction of the image's.
        erased: Height and width of the erased rectangle, as a fraction of the image's.
        labels: Number of labelled images to train the linear probe on.
        learning_rate: Learning rate of Adam.
        batch_size: Images per step; each is compared with the views of all the others.
    """

    epochs = 4

    def __init__(
        self,
        features: int = 256,
        projected: int = 64,
        temperature: float = 0.2,
        smallest: float = 0.6,
        erased: float = 0.3,
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
                layers.Dense(projected),
            ]
        )
        self.optimizer = keras.optimizers.Adam(learning_rate)
        self.seeds = keras.random.SeedGenerator()
        self.smallest, self.erased = smallest, erased
        self.temperature, self.labels, self.batch_size = temperature, labels, batch_size

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Minimize the contrastive loss of two views of each image."""
        views = ops.concatenate([self.view(batch), self.view(batch)])
        variables = [*self.encoder.trainable_variables, *self.projector.trainable_variables]

        def objective() -> Any:
            projections = self.projector(self.encoder(views, training=True), training=True)
            return contrast(projections, self.temperature)

        loss, found = treadle.minimize(objective, variables, self.optimizer)
        return {"loss": loss, "found": found}

    def view(self, images: Any) -> Any:
        """Return a view of each image: a random crop, resized to full size, with a part erased.

        Args:
            images: (n, 28, 28, 1), from 0 to 1.
        """
        count, places = images.shape[0], ops.arange(SIDE, dtype="float32")

        def drawn(low: float, high: float) -> Any:
            return keras.random.uniform((count, 2, 1), low, high, seed=self.seeds)

        size = drawn(self.smallest, 1.0)
        begin = drawn(0.0, 1.0) * (1 - size) * SIDE
        # Bilinear interpolation is separable: each row (column) of the view is a weighted mean of
        # the two nearest rows (columns) of the image.
        source = begin + (places + 0.5) * size - 0.5  # (n, 2, 28): rows and columns
        takes = ops.relu(1 - ops.abs(source[..., None] - places))
        hidden = drawn(0.0, 1.0) * (1 - self.erased) * SIDE
        inside = ops.cast((places >= hidden) & (places < hidden + self.erased * SIDE), "float32")
        seen = ops.einsum("nyi,nijc,nxj->nyxc", takes[:, 0], images, takes[:, 1])
        return seen * (1 - inside[:, 0, :, None, None] * inside[:, 1, None, :, None])

    def encode(self, images: Any) -> Any:
        """Return the encoder's features of images, (n, features)."""
        return self.encoder(images, training=False)

    def hooks(self) -> list[Any]:
        """Evaluate the linear probe before training and after each epoch."""
        return [Probe(self.labels)]

    def datasets(self) -> treadle.Datasets:
        """Return MNIST's images, (n, 28, 28, 1) from 0 to 1, without their labels."""
        images = pixels(datasets.mnist().x_train)
        return treadle.Datasets(
            train=data.from_arrays(images, batch_size=self.batch_size, drop_last=True)
        )


def contrast(projections: Any, temperature: float) -> tuple[Any, Any]:
    """Return the NT-Xent loss, and the accuracy of identifying the positive of each view.

    Args:
        projections: Projections of shape (2 n, …): the first views of n images, then the second
            views in the same order.
        temperature: Divisor of the cosine similarities.
    """
    count = projections.shape[0]
    directions = ops.normalize(projections, axis=-1)
    likeness = ops.matmul(directions, ops.transpose(directions)) / temperature
    likeness = likeness - 1e9 * ops.eye(count)  # exclude each view itself
    others = ops.roll(ops.arange(count), count // 2)
    loss = ops.mean(keras.losses.sparse_categorical_crossentropy(others, likeness, True))
    found = ops.equal(ops.cast(ops.argmax(likeness, axis=-1), others.dtype), others)
    return loss, ops.mean(ops.cast(found, "float32"))


class Probe(treadle.Hook):
    """Logs the test accuracy of a linear probe on the encoder's features.

    Args:
        labels: Number of labelled images to train the probe on.
    """

    def __init__(self, labels: int) -> None:
        mnist = datasets.mnist()
        self.images = pixels(mnist.x_train[:labels]), pixels(mnist.x_test)
        self.digits = mnist.y_train[:labels], mnist.y_test

    def start(self, loop: LoopView) -> None:
        """Log the baselines: a probe on raw pixels, and one on the untrained encoder."""
        if loop.progress.step == 0:
            rows = [images.reshape(len(images), -1) for images in self.images]
            loop.log({"pixels": probed(rows, self.digits), "untrained": self.accuracy(loop)})

    def record(self, loop: LoopView, record: Record) -> None:
        """Log the probe's accuracy after each epoch."""
        if record.kind == "epoch":
            loop.log({"probe": self.accuracy(loop)})

    def accuracy(self, loop: LoopView) -> float:
        """Return the accuracy of a probe on the current features."""
        features = [loop.call(loop.task.encode, images) for images in self.images]
        return probed(features, self.digits)


def probed(inputs: Any, digits: Any) -> float:
    """Return the test accuracy of a logistic regression.

    Its weight decay is selected on a held-out fifth of the labelled images.

    Args:
        inputs: Training inputs, (labels, k), and test inputs, (m, k).
        digits: Their labels, (labels,) and (m,).
    """
    (train, test), (known, truth) = inputs, digits
    fifth = len(train) // 5

    def held_out(decay: float) -> float:
        return regression(train[fifth:], known[fifth:], train[:fifth], known[:fifth], decay)

    return regression(train, known, test, truth, max(DECAYS, key=held_out))


def regression(train: Any, digits: Any, test: Any, truth: Any, decay: float) -> float:
    """Train a logistic regression close to convergence, and return its test accuracy."""
    mean = train.mean(axis=0)
    spread = (train - mean).std()
    train, test = (
        np.pad((x - mean) / spread, ((0, 0), (0, 1)), constant_values=1) for x in (train, test)
    )
    # The step size of Nesterov's method: the inverse of an upper bound of the loss's curvature.
    rate = np.float32(1 / (np.linalg.norm(train, 2) ** 2 / (2 * len(train)) + decay))
    wanted = np.eye(10, dtype="float32")[digits]
    weights = ahead = np.zeros((train.shape[1], 10), "float32")
    for step in range(500):
        scores = train @ ahead
        likely = np.exp(scores - scores.max(axis=1, keepdims=True))
        likely /= likely.sum(axis=1, keepdims=True)
        slope = train.T @ (likely - wanted) / len(train) + decay * ahead
        before, weights = weights, ahead - rate * slope
        ahead = weights + step / (step + 3) * (weights - before)
    return float(np.mean((test @ weights).argmax(axis=1) == truth))


def pixels(images: Any) -> Any:
    """Return images as (n, 28, 28, 1), float32 from 0 to 1."""
    return images[..., None].astype("float32") / 255
