"""Vectorized reinforcement learning environments whose state can be saved in checkpoints.

Use them with `treadle.data.closed_loop`: its function runs some steps, computes actions of the
policy with `loop.call`, and returns a batch.
"""

import importlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..core.options import run_seed
from ..errors import DataError, require_package, whole_number, whole_number_or_none
from .order import hashed

Array = np.ndarray[Any, np.dtype[Any]]

PURPOSE: Final = 3
"""Distinguishes these hashes from those in `functions` and `random_states`."""

RECENT: Final = 100
"""The number of recent episodes whose returns are kept; benchmarks usually average over as many."""


@dataclass(frozen=True, slots=True)
class Moves:
    """The transitions of one step in each of n environments.

    Attributes:
        observations: The observations before the step, (n, …).
        actions: The actions, (n, …).
        rewards: The rewards, (n,), float32; 0 for environments that were not stepped.
        next_observations: The observations after the step, (n, …). At the end of an episode, this
            is the final observation, not the first one of the next episode.
        terminations: Whether the episode reached a terminal state, (n,), bool.
        truncations: Whether the episode was cut off, such as by a time limit, (n,), bool.

    Example:
        >>> import numpy as np, treadle
        >>> environments = treadle.data.Environments("CartPole-v1", 2, seed=0)
        >>> moves = environments.step(np.array([0, 1]))
        >>> moves.actions.tolist(), moves.next_observations.shape, moves.ended.tolist()
        ([0, 1], (2, 4), [False, False])
    """

    observations: Array
    actions: Array
    rewards: Array
    next_observations: Array
    terminations: Array
    truncations: Array

    @property
    def ended(self) -> Array:
        """Whether the episode ended, by termination or truncation."""
        return self.terminations | self.truncations


