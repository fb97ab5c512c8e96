"""What once went wrong in silence, one test for each."""

import time
from typing import Any

import keras
import numpy as np
import pytest
from classifier import FEATURES, Classifier, dense, head
from keras import ops
from mistakes import ROWS, arrays, source

import treadle
from treadle.errors import GradientError, StepError


class Plain(Classifier):
    def __init__(self, **state: Any) -> None:
        super().__init__([keras.Input((FEATURES,)), dense(), head()])
        vars(self).update(state)


class Returns(Plain):
    """A task whose steps return what a function makes of the batch."""

    def __init__(self, function: Any, **state: Any) -> None:
        super().__init__(**state)
        self.holder = [function]

    def train_step(self, batch: Any) -> Any:
        return {"value": ops.convert_to_tensor(self.holder[0](self, batch)) + 0.0}

    eval_step = train_step


def loop_of(task: Any, **kwargs: Any) -> treadle.Loop:
    return treadle.Loop(task, console=False, **kwargs)


def test_freezing_a_layer_is_seen() -> None:
    for index in (0, 1):
        task = Plain()
        with loop_of(task) as loop:
            loop.fit(source(), steps=2)
            task.model.layers[index].trainable = False
            before = [ops.convert_to_numpy(layer.kernel) for layer in task.model.layers]
            loop.fit(source(), steps=2)
            after = [ops.convert_to_numpy(layer.kernel) for layer in task.model.layers]
        moved = [not np.array_equal(a, b) for a, b in zip(before, after, strict=True)]
        assert moved == [index != 0, index != 1]


def test_replaced_objects_and_changed_settings_are_seen() -> None:
    task = Plain()
    with loop_of(task) as loop:
        loop.fit(source(), steps=2)
        task.optimizer = keras.optimizers.SGD(0.0)
        before = loop.state.arrays()["model/layers/0/kernel"]
        history = loop.fit(source(), steps=2)
        np.testing.assert_array_equal(before, loop.state.arrays()["model/layers/0/kernel"])
    assert "recompiled because optimizer changed from one SGD to another SGD" in history["note"][0]


def test_functions_that_are_called_once_are_not_kept() -> None:
    built: list[int] = []

    def lasting(x: Any) -> Any:
        built.append(1)
        return x + 1.0

    with treadle.Loop(Plain(), console=False) as loop:
        loop.call(lasting, np.ones(1))
        first = len(built)
        for factor in range(20):
            assert loop.call(lambda x, factor=factor: x * factor, np.ones(1)).tolist() == [factor]
            before = len(built)
            assert loop.call(lasting, np.ones(1)).tolist() == [2.0]
            assert keras.config.backend() == "torch" or len(built) == before == first
        assert len(loop._run.evaluation._callers) == 16


def test_a_constant_that_is_no_number_has_not_changed() -> None:
    with loop_of(Plain(missing=float("nan"))) as loop:
        loop.fit(source(), steps=2)
    assert loop.progress.step == 2


def test_none_in_another_place_is_another_form() -> None:
    def place(_: Any, batch: Any) -> Any:
        return 10.0 if batch[1] is None else 20.0

    one = np.ones(ROWS, "float32")
    with loop_of(Returns(place)) as loop:
        history = loop.fit([(one, None, one), (one, one, None)], epochs=1)
    assert history.steps("value").tolist() == [10.0, 20.0]


def test_branches_may_return_numbers_and_variables() -> None:
    def branch(task: Any, batch: Any) -> Any:
        number = treadle.cond(treadle.step() % 2 == 0, lambda: 1.0, lambda: 0.0)
        chosen = treadle.cond(treadle.step() % 2 == 0, lambda: task.a, lambda: task.b)
        return number + chosen

    task = Returns(branch, a=keras.Variable(10.0), b=keras.Variable(20.0))
    with loop_of(task) as loop:
        values = loop.fit(source(), steps=4).steps("value").tolist()
    assert values == [11.0, 20.0, 11.0, 20.0]


def test_no_gradient_flows_through_an_assignment() -> None:
    a, c = keras.Variable(2.0), keras.Variable(0.0, trainable=False)

    def objective() -> Any:
        c.assign(a * a)
        return c * 2.0 + 0.0 * a

    _, (gradient,) = treadle.gradients(objective, [a])
    assert float(ops.convert_to_numpy(gradient)) == 0.0


