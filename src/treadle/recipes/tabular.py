"""A table in which what is looked for is rare: one white wine in thirty is excellent.

A network that is to be right as often as possible calls no wine excellent. Here each wine counts
by how rare its kind is, so that both kinds weigh the same, and the metric is the balanced
accuracy: the mean of how often excellent ones and others are recognized, 0.5 for who always says
the same. Training stops where that has not been better for a while, and the best weights are put
back, whatever ended it: `final_balanced_accuracy` is measured with them, once all is over.

Compare with `--set weighted=false`.
"""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

import treadle
from treadle import data, datasets
from treadle.core.hook import LoopView

EXCELLENT = 8  # the grade from which a wine is called so


class RareWines(treadle.Task):
    """Find the few excellent wines in a table: sample weights, early stopping, an own metric.

    Args:
        units: Width of both hidden layers.
        dropout: Part of the hidden units that is left out.
        learning_rate: Adam's.
        weighted: Let each wine count by how rare its kind is.
        patience: After how many epochs without a better balanced accuracy training stops.
        batch_size: Wines in a step.
    """

    epochs = 300

    def __init__(
        self,
        units: int = 64,
        dropout: float = 0.3,
        learning_rate: float = 1e-3,
        weighted: bool = True,
        patience: int = 30,
        batch_size: int = 64,
    ) -> None:
        x, _ = split("train")
        normalization = layers.Normalization()
        normalization.adapt(x)  # by what is trained on: the others tell nothing, not even a mean
        self.model = keras.Sequential(
            [
                keras.Input(x.shape[1:]),
                normalization,
                layers.Dense(units, activation="relu"),
                layers.Dropout(dropout),
                layers.Dense(units, activation="relu"),
                layers.Dropout(dropout),
                layers.Dense(1),
            ]
        )
        self.optimizer = keras.optimizers.Adam(learning_rate)
        self.loss = keras.losses.BinaryCrossentropy(from_logits=True)
        self.balanced_accuracy = BalancedAccuracy()
        self.recall = keras.metrics.Recall()
        self.precision_recall_area = keras.metrics.AUC(curve="PR")
        self.weighted, self.patience, self.batch_size = weighted, patience, batch_size

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Follow the gradient of the loss, in which each wine has its weight."""
        x, y, weight = batch

        def objective() -> Any:
            logits = self.model(x, training=True)
            return self.loss(y, logits, sample_weight=weight), logits

        loss, logits = treadle.minimize(objective, self.model, self.optimizer)
        self.balanced_accuracy.update_state(y, ops.sigmoid(logits))
        return {"loss": loss}

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """Measure; the metrics know no weights."""
        x, y, weight = batch
        logits = self.model(x, training=False)
        for metric in (self.balanced_accuracy, self.recall, self.precision_recall_area):
            metric.update_state(y, ops.sigmoid(logits))
        return {"loss": self.loss(y, logits, sample_weight=weight)}

    def hooks(self) -> list[Any]:
        """Stop in time, put the best weights back, and then measure: hooks end in reverse."""
        stopping = treadle.hooks.EarlyStopping(
            "val_balanced_accuracy", direction="max", patience=self.patience
        )
        return [FinalMeasure(), stopping]

    def datasets(self) -> treadle.Datasets:
        """Return wines to train on, to choose the best weights by, and to judge those by."""

        def source(name: str) -> Any:
            x, y = split(name)
            weights = balanced(y) if self.weighted else np.ones(len(y), "float32")
            return data.from_arrays(
                x, y, weights, batch_size=self.batch_size, shuffle=name == "train"
            )

        return treadle.Datasets(source("train"), source("validation"), source("test"))


class BalancedAccuracy(keras.metrics.Metric):
    """The mean of two parts: of the positives, and of the negatives, that are recognized."""

    def __init__(self) -> None:
        super().__init__(name="balanced_accuracy")
        self.right = self.add_weight(shape=(2,), initializer="zeros", name="right")
        self.seen = self.add_weight(shape=(2,), initializer="zeros", name="seen")

    def update_state(self, y: Any, probabilities: Any) -> None:
        """Count; `y` is 0 or 1, (n, 1), beside its probability of being 1."""
        kinds = ops.concatenate([1 - y, y], axis=1)
        found = ops.cast(probabilities >= 0.5, "float32")
        self.right.assign_add(ops.sum(kinds * ops.concatenate([1 - found, found], axis=1), axis=0))
        self.seen.assign_add(ops.sum(kinds, axis=0))

    def result(self) -> Any:
        """Return the mean of both parts; a kind that was not seen counts as not recognized."""
        return ops.mean(ops.divide_no_nan(self.right, self.seen))


class FinalMeasure(treadle.Hook):
    """Logs how good the weights are that training leaves."""

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Measure wines for validation again, and those that nobody has looked at."""
        if error is not None or loop.unfinished:
            return
        found = loop.task.datasets()
        for prefix, source in (("final", found.validation), ("test", found.test)):
            results = loop.evaluate(source)
            loop.log({f"{prefix}_{name}": value for name, value in results.items()})


def split(name: str) -> tuple[Any, Any]:
    """Return measurements, (n, 11), and whether a wine is excellent, (n, 1), float32 1 or 0.

    Args:
        name: `"train"`, `"validation"` (a quarter of the training rows) or `"test"`.
    """
    wines = datasets.wine()
    quarter = len(wines.x_train) // 4
    rows = {
        "train": (wines.x_train[quarter:], wines.y_train[quarter:]),
        "validation": (wines.x_train[:quarter], wines.y_train[:quarter]),
        "test": (wines.x_test, wines.y_test),
    }
    x, grades = rows[name]
    return x, (grades >= EXCELLENT).astype("float32")[:, None]


def balanced(y: Any) -> Any:
    """Return a weight for each row, (n,), by which both kinds weigh as much, and 1 on average."""
    share = y.mean()
    return np.where(y[:, 0] == 1, 0.5 / share, 0.5 / (1 - share)).astype("float32")
