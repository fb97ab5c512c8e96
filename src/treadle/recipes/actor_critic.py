"""Moves instead of whole episodes: a critic says what is still to come, so no end is waited for.

Advantage actor-critic on CartPole, which Gymnasium brings (`pip install 'treadle[rl]'`): several
environments side by side, as in section 4 of Mnih et al. 2016 (https://arxiv.org/abs/1602.01783),
one after the other instead of asynchronously, and generalized advantage estimates (Schulman et al.
2016, https://arxiv.org/abs/1506.02438). A batch is the next 128 moves in each environment. Episodes
go on from batch to batch; `keeps=self.environments` is why a run that was killed goes on with them
where they were.

Actor and critic each follow a loss of their own, from one forward pass. `return` is the mean over
the last 100 episodes; the run stops when that is 475, which is called solved.
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
    """Balance a pole with an actor and a critic, on moves of their own policy.

    Args:
        units: Width of each hidden layer.
        actor_rate: Learning rate of the actor's Adam.
        critic_rate: The same for the critic, which should not be the slower one.
        discount: Of rewards, for each move that they are away.
        trace: How far advantages look beyond the critic's next guess: 0 not at all, 1 to the end.
        entropy: Weight of the entropy of the policy, which keeps it trying.
        environments: How many are played in.
        moves: How many moves are played in each for a step.
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
        """Make moves that were better than the critic thought more probable; correct the critic."""

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
        """Play on in all environments; arrays of shape (moves * environments, …)."""
        played: list[data.Moves] = []
        for _ in range(self.moves):
            logits = loop.call(self.actor, self.environments.observations)
            # The global generator of NumPy is seeded anew for each batch: equal runs draw alike.
            actions = np.argmax(logits + np.random.gumbel(size=logits.shape), axis=-1)
            played.append(self.environments.step(actions))
        observations = np.stack([moves.observations for moves in played])
        following = np.stack([moves.following for moves in played])
        values, next_values = (
            loop.call(self.critic, part.reshape(-1, 4)).reshape(self.moves, -1)
            for part in (observations, following)
        )
        advantages, coming = np.zeros_like(values), 0.0
        for i in reversed(range(self.moves)):
            moves = played[i]
            next_value = np.where(moves.terminated, 0.0, next_values[i])
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
        """Tell the mean return of the last 100 episodes, and stop when it is high enough."""
        return [treadle.every("10 steps", self.told)]

    def told(self, loop: LoopView) -> dict[str, Any]:
        """Return the mean return of the last 100 episodes."""
        found = float(np.mean(self.environments.recent or [0.0]))
        if found >= SOLVED:
            loop.stop(f"the mean return of the last 100 episodes is {found:.0f}")
        return {"return": found}

    def datasets(self) -> treadle.Datasets:
        """Return the next moves of the policy, as it is when they are asked for."""
        return treadle.Datasets(train=data.closed(self.play, keeps=self.environments))


def network(units: int, outputs: int) -> keras.Model:
    """Return a network that makes something of what an environment shows."""
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(units, activation="tanh"),
            layers.Dense(units, activation="tanh"),
            layers.Dense(outputs),
        ]
    )
