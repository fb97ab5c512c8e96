"""An encoder learns what digits look like from images alone: two views of one belong together.

Contrastive learning as in SimCLR (Chen et al. 2020, https://arxiv.org/abs/2002.05709): each image
of a batch is seen twice, cropped, stretched and in part erased at random. Among all views
of the batch, each is to find the other one of its own image. No label is used.

What was learned is told by a linear probe: a logistic regression on the frozen features, trained
on a few labelled images after each epoch. The same regression on raw pixels, and on the features
of the encoder as it was drawn, stand beside it: `pixels` and `untrained`.
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
DECAYS = (1e-3, 1e-2, 1e-1)  # of a probe's weights


class SelfSupervised(treadle.Task):
    """Learn features of MNIST digits without labels, by a contrastive loss over the batch (SimCLR).

    Args:
        features: Numbers that the encoder makes of an image.
        projected: Numbers that the loss compares.
        temperature: By what similarities are divided.
        smallest: Height and width of the smallest crop, as a part of the image's.
        erased: Height and width of what is erased, as a part of the image's.
        labels: How many labelled images the probe is trained on.
        learning_rate: Adam's.
        batch_size: Images in a step; each is compared with the views of all the others.
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
        # The loss is of a projection, which may forget what differs between views.
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
        """Follow the gradient of the contrastive loss of two views of each image."""
        views = ops.concatenate([self.view(batch), self.view(batch)])
        variables = [*self.encoder.trainable_variables, *self.projector.trainable_variables]

        def objective() -> Any:
            projections = self.projector(self.encoder(views, training=True), training=True)
            return contrast(projections, self.temperature)

        loss, found = treadle.minimize(objective, variables, self.optimizer)
        return {"loss": loss, "found": found}

    def view(self, images: Any) -> Any:
        """Return a random part of each image, stretched to the whole, with a rectangle erased.

        Args:
            images: (n, 28, 28, 1), from 0 to 1.
        """
        count, places = images.shape[0], ops.arange(SIDE, dtype="float32")

        def drawn(low: float, high: float) -> Any:
            return keras.random.uniform((count, 2, 1), low, high, seed=self.seeds)

        size = drawn(self.smallest, 1.0)
        begin = drawn(0.0, 1.0) * (1 - size) * SIDE
        # Bilinear interpolation is linear in rows and in columns: each pixel of the view takes of
        # the two that it lies between.
        source = begin + (places + 0.5) * size - 0.5  # (n, 2, 28): of rows, and of columns
        takes = ops.relu(1 - ops.abs(source[..., None] - places))
        hidden = drawn(0.0, 1.0) * (1 - self.erased) * SIDE
        inside = ops.cast((places >= hidden) & (places < hidden + self.erased * SIDE), "float32")
        seen = ops.einsum("nyi,nijc,nxj->nyxc", takes[:, 0], images, takes[:, 1])
        return seen * (1 - inside[:, 0, :, None, None] * inside[:, 1, None, :, None])

    def encode(self, images: Any) -> Any:
        """Return the features of images, (n, features)."""
        return self.encoder(images, training=False)

    def hooks(self) -> list[Any]:
        """Probe before training, and after each epoch."""
        return [Probe(self.labels)]

    def datasets(self) -> treadle.Datasets:
        """Return MNIST's images, (n, 28, 28, 1) from 0 to 1, without their labels."""
        images = pixels(datasets.mnist().x_train)
        return treadle.Datasets(
            train=data.from_arrays(images, batch_size=self.batch_size, drop_last=True)
        )


def contrast(projections: Any, temperature: float) -> tuple[Any, Any]:
    """Return the loss NT-Xent, and how often a view is most like the other one of its image.

    Args:
        projections: (2 n, …): of one view of each of n images, then of the other one.
        temperature: By what cosines are divided.
    """
    count = projections.shape[0]
    directions = ops.normalize(projections, axis=-1)
    likeness = ops.matmul(directions, ops.transpose(directions)) / temperature
    likeness = likeness - 1e9 * ops.eye(count)  # none is compared with itself
    others = ops.roll(ops.arange(count), count // 2)
    loss = ops.mean(keras.losses.sparse_categorical_crossentropy(others, likeness, True))
    found = ops.equal(ops.cast(ops.argmax(likeness, axis=-1), others.dtype), others)
    return loss, ops.mean(ops.cast(found, "float32"))


class Probe(treadle.Hook):
    """Logs how many test images a linear probe recognizes by an encoder's features.

    Args:
        labels: How many labelled images it is trained on.
    """

    def __init__(self, labels: int) -> None:
        mnist = datasets.mnist()
        self.images = pixels(mnist.x_train[:labels]), pixels(mnist.x_test)
        self.digits = mnist.y_train[:labels], mnist.y_test

    def start(self, loop: LoopView) -> None:
        """Log what to compare with: raw pixels, and an encoder that has learned nothing."""
        if loop.progress.step == 0:
            rows = [images.reshape(len(images), -1) for images in self.images]
            loop.log({"pixels": probed(rows, self.digits), "untrained": self.accuracy(loop)})

    def record(self, loop: LoopView, record: Record) -> None:
        """Log what the encoder is worth after an epoch."""
        if record.kind == "epoch":
            loop.log({"probe": self.accuracy(loop)})

    def accuracy(self, loop: LoopView) -> float:
        """Return the accuracy of a probe on the features as they are now."""
        features = [loop.call(loop.task.encode, images) for images in self.images]
        return probed(features, self.digits)


def probed(inputs: Any, digits: Any) -> float:
    """Return the accuracy of a logistic regression on images that it was not trained on.

    Its weight decay is chosen by a fifth of the labelled images, whatever its inputs are.

    Args:
        inputs: Of images that it is trained on, (labels, k), and of the others, (m, k).
        digits: What they show, (labels,) and (m,).
    """
    (train, test), (known, truth) = inputs, digits
    fifth = len(train) // 5

    def held_out(decay: float) -> float:
        return regression(train[fifth:], known[fifth:], train[:fifth], known[:fifth], decay)

    return regression(train, known, test, truth, max(DECAYS, key=held_out))


def regression(train: Any, digits: Any, test: Any, truth: Any, decay: float) -> float:
    """Return the test accuracy of a logistic regression, trained until it hardly moves any more."""
    mean = train.mean(axis=0)
    spread = (train - mean).std()
    train, test = (
        np.pad((x - mean) / spread, ((0, 0), (0, 1)), constant_values=1) for x in (train, test)
    )
    # The steepest that the loss can be curved: Nesterov's method needs no other rate.
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
