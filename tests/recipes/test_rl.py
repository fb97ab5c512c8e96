"""Reinforcement learning, shrunken, on the active backend: what is played, learned and resumed."""

import keras
import numpy as np
import pytest
from keras import ops
from recipe_runs import make, run

import treadle
from treadle.data import Environments
from treadle.errors import ConfigurationError
from treadle.recipes import actor_critic, dqn
from treadle.recipes.actor_critic import ActorCritic
from treadle.recipes.dqn import DQN, ReplayBuffer
from treadle.recipes.reinforce import Reinforce, sample_actions
from treadle.testing import resumed_equals_uninterrupted

EAGER = treadle.Options(execution="eager")


class Choice:
    """Shows four numbers, and gives 1 for the action that says the sign of the first.

    Args:
        length: Moves in an episode.
        truncating: The episode is cut off there; else it ends.
    """

    def __init__(self, length=4, truncating=False):
        self.length, self.truncating = length, truncating

    def reset(self, seed=None):
        self.random, self.moved = np.random.default_rng(seed), 0
        return self._show()

    def _show(self):
        self.shown = self.random.normal(size=4).astype("float32")
        return self.shown, {}

    def step(self, action):
        reward, self.moved = float(action == (self.shown[0] > 0)), self.moved + 1
        over = self.moved == self.length
        shown, about = self._show()
        return shown, reward, over and not self.truncating, over and self.truncating, about


def of_lengths(*lengths, **how):
    """Return environments whose episodes have these lengths."""
    rest = iter(lengths)
    return Environments(lambda: Choice(next(rest), **how), len(lengths), seed=0)


def played(task):
    """Let a task play one batch."""
    with treadle.Loop(task, options=EAGER, console=False) as loop:
        return task.play(loop), loop


@pytest.mark.long
def test_reinforce():
    made, loop = run("reinforce", "episodes=10", epochs=3)
    returns = loop.history["return"]
    assert returns[-1] > 1.3 * returns[0]
    # An epoch's return is the mean of its episodes, five times ten.
    assert returns[-1] == pytest.approx(np.mean(made.task.environments.recent[-50:]), rel=1e-5)
    assert loop.costs.programs == 1  # whatever the length of episodes


def test_episodes_are_padded_and_returns_discounted():
    task = make("reinforce", "discount=0.5").task
    task.environments = of_lengths(2, 4)
    batch, _ = played(task)
    assert {name: len(array) for name, array in batch.items()} == dict.fromkeys(batch, 2 * 500)
    counts, gains = batch["played"].reshape(2, 500), batch["gains"].reshape(2, 500)
    assert counts.sum(axis=1).tolist() == [2, 4]
    seen = batch["observations"].reshape(2, 500, 4)
    actions = batch["actions"].reshape(2, 500)
    for i, length in enumerate((2, 4)):
        assert counts[i, :length].all() and not gains[i, length:].any()
        rewards = actions[i, :length] == (seen[i, :length, 0] > 0)
        for start in range(length):
            later = sum(0.5**k * reward for k, reward in enumerate(rewards[start:]))
            assert gains[i, start] == pytest.approx(later)
    assert task.environments.recent == [
        float(sum(actions[i, :n] == (seen[i, :n, 0] > 0))) for i, n in enumerate((2, 4))
    ]


