"""Imbalanced tabular classification: one white wine in thirty is excellent.

A network trained for plain accuracy predicts that no wine is excellent. Here each example is
weighted by the inverse frequency of its class, and the metric is the balanced accuracy: the mean of
the recalls of both classes, which is 0.5 for a constant prediction. Early stopping ends training
when the validation value has stopped improving, and restores the best weights.
`final_balanced_accuracy` is measured with the restored weights at the end.

Compare with `--set weighted=false`.
"""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

import treadle
from treadle import data, datasets
from treadle.core.hook import LoopView

EXCELLENT = 8  # lowest grade of an excellent wine


class RareWines(treadle.Task):
    """Classify rare excellent wines, with class weights, early stopping and a custom metric.

    Args:
        units: Width of both hidden layers.
        dropout: Dropout rate.
        learning_rate: Learning rate of Adam.
        weighted: Whether to weight each example by the inverse frequency of its class.
        patience: Epochs without a better balanced accuracy after which training stops.
        batch_size: Examples per step.
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
        normalization.adapt(x)  # statistics of the training data only, so that nothing leaks
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
        """Minimize the weighted loss on one batch."""
        x, y, weight = batch

        def objective() -> Any:
            logits = self.model(x, training=True)
            return self.loss(y, logits, sample_weight=weight), logits

        loss, logits = treadle.minimize(objective, self.model, self.optimizer)
        self.balanced_accuracy.update_state(y, ops.sigmoid(logits))
        return {"loss": loss}

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """Evaluate one batch in inference mode; the metrics are unweighted."""
        x, y, weight = batch
        logits = self.model(x, training=False)
        for metric in (self.balanced_accuracy, self.recall, self.precision_recall_area):
            metric.update_state(y, ops.sigmoid(logits))
        return {"loss": self.loss(y, logits, sample_weight=weight)}

    def hooks(self) -> list[Any]:
        """Return early stopping and the final evaluation.

        Hooks end in reverse order, so the best weights are restored before the final evaluation.
        """
        stopping = treadle.hooks.EarlyStopping(
            "val_balanced_accuracy", direction="max", patience=self.patience
        )
        return [FinalEvaluation(), stopping]

    def datasets(self) -> treadle.Datasets:
        """Return training, validation and test data."""

        def source(name: str) -> Any:
            x, y = split(name)
            weights = balanced_weights(y) if self.weighted else np.ones(len(y), "float32")
            return data.from_arrays(
                x, y, weights, batch_size=self.batch_size, shuffle=name == "train"
            )

        return treadle.Datasets(source("train"), source("validation"), source("test"))


class BalancedAccuracy(keras.metrics.Metric):
    """Balanced accuracy: the mean of the recalls of the positive and the negative class."""

    def __init__(self) -> None:
        super().__init__(name="balanced_accuracy")
        # Checkpoints contain the names of these weights.
        self.correct = self.add_weight(shape=(2,), initializer="zeros", name="right")
        self.total = self.add_weight(shape=(2,), initializer="zeros", name="seen")

    def update_state(self, y: Any, probabilities: Any) -> None:
        """Add a batch.

        Args:
            y: Labels 0 or 1, (n, 1).
            probabilities: Predicted probabilities of label 1, (n, 1).
        """
        labels = ops.concatenate([1 - y, y], axis=1)  # one-hot, (n, 2)
        positive = ops.cast(probabilities >= 0.5, "float32")
        predictions = ops.concatenate([1 - positive, positive], axis=1)
        self.correct.assign_add(ops.sum(labels * predictions, axis=0))
        self.total.assign_add(ops.sum(labels, axis=0))

    def result(self) -> Any:
        """Return the mean of both recalls; the recall of a class without examples counts as 0."""
        return ops.mean(ops.divide_no_nan(self.correct, self.total))


class FinalEvaluation(treadle.Hook):
    """Logs validation and test results of the final weights."""

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Evaluate the validation and the test data, unless the run failed or is unfinished."""
        if error is not None or loop.unfinished:
            return
        sources = loop.task.datasets()
        for prefix, source in (("final", sources.validation), ("test", sources.test)):
            results = loop.evaluate(source)
            loop.log({f"{prefix}_{name}": value for name, value in results.items()})


def split(name: str) -> tuple[Any, Any]:
    """Return features, (n, 11), and labels, (n, 1), float32: 1 for an excellent wine, else 0.

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


def balanced_weights(y: Any) -> Any:
    """Return example weights, (n,), that balance both classes and have mean 1."""
    frequency = y.mean()  # of label 1
    return np.where(y[:, 0] == 1, 0.5 / frequency, 0.5 / (1 - frequency)).astype("float32")
