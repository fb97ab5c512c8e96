"""Advantage actor-critic (A2C) with generalized advantage estimation (GAE) on CartPole.

CartPole comes with Gymnasium (`pip install gymnasium`). Several environments are stepped
synchronously, instead of asynchronously as in section 4 of Mnih et al. 2016
(https://arxiv.org/abs/1602.01783), with the advantage estimates of Schulman et al. 2016
(https://arxiv.org/abs/1506.02438). The critic estimates future rewards, so updates do not need
complete episodes: a batch is a rollout of 128 steps in each environment, and episodes continue in
the next batch. `keeps=self.environments` saves the environments in checkpoints, so a resumed run
continues the same episodes.

Actor and critic each have their own loss, computed in one forward pass. `return` is the mean return
of the last 100 episodes; the run stops when it reaches 475, the threshold for a solved task.
"""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

import treadle
from treadle import data
from treadle.core.hook import LoopView

SOLVED = 475.0


class ActorCritic(treadle.Task):
    """Train an advantage actor-critic (A2C) on CartPole.

    Args:
        units: Width of each hidden layer.
        actor_learning_rate: Learning rate of the actor's Adam optimizer.
        critic_learning_rate: Learning rate of the critic's Adam optimizer; should not be less than
            the actor's.
        discount: Discount factor of rewards per step (gamma).
        gae_lambda: Lambda of generalized advantage estimation: 0 uses the one-step estimate of the
            critic, 1 the full discounted return.
        entropy_coefficient: Weight of the entropy bonus, which encourages exploration.
        environments: Number of parallel environments.
        rollout_steps: Steps per batch in each environment.
    """

    steps = 300

    def __init__(
        self,
        units: int = 64,
        actor_learning_rate: float = 3e-3,
        critic_learning_rate: float = 1e-2,
        discount: float = 0.99,
        gae_lambda: float = 0.95,
        entropy_coefficient: float = 0.01,
        environments: int = 16,
        rollout_steps: int = 128,
    ) -> None:
        self.actor = network(units, 2)
        self.critic = network(units, 1)
        self.optimizers = {
            "actor": keras.optimizers.Adam(actor_learning_rate),
            "critic": keras.optimizers.Adam(critic_learning_rate),
        }
        self.environments = data.Environments("CartPole-v1", environments)
        self.discount, self.gae_lambda = discount, gae_lambda
        self.entropy_coefficient, self.rollout_steps = entropy_coefficient, rollout_steps

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Update the policy with the advantages, and the critic with its targets."""

        def objective() -> Any:
            log_probabilities = ops.log_softmax(self.actor(batch["observations"], training=True))
            actions = ops.one_hot(batch["actions"], 2)
            log_likelihoods = ops.sum(actions * log_probabilities, axis=-1)
            entropy = -ops.mean(ops.sum(ops.exp(log_probabilities) * log_probabilities, axis=-1))
            values = self.critic(batch["observations"], training=True)[:, 0]
            policy_loss = -ops.mean(batch["advantages"] * log_likelihoods)
            losses = {
                "actor": policy_loss - self.entropy_coefficient * entropy,
                "critic": ops.mean((batch["targets"] - values) ** 2),
            }
            return losses, entropy

        networks = {"actor": self.actor, "critic": self.critic}
        losses, entropy = treadle.minimize(objective, networks, self.optimizers)
        return {**losses, "entropy": entropy}

    def play(self, loop: LoopView) -> dict[str, Any]:
        """Collect a rollout; return arrays of shape (rollout_steps * environments, …)."""
        transitions: list[data.Moves] = []
        for _ in range(self.rollout_steps):
            logits = loop.call(self.actor, self.environments.observations)
            # Gumbel-max trick: the argmax of logits plus Gumbel noise is a sample from the policy.
            # NumPy's global generator is reseeded for each batch, so equal runs draw equal actions.
            actions = np.argmax(logits + np.random.gumbel(size=logits.shape), axis=-1)
            transitions.append(self.environments.step(actions))
        observations = np.stack([step.observations for step in transitions])
        next_observations = np.stack([step.next_observations for step in transitions])
        values, next_values = (
            loop.call(self.critic, part.reshape(-1, 4)).reshape(self.rollout_steps, -1)
            for part in (observations, next_observations)
        )
        advantages = self.advantages(transitions, values, next_values)
        return {
            "observations": observations.reshape(-1, 4),
            "actions": np.concatenate([step.actions for step in transitions]).astype("int32"),
            "advantages": advantages.ravel(),
            "targets": (advantages + values).ravel(),
        }

    def advantages(self, transitions: list[data.Moves], values: Any, next_values: Any) -> Any:
        """Return generalized advantage estimates of shape (rollout_steps, environments)."""
        advantages, advantage = np.zeros_like(values), 0.0
        for i in reversed(range(self.rollout_steps)):
            step = transitions[i]
            next_value = np.where(step.terminations, 0.0, next_values[i])
            td_error = step.rewards + self.discount * next_value - values[i]
            decay = self.discount * self.gae_lambda
            advantage = td_error + decay * np.where(step.ended, 0.0, advantage)
            advantages[i] = advantage
        return advantages

    def hooks(self) -> list[Any]:
        """Log the mean return of the last 100 episodes, and stop when the task is solved."""
        return [treadle.every("10 steps", self.log_return)]

    def log_return(self, loop: LoopView) -> dict[str, Any]:
        """Return the mean return of the last 100 episodes; stop the run if it is high enough."""
        mean_return = float(np.mean(self.environments.recent or [0.0]))
        if mean_return >= SOLVED:
            loop.stop(f"the mean return of the last 100 episodes is {mean_return:.0f}")
        return {"return": mean_return}

    def datasets(self) -> treadle.Datasets:
        """Return a source that plays the current policy for each batch."""
        return treadle.Datasets(train=data.closed_loop(self.play, keeps=self.environments))


def network(units: int, outputs: int) -> keras.Model:
    """Return a network from observations to `outputs` numbers."""
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(units, activation="tanh"),
            layers.Dense(units, activation="tanh"),
            layers.Dense(outputs),
        ]
    )