def test_padding_does_not_count_and_good_actions_become_more_probable():
    task = make("reinforce").task
    task.environments = of_lengths(2, 4, 3)
    task.optimizer = keras.optimizers.SGD(0.1)
    batch, loop = played(task)
    counts = batch["played"] > 0
    before = task.policy.get_weights()

    def wished():
        """The mean of log-probabilities, weighted by how much better than usual a move was."""
        logits = ops.convert_to_numpy(task.policy(batch["observations"]))[counts]
        log = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        gains = batch["gains"][counts]
        advantages = (gains - gains.mean()) / (gains.std() + 1e-6)
        return np.mean(advantages * log[np.arange(len(log)), batch["actions"][counts]])

    start = wished()
    logs = loop.step(batch)
    assert logs["loss"] == pytest.approx(-start, abs=1e-5)
    assert logs["return"] == 3  # moves, of which each gives 1 in CartPole
    assert wished() > start
    after = task.policy.get_weights()
    task.policy.set_weights(before)
    garbage = {name: np.where(counts, array.T, 7).T for name, array in batch.items()}
    garbage["played"], garbage["actions"] = batch["played"], garbage["actions"] % 2
    loop.step({name: garbage[name].astype(batch[name].dtype) for name in batch})
    for one, other in zip(after, task.policy.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_actions_are_drawn_as_probable_as_the_logits_say():
    state = np.random.get_state()
    np.random.seed(0)
    share = sample_actions(np.log(np.tile([[0.2, 0.8]], (20_000, 1)))).mean()
    np.random.set_state(state)
    assert share == pytest.approx(0.8, abs=0.01)


@pytest.mark.long
def test_actor_critic():
    made, loop = run("actor-critic", "environments=8", "rollout_steps=32", steps=60)
    returns = [record.values["return"] for record in loop.history.records if record.kind == "log"]
    assert len(returns) == 6
    assert returns[-1] > 2 * returns[0] > 0
    assert returns[-1] == pytest.approx(np.mean(made.task.environments.recent))
    assert loop.costs.programs == 1


@pytest.mark.long
@pytest.mark.parametrize("module", [actor_critic, dqn])
def test_a_run_stops_when_it_is_solved(module, monkeypatch):
    monkeypatch.setattr(module, "SOLVED", 5.0)
    name = module.__name__.rpartition(".")[2].replace("_", "-")
    _, loop = run(name, "environments=4")
    assert loop.reason.startswith("the mean return of the last 100 episodes is ")
    assert loop.progress.step <= 100


@pytest.mark.parametrize("truncating", [False, True])
def test_advantages_are_summed_up_to_the_end_of_an_episode(truncating):
    settings = ("rollout_steps=7", "discount=0.9", "gae_lambda=0.8")
    task = make("actor-critic", *settings).task
    task.environments = of_lengths(3, 100, truncating=truncating)
    batch, _ = played(task)
    again = of_lengths(3, 100, truncating=truncating)
    actions = batch["actions"].reshape(7, 2)
    moves = [again.step(row) for row in actions]
    seen = np.stack([m.observations for m in moves])
    np.testing.assert_array_equal(batch["observations"].reshape(7, 2, 4), seen)

    def values(shown):
        return ops.convert_to_numpy(task.critic(shown))[:, 0]

    expected = np.zeros((7, 2))
    for start in range(7):
        for i in range(2):
            weight = 1.0
            for m in moves[start:]:
                coming = 0.0 if m.terminations[i] else 0.9 * values(m.next_observations)[i]
                expected[start, i] += weight * (m.rewards[i] + coming - values(m.observations)[i])
                weight *= 0.9 * 0.8
                if m.ended[i]:
                    break
    found = batch["advantages"].reshape(7, 2)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    known = np.stack([values(shown) for shown in seen])
    np.testing.assert_allclose(batch["targets"].reshape(7, 2), expected + known, atol=1e-5)


@pytest.mark.parametrize("still", ["actor", "critic"])
def test_each_network_follows_its_own_loss_alone(still):
    task = make("actor-critic", "rollout_steps=4").task
    task.environments = of_lengths(3, 5)
    task.optimizers[still] = keras.optimizers.SGD(0.0)
    before = {name: getattr(task, name).get_weights() for name in ("actor", "critic")}
    batch, loop = played(task)
    loop.step(batch)
    for name, weights in before.items():
        now = getattr(task, name).get_weights()
        moved = any(np.any(a != b) for a, b in zip(weights, now, strict=True))
        assert moved == (name != still)


@pytest.mark.long
def test_dqn_learns_which_action_pays():
    made = make("dqn", "discount=0", "epsilon_decay_steps=100")
    task = made.task
    task.environments = of_lengths(*[10] * 8)
    with treadle.Loop(task, console=False) as loop:
        loop.fit(made.datasets().train, steps=300)
        shown = np.random.default_rng(0).normal(size=(200, 4)).astype("float32")
        chosen = np.argmax(loop.call(task.online, shown), axis=-1)
    assert np.mean(chosen == (shown[:, 0] > 0)) > 0.9
    # Before the first batch as many moves were played as it holds, and then one for each step.
    assert task.buffer.added == 128 + 8 * 299
    assert loop.costs.programs == 1


def test_the_td_target_uses_double_q_learning_and_the_target_network_follows():
    task = make("dqn", "discount=0.9", "target_update_rate=0.25").task
    random = np.random.default_rng(0)
    task.target.set_weights([w + random.normal(0, 0.3, w.shape) for w in task.target.get_weights()])
    batch = {
        "observations": random.normal(size=(6, 4)).astype("float32"),
        "actions": random.integers(2, size=6).astype("int32"),
        "rewards": random.random(6).astype("float32"),
        "next_observations": random.normal(size=(6, 4)).astype("float32"),
        "terminations": np.array([0, 0, 0, 0, 1, 1], "float32"),
    }
    rows = np.arange(6)
    best = np.argmax(ops.convert_to_numpy(task.online(batch["next_observations"])), axis=-1)
    after = ops.convert_to_numpy(task.target(batch["next_observations"]))[rows, best]
    td_target = batch["rewards"] + 0.9 * (1 - batch["terminations"]) * after
    chosen = ops.convert_to_numpy(task.online(batch["observations"]))[rows, batch["actions"]]
    gap = np.abs(td_target - chosen)
    huber = np.where(gap < 1, gap**2 / 2, gap - 0.5).mean()
    slow = task.target.get_weights()
    with treadle.Loop(task, console=False) as loop:
        assert loop.step(batch)["loss"] == pytest.approx(huber, rel=1e-4)
    for old, new, fast in zip(
        slow, task.target.get_weights(), task.online.get_weights(), strict=True
    ):
        np.testing.assert_allclose(new, old + 0.25 * (fast - old), atol=1e-5)


def test_the_replay_buffer_holds_the_newest_transitions_and_is_restored():
    environments, buffer = of_lengths(4, 5, 6), ReplayBuffer(8)
    seen = []
    for _ in range(5):
        moves = environments.step([0, 1, 0])
        seen += list(moves.observations)
        buffer.add(moves)
        assert len(buffer) == min(len(seen), 8)
        kept = {tuple(row) for row in buffer.columns["observations"][: len(buffer)]}
        assert kept == {tuple(row) for row in seen[-8:]}
        other = ReplayBuffer(8)
        other.restore(buffer.state())
        assert other.added == buffer.added
        for name, column in buffer.columns.items():
            np.testing.assert_array_equal(column, other.columns[name])
    state = np.random.get_state()
    drawn = buffer.sample(200)["observations"]
    np.random.set_state(state)
    assert {tuple(row) for row in drawn} == kept


def small_reinforce():
    return Reinforce(episodes=2)


def small_actor_critic():
    return ActorCritic(environments=2, rollout_steps=9)


def test_dqn_refuses_a_buffer_that_never_holds_a_batch():
    with pytest.raises(
        ConfigurationError, match=r"^capacity=7: the buffer never holds the 8 moves"
    ):
        DQN(batch_size=8, capacity=7)


def small_dqn():
    return DQN(environments=2, batch_size=8, capacity=20)


@pytest.mark.long
@pytest.mark.usefixtures("started_at_once")
@pytest.mark.parametrize("make_task", [small_reinforce, small_actor_critic, small_dqn])
def test_a_killed_run_resumes_in_the_middle_of_its_episodes(make_task):
    resumed_equals_uninterrupted(make_task, steps=12 if make_task is small_dqn else 4)