class Active(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        self.add_loss(ops.sum(ops.abs(inputs)))
        return inputs


@pytest.mark.parametrize("nested", [False, True])
def test_losses_of_layers_are_there_after_substituted(nested: bool) -> None:
    class Penalized(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.model = keras.Sequential([keras.Input((FEATURES,)), Active(), head()])

        def train_step(self, batch: Any) -> Any:
            x, y = batch
            variables = self.model.trainable_variables
            with treadle.substituted(variables, [v * 0.5 for v in variables]):
                if nested:
                    treadle.gradients(lambda: self.loss(y, self.model(x)), variables)
                else:
                    self.model(x)
            return {"penalty": sum(self.model.losses), "expected": ops.sum(ops.abs(x))}

    with loop_of(Penalized()) as loop:
        history = loop.fit(source(), steps=3)
    np.testing.assert_allclose(history.steps("penalty"), history.steps("expected"), rtol=1e-5)


def test_evaluation_restores_what_an_optimizer_changed() -> None:
    class Adapting(Plain):
        def eval_step(self, batch: Any) -> Any:
            return self.train_step(batch)

    with loop_of(Adapting()) as loop:
        loop.fit(source(), steps=2)
        before = loop.state.arrays()
        loop.evaluate(source())
        for path, value in loop.state.arrays().items():
            np.testing.assert_array_equal(before[path], value, err_msg=path)


def test_timed_hooks_fire_also_where_hooks_take_the_time() -> None:
    fired: list[int] = []
    hooks = [
        treadle.every("1 step", lambda loop: time.sleep(0.03)),
        treadle.every("0.05 s", lambda loop: fired.append(loop.progress.step)),
    ]
    with loop_of(Plain(), hooks=hooks) as loop:
        loop.fit(source(), epochs=2)
    assert len(fired) >= 3  # 0.3 s or more, however slow the machine is


def test_a_phase_inside_an_objective_is_refused() -> None:
    class Inside(Plain):
        def train_step(self, batch: Any) -> Any:
            x, y = batch

            def objective() -> Any:
                with treadle.phase("critic", owns=[self.model]):
                    return self.loss(y, self.model(x))

            return treadle.minimize(objective, self.model, self.optimizer)

    with pytest.raises(StepError, match=r"phase 'critic' is inside an objective"):
        loop_of(Inside()).fit(source(), steps=1)


def test_whole_numbers_have_no_gradients() -> None:
    count = keras.Variable(1, dtype="int32", trainable=False, name="count")
    with pytest.raises(GradientError, match=r"count is of dtype int32, and only float variables"):
        treadle.gradients(lambda: ops.cast(count, "float32") * 2.0, [count])


def test_values_that_appear_later_are_filled_with_nan() -> None:
    task = Plain(more=False)
    original = task.train_step

    def train_step(batch: Any) -> Any:
        logs = original(batch)
        return {**logs, "extra": logs["loss"]} if task.more else logs

    task.train_step = train_step
    with loop_of(task) as loop:
        loop.fit(source(), steps=2)
        task.more = True
        history = loop.fit(source(), steps=2)
    assert history.steps("loss").shape == (4,)
    assert np.isnan(history.steps("extra")).tolist() == [True, True, False, False]


def test_weights_of_means_are_copied() -> None:
    class Counting(Plain):
        def __init__(self) -> None:
            super().__init__(n=keras.Variable(0.0))

        def train_step(self, batch: Any) -> Any:
            self.n.assign_add(1.0)
            return {"value": treadle.weighted(self.n * 1.0, self.n.value)}

    with loop_of(Counting()) as loop:
        history = loop.fit(source(), epochs=1)
    assert history["value"] == [pytest.approx((1 + 4 + 9 + 16 + 25) / 15)]


def test_single_steps_are_not_part_of_an_epoch() -> None:
    x, y = arrays()
    with loop_of(Plain()) as loop:
        for _ in range(3):
            loop.step((x[:8], y[:8]))
        loop.fit(source(), epochs=1)
    assert loop.progress.step == 8


def test_hooks_triggered_by_epochs_run_at_their_end() -> None:
    with loop_of(Plain()) as loop:
        assert [logs.step for logs in loop.steps(source(), every="1 epoch")] == [5]
