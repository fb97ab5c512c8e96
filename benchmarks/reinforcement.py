"""How many environment steps per second do the recipes `actor-critic` and `dqn` take?

Compared with loops by hand on the same backend: the same networks, Gymnasium's CartPole in the same
number of environments, the same number of updates, the loss of each update read, a jitted (JAX),
`tf.function` (TensorFlow) or `torch.nn` (PyTorch) policy and update. Treadle runs with a directory
and all default hooks. Each recipe and backend has a process of its own, in which both take turns.

    scripts/bench reinforcement --backend jax --recipe dqn
"""

import importlib
import json
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from . import BACKENDS, DOCS, in_process, keep, kept, parser_of, write_section

RECIPES = ("actor-critic", "dqn")
TREADLE, BY_HAND = "treadle", "loop by hand"
# The settings of the recipes, which the loops by hand share.
ENVIRONMENTS = {"actor-critic": 16, "dqn": 8}
ROLLOUT = 128
DISCOUNT = {"actor-critic": 0.99, "dqn": 0.98}
GAE_LAMBDA, ENTROPY, RATES = 0.95, 0.01, (3e-3, 1e-2)
CAPACITY, BATCH, TARGET_RATE, EPSILON_END, EPSILON_STEPS = 20_000, 128, 0.02, 0.02, 500
# Updates in an epoch, which is a part of a turn.
UPDATES = {"actor-critic": 2, "dqn": 100}
ENVIRONMENT_STEPS = {"actor-critic": ROLLOUT * 16, "dqn": 8}  # per update
Times = dict[str, list[float]]


def main(arguments: list[str]) -> None:
    """Measure what was chosen, and print a table."""
    parser = parser_of("reinforcement", __doc__, 11, "reinforcement.md")
    parser.add_argument("--recipe", choices=RECIPES, action="append", help="only this recipe")
    chosen = parser.parse_args(arguments)
    if chosen.child:
        print(json.dumps(_measured(chosen.recipe[-1], chosen.rounds)))
        return
    results = kept("reinforcement")
    print("\n".join(_head()))
    for backend in chosen.backend or BACKENDS:
        for recipe in chosen.recipe or RECIPES:
            options = ("--recipe", recipe, "--rounds", str(chosen.rounds))
            times = results[f"{recipe} {backend}"] = in_process("reinforcement", backend, *options)
            print("\n".join(_rows(recipe, backend, times)), flush=True)
    if chosen.write:
        keep("reinforcement", results)
        write_section(DOCS / "reinforcement.md", "bench reinforcement --write", page(results))


def page(results: dict[str, Times]) -> list[str]:
    """Return the lines of the section of `docs/reinforcement.md`."""
    from .timing import processor

    lines = [f"{processor()}.", "", *_head()]
    for key in (f"{recipe} {backend}" for backend in BACKENDS for recipe in RECIPES):
        if key in results:
            lines += _rows(*key.split(), results[key])
    return lines


def _head() -> list[str]:
    return [
        "| recipe | backend | contestant | environment steps/s | its time by Treadle's "
        "(quartiles) |",
        "| --- | --- | --- | --- | --- |",
    ]


def _rows(recipe: str, backend: str, times: Times) -> list[str]:
    from .timing import Spread, by_base

    rows: list[str] = []
    for name, share in by_base(times).items():
        per_second = ENVIRONMENT_STEPS[recipe] / Spread.of(times[name]).median * 1e6
        rows.append(f"| {recipe} | {backend} | {name} | {per_second:,.0f} | {share:.2f} |")
    return rows


def _measured(recipe: str, rounds: int) -> Times:
    """Return microseconds per update by contestant, a value for each turn."""
    from .timing import per_step

    by_hand = {"actor-critic": _actor_critic, "dqn": _dqn}[recipe]
    makers: dict[str, Callable[[], Any]] = {
        TREADLE: partial(_contestant, recipe, _treadle),
        BY_HAND: partial(_contestant, recipe, lambda _: by_hand()),
    }
    return per_step(makers, rounds)


def _contestant(recipe: str, make: Callable[[str], Iterator[float]]) -> Any:
    """Return a contestant that draws its updates from a generator."""
    import keras

    from .contestants import Contestant

    keras.utils.set_random_seed(0)
    updates = make(recipe)

    def epoch() -> dict[str, float]:
        for _ in range(UPDATES[recipe]):
            value = next(updates)
        return {"value": value}

    return Contestant(epoch, UPDATES[recipe])


def _treadle(recipe: str) -> Iterator[float]:
    """Run a recipe as `treadle run` does, and yield after each update."""
    from tempfile import TemporaryDirectory

    import treadle

    module = importlib.import_module(f"treadle.recipes.{recipe.replace('-', '_')}")
    module.SOLVED = float("inf")  # type: ignore[attr-defined]
    task = module.ActorCritic() if recipe == "actor-critic" else module.DQN()
    with (
        TemporaryDirectory() as directory,
        treadle.Loop(task, directory, hooks=task.hooks()) as loop,
    ):
        for _ in loop.steps(task.datasets().train, every="auto"):
            yield 0.0


