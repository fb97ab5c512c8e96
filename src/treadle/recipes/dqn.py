"""Double DQN on CartPole: a replay buffer, and a target network with soft updates.

Deep Q-learning (Mnih et al. 2015, https://doi.org/10.1038/nature14236) with the double Q-learning
target of van Hasselt et al. 2016 (https://arxiv.org/abs/1509.06461). CartPole comes with Gymnasium
(`pip install 'treadle[rl]'`). Before each training step, an epsilon-greedy policy adds a few
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
        follow: Update rate of the target network (tau).
        trying_ends: Final epsilon: the probability of a random action from step `trying_steps` on.
        trying_steps: Number of steps over which epsilon decays linearly from 1.
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
        follow: float = 0.02,
        trying_ends: float = 0.02,
        trying_steps: int = 500,
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
        self.buffer = Buffer(capacity)
        self.discount, self.follow, self.batch_size = discount, follow, batch_size
        self.trying_ends, self.trying_steps = trying_ends, trying_steps

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Update the Q-network towards the double Q-learning target."""
        best = ops.one_hot(ops.argmax(self.online(batch["next_observations"]), axis=-1), 2)
        after = ops.sum(best * self.target(batch["next_observations"]), axis=-1)
        worth = batch["rewards"] + self.discount * (1.0 - batch["terminations"]) * after

        def objective() -> Any:
            values = self.online(batch["observations"], training=True)
            chosen = ops.sum(ops.one_hot(batch["actions"], 2) * values, axis=-1)
            return self.loss(worth, chosen), ops.mean(chosen)

        loss, value = treadle.minimize(objective, self.online, self.optimizer)
        treadle.blend(self.target, self.online, self.follow)
        return {"loss": loss, "value": value}

    def play(self, loop: LoopView) -> dict[str, Any]:
        """Take one action in each environment, and sample a batch from the buffer."""
        passed = min(loop.progress.step / max(self.trying_steps, 1), 1.0)
        trying = 1.0 + (self.trying_ends - 1.0) * passed
        while True:
            actions = np.argmax(loop.call(self.online, self.environments.observations), axis=-1)
            # NumPy's global generator is reseeded for each batch, so equal runs draw equal actions.
            at_random = np.random.random(len(actions)) < trying
            actions = np.where(at_random, np.random.randint(2, size=len(actions)), actions)
            self.buffer.add(self.environments.step(actions))
            if self.buffer.filled >= self.batch_size:
                return self.buffer.draw(self.batch_size)

    def hooks(self) -> list[Any]:
        """Log the mean return of the last 100 episodes, and stop when the task is solved."""
        return [treadle.every("100 steps", self.told)]

    def told(self, loop: LoopView) -> dict[str, Any]:
        """Return the mean return of the last 100 episodes; stop the run if it is high enough."""
        found = float(np.mean(self.environments.recent or [0.0]))
        if found >= SOLVED:
            loop.stop(f"the mean return of the last 100 episodes is {found:.0f}")
        return {"return": found}

    def datasets(self) -> treadle.Datasets:
        """Return a source that plays and samples from the replay buffer for each batch."""
        source = data.closed_loop(self.play, keeps=[self.environments, self.buffer])
        return treadle.Datasets(train=source)


class Buffer:
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

    @property
    def filled(self) -> int:
        """Number of transitions in the buffer."""
        return min(self.added, self.capacity)

    def add(self, moves: data.Moves) -> None:
        """Add transitions; a full buffer overwrites the oldest ones."""
        places = (self.added + np.arange(len(moves.rewards))) % self.capacity
        for name, column in self.columns.items():
            column[places] = getattr(moves, name)
        self.added += len(places)

    def draw(self, count: int) -> dict[str, Any]:
        """Sample transitions uniformly, with replacement."""
        chosen = np.random.randint(self.filled, size=count)
        return {name: column[chosen] for name, column in self.columns.items()}

    def state(self) -> dict[str, Any]:
        """Return the state for checkpoints; unused rows are left out."""
        filled = {name: column[: self.filled] for name, column in self.columns.items()}
        return {"added": self.added, **filled}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state`."""
        if "following" in state:  # the names in checkpoints of earlier versions
            state = {
                **state,
                "next_observations": state["following"],
                "terminations": state["terminated"],
            }
        self.added = state["added"]
        for name, column in self.columns.items():
            column[: self.filled] = state[name]
