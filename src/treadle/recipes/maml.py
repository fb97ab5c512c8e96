"""Model-agnostic meta-learning (MAML): second-order gradients through inner gradient steps.

The experiment is the sinusoid regression of section 5.1 of Finn, Abbeel and Levine 2017
(https://arxiv.org/abs/1703.03400). Each task is a curve with its own amplitude and phase. The inner
loop adapts substituted weights to ten points of a curve with one gradient step. The outer update
minimizes the error of the adapted weights on ten other points, by differentiating through the inner
step.

Validation measures adaptation to new curves: `val_error_0` is the mean squared error before any
gradient step on a curve; `val_error_1`, `val_error_5` and `val_error_10` are the errors after 1, 5
and 10 steps. Compare with `--set first_order=true`, which treats the inner gradients as constants
(first-order MAML), and with `--set inner_steps=0`, which trains one network on all curves.
"""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

import treadle
from treadle import data
from treadle.core.hook import LoopView

MEASURED_STEPS = (0, 1, 5, 10)  # validation measures the error after so many gradient steps
COLORS = ("#c8c8c8", "#f0d060", "#e8862a", "#b03020", "#2050a0")  # the curve, then predictions


class MAML(treadle.Task):
    """Meta-learn sinusoid regression from ten points with MAML.

    Args:
        inner_steps: Inner gradient steps per curve in training; 0 trains without adaptation.
        inner_learning_rate: Learning rate of the inner steps, in training and validation.
        first_order: Treat the inner gradients as constants, which saves second-order gradients.
        learning_rate: Learning rate of Adam for the initial weights (outer loop).
        tasks: Curves per step.
        shots: Support points per curve.
    """

    epochs = 40

    def __init__(
        self,
        inner_steps: int = 1,
        inner_learning_rate: float = 0.01,
        first_order: bool = False,
        learning_rate: float = 1e-3,
        tasks: int = 25,
        shots: int = 10,
    ) -> None:
        self.model = keras.Sequential(
            [
                keras.Input((1,)),
                layers.Dense(40, activation="relu"),
                layers.Dense(40, activation="relu"),
                layers.Dense(1),
            ]
        )
        self.optimizer = keras.optimizers.Adam(learning_rate)
        self.inner_steps, self.inner_learning_rate = inner_steps, inner_learning_rate
        self.first_order = first_order
        self.tasks, self.shots = tasks, shots

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Update the initial weights with the mean gradient of the errors after adaptation."""
        variables = self.model.trainable_variables

        def meta_gradients(curve: Any) -> Any:
            support, query = curve

            def objective() -> Any:
                weights = variables
                for _ in range(self.inner_steps):
                    weights = self.adapt(weights, support)
                return self.error(weights, query)

            return treadle.gradients(objective, variables)

        errors, gradients = treadle.for_each(meta_gradients, batch)
        self.optimizer.apply([ops.mean(gradient, axis=0) for gradient in gradients], variables)
        return {"loss": ops.mean(errors)}

    def adapt(self, weights: list[Any], support: Any) -> list[Any]:
        """Return the weights after one inner gradient step on the support points of a curve."""
        (x, y), variables = support, self.model.trainable_variables
        with treadle.substituted(variables, weights):
            _, grads = treadle.gradients(lambda: mean_squared_error(self.model(x), y), variables)
        if self.first_order:
            grads = [ops.stop_gradient(grad) for grad in grads]
        return [w - self.inner_learning_rate * g for w, g in zip(weights, grads, strict=True)]

    def error(self, weights: list[Any], points: Any) -> Any:
        """Return the mean squared error of the model with these weights on points of a curve."""
        x, y = points
        with treadle.substituted(self.model, weights):
            return mean_squared_error(self.model(x), y)

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """Adapt to each validation curve, and measure the error after `MEASURED_STEPS`."""

        def errors_of_curve(curve: Any) -> Any:
            support, (x, y) = curve
            return [mean_squared_error(found, y) for found in self.predictions(support, x)]

        errors = treadle.for_each(errors_of_curve, batch)
        return {
            f"error_{steps}": ops.mean(error)
            for steps, error in zip(MEASURED_STEPS, errors, strict=True)
        }

    def predictions(self, support: Any, x: Any) -> list[Any]:
        """Return predictions for `x` after `MEASURED_STEPS` steps on the support points."""
        weights, predictions = self.model.trainable_variables, []
        for step in range(max(MEASURED_STEPS) + 1):
            if step in MEASURED_STEPS:
                with treadle.substituted(self.model, weights):
                    predictions.append(self.model(x))
            weights = self.adapt(weights, support)
        return predictions

    def hooks(self) -> list[Any]:
        """Log a picture of the adaptation to a curve after each epoch."""
        return [treadle.every("1 epoch", self.draw_curve)]

    def draw_curve(self, loop: LoopView) -> dict[str, Any]:
        """Return a picture of a curve and its predictions, from ten points in its left half.

        The curve is grey; the predictions are yellow before any gradient step, orange after 1, red
        after 5 and blue after 10.
        """
        x = np.linspace(-5, 5, 400, dtype="float32")[:, None]
        support = x[15:200:20]
        predictions = loop.call(self.predictions, (support, 4 * np.sin(support)), x)
        return {"curve": draw([4 * np.sin(x), *predictions])}

    def datasets(self) -> treadle.Datasets:
        """Return random curves for training, and 100 fixed curves for validation."""
        return treadle.Datasets(
            train=data.from_function(lambda random: self.curves(random, self.shots), length=500),
            validation=data.from_function(lambda random: self.curves(random, 100), 4, seed=1),
        )

    def curves(self, random: np.random.Generator, queries: int) -> Any:
        """Return points of `tasks` random curves, as `(support, query)`, each of them `(x, y)`."""
        amplitude = random.uniform(0.1, 5.0, (self.tasks, 1, 1))
        phase = random.uniform(0.0, np.pi, (self.tasks, 1, 1))
        x = random.uniform(-5.0, 5.0, (self.tasks, self.shots + queries, 1))
        y = amplitude * np.sin(x - phase)
        parts = ((part[:, : self.shots], part[:, self.shots :]) for part in (x, y))
        support, query = zip(*parts, strict=True)
        return support, query


def mean_squared_error(predictions: Any, y: Any) -> Any:
    """Return the mean squared error."""
    return ops.mean((predictions - y) ** 2)


def draw(curves: list[Any]) -> treadle.Image:
    """Draw curves of shape (n, 1), with values between -5 and 5, into one image."""
    heights = np.linspace(5, -5, 240)[:, None]
    pixels = np.ones((240, len(curves[0]), 3))
    for color, curve in zip(COLORS, curves, strict=True):
        line = curve[:, 0]
        thickness = 0.04 + np.abs(np.gradient(line)) / 2  # wider where steep: no gaps
        pixels[np.abs(heights - line) < thickness] = [
            int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)
        ]
    return treadle.Image(pixels)