class Environments:
    """CartPoles of Gymnasium, stepped one by one: the class of its own for that takes longer.

    Args:
        count: The number of environments.
    """

    def __init__(self, count: int) -> None:
        import gymnasium

        self._all = [gymnasium.make("CartPole-v1") for _ in range(count)]
        self.observations = np.stack([x.reset(seed=i)[0] for i, x in enumerate(self._all)])
        self.returns, self._gained = deque[float](maxlen=100), [0.0] * count

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any]:
        """Return next observations, rewards, terminations and the ends of episodes."""
        count = len(self._all)
        rewards, after = np.zeros(count, "float32"), np.empty((count, 4), "float32")
        ended, terminations = np.zeros(count, "bool"), np.zeros(count, "bool")
        begun = after
        for i, (environment, action) in enumerate(zip(self._all, actions, strict=True)):
            after[i], rewards[i], terminations[i], truncated, _ = environment.step(action)
            self._gained[i] += rewards[i]
            if terminations[i] or truncated:
                ended[i] = True
                self.returns.append(self._gained[i])
                self._gained[i] = 0.0
                begun = after.copy() if begun is after else begun
                begun[i], _ = environment.reset()
            elif begun is not after:
                begun[i] = after[i]
        self.observations = begun
        return after, rewards, terminations, ended


def _learners() -> Any:
    import keras

    return importlib.import_module(f"benchmarks.by_hand_{keras.config.backend()}")


def q_network() -> Any:
    """Return the network of the recipe `dqn`."""
    import keras
    from keras import layers

    hidden = [layers.Dense(128, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(2)])


def _actor_critic() -> Iterator[float]:
    learner, count = _learners().ActorCritic(), ENVIRONMENTS["actor-critic"]
    environments, discount = Environments(count), DISCOUNT["actor-critic"]
    observations = np.zeros((ROLLOUT, count, 4), "float32")
    following = np.zeros((ROLLOUT, count, 4), "float32")
    actions = np.zeros((ROLLOUT, count), "int32")
    rewards, advantages = np.zeros((2, ROLLOUT, count), "float32")
    terminations, ended = np.zeros((2, ROLLOUT, count), "bool")
    while True:
        for i in range(ROLLOUT):
            observations[i] = environments.observations
            logits = learner.logits(environments.observations)
            actions[i] = np.argmax(logits + np.random.gumbel(size=logits.shape), axis=-1)
            following[i], rewards[i], terminations[i], ended[i] = environments.step(actions[i])
        values = learner.values(observations.reshape(-1, 4)).reshape(ROLLOUT, count)
        after = learner.values(following.reshape(-1, 4)).reshape(ROLLOUT, count)
        errors = rewards + discount * np.where(terminations, 0, after) - values
        advantage = np.zeros(count, "float32")
        for i in reversed(range(ROLLOUT)):
            advantage = np.where(ended[i], 0, advantage)
            advantages[i] = advantage = errors[i] + discount * GAE_LAMBDA * advantage
        batch = {
            "observations": observations.reshape(-1, 4),
            "actions": actions.ravel(),
            "advantages": advantages.ravel(),
            "targets": (advantages + values).ravel(),
        }
        yield learner.update(batch)[0]


def _dqn() -> Iterator[float]:
    learner, count = _learners().DQN(), ENVIRONMENTS["dqn"]
    environments, added = Environments(count), 0
    buffer = {
        "observations": np.zeros((CAPACITY, 4), "float32"),
        "actions": np.zeros(CAPACITY, "int32"),
        "rewards": np.zeros(CAPACITY, "float32"),
        "next_observations": np.zeros((CAPACITY, 4), "float32"),
        "terminations": np.zeros(CAPACITY, "float32"),
    }
    step = 0
    while True:
        epsilon = 1.0 + (EPSILON_END - 1.0) * min(step / EPSILON_STEPS, 1.0)
        before = environments.observations
        actions = np.argmax(learner.q_values(before), axis=-1)
        explore = np.random.random(count) < epsilon
        actions = np.where(explore, np.random.randint(2, size=count), actions)
        after, rewards, terminations, _ = environments.step(actions)
        rows = (added + np.arange(count)) % CAPACITY
        new = (before, actions, rewards, after, terminations)
        for column, values in zip(buffer.values(), new, strict=True):
            column[rows] = values
        added += count
        if added < BATCH:
            continue
        chosen = np.random.randint(min(added, CAPACITY), size=BATCH)
        yield learner.update({name: column[chosen] for name, column in buffer.items()})
        step += 1
