"""The record of a run: learning rates, resumes and the time spent."""

import json

import keras
import numpy as np
import pytest
from keras import ops

import treadle
from treadle.hooks.learning_rates import MOST_SAMPLES, LearningRates


def test_samples_are_thinned_out_evenly_and_alike_after_a_restore():
    one, two = LearningRates(), LearningRates()
    for step in range(1, 2000):
        one.add(step, {"optimizer": 1 / step})
        two.add(step, {"optimizer": 1 / step})
        if step % 300 == 0:
            state, two = two.state(), LearningRates()
            two.restore(json.loads(json.dumps(state)))
    steps = one.facts()["steps"]
    assert one.facts() == two.facts()
    assert MOST_SAMPLES // 2 < len(steps) <= MOST_SAMPLES and set(np.diff(steps)) == {8}
    assert one.facts()["rates"]["optimizer"] == [1 / step for step in steps]


def test_a_new_optimizer_a_repeated_step_and_a_value_that_is_not_finite():
    rates = LearningRates()
    rates.add(1, {"a": 0.5})
    rates.add(1, {"a": 0.7})
    rates.add(2, {"a": float("nan"), "b": 0.1})
    assert rates.facts() == {"steps": [1, 2], "rates": {"a": [0.5, None], "b": [None, 0.1]}}
    assert LearningRates().facts() == LearningRates().state() == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rates": {"a": [1.0]}}, r"learning_rates.rates.a has 1 values for 2 steps"),
        ({"steps": ["x", 2]}, r"learning_rates.steps\[0\] is 'x'; expected a whole number"),
        ({"spacing": 0}, "learning_rates.spacing is 0; expected a whole number from 1"),
    ],
)
def test_a_damaged_state_is_explained(change, message):
    state = {"spacing": 1, "seen": 2, "steps": [1, 2], "rates": {"a": [0.5, 0.1]}}
    with pytest.raises(ValueError, match=message):
        LearningRates().restore({**state, **change})


CALLS = []


class Counting(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        CALLS.append(None)
        return 0.1 + 0.0 * ops.cast(step, "float32")


class Line(treadle.Task):
    def __init__(self):
        self.model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5, staircase=True)
        self.falling = keras.optimizers.SGD(schedule)
        self.own = keras.optimizers.SGD(Counting())

    def train_step(self, batch):
        x, y = batch
        loss, gradients = treadle.gradients(
            lambda: ops.mean((self.model(x) - y) ** 2), self.model.trainable_variables
        )
        for optimizer in (self.falling, self.own):
            optimizer.apply(gradients, self.model.trainable_variables)
        return {"loss": loss}


class Validated(Line):
    def eval_step(self, batch):
        return {"loss": ops.mean((self.model(batch[0]) - batch[1]) ** 2)}


def test_the_time_of_all_processes_and_their_resumes_are_recorded(tmp_path):
    x = np.ones((8, 2), np.float32)
    train = treadle.data.from_arrays(x, x[:, :1], batch_size=4)
    records = []
    for epochs in (2, 4, 4):  # the third finds a finished run
        with treadle.Loop(Validated(), tmp_path, console=False, override=True) as loop:
            loop.fit(train, train, epochs=epochs)
        records.append(json.loads((tmp_path / "run.json").read_text()))
    first, second, third = (record["costs"] for record in records)
    assert all(0 < first[name] < second[name] for name in ("compiling", "validating", "saving"))
    assert third == second
    assert second["validating"] + second["saving"] < records[1]["progress"]["seconds"]
    assert "resumed" not in records[0]
    assert [one["step"] for one in records[2]["resumed"]] == [4]


def test_the_record_of_a_run_holds_the_rates_also_of_a_resumed_one(tmp_path):
    x = np.ones((8, 2), np.float32)
    train = treadle.data.from_arrays(x, x[:, :1], batch_size=4)
    for epochs in (2, 4):
        with treadle.Loop(Line(), tmp_path, console=False, override=True) as loop:
            loop.fit(train, epochs=epochs)
    found = json.loads((tmp_path / "run.json").read_text())["learning_rates"]
    assert found["steps"] == [2, 4, 6, 8]
    # A schedule of the user's is not called: it might count, or draw random numbers.
    assert list(found["rates"]) == ["falling"]
    assert found["rates"]["falling"] == pytest.approx([0.05, 0.025, 0.0125, 0.00625])
    (tmp_path / "log.jsonl").unlink()
    from treadle.report.reading import read_run

    curve = read_run(tmp_path, 100, 0)["curves"][0]
    assert (curve["name"], curve["x"]) == ("learning rate", [2, 4, 6, 8])
