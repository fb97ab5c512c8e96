"""Tasks and data for programs on several processes."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from classifier import Classifier, dense
from keras import layers, ops

import treadle
from treadle import data
from treadle.core import processes

TORCH = keras.config.backend() == "torch"
FEATURES, CLASSES = 6, 4


def rows(count: int, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, FEATURES)).astype("float32")
    return x, rng.integers(0, CLASSES, size=count).astype("int32")


def source(count: int, batch_size: int, **kwargs: Any) -> Any:
    return data.from_arrays(*rows(count), batch_size=batch_size, **kwargs)


def rank() -> int:
    """The number of this process; 0 also while one process computes what is expected."""
    return processes.process_group().rank


class Reference(Classifier):
    """What is computed over a whole batch, or drawn: statistics, masks, norms, averages."""

    def __init__(self) -> None:
        super().__init__(
            [
                layers.Dense(8, activation="relu", name="hidden", kernel_regularizer="l2"),
                layers.BatchNormalization(),
                layers.Dropout(0.2, seed=3),
                layers.Dropout(0.1),
                layers.Dense(CLASSES, name="out"),
            ],
            keras.optimizers.Adam(1e-2, global_clipnorm=0.5, use_ema=True),
        )

    def predict_step(self, batch: Any) -> Any:
        return self.model(batch[0], training=False)


class Accumulating(Reference):
    def __init__(self) -> None:
        super().__init__()
        self.accumulator = treadle.Accumulator(steps=3)

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        weights = self.model.trainable_variables
        loss, grads = treadle.gradients(lambda: self.loss(y, self.model(x, training=True)), weights)
        self.accumulator.add(grads, lambda mean: self.optimizer.apply(mean, weights))
        return {"loss": loss}


class Apart(Reference):
    """Begins with other weights and seeds in each process, which process 0 sends to the others."""

    def __init__(self) -> None:
        super().__init__()
        self.model.layers[0].kernel_initializer = keras.initializers.HeNormal(seed=rank())
        self.noise = keras.random.SeedGenerator(rank())
        if TORCH:
            import torch

            torch.manual_seed(rank())


class Masked(Classifier):
    """Statistics over the elements that a mask selects, of which rows have different numbers."""

    def __init__(self) -> None:
        super().__init__(
            [
                layers.Reshape((3, 2)),
                layers.Masking(0.0),
                layers.BatchNormalization(),
                layers.Flatten(),
                layers.Dense(CLASSES),
            ]
        )

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        return super().train_step((ops.where(x[:, :1] > ops.abs(x) - 1, x, 0), y))


class Small(Classifier):
    """A step, given as a function of the task and a batch."""

    def __init__(self, step: Callable[[Any, Any, Any], Any], units: int = 5) -> None:
        super().__init__([dense(units), keras.layers.Dense(CLASSES)])
        self.step = step
        self.mean = keras.Variable(0.0, trainable=False, name="mean")
        self.known = keras.Variable(0.0, trainable=False, aggregation="mean", name="known")
        self.count = keras.Variable(0, dtype="int32", trainable=False, aggregation="sum")

    def minimized(self, loss: Callable[[], Any]) -> Any:
        return {"loss": treadle.minimize(loss, self.model, self.optimizer)}

    def train_step(self, batch: Any) -> Any:
        return self.step(self, *batch)


def usual(task: Any, x: Any, y: Any) -> Any:
    return task.minimized(lambda: task.loss(y, task.model(x, training=True)))


def counted(task: Any, x: Any, y: Any) -> Any:
    """Variables that say how their changes are combined."""
    task.known.assign(0.9 * task.known + ops.mean(x))
    task.count.assign(task.count + x.shape[0])
    return usual(task, x, y)


def noise(x: Any) -> Any:
    """Normal numbers, on TensorFlow by its own function."""
    if keras.config.backend() != "tensorflow":
        return keras.random.normal(ops.shape(x))
    import tensorflow as tf

    return tf.random.normal(x.shape)


def contrastive(task: Any, x: Any, y: Any) -> Any:
    """A loss that compares each view with all other views."""

    def objective() -> Any:
        views = ops.concatenate([x, x + 0.1 * noise(x)])
        z = ops.normalize(treadle.gathered(task.model(views, training=True)))
        count = z.shape[0]
        logits = ops.matmul(z, ops.transpose(z)) - 1e9 * ops.eye(count)
        return task.loss(ops.roll(ops.arange(count), count // 2), logits)

    return task.minimized(objective)


def on_values(task: Any, x: Any, y: Any) -> Any:
    """Python decides by the loss, which is that of the whole batch."""
    logs = usual(task, x, y)
    return logs if float(logs["loss"]) > 1.3 else {"loss": logs["loss"] + 1}


def tokens(task: Any, x: Any, y: Any) -> Any:
    """A mean over the tokens of all rows, of which rows have none to three."""

    def objective() -> Any:
        mask = ops.cast(ops.arange(3)[None] < y[:, None], "float32")
        targets = ops.cast(ops.reshape(x, (-1, 3, 2))[..., 0] > 0, "int32")
        logits = ops.log_softmax(ops.reshape(task.model(x, training=True), (-1, 1, CLASSES)))
        losses = -ops.sum(ops.one_hot(targets, CLASSES) * logits, axis=-1)
        right = ops.cast(ops.argmax(logits, axis=-1) == targets, "float32")
        count = ops.sum(mask)
        mean, accuracy = (
            ops.sum(value * mask) / ops.maximum(count, 1.0) for value in (losses, right)
        )
        return treadle.weighted(mean, count), {"accuracy": treadle.weighted(accuracy, count)}

    weights = task.model.trainable_variables
    (loss, logs), grads = treadle.gradients(objective, weights)
    task.accumulator.add(
        grads, lambda mean: task.optimizer.apply(mean, weights), weight=loss.weight
    )
    return {"loss": loss, **logs}


class Tokens(Small):
    def __init__(self, steps: int) -> None:
        super().__init__(tokens)
        self.accumulator = treadle.Accumulator(steps)


class MetricResults(Reference):
    """Returns the results of metrics so far, as steps for `keras.Model` do: ratios, and sums.

    One counts again after its result, one is updated with a scalar, which has no rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recall = keras.metrics.F1Score(average="macro")
        self.losses = keras.metrics.Sum()

    def results(self, x: Any, y: Any, loss: Any) -> Any:
        logits = self.model(x, training=False)
        known = self.recall(ops.one_hot(y, CLASSES), ops.softmax(logits))
        self.recall.update_state(ops.one_hot(y, CLASSES), ops.one_hot(y, CLASSES))
        found = {"f1": known, "right": self.accuracy.result()}
        if loss is not None:
            self.losses.update_state(loss)
            found["sum"] = self.losses.result()
        return found

    def train_step(self, batch: Any) -> Any:
        found = super().train_step(batch)
        return {**found, **self.results(*batch, found["loss"])}

    def eval_step(self, batch: Any) -> Any:
        return {**super().eval_step(batch), **self.results(*batch, None)}


class OwnFunction(Reference):
    """Trains in a `tf.function` of its own, of which TensorFlow would use the first trace again.

    Process 0 has as many rows of the last batch as of others, but they are a larger share of it.
    """

    def __init__(self) -> None:
        super().__init__()
        import tensorflow as tf

        self.update = tf.function(lambda *batch: Classifier.train_step(self, batch))

    def train_step(self, batch: Any) -> Any:
        return self.update(*batch)
