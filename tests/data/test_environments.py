"""Environments side by side: what they answer, and that a checkpoint can hold them."""

import importlib.util

import keras
import numpy as np
import pytest
from executions import some

import treadle
from treadle.checkpoint.structure import from_snapshot, snapshot
from treadle.data import Environments, closed_loop
from treadle.errors import ConfigurationError, DataError


class Walk:
    """An environment that adds the action and some noise, and ends at 3, or after 6 moves."""

    def __init__(self):
        self.place, self.moved = 0.0, 0

    def reset(self, seed=None):
        self.random = np.random.default_rng(seed)
        self.place, self.moved = self.random.random(), 0
        return np.array([self.place]), {}

    def step(self, action):
        self.place += float(action) + 0.1 * self.random.random()
        self.moved += 1
        return np.array([self.place]), 0.5, self.place > 3, self.moved == 6, {}


class Forgetful(Walk):
    """Draws from a generator that no seed reaches."""

    drawn = 0

    def step(self, action):
        Forgetful.drawn += 1
        return super().step(action + Forgetful.drawn)


def played(environments, moves, seed=0):
    """Play so many moves at random; returns what was seen."""
    random = np.random.default_rng(seed)
    return [environments.step(random.integers(2, size=environments.count)) for _ in range(moves)]


def same(one, other):
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for a, b in zip(one, other, strict=True)
        for name in a.__slots__
    )


def test_one_environment_takes_one_action():
    environments = Environments(Walk, 1, seed=0)
    assert (
        environments.step(1).next_observations[0, 0]
        > environments.step([0]).observations[0, 0] - 1e-6
    )


def test_a_step_returns_observations_actions_rewards_and_next_observations():
    environments = Environments(Walk, 3, seed=0)
    before = environments.observations
    moves = environments.step([1, 0, 1])
    assert moves.observations.tolist() == before.tolist()
    assert moves.actions.tolist() == [1, 0, 1]
    assert moves.rewards.tolist() == [0.5] * 3 and moves.rewards.dtype == np.float32
    assert ((moves.next_observations - before).ravel() >= [1, 0, 1]).all()
    assert not moves.ended.any()
    assert environments.observations.tolist() == moves.next_observations.tolist()


def test_an_episode_that_ends_is_followed_by_another_one():
    environments = Environments(Walk, 2, seed=0)
    seen = [environments.step([1, 0]) for _ in range(6)]
    first = next(i for i, moves in enumerate(seen) if moves.ended[0])
    assert seen[first].terminations.tolist() == [True, False]
    assert seen[first].next_observations[0] > 3  # the last sight of the old episode
    assert seen[first + 1].observations[0] < 1  # the first of the new one
    assert seen[5].truncations.tolist() == [False, True] and not seen[5].terminations[1]
    assert environments.recent[0] == 0.5 * (first + 1)
    assert environments.recent[-1] == 3.0


def test_the_returns_of_the_last_hundred_episodes_are_kept():
    environments = Environments(Walk, 20, seed=0)
    for _ in range(40):
        environments.step(np.ones(20))
    assert len(environments.recent) == 100
    assert set(environments.recent) <= {1.0, 1.5, 2.0}


def test_inactive_environments_do_not_move():
    environments = Environments(Walk, 2, seed=0)
    before = environments.observations
    moves = environments.step([1, 1], playing=[True, False])
    assert moves.rewards.tolist() == [0.5, 0]
    assert moves.next_observations[1] == before[1] == environments.observations[1]
    assert moves.next_observations[0] > before[0] + 1


def test_restart_begins_new_episodes_where_something_was_played():
    environments = Environments(Walk, 2, seed=0)
    environments.step([1, 1], playing=[True, False])
    shown = environments.observations
    environments.restart()
    assert environments.observations[0] != shown[0]
    assert environments.observations[1] == shown[1]
    assert environments.recent == []


def test_episodes_follow_from_the_seed():
    seen = {seed: played(Environments(Walk, 3, seed=seed), 20) for seed in (0, 1)}
    assert same(seen[0], played(Environments(Walk, 3, seed=0), 20))
    assert not same(seen[0], seen[1])
    shown = Environments(Walk, 3, seed=0).observations.ravel().tolist()
    assert len(set(shown)) == 3
    keras.backend.clear_session()  # other tests have made layers
    try:
        treadle.setup(seed=1)
        assert same(seen[1], played(Environments(Walk, 3), 20))
    finally:
        treadle.setup(seed=0)  # as in the tests after it


