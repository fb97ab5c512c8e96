"""Schedules: their numbers by hand, and their place in compiled steps, on every backend."""

import json
from typing import Any

import keras
import numpy as np
import pytest
from executions import long_to_compile

import treadle
from treadle.schedules import Cyclic, OneCycle, Piecewise, WarmUp

pytestmark = long_to_compile

# From the formulas of Smith 2017 by hand; the first two with the paper's own bounds for CIFAR-10.
# In exp_range the triangle 1, 2, 3, 2, 1 is multiplied by 1, 1/2, 1/4, 1/8, 1/16.
BY_HAND = {
    "triangular": (
        Cyclic(0.001, 0.006, 2000),
        {0: 0.001, 500: 0.00225, 2000: 0.006, 3000: 0.0035, 4000: 0.001, 5000: 0.0035},
    ),
    "triangular2": (
        Cyclic(0.001, 0.006, 2000, "triangular2"),
        {2000: 0.006, 4000: 0.001, 5000: 0.00225, 6000: 0.0035, 10000: 0.00225},
    ),
    "exp_range": (
        Cyclic(1, 3, 2, "exp_range", gamma=0.5),
        {0: 1.0, 1: 1.0, 2: 0.75, 3: 0.25, 4: 0.0625, 5: 0.0625},
    ),
    "beyond what float32 counts": (Cyclic(0, 1, 2), {2**24: 0.0, 2**24 + 1: 0.5, 2**24 + 2: 1.0}),
    "one cycle": (
        OneCycle(1.0, 10, initial=0.2, final=0.0, cycle=0.8),
        {0: 0.2, 1: 0.4, 4: 1.0, 7: 0.4, 8: 0.2, 9: 0.1, 10: 0.0, 50: 0.0},
    ),
    "one cycle of its own bounds": (
        OneCycle(1.0, 1000),
        {0: 0.1, 225: 0.55, 450: 1.0, 900: 0.1, 950: 0.05005, 1000: 0.0001},
    ),
    "one cycle of all steps": (OneCycle(1.0, 4, 0.0, cycle=1), {0: 0.0, 1: 0.5, 2: 1.0, 4: 0.0}),
    "warm-up to a number": (WarmUp(0.4, 4, start=0.2), {0: 0.2, 1: 0.25, 4: 0.4, 9: 0.4}),
    "warm-up to a schedule": (
        WarmUp(Cyclic(1.0, 2.0, 2), 4),
        {0: 0.0, 1: 0.25, 3: 0.75, 4: 1.0, 5: 1.5, 6: 2.0, 8: 1.0},
    ),
    "warm-up to one of Keras'": (
        WarmUp(keras.optimizers.schedules.ExponentialDecay(0.8, 1, 0.5), 2),
        {0: 0.0, 1: 0.4, 2: 0.8, 3: 0.4, 4: 0.2},
    ),
    "piecewise": (
        Piecewise([0.125, Cyclic(0.0, 1.0, 2), 5], [2, 5]),
        {0: 0.125, 1: 0.125, 2: 0.0, 3: 0.5, 4: 1.0, 5: 5.0, 9: 5.0},
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str) -> None:
    schedule, numbers = BY_HAND[name]
    for step, value in numbers.items():
        for given in (step, np.int64(step), keras.ops.convert_to_tensor(step, dtype="int32")):
            found = schedule(given)
            assert keras.backend.standardize_dtype(found.dtype) == "float32"
            assert tuple(found.shape) == ()
            assert float(found) == pytest.approx(value, rel=2e-6, abs=1e-7), (step, given)
    if name != "warm-up to one of Keras'":  # which takes one step at a time
        found = keras.ops.convert_to_numpy(schedule(np.array(list(numbers))))
        np.testing.assert_allclose(found, list(numbers.values()), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("name", BY_HAND)
def test_saved_schedules_are_restored(name: str) -> None:
    schedule, numbers = BY_HAND[name]
    optimizer = keras.optimizers.SGD(schedule)
    config = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
    again = keras.optimizers.deserialize(config)._learning_rate
    assert type(again) is type(schedule) and again is not schedule
    assert again.get_config() == schedule.get_config()
    for step in numbers:
        assert float(again(step)) == float(schedule(step))


class Followed(treadle.Task):
    """A weight that moves by the learning rate, and a quantity that follows a schedule."""

    def __init__(self, rate: Any, other: Any) -> None:
        self.w = keras.Variable(0.0)
        self.optimizer = keras.optimizers.SGD(rate)
        self.other = other

    def train_step(self, batch: Any) -> Any:
        treadle.minimize(lambda: 1.0 * self.w, [self.w], self.optimizer)
        return {"w": self.w, "other": self.other(treadle.step())}


WAYS = [treadle.Options(window=8), treadle.Options(window=1), treadle.Options(execution="eager")]


@pytest.mark.parametrize("options", WAYS, ids=["windows", "single steps", "eager"])
def test_in_steps(options: treadle.Options) -> None:
    other = Piecewise([WarmUp(1.0, 4), Cyclic(0, 2, 2, "triangular2")], [5])
    task = Followed(Cyclic(0.1, 0.5, step_size=2), other)
    batches = [np.zeros(1, "float32")] * 11
    with treadle.Loop(task, options=options, console=False) as loop:
        history = loop.fit(batches, epochs=1)
    rates = [0.1, 0.3, 0.5, 0.3] * 3
    np.testing.assert_allclose(history.steps("w"), -np.cumsum(rates)[:11], rtol=1e-5)
    expected = [0.0, 0.25, 0.5, 0.75, 1.0, 0.0, 1.0, 2.0, 1.0, 0.0, 0.5]
    np.testing.assert_allclose(history.steps("other"), expected, atol=1e-6)


def test_keras_fit_takes_them() -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.zeros((1, 1))])
    # The gradient of the mean of the outputs is 1.
    model.compile(
        keras.optimizers.SGD(Cyclic(0.1, 0.5, step_size=2)), lambda _, outputs: outputs[:, 0]
    )
    model.fit(np.ones((3, 1)), np.ones((3, 1)), batch_size=1, verbose=0)
    assert float(model.get_weights()[0][0, 0]) == pytest.approx(-0.9, rel=1e-5)
