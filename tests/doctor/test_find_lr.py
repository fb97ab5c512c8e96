"""The learning-rate range test: what it says, and that it leaves everything as it was."""

import random
from typing import Any

import keras
import numpy as np
import pytest
from classifier import CLASSES, FEATURES, Classifier, dense, head
from executions import some
from keras import ops

import treadle
from treadle.doctor import RangeTest, find_learning_rate
from treadle.doctor.find_lr import good_steps, smooth
from treadle.errors import ConfigurationError
from treadle.schedules import Cyclic

BATCH = np.zeros(1, "float32")


class Everything(Classifier):
    """What a test could leave changed: statistics, dropout, slots, counts; not built yet."""

    def __init__(self, rate: Any = 1e-2) -> None:
        keras.utils.set_random_seed(0)
        layers = [dense(), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3), head()]
        super().__init__(layers, keras.optimizers.Adam(rate))


def source() -> Any:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(44, FEATURES)).astype("float32")
    return treadle.data.from_arrays(x, rng.integers(0, CLASSES, size=44), batch_size=8)


class One(treadle.Task):
    """A single weight and a loss of it."""

    def __init__(self, loss: Any, start: float = 0.0, **more: Any) -> None:
        self.w = keras.Variable(start)
        self.optimizer = keras.optimizers.SGD(0.1)
        self.loss = loss
        vars(self).update(more)

    def train_step(self, batch: Any) -> Any:
        return {"loss": treadle.minimize(lambda: self.loss(self.w), [self.w], self.optimizer)}


def test_each_step_has_its_own_rate() -> None:
    # The gradient is 1: a loss is minus the sum of the rates before it.
    found = find_learning_rate(One(lambda w: 1.0 * w), [BATCH] * 7, begin=1e-3, end=10, steps=41)
    np.testing.assert_allclose(found.rates, np.geomspace(1e-3, 10, 41))
    np.testing.assert_allclose(found.losses[1:], -np.cumsum(found.rates)[:-1], rtol=1e-4)
    assert not found.diverged
    assert found.lowest == pytest.approx(10) and found.tenth == pytest.approx(1)
    assert 5 < found.suggestion <= found.lowest
    assert found.optimizer == "optimizer"


def test_it_ends_where_the_loss_diverges() -> None:
    # Gradient descent on the square of a weight diverges at rates above 1.
    task = One(lambda w: w * w, start=1.0)
    found = find_learning_rate(task, [BATCH] * 9, begin=1e-4, end=1e4, steps=200)
    assert found.diverged and 1.0 < found.rates[len(found.smoothed) - 1] < 10
    assert len(found.losses) == len(found.rates) > len(found.smoothed)
    assert 0.1 < found.lowest < 1.3 and found.tenth == found.lowest / 10
    assert 0.01 < found.suggestion == found.steepest < found.lowest
    assert float(task.w.numpy()) == 1.0


@pytest.mark.parametrize("rate", some([1e-2, Cyclic(1e-3, 1e-2, 4)]), ids=["variable", "schedule"])
def test_nothing_is_changed(rate: Any) -> None:
    tasks = [Everything(rate), Everything(rate)]
    weights: list[Any] = []
    for tested, task in enumerate(tasks):
        keras.utils.set_random_seed(1)  # Keras' seed generator is one for both
        with treadle.Loop(task, console=False) as loop:
            loop.fit(source(), epochs=1)
            state = loop.state
            before, listed = state.arrays(), [v.path for v in task.optimizer.variables]
            own = task.optimizer._learning_rate
            numbers = random.getstate(), np.random.get_state()[1].tolist()
            progress, records = loop.progress, len(loop.history.records)
            if tested:
                assert loop.find_learning_rate(source(), steps=30).suggestion
            assert task.optimizer._learning_rate is own
            assert [v.path for v in task.optimizer.variables] == listed
            assert (random.getstate(), np.random.get_state()[1].tolist()) == numbers
            assert (loop.progress, len(loop.history.records)) == (progress, records)
            after = loop.state.arrays()
            assert list(after) == list(before)
            for path, array in before.items():
                np.testing.assert_array_equal(after[path], array, path)
            loop.fit(source(), epochs=1)  # and it trains on as if there had been no test
            weights.append((loop.history.steps("loss"), loop.state.arrays()))
    np.testing.assert_array_equal(weights[0][0], weights[1][0])
    for path, array in weights[0][1].items():
        np.testing.assert_array_equal(weights[1][1][path], array, path)


def test_a_failing_step_changes_nothing_either() -> None:
    task = One(lambda w: w * w, start=1.0)
    own = task.optimizer._learning_rate
    with pytest.raises(ConfigurationError, match=r"train_step returns no 'los' .* mean 'loss'\?"):
        find_learning_rate(task, [BATCH], monitor="los")
    assert task.optimizer._learning_rate is own and float(task.w.numpy()) == 1.0
    assert int(task.optimizer.iterations.numpy()) == 0


