"""Environments that answer what a policy does, several side by side, as a checkpoint can hold them.

For `treadle.data.closed`: its function plays some moves, asking the policy by `loop.call`, and
makes a batch of them.
"""

import importlib
import importlib.util
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..core.options import run_seed
from ..errors import ConfigurationError, DataError, whole_number
from .order import hashed

Array = np.ndarray[Any, np.dtype[Any]]

PURPOSE: Final = 3
"""Tells these hashes from those of `functions` and `random_states`."""

RECENT: Final = 100
"""Of so many episodes the returns are kept: over as many the usual tasks are judged."""


@dataclass(frozen=True, slots=True)
class Moves:
    """One move in each of n environments.

    Attributes:
        observations: What each showed before, (n, …).
        actions: What was done there, (n, …).
        rewards: What it gave, (n,), float32; 0 where an environment stood still.
        following: What each showed afterwards, (n, …); where an episode ended, its last sight and
            not the first of the next one.
        terminated: Whether the episode came to its end, (n,), bool: nothing follows from there.
        truncated: Whether it was cut off, by a limit of time: more would have followed.
    """

    observations: Array
    actions: Array
    rewards: Array
    following: Array
    terminated: Array
    truncated: Array

    @property
    def ended(self) -> Array:
        """Whether the episode is over, in either way."""
        return self.terminated | self.truncated


class Environments:
    """Several environments of one kind, each in an episode of its own.

    They keep to Gymnasium's interface (https://gymnasium.farama.org); what they show, and what is
    done, are arrays or numbers. An episode that ends is
    followed by another one at once. Every episode has a seed of its own, which follows from the
    run's seed, from the environment and from the episode's number: so the state of an environment,
    whatever is inside it, is the number of its episode and the actions in it so far, and `restore`
    plays these again. That takes as long as they took, and holds for environments that do the same
    again from the same seed, as Gymnasium wants of all.

    Args:
        make: A name that `gymnasium.make` knows, or a function that returns an environment.
        count: How many there are.
        seed: Seed of the episodes; None derives them from the run's.

    Raises:
        ConfigurationError: A name is given and Gymnasium is not installed.
        DataError: A count that is no whole number from 1, or a seed that is none from 0.

    Example:
        >>> environments = Environments("CartPole-v1", 4, seed=0)
        >>> moves = environments.step(np.array([0, 1, 0, 1]))
        >>> moves.observations.shape, moves.rewards.tolist()
        ((4, 4), [1.0, 1.0, 1.0, 1.0])
    """

    def __init__(self, make: str | Callable[[], Any], count: int, seed: int | None = None) -> None:
        if isinstance(make, str) and importlib.util.find_spec("gymnasium") is None:
            raise ConfigurationError(
                f"the environment {make!r} cannot be made, because Gymnasium is not installed: pip "
                "install 'treadle[rl]'"
            )
        self._make, self._seed = make, seed
        if seed is not None:
            self._seed = whole_number("seed", seed, DataError, least=0)
        self.count: Final = whole_number("count", count, DataError)
        self._made: list[_Environment] = []
        self._recent: deque[float] = deque(maxlen=RECENT)

    @property
    def observations(self) -> Array:
        """What each shows now, (n, …); an array of its own."""
        return np.stack([one.shown for one in self._all()])

    @property
    def recent(self) -> list[float]:
        """The returns (sums of rewards) of the episodes that ended last, at most 100."""
        return list(self._recent)

    def step(self, actions: Any, playing: Any = None) -> Moves:
        """Do one action in each environment.

        Args:
            actions: An array (n, …); row i is what environment i is given.
            playing: Which of them play, (n,), bool; the others stand still. All, if not given.

        Raises:
            DataError: Not one action for each environment.
        """
        environments, before = self._all(), self.observations
        chosen = np.atleast_1d(actions)
        if len(chosen) != self.count:
            raise DataError(
                f"step takes an action for each of the {self.count} environments, in the first "
                f"axis of an array, but got one of shape {chosen.shape}"
            )
        rewards = np.zeros(self.count, "float32")
        terminated, truncated = np.zeros((2, self.count), "bool")
        following = before.copy()
        for i, environment in enumerate(environments):
            if playing is not None and not playing[i]:
                continue
            following[i], rewards[i], terminated[i], truncated[i] = environment.step(chosen[i])
            if terminated[i] or truncated[i]:
                self._recent.append(environment.gained)
                environment.begin()
        return Moves(before, chosen, rewards, following, terminated, truncated)

    def restart(self) -> None:
        """Begin a new episode everywhere; those under way have no return."""
        for environment in self._all():
            if environment.actions:
                environment.begin()

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs: each environment's episode, and the actions in it."""
        return {
            "environments": [environment.state() for environment in self._all()],
            "recent": self.recent,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned, by playing again what had been played.

        Raises:
            DataError: There were more or fewer environments, or one does not do the same again.
        """
        kept = state["environments"]
        if len(kept) != self.count:
            raise DataError(
                f"the checkpoint holds {len(kept)} environments, and there are {self.count}: they "
                "must be as many as when the run began"
            )
        for environment, one in zip(self._all(), kept, strict=True):
            environment.restore(one)
        self._recent = deque(state["recent"], maxlen=RECENT)

    def _all(self) -> list["_Environment"]:
        """Return the environments; the first who asks makes them, when the run has its seed."""
        if not self._made:
            seed = run_seed() if self._seed is None else self._seed
            self._made = [_Environment(self._one(), seed, i) for i in range(self.count)]
        return self._made

    def _one(self) -> Any:
        if callable(self._make):
            return self._make()
        return importlib.import_module("gymnasium").make(self._make)


class _Environment:
    """One environment.

    Args:
        environment: Of Gymnasium's interface.
        seed: Of the run.
        index: Which one of several it is.

    Attributes:
        shown: What it shows now.
        actions: What was done in this episode so far.
        gained: The sum of the rewards in it.
    """

    def __init__(self, environment: Any, seed: int, index: int) -> None:
        self._environment, self._seed, self._index = environment, seed, index
        self._episode = -1
        self.begin()

    def begin(self) -> None:
        """Begin the next episode."""
        self._episode += 1
        key = hashed(PURPOSE, self._seed, self._index, self._episode)
        shown, _ = self._environment.reset(seed=key >> 33)  # some take no more than 31 bits
        self.shown: Array = np.array(shown)
        self.actions: list[Array] = []
        self.gained = 0.0

    def step(self, action: Any) -> tuple[Array, float, bool, bool]:
        """Do one action; returns what it shows then, the reward, and how the episode ended."""
        shown, reward, terminated, truncated, _ = self._environment.step(action)
        self.shown = np.array(shown)
        self.actions.append(np.array(action))
        self.gained += float(reward)
        return self.shown, float(reward), bool(terminated), bool(truncated)

    def state(self) -> dict[str, Any]:
        """Return the episode, its actions, and what is shown."""
        actions = np.stack(self.actions) if self.actions else None
        return {"episode": self._episode, "actions": actions, "shown": self.shown}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Play again what was played; what is shown at the end must be the same."""
        self._episode = state["episode"] - 1
        self.begin()
        for action in () if state["actions"] is None else state["actions"]:
            self.step(action)
        if not np.array_equal(self.shown, state["shown"], equal_nan=True):
            raise DataError(
                f"environment {self._index} does not do the same again: after reset and the "
                f"{len(self.actions)} actions of episode {self._episode + 1} it shows something "
                "else than when the checkpoint was made. It must draw from self.np_random alone, "
                "which reset(seed=…) sets, or the seed, the settings or the version of Gymnasium "
                "changed"
            )