@pytest.mark.parametrize("make", [Walk, "CartPole-v1"])
@pytest.mark.parametrize("moves", [0, 1, 13, 40])
def test_a_checkpoint_holds_them(make, moves):
    environments = Environments(make, 3, seed=0)
    played(environments, moves)
    kept = snapshot(environments.state(), "Environments")
    expected = played(environments, 30, seed=1)
    other = Environments(make, 3, seed=0)
    played(other, 7, seed=2)  # something else, which restore forgets
    other.restore(from_snapshot(kept))
    assert same(played(other, 30, seed=1), expected)
    assert other.recent == environments.recent
    environments.restore(from_snapshot(kept))  # back, within one process
    assert same(played(environments, 30, seed=1), expected)


def test_an_environment_that_is_not_reproducible_is_named():
    environments = Environments(Forgetful, 2, seed=0)
    environments.step([0, 0], playing=[False, True])
    message = (
        r"^environment 1 is not deterministic: after reset and the 1 actions of episode 1, its "
        r"observation differs from the one in the checkpoint\. It must draw random numbers only "
        r"from self\.np_random, which reset\(seed=…\) sets"
    )
    with pytest.raises(DataError, match=message):
        environments.restore(environments.state())


def test_messages(monkeypatch):
    with pytest.raises(DataError, match=r"^count must be at least 1, not 0$"):
        Environments(Walk, 0)
    with pytest.raises(DataError, match=r"^seed must be at least 0, not -1$"):
        Environments(Walk, 1, seed=-1)
    environments = Environments(Walk, 2)
    message = (
        r"^step takes an action for each of the 2 environments, in the first axis of an array, but "
        r"got one of shape \(3,\)$"
    )
    with pytest.raises(DataError, match=message):
        environments.step([0, 1, 0])
    message = (
        r"^the checkpoint holds 2 environments, but there are 3: use the same number as when the "
        r"run began$"
    )
    with pytest.raises(DataError, match=message):
        Environments(Walk, 3).restore(environments.state())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = (
        r"^the environment 'CartPole-v1' cannot be made, because Gymnasium is not installed: pip "
        r"install gymnasium$"
    )
    with pytest.raises(ConfigurationError, match=message):
        Environments("CartPole-v1", 2)
    Environments(Walk, 2)  # a function needs no Gymnasium


def test_a_closed_loop_source_is_exact_if_all_changed_objects_are_named():
    environments = Environments(Walk, 2, seed=0)
    assert closed_loop(print).inexact.endswith(
        "checkpoints: pass objects that have them as keeps=[…]"
    )
    assert closed_loop(print, keeps=[]).inexact is None
    assert closed_loop(print, keeps=environments).inexact is None
    message = (
        r"^keeps contains a list, which cannot be saved in checkpoints: it needs state\(\) and "
        r"restore\(state\)$"
    )
    with pytest.raises(DataError, match=message):
        closed_loop(print, keeps=[environments, []])


def test_kept_objects_are_restored_with_the_source():
    def source():
        one, other = Environments(Walk, 2, seed=0), Environments(Walk, 1, seed=1)

        def play(loop):
            moves = one.step(np.random.randint(2, size=2))
            return np.concatenate([moves.next_observations, other.step([1]).next_observations])

        return closed_loop(play, length=4, keeps=[one, other])

    loop, whole = object(), source()
    seen = []
    for epoch in range(2):
        reader = whole.read(epoch, loop=loop)
        while (window := reader.take(1)) is not None:
            seen.append((epoch, reader.position(), window.batches))
    for at, (epoch, position, _) in enumerate(seen[:-1]):
        start = at % 4 + 1
        reader = source().read(epoch, start, loop=loop, position=position)
        if start == 4:
            assert reader.take(1) is None
            epoch, position = epoch + 1, reader.position()
            reader = source().read(epoch, loop=loop, position=position)
        np.testing.assert_array_equal(reader.take(1).batches, seen[at + 1][2])


class Follow(treadle.Task):
    """Acts as its weight says, which no batch leaves as it was."""

    def __init__(self):
        self.weight = keras.Variable(0.0)
        self.environments = Environments(Walk, 2, seed=0)

    def train_step(self, batch):
        self.weight.assign_add(keras.ops.cast(keras.ops.mean(batch), "float32"))
        return {"weight": self.weight.value}

    def act(self):
        return keras.ops.sin(10 * self.weight)

    def play(self, loop):
        moves = self.environments.step([loop.call(self.act)] * 2)
        return moves.next_observations + np.random.random()


@pytest.mark.parametrize("length", some([None, 3]))
@pytest.mark.parametrize("died", [1, 3, 4])
def test_the_policy_of_the_first_batch_after_a_resume_is_the_one_that_was_trained(
    tmp_path, length, died
):
    """Also where the checkpoint lies at the end of an epoch."""

    def trained(directory, *hooks):
        task = Follow()
        source = closed_loop(task.play, length, keeps=task.environments)
        with treadle.Loop(task, directory, hooks=hooks, console=False) as loop:
            loop.fit(source, **({"steps": 7} if length is None else {"epochs": 3}))
        return loop.history.steps("weight").tolist()

    whole = trained(None)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, treadle.hooks.Checkpoint("1 step"), treadle.at(f"{died + 1} steps", die))
    assert trained(tmp_path, treadle.hooks.Checkpoint("1 step")) == whole


