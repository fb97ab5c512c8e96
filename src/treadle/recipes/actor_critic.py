"""Advantage actor-critic (A2C) with generalized advantage estimation (GAE) on CartPole.

CartPole comes with Gymnasium (`pip install 'treadle[rl]'`). Several environments are stepped
synchronously, instead of asynchronously as in section 4 of Mnih et al. 2016
(https://arxiv.org/abs/1602.01783), with the advantage estimates of Schulman et al. 2016
(https://arxiv.org/abs/1506.02438). The critic estimates future rewards, so updates do not need
complete episodes: a batch is the next 128 steps of each environment, and episodes continue in the
next batch. `keeps=self.environments` saves the environments in checkpoints, so a resumed run
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
        actor_rate: Learning rate of the actor's Adam optimizer.
        critic_rate: Learning rate of the critic's Adam optimizer; should not be the smaller one.
        discount: Discount factor of rewards per step (gamma).
        trace: Lambda of generalized advantage estimation: 0 uses the one-step estimate of the
            critic, 1 the full discounted return.
        entropy: Weight of the entropy bonus, which encourages exploration.
        environments: Number of parallel environments.
        moves: Environment steps per batch, in each environment.
    """

    steps = 300

    def __init__(
        self,
        units: int = 64,
        actor_rate: float = 3e-3,
        critic_rate: float = 1e-2,
        discount: float = 0.99,
        trace: float = 0.95,
        entropy: float = 0.01,
        environments: int = 16,
        moves: int = 128,
    ) -> None:
        self.actor = network(units, 2)
        self.critic = network(units, 1)
        self.optimizers = {
            "actor": keras.optimizers.Adam(actor_rate),
            "critic": keras.optimizers.Adam(critic_rate),
        }
        self.environments = data.Environments("CartPole-v1", environments)
        self.discount, self.trace, self.entropy, self.moves = discount, trace, entropy, moves

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Update the policy with the advantages, and the critic with its targets."""

        def objective() -> Any:
            log_probabilities = ops.log_softmax(self.actor(batch["observations"], training=True))
            chosen = ops.sum(ops.one_hot(batch["actions"], 2) * log_probabilities, axis=-1)
            entropy = -ops.mean(ops.sum(ops.exp(log_probabilities) * log_probabilities, axis=-1))
            values = self.critic(batch["observations"], training=True)[:, 0]
            losses = {
                "actor": -ops.mean(batch["advantages"] * chosen) - self.entropy * entropy,
                "critic": ops.mean((batch["targets"] - values) ** 2),
            }
            return losses, entropy

        networks = {"actor": self.actor, "critic": self.critic}
        losses, entropy = treadle.minimize(objective, networks, self.optimizers)
        return {**losses, "entropy": entropy}

    def play(self, loop: LoopView) -> dict[str, Any]:
        """Continue all episodes; return arrays of shape (moves * environments, …)."""
        played: list[data.Moves] = []
        for _ in range(self.moves):
            logits = loop.call(self.actor, self.environments.observations)
            # NumPy's global generator is reseeded for each batch, so equal runs draw equal actions.
            actions = np.argmax(logits + np.random.gumbel(size=logits.shape), axis=-1)
            played.append(self.environments.step(actions))
        observations = np.stack([moves.observations for moves in played])
        next_observations = np.stack([moves.next_observations for moves in played])
        values, next_values = (
            loop.call(self.critic, part.reshape(-1, 4)).reshape(self.moves, -1)
            for part in (observations, next_observations)
        )
        advantages, coming = np.zeros_like(values), 0.0
        for i in reversed(range(self.moves)):
            moves = played[i]
            next_value = np.where(moves.terminations, 0.0, next_values[i])
            surprise = moves.rewards + self.discount * next_value - values[i]
            coming = surprise + self.discount * self.trace * np.where(moves.ended, 0.0, coming)
            advantages[i] = coming
        return {
            "observations": observations.reshape(-1, 4),
            "actions": np.concatenate([moves.actions for moves in played]).astype("int32"),
            "advantages": advantages.ravel(),
            "targets": (advantages + values).ravel(),
        }

    def hooks(self) -> list[Any]:
        """Log the mean return of the last 100 episodes, and stop when the task is solved."""
        return [treadle.every("10 steps", self.told)]

    def told(self, loop: LoopView) -> dict[str, Any]:
        """Return the mean return of the last 100 episodes; stop the run if it is high enough."""
        found = float(np.mean(self.environments.recent or [0.0]))
        if found >= SOLVED:
            loop.stop(f"the mean return of the last 100 episodes is {found:.0f}")
        return {"return": found}

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