class Environments:
    """Several environments of the same kind, each running its own episode.

    Environments implement Gymnasium's interface (https://gymnasium.farama.org). Observations and
    actions are arrays or numbers. When an episode ends, the next one starts immediately.

    The seed of each episode is derived from the seed of the run, the index of the environment and
    the number of the episode. The state of an environment is therefore the number of its episode
    and the actions since its start, and `restore` replays these actions. This takes as long as the
    original steps, and requires that environments are deterministic for a given seed, as Gymnasium
    specifies.

    Args:
        make: A name for `gymnasium.make`, or a function that returns an environment.
        count: The number of environments.
        seed: The seed of the episodes; None derives it from the seed of the run.

    Raises:
        ConfigurationError: If a name is given and Gymnasium is not installed.
        DataError: If `count` is not a positive integer, or `seed` is not a non-negative integer.

    Example:
        >>> environments = Environments("CartPole-v1", 4, seed=0)
        >>> moves = environments.step(np.array([0, 1, 0, 1]))
        >>> moves.observations.shape, moves.rewards.tolist()
        ((4, 4), [1.0, 1.0, 1.0, 1.0])
    """

    def __init__(self, make: str | Callable[[], Any], count: int, seed: int | None = None) -> None:
        if isinstance(make, str):
            why = f"the environment {make!r} cannot be made, because Gymnasium"
            require_package("gymnasium", why)
        self._make = make
        self._seed = whole_number_or_none("seed", seed, DataError, least=0)
        self.count: Final = whole_number("count", count, DataError)
        self._made: list[_Environment] = []
        # Of all environments, (n, …); None if they must be collected from them.
        self._observations: Array | None = None
        self._recent: deque[float] = deque(maxlen=RECENT)

    @property
    def observations(self) -> Array:
        """A new array of the current observations, (n, …)."""
        return self._current().copy()

    @property
    def recent(self) -> list[float]:
        """The returns (sums of rewards) of the last finished episodes, at most 100."""
        return list(self._recent)

    def step(self, actions: Any, playing: Any = None) -> Moves:
        """Step each environment with one action.

        Args:
            actions: The actions, an array (n, …); row i is the action in environment i.
            playing: A mask of the environments to step, (n,), bool; None for all.

        Raises:
            DataError: If there is not exactly one action for each environment.
        """
        environments, before = self._all(), self._current()
        chosen = np.array(actions, ndmin=1)  # a copy: environments keep rows of it
        if len(chosen) != self.count:
            raise DataError(
                f"step takes an action for each of the {self.count} environments, in the first "
                f"axis of an array, but got one of shape {chosen.shape}"
            )
        # Lists become arrays at once: to write elements of arrays one by one takes as long as
        # some environments.
        rewards, terminations = [0.0] * self.count, [False] * self.count
        truncations, ended = [False] * self.count, False
        shown = [environment.shown for environment in environments]
        for i, environment in enumerate(environments):
            if playing is not None and not playing[i]:
                continue
            shown[i], rewards[i], terminations[i], truncations[i] = environment.step(chosen[i])
            if terminations[i] or truncations[i]:
                ended = True
                shown[i] = np.array(shown[i])  # the environment may overwrite it
                self._recent.append(environment.gained)
                environment.begin()
        after = np.array(shown)
        self._observations = None if ended else after.copy()
        return Moves(
            before.copy(),
            chosen.copy(),
            np.array(rewards, "float32"),
            after,
            np.array(terminations),
            np.array(truncations),
        )

    def restart(self) -> None:
        """Start a new episode in each environment; unfinished episodes do not count in `recent`."""
        for environment in self._all():
            if environment.actions:
                environment.begin()
        self._observations = None

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`: the episode and actions of each environment."""
        return {
            "environments": [environment.state() for environment in self._all()],
            "recent": self.recent,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state returned by `state`, by replaying actions.

        Raises:
            DataError: If the number of environments differs, or an environment is not
                deterministic.
        """
        kept = state["environments"]
        if len(kept) != self.count:
            raise DataError(
                f"the checkpoint holds {len(kept)} environments, but there are {self.count}: use "
                "the same number as when the run began"
            )
        for environment, one in zip(self._all(), kept, strict=True):
            environment.restore(one)
        self._observations = None
        self._recent = deque(state["recent"], maxlen=RECENT)

    def _current(self) -> Array:
        """Return the current observations, which must not be modified."""
        if self._observations is None:
            self._observations = np.array([environment.shown for environment in self._all()])
        return self._observations

    def _all(self) -> list["_Environment"]:
        """Return the environments. They are created on first use, when the run has its seed."""
        if not self._made:
            seed = run_seed() if self._seed is None else self._seed
            self._made = [_Environment(self._one(), seed, i) for i in range(self.count)]
        return self._made

    def _one(self) -> Any:
        if callable(self._make):
            return self._make()
        return importlib.import_module("gymnasium").make(self._make)


class _Environment:
    """One environment with the actions of its current episode.

    Args:
        environment: An environment with Gymnasium's interface.
        seed: The seed of the run.
        index: The index among the environments.

    Attributes:
        shown: The current observation, which the environment may overwrite in its next step.
        actions: The actions since the start of the episode.
        gained: The sum of rewards since the start of the episode.
    """

    def __init__(self, environment: Any, seed: int, index: int) -> None:
        self._environment, self._seed, self._index = environment, seed, index
        self._episode = -1
        self.begin()

    def begin(self) -> None:
        """Start the next episode."""
        self._episode += 1
        key = hashed(PURPOSE, self._seed, self._index, self._episode)
        shown, _ = self._environment.reset(seed=key >> 33)  # some accept at most 31 bits
        self.shown: Any = shown
        self.actions: list[Array] = []
        self.gained = 0.0

    def step(self, action: Any) -> tuple[Any, float, bool, bool]:
        """Run one action, which must not change later.

        Returns:
            The next observation, the reward, and whether the episode was terminated or truncated.
        """
        self.shown, reward, terminated, truncated, _ = self._environment.step(action)
        reward = float(reward)
        self.actions.append(action)
        self.gained += reward
        return self.shown, reward, bool(terminated), bool(truncated)

    def state(self) -> dict[str, Any]:
        """Return the number of the episode, its actions, and the current observation."""
        actions = np.stack(self.actions) if self.actions else None
        return {"episode": self._episode, "actions": actions, "shown": np.array(self.shown)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replay the actions of a state; raise if the final observation differs."""
        self._episode = state["episode"] - 1
        self.begin()
        for action in () if state["actions"] is None else state["actions"]:
            self.step(action)
        if not np.array_equal(self.shown, state["shown"], equal_nan=True):
            raise DataError(
                f"environment {self._index} is not deterministic: after reset and the "
                f"{len(self.actions)} actions of episode {self._episode + 1}, its observation "
                "differs from the one in the checkpoint. It must draw random numbers only from "
                "self.np_random, which reset(seed=…) sets; or else the seed, the settings or the "
                "version of Gymnasium changed"
            )