class Counted:
    """Batches of what it has counted, and of what the task draws."""

    def __init__(self):
        self.count = 0

    def state(self):
        return {"count": self.count}

    def restore(self, state):
        self.count = int(state["count"])

    def next(self, loop):
        self.count += 1
        return np.array([[self.count, loop.call(loop.task.draw)]], "float32")


class Drawing(treadle.Task):
    def __init__(self):
        self.seeds = keras.random.SeedGenerator(0)
        self.weight = keras.Variable(0.0)

    def draw(self):
        return keras.random.uniform((), seed=self.seeds)

    def train_step(self, batch):
        self.weight.assign_add(keras.ops.sum(batch))
        return {"count": batch[0, 0], "drawn": batch[0, 1]}


def counted(directory, *hooks, length=3, prepared=False, fits=({"epochs": 3},)):
    """Train; returns what each step saw."""
    task, source = Drawing(), Counted()
    with treadle.Loop(task, directory, hooks=hooks, console=False) as loop:
        train = closed_loop(source.next, length, keeps=source)
        if prepared:
            loop.prepare(train)
        for fit in fits:
            loop.fit(train, **fit)
    return [loop.history.steps(name).tolist() for name in ("count", "drawn")]


def die(loop):
    raise KeyboardInterrupt


@pytest.mark.parametrize("prepared", some([False, True]))
@pytest.mark.parametrize("saved", [0, 2, 3, 4])
def test_a_closed_loop_source_resumes_from_the_state_of_its_objects(tmp_path, saved, prepared):
    """Also at the end of an epoch, and where the source is asked before the loop trains."""
    whole = counted(None)
    assert whole[0] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert len(set(whole[1])) == 9
    never = treadle.hooks.Checkpoint("1000 steps")  # but before the first step
    save = [treadle.at(f"{saved} steps", lambda loop: loop.save())] if saved else []
    with pytest.raises(KeyboardInterrupt):
        counted(tmp_path, *save, treadle.at(f"{saved + 1} steps", die), never)
    assert counted(tmp_path, never, prepared=prepared) == whole


def test_a_closed_loop_source_continues_in_a_second_call(tmp_path):
    fits = ({"steps": 2}, {"steps": 3})
    whole = counted(None, length=None, fits=fits)
    never = treadle.hooks.Checkpoint("1000 steps")
    save = treadle.at("2 steps", lambda loop: loop.save())
    with pytest.raises(KeyboardInterrupt):
        counted(tmp_path, save, treadle.at("3 steps", die), never, length=None, fits=fits)
    assert counted(tmp_path, never, length=None, fits=fits) == whole


def test_what_is_saved_before_the_first_window_is_that_of_the_step_before(tmp_path):
    """As where a signal comes while the step is compiled, after a resume."""
    whole = counted(None)
    never = treadle.hooks.Checkpoint("1000 steps")
    with pytest.raises(KeyboardInterrupt):
        save = treadle.at("2 steps", lambda loop: loop.save())
        counted(tmp_path, save, treadle.at("3 steps", die), never)

    class Early(treadle.Hook):
        def start(self, loop):
            loop.save()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        counted(tmp_path, Early(), never)
    assert counted(tmp_path, never) == whole


class Overwriting(Walk):
    """Shows the same array each time, as some environments do, and changes its action."""

    def __init__(self):
        super().__init__()
        self.shown = np.zeros(1)

    def reset(self, seed=None):
        self.shown[:] = super().reset(seed)[0]
        return self.shown, {}

    def step(self, action):
        shown, *others = super().step(action[0])
        action += 1
        self.shown[:] = shown
        return self.shown, *others


def test_an_environment_may_overwrite_its_observations_and_actions():
    one, other = Environments(Walk, 3, seed=0), Environments(Overwriting, 3, seed=0)
    for actions in np.random.default_rng(0).integers(2, size=(20, 3)):
        given = actions[:, None].copy()
        assert same_but_actions(one.step(actions), other.step(given))
        assert np.array_equal(given[:, 0], actions)
        assert np.array_equal(one.observations, other.observations)


def same_but_actions(one, other):
    names = [name for name in one.__slots__ if name != "actions"]
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def test_what_environments_return_may_be_changed():
    one, other = Environments(Walk, 2, seed=0), Environments(Walk, 2, seed=0)
    for _ in range(5):
        moves = one.step([1, 0])
        assert same([moves], [other.step([1, 0])])
        for name in moves.__slots__:
            getattr(moves, name)[:] = 1
        one.observations[:] = 7
    kept = snapshot(one.state(), "Environments")
    assert str(kept) == str(snapshot(other.state(), "Environments"))