def test_a_model_is_built_and_has_the_weights_it_would_have_had() -> None:
    tested, other = Everything(), Everything()
    keras.utils.set_random_seed(0)
    find_learning_rate(tested, source(), steps=10)
    keras.utils.set_random_seed(0)
    with treadle.Loop(other, console=False) as loop:
        loop.prepare(source())
    for mine, its in zip(tested.model.get_weights(), other.model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, its)


def test_of_several_optimizers_one_is_named() -> None:
    class Two(One):
        def train_step(self, batch: Any) -> Any:
            treadle.minimize(lambda: 1.0 * self.v, [self.v], self.other)
            return {**super().train_step(batch), "v": self.v}

    task = Two(lambda w: 1.0 * w, v=keras.Variable(0.0), other=keras.optimizers.SGD(1.0))
    with pytest.raises(ConfigurationError) as caught:
        find_learning_rate(task, [BATCH])
    assert str(caught.value) == (
        "the task has 2 optimizers (optimizer, other): choose one, for example "
        "optimizer='optimizer'"
    )
    found = find_learning_rate(task, [BATCH], optimizer="other", monitor="v", steps=20)
    np.testing.assert_allclose(found.losses, -np.cumsum(found.rates), rtol=1e-4)
    with pytest.raises(ConfigurationError, match=r"no optimizer 'othr'\. Did you mean 'other'\?"):
        find_learning_rate(task, [BATCH], optimizer="othr")


def test_what_cannot_be_tested_is_refused_with_the_reason() -> None:
    def message(task: Any = None, **how: Any) -> str:
        with pytest.raises(ConfigurationError) as caught:
            find_learning_rate(task or One(lambda w: w * w), [BATCH], **how)
        return str(caught.value)

    assert message(steps=9) == "steps must be at least 10, not 9"
    assert message(begin=1, end=0.1) == (
        "learning rates must satisfy 0 < begin < end, not begin=1, end=0.1"
    )
    assert message(One(lambda w: w * np.nan)).startswith(
        "loss diverged after 0 steps, at a learning rate of 1e-06: start with a lower one"
    )
    w = keras.Variable(0.0)
    bare = treadle.task(lambda batch: {"loss": w.assign_add(1.0)}, w=w)
    assert message(bare) == (
        "the task holds no optimizer, so it has no learning rate: keep one as an attribute, such "
        "as self.optimizer"
    )


def test_a_hook_cannot_test() -> None:
    hook = treadle.at("1 step", lambda loop: loop.find_learning_rate([BATCH]))
    with (
        pytest.raises(ConfigurationError, match="find_learning_rate trains, and was called by"),
        treadle.Loop(One(lambda w: w * w), hooks=[hook], console=False) as loop,
    ):
        loop.fit([BATCH], epochs=1)


def test_a_loss_that_never_falls_suggests_nothing(tmp_path: Any) -> None:
    found = find_learning_rate(One(lambda w: ops.abs(w) + 1.0), [BATCH], steps=20)
    assert found.suggestion is None
    assert found.lines()[-1].endswith(": nothing to suggest")
    found.draw(tmp_path / "rates.png")


def test_divergence_and_smoothing_by_hand() -> None:
    assert smooth([3.0, 0.0, 0.0, 6.0], 1) == [1.5, 1.0, 2.0, 3.0]
    assert good_steps([], 4) == 0
    ones = [0.0, 2.0] * 5  # a mean of 1
    assert good_steps([*ones, 1.9, 2.1], 0) == 11  # above it by more than its size
    assert good_steps([*ones, -4.0, 5.9, 6.1], 0) == 12  # by more than it had fallen
    assert good_steps([-1.0] * 10 + [-0.1, 0.1], 0) == 11
    assert good_steps([1.0, np.inf], 0) == 1


def test_results_are_printed_and_drawn(tmp_path: Any) -> None:
    found = RangeTest(
        optimizer="optimizer",
        monitor="loss",
        rates=(0.001, 0.01, 0.1, 1.0, 10.0),
        losses=(2.0, 2.0, 2.0, 2.0, 2.0),
        smoothed=(2.0, 1.8, 0.9, 0.6),
        planned=9,
        steepest=0.05,
        lowest=1.0,
    )
    assert found.lines() == [
        "optimizer: 4 steps at learning rates from 0.001 to 1, where it diverged",
        "loss fell from 2 to 0.6 at 1; a tenth of that is 0.1",
        "suggested, where it fell fastest: 0.05",
    ]
    facts = found.facts()
    assert (
        facts["suggestion"] == 0.05
        and facts["tenth"] == 0.1
        and facts["diverged"]
        and facts["rates"][1] == 0.01
    )
    found.draw(tmp_path / "rates.png")
    assert (tmp_path / "rates.png").stat().st_size > 10_000
