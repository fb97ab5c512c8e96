"""Moves that are learned from more than once: a replay buffer, and a target that follows slowly.

Deep Q-learning (Mnih et al. 2015, https://doi.org/10.1038/nature14236) on CartPole, which Gymnasium
brings (`pip install 'treadle[rl]'`), with the double estimate of van Hasselt et al. 2016
(https://arxiv.org/abs/1509.06461). For each step a few moves are played, some of them at random,
and put into the buffer; the batch is drawn from all that is in it. The buffer has `state()` and
`restore(state)`, so it is part of every checkpoint, and a run that was killed goes on with it.

`return` is the mean over the last 100 episodes; the run stops when that is 475, which is called
solved.
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
    """Balance a pole with deep Q-learning, from a replay buffer.

    Args:
        units: Width of each hidden layer.
        learning_rate: Adam's.
        discount: Of rewards, for each move that they are away.
        follow: How far the target network moves towards the other one in a step.
        trying_ends: Share of random moves, from step `trying_steps` on.
        trying_steps: Steps over which it falls from 1 to there.
        capacity: Moves in the buffer.
        batch_size: Moves in a step.
        environments: How many are played in, one move in each for a step.
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
        """Correct what moves are thought to be worth, by the reward and what follows."""
        best = ops.one_hot(ops.argmax(self.online(batch["following"]), axis=-1), 2)
        after = ops.sum(best * self.target(batch["following"]), axis=-1)
        worth = batch["rewards"] + self.discount * (1.0 - batch["terminated"]) * after

        def objective() -> Any:
            values = self.online(batch["observations"], training=True)
            chosen = ops.sum(ops.one_hot(batch["actions"], 2) * values, axis=-1)
            return self.loss(worth, chosen), ops.mean(chosen)

        loss, value = treadle.minimize(objective, self.online, self.optimizer)
        treadle.blend(self.target, self.online, self.follow)
        return {"loss": loss, "value": value}

    def play(self, loop: LoopView) -> dict[str, Any]:
        """Play one move in each environment, and draw a batch of all that were played."""
        passed = min(loop.progress.step / max(self.trying_steps, 1), 1.0)
        trying = 1.0 + (self.trying_ends - 1.0) * passed
        while True:
            actions = np.argmax(loop.call(self.online, self.environments.observations), axis=-1)
            # The global generator of NumPy is seeded anew for each batch: equal runs draw alike.
            at_random = np.random.random(len(actions)) < trying
            actions = np.where(at_random, np.random.randint(2, size=len(actions)), actions)
            self.buffer.add(self.environments.step(actions))
            if self.buffer.filled >= self.batch_size:
                return self.buffer.draw(self.batch_size)

    def hooks(self) -> list[Any]:
        """Tell the mean return of the last 100 episodes, and stop when it is high enough."""
        return [treadle.every("100 steps", self.told)]

    def told(self, loop: LoopView) -> dict[str, Any]:
        """Return the mean return of the last 100 episodes."""
        found = float(np.mean(self.environments.recent or [0.0]))
        if found >= SOLVED:
            loop.stop(f"the mean return of the last 100 episodes is {found:.0f}")
        return {"return": found}

    def datasets(self) -> treadle.Datasets:
        """Return batches of what was played so far."""
        source = data.closed(self.play, keeps=[self.environments, self.buffer])
        return treadle.Datasets(train=source)


class Buffer:
    """The newest moves, as many as it has room for.

    Args:
        capacity: How many that are.
    """

    def __init__(self, capacity: int) -> None:
        self.columns = {
            "observations": np.zeros((capacity, 4), "float32"),
            "actions": np.zeros(capacity, "int32"),
            "rewards": np.zeros(capacity, "float32"),
            "following": np.zeros((capacity, 4), "float32"),
            "terminated": np.zeros(capacity, "float32"),
        }
        self.capacity, self.added = capacity, 0

    @property
    def filled(self) -> int:
        """How many it holds."""
        return min(self.added, self.capacity)

    def add(self, moves: data.Moves) -> None:
        """Add moves, in the place of the oldest ones where it is full."""
        places = (self.added + np.arange(len(moves.rewards))) % self.capacity
        for name, column in self.columns.items():
            column[places] = getattr(moves, name)
        self.added += len(places)

    def draw(self, count: int) -> dict[str, Any]:
        """Return some of the moves, each as probable as any other."""
        chosen = np.random.randint(self.filled, size=count)
        return {name: column[chosen] for name, column in self.columns.items()}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint is to hold: what is filled, and no more."""
        filled = {name: column[: self.filled] for name, column in self.columns.items()}
        return {"added": self.added, **filled}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned."""
        self.added = state["added"]
        for name, column in self.columns.items():
            column[: self.filled] = state[name]
