"""Cyclical learning rates: choose the bounds with a range test, and the shape with a schedule.

    treadle find-lr cyclic-lr --plot rates.png
    treadle schedule cyclic-lr --steps 460 --plot schedule.png
    treadle run cyclic-lr --set policy=one_cycle

Cyclical learning rates (Smith 2017, https://arxiv.org/abs/1506.01186) and the one-cycle policy of
super-convergence (Smith & Topin 2018, https://arxiv.org/abs/1708.07120).
"""

from typing import Any, Literal

import keras

import treadle
from treadle.recipes.digits import digit_batches
from treadle.schedules import Cyclic, OneCycle


class CyclicRates(treadle.Task):
    """Classify digits with a cyclical learning rate schedule.

    Args:
        policy: Shape of the schedule.
        low: Lowest learning rate, at the start and end of a cycle.
        high: Highest learning rate, in the middle of a cycle.
        step_size: Steps in half a cycle; an epoch has 23 steps.
        batch_size: Examples per step.
    """

    steps = 460  # 20 epochs

    def __init__(
        self,
        policy: Literal[
            "triangular", "triangular2", "exp_range", "one_cycle", "constant"
        ] = "triangular2",
        low: float = 0.05,
        high: float = 0.5,
        step_size: int = 46,
        batch_size: int = 64,
    ) -> None:
        self.model = keras.Sequential(
            [
                keras.Input((8, 8)),
                keras.layers.Rescaling(1 / 16),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        self.schedule = schedule_of(policy, low, high, step_size, self.steps)
        self.optimizer = keras.optimizers.SGD(self.schedule, momentum=0.9)
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()
        self.batch_size = batch_size

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Minimize the loss on one batch, and log the scheduled learning rate."""
        x, y = batch

        def objective() -> Any:
            logits = self.model(x, training=True)
            return self.loss(y, logits), logits

        learning_rate = self.schedule(treadle.step())  # the rate that this step's update uses
        loss, logits = treadle.minimize(objective, self.model, self.optimizer)
        self.accuracy.update_state(y, logits)
        return {"loss": loss, "learning_rate": learning_rate}

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """Evaluate one batch in inference mode."""
        x, y = batch
        logits = self.model(x, training=False)
        self.accuracy.update_state(y, logits)
        return {"loss": self.loss(y, logits)}

    def datasets(self) -> treadle.Datasets:
        """Return 1,437 training digits and 360 validation digits."""
        return digit_batches(self.batch_size)


def schedule_of(policy: Any, low: float, high: float, step_size: int, steps: int) -> Any:
    """Return the schedule of a policy; `constant` stays at `high`."""
    if policy == "one_cycle":
        return OneCycle(high, steps, initial=low)
    if policy == "constant":
        return Cyclic(high, high, step_size)
    gamma = 0.995 if policy == "exp_range" else 1.0
    return Cyclic(low, high, step_size, policy, gamma)
