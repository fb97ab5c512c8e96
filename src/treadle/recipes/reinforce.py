"""REINFORCE on CartPole: each batch is a set of whole episodes played by the current policy.

REINFORCE is due to Williams 1992 (https://doi.org/10.1007/BF00992696); CartPole comes with
Gymnasium (`pip install gymnasium`). A batch is 20 episodes of one policy. Episodes have unequal
lengths, but the step is compiled for one shape, so they are padded to the maximum length; `played`
is the mask of the steps that count. The advantage of each action is the discounted return from
there on, normalized over the batch (mean subtracted, divided by the standard deviation).

An epoch is five batches, so that its `return` is the mean over 100 consecutive episodes.
"""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

import treadle
from treadle import data
from treadle.core.hook import LoopView

MAX_STEPS = 500  # maximum episode length of CartPole-v1


class Reinforce(treadle.Task):
    """Train a policy with REINFORCE on CartPole, from whole episodes.

    Args:
        units: Width of the hidden layer.
        learning_rate: Learning rate of Adam.
        discount: Discount factor of rewards per step (gamma).
        episodes: Episodes per training step.
    """

    epochs = 12

    def __init__(
        self,
        units: int = 64,
        learning_rate: float = 1e-2,
        discount: float = 0.99,
        episodes: int = 20,
    ) -> None:
        self.policy = keras.Sequential(
            [keras.Input((4,)), layers.Dense(units, activation="relu"), layers.Dense(2)]
        )
        self.optimizer = keras.optimizers.Adam(learning_rate)
        self.environments = data.Environments("CartPole-v1", episodes)
        self.discount = discount

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Update the policy with normalized returns as advantages."""
        mask, returns = batch["played"], batch["gains"]
        # Of the episodes of all processes, if several train together.
        played, gains = treadle.gathered(mask), treadle.gathered(returns)
        steps = ops.sum(played)
        mean = ops.sum(played * gains) / steps
        deviation = ops.sqrt(ops.sum(played * (gains - mean) ** 2) / steps)
        advantages = mask * (returns - mean) / (deviation + 1e-6)

        def objective() -> Any:
            log_probabilities = ops.log_softmax(self.policy(batch["observations"], training=True))
            log_likelihoods = ops.one_hot(batch["actions"], 2) * log_probabilities
            total, own = -ops.sum(advantages[:, None] * log_likelihoods), ops.sum(mask)
            return treadle.weighted(total / ops.maximum(own, 1.0), own)

        loss = treadle.minimize(objective, self.policy, self.optimizer)
        return {"loss": loss, "return": steps / self.environments.count}  # reward 1 per step

    def play(self, loop: LoopView) -> dict[str, Any]:
        """Play an episode in each environment; return arrays of shape (episodes * MAX_STEPS, …)."""
        environments = self.environments
        environments.restart()
        n = environments.count
        observations = np.zeros((n, MAX_STEPS, 4), "float32")
        actions = np.zeros((n, MAX_STEPS), "int32")
        mask = np.zeros((n, MAX_STEPS), "float32")
        rewards = np.zeros((n, MAX_STEPS), "float32")
        playing = np.ones(n, "bool")
        for i in range(MAX_STEPS):
            sampled = sample_actions(loop.call(self.policy, environments.observations))
            step = environments.step(sampled, playing)
            observations[:, i], actions[:, i] = step.observations, sampled
            rewards[:, i], mask[:, i] = step.rewards, playing
            playing &= ~step.ended
            if not playing.any():
                break
        returns = np.zeros((n, MAX_STEPS + 1), "float32")
        for i in reversed(range(MAX_STEPS)):
            returns[:, i] = rewards[:, i] + self.discount * returns[:, i + 1]
        return {
            "observations": observations.reshape(-1, 4),
            "actions": actions.ravel(),
            "played": mask.ravel(),
            "gains": returns[:, :-1].ravel(),
        }

    def datasets(self) -> treadle.Datasets:
        """Return a source that plays the current policy for each batch."""
        return treadle.Datasets(
            train=data.closed_loop(self.play, length=5, keeps=self.environments)
        )


def sample_actions(logits: Any) -> Any:
    """Sample an action for each row of logits (Gumbel-max trick).

    NumPy's global generator is reseeded for each batch, so equal runs draw equal actions.
    """
    return np.argmax(logits + np.random.gumbel(size=logits.shape), axis=-1)
