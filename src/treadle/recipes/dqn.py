"""Double DQN on CartPole: a replay buffer, and a target network with soft updates.

Deep Q-learning (Mnih et al. 2015, https://doi.org/10.1038/nature14236) with the double Q-learning
target of van Hasselt et al. 2016 (https://arxiv.org/abs/1509.06461). CartPole comes with Gymnasium
(`pip install gymnasium`). Before each training step, an epsilon-greedy policy adds a few
transitions to the buffer, and the batch is sampled from the whole buffer. The buffer has `state()`
and `restore(state)`, so it is part of every checkpoint and a resumed run continues with it.

`return` is the mean return of the last 100 episodes; the run stops when it reaches 475, the
threshold for a solved task.
"""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import treadle
from treadle import data
from treadle.core.hook import LoopView
from treadle.errors import ConfigurationError

SOLVED = 475.0


class DQN(treadle.Task):
    """Train a double DQN with a replay buffer on CartPole.

    Args:
        units: Width of each hidden layer.
        learning_rate: Learning rate of Adam.
        discount: Discount factor of rewards per step (gamma).
        target_update_rate: Update rate of the target network (tau).
        epsilon_end: Probability of a random action from step `epsilon_decay_steps` on.
        epsilon_decay_steps: Steps over which epsilon decays linearly from 1.
        capacity: Maximum number of transitions in the buffer.
        batch_size: Transitions per batch.
        environments: Number of parallel environments, each with one transition per training step.
    """

    steps = 20_000

    def __init__(
        self,
        units: int = 128,
        learning_rate: float = 1e-3,
        discount: float = 0.98,
        target_update_rate: float = 0.02,
        epsilon_end: float = 0.02,
        epsilon_decay_steps: int = 500,
        capacity: int = 20_000,
        batch_size: int = 128,
        environments: int = 8,
    ) -> None:
        self.online = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(units, activation="relu"),
                layers.Dense(units, activation="relu"),
                layers.Dense(2),
            ]
        )
        self.target = treadle.frozen_copy(self.online)
        self.optimizer = keras.optimizers.Adam(learning_rate)
        self.loss = keras.losses.Huber()
        if batch_size > capacity:
            raise ConfigurationError(
                f"capacity={capacity}: the buffer never holds the {batch_size} moves of a batch; "
                "make it larger, or batch_size smaller"
            )
        self.environments = data.Environments("CartPole-v1", environments)
        self.buffer = ReplayBuffer(capacity)
        self.discount, self.batch_size = discount, batch_size
        self.target_update_rate = target_update_rate
        self.epsilon_end, self.epsilon_decay_steps = epsilon_end, epsilon_decay_steps

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Update the Q-network towards the double Q-learning target."""
        next_observations = batch["next_observations"]
        next_actions = ops.one_hot(ops.argmax(self.online(next_observations), axis=-1), 2)
        next_values = ops.sum(next_actions * self.target(next_observations), axis=-1)
        continues = 1.0 - batch["terminations"]
        td_target = batch["rewards"] + self.discount * continues * next_values

        def objective() -> Any:
            q_values = self.online(batch["observations"], training=True)
            action_values = ops.sum(ops.one_hot(batch["actions"], 2) * q_values, axis=-1)
            return self.loss(td_target, action_values), ops.mean(action_values)

        loss, q_value = treadle.minimize(objective, self.online, self.optimizer)
        treadle.blend(self.target, self.online, self.target_update_rate)
        return {"loss": loss, "q_value": q_value}

    def play(self, loop: LoopView) -> dict[str, Any]:
        """Take one action in each environment, and sample a batch from the buffer."""
        decayed = min(loop.progress.step / max(self.epsilon_decay_steps, 1), 1.0)
        epsilon = 1.0 + (self.epsilon_end - 1.0) * decayed
        while True:
            actions = np.argmax(loop.call(self.online, self.environments.observations), axis=-1)
            # NumPy's global generator is reseeded for each batch, so equal runs draw equal actions.
            explore = np.random.random(len(actions)) < epsilon
            actions = np.where(explore, np.random.randint(2, size=len(actions)), actions)
            self.buffer.add(self.environments.step(actions))
            if len(self.buffer) >= self.batch_size:
                return self.buffer.sample(self.batch_size)

    def hooks(self) -> list[Any]:
        """Log the mean return of the last 100 episodes, and stop when the task is solved."""
        return [treadle.every("100 steps", self.log_return)]

    def log_return(self, loop: LoopView) -> dict[str, Any]:
        """Return the mean return of the last 100 episodes; stop the run if it is high enough."""
        mean_return = float(np.mean(self.environments.recent or [0.0]))
        if mean_return >= SOLVED:
            loop.stop(f"the mean return of the last 100 episodes is {mean_return:.0f}")
        return {"return": mean_return}

    def datasets(self) -> treadle.Datasets:
        """Return a source that plays and samples from the replay buffer for each batch."""
        source = data.closed_loop(self.play, keeps=[self.environments, self.buffer])
        return treadle.Datasets(train=source)


class ReplayBuffer:
    """Replay buffer with the newest transitions.

    Args:
        capacity: Maximum number of transitions.
    """

    def __init__(self, capacity: int) -> None:
        self.columns = {
            "observations": np.zeros((capacity, 4), "float32"),
            "actions": np.zeros(capacity, "int32"),
            "rewards": np.zeros(capacity, "float32"),
            "next_observations": np.zeros((capacity, 4), "float32"),
            "terminations": np.zeros(capacity, "float32"),
        }
        self.capacity, self.added = capacity, 0

    def __len__(self) -> int:
        """Return the number of transitions in the buffer."""
        return min(self.added, self.capacity)

    def add(self, transitions: data.Moves) -> None:
        """Add transitions; a full buffer overwrites the oldest ones."""
        rows = (self.added + np.arange(len(transitions.rewards))) % self.capacity
        for name, column in self.columns.items():
            column[rows] = getattr(transitions, name)
        self.added += len(rows)

    def sample(self, count: int) -> dict[str, Any]:
        """Sample transitions uniformly, with replacement."""
        rows = np.random.randint(len(self), size=count)
        return {name: column[rows] for name, column in self.columns.items()}

    def state(self) -> dict[str, Any]:
        """Return the state for checkpoints; unused rows are left out."""
        used = {name: column[: len(self)] for name, column in self.columns.items()}
        return {"added": self.added, **used}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state`."""
        self.added = state["added"]
        for name, column in self.columns.items():
            column[: len(self)] = state[name]
