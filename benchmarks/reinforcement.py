"""How many environment steps per second do the recipes `actor-critic` and `dqn` take?

Compared with loops by hand on the same backend: the same networks, Gymnasium's CartPole in the same
number of environments, the same number of updates, the loss of each update read, a jitted (JAX),
`tf.function` (TensorFlow) or `torch.nn` (PyTorch) policy and update. Treadle runs with a directory
and all default hooks. Each recipe and backend has a process of its own, in which both take turns.

    scripts/bench reinforcement --backend jax --recipe dqn
"""

import argparse
import importlib
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from . import in_process, parser_of

BACKENDS = ("tensorflow", "jax", "torch")
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
RESULTS = Path(__file__).with_name("reinforcement.json")
PAGE = Path(__file__).parent.parent / "docs" / "reinforcement.md"
Times = dict[str, list[float]]


def main(arguments: list[str]) -> None:
    """Measure what was chosen, and print a table."""
    parser = parser_of("reinforcement", __doc__)
    parser.add_argument("--recipe", choices=RECIPES, action="append", help="only this recipe")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="only this backend")
    parser.add_argument("--rounds", type=int, default=11, help="turns of each contestant (11)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help=f"write docs/{PAGE.name}")
    chosen = parser.parse_args(arguments)
    if chosen.child:
        print(json.dumps(_measured(chosen.recipe[-1], chosen.rounds)))
        return
    kept: dict[str, Times] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    print("\n".join(_head()))
    for backend in chosen.backend or BACKENDS:
        for recipe in chosen.recipe or RECIPES:
            options = ("--recipe", recipe, "--rounds", str(chosen.rounds))
            times = in_process("reinforcement", backend, *options)
            kept[f"{recipe} {backend}"] = times
            print("\n".join(_rows(recipe, backend, times)), flush=True)
    if chosen.write:
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
        PAGE.write_text(page(kept))


def page(kept: dict[str, Times]) -> str:
    """Return the page with the table."""
    from .timing import machine

    about = machine()
    lines = [
        "# Reinforcement learning",
        "",
        "This page compares the recipes `actor-critic` and `dqn` with loops by hand on the same "
        "backend, in environment steps per\nsecond. The loops by hand have the same networks, "
        "environments and number of updates; their policies and updates are\ncompiled by "
        "`jax.jit` or `tf.function`, or use `torch.nn`, and they read the losses of each update. "
        "Both step the\nenvironments of `gymnasium.make` one by one. Treadle runs with a "
        "directory and all default hooks. The turns of a recipe\nfollow each other in one "
        "process; the last column is the median ratio of their times with quartiles. Above 1.00, "
        "Treadle\nis faster. Written by `scripts/bench reinforcement --write`.",
        "",
        "Where Treadle takes longer, a profile finds the difference in the Python code around each "
        "call and each update: it compares\nthe Python values of the task, which are constants of "
        "compiled functions; it seeds the random states of each batch, so that\nthe batch can be "
        "drawn again; and it writes the values of each update to the log.",
        "",
        f"{about['cpu']}, {about['cores']} cores.",
        "",
        "- actor-critic: 16 environments, rollouts of 128 steps, an update for each rollout of "
        "2,048 steps",
        "- dqn: 8 environments, an update with 128 transitions after each step of all of them",
        "",
        *_head(),
    ]
    for key in (f"{recipe} {backend}" for backend in BACKENDS for recipe in RECIPES):
        if key in kept:
            lines += _rows(*key.split(), kept[key])
    return "\n".join(lines) + "\n"


def _head() -> list[str]:
    return [
        "| recipe | backend | contestant | environment steps/s | its time by Treadle's "
        "(quartiles) |",
        "| --- | --- | --- | --- | --- |",
    ]


def _rows(recipe: str, backend: str, times: Times) -> list[str]:
    from .timing import Spread, ratio

    rows: list[str] = []
    for name, found in times.items():
        share = ratio(found, times[TREADLE])
        per_second = ENVIRONMENT_STEPS[recipe] / Spread.of(found).median * 1e6
        rows.append(
            f"| {recipe} | {backend} | {name} | {per_second:,.0f} "
            f"| {share.median:.2f} ({share.low:.2f} to {share.high:.2f}) |"
        )
    return rows


def _measured(recipe: str, rounds: int) -> Times:
    """Return microseconds per update by contestant, a value for each turn."""
    from functools import partial

    from .timing import take_turns

    by_hand = {"actor-critic": _actor_critic, "dqn": _dqn}[recipe]
    makers: dict[str, Callable[[], Any]] = {
        TREADLE: partial(_contestant, recipe, _treadle),
        BY_HAND: partial(_contestant, recipe, lambda _: by_hand()),
    }
    found = take_turns(makers, rounds)
    failed = [f"{name}: {times.failed}" for name, times in found.items() if times.failed]
    if failed:
        sys.exit("\n".join(failed))
    return {name: times.per_step for name, times in found.items()}


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

    return importlib.import_module(f"benchmarks.learners_{keras.config.backend()}")


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
