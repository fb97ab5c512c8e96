"""`loop.call` of one function many times: PyTorch captures it then, JAX passes what it reads."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import treadle

X = np.random.default_rng(0).normal(size=(30, 4, 3)).astype("float32")


class Policy(treadle.Task):
    """A network, a variable that no function reads, and a Python value."""

    def __init__(self) -> None:
        self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        self.unread = keras.Variable(1.0, trainable=False)
        self.count = keras.Variable(0.0, trainable=False)
        self.seeds = keras.random.SeedGenerator(0)
        self.factor = 1.0

    def scaled(self, x: Any) -> Any:
        return {"scaled": self.factor * self.model(x, training=False), "sum": ops.sum(x)}

    def weight(self) -> Any:
        return ops.sum(self.model.layers[0].kernel)

    def noise(self, x: Any) -> Any:
        return x + keras.random.normal(ops.shape(x), seed=self.seeds)

    def counted(self, x: Any) -> Any:
        self.count.assign_add(1.0)
        return x + self.count


@pytest.fixture
def loop() -> Any:
    keras.utils.set_random_seed(0)
    with treadle.Loop(Policy(), console=False) as loop:
        yield loop


def expected(task: Policy, x: Any) -> Any:
    kernel, bias = (ops.convert_to_numpy(v.value) for v in task.model.weights)
    return task.factor * (x @ kernel + bias)


def test_many_calls_use_the_newest_weights_and_python_values(loop: Any) -> None:
    for i, x in enumerate(X):
        if i in (5, 20, 25):
            loop.task.model.layers[0].kernel.assign(np.full((3, 2), i, "float32"))
        if i == 22:
            loop.task.factor = 2.0
        found = loop.call(loop.task.scaled, x)
        assert set(found) == {"scaled", "sum"}
        np.testing.assert_allclose(found["scaled"], expected(loop.task, x), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found["sum"], x.sum(), rtol=1e-5, atol=1e-5)


def test_many_calls_without_inputs(loop: Any) -> None:
    for i in range(24):
        loop.task.model.layers[0].kernel.assign(np.full((3, 2), i, "float32"))
        assert loop.call(loop.task.weight) == 6 * i


def test_inputs_are_not_changed_and_outputs_are_their_own(loop: Any) -> None:
    x = X[0].copy()
    found = [loop.call(loop.task.model, x) for _ in range(24)]
    np.testing.assert_array_equal(x, X[0])
    x += 1.0
    assert all(np.array_equal(one, found[0]) for one in found)


def test_each_of_many_calls_draws_other_numbers(loop: Any) -> None:
    found = [loop.call(loop.task.noise, X[0]).tobytes() for _ in range(24)]
    assert len(set(found)) == 24


def test_many_calls_discard_assignments(loop: Any) -> None:
    found = [loop.call(loop.task.counted, X[0]) for _ in range(24)]
    assert all(np.array_equal(one, X[0] + 1.0) for one in found)
    assert float(ops.convert_to_numpy(loop.task.count.value)) == 0.0


@pytest.mark.skipif(keras.config.backend() != "torch", reason="only PyTorch captures")
def test_a_function_is_captured_after_some_calls(loop: Any) -> None:
    task, runs = loop.task, []

    def function(x: Any) -> Any:
        runs.append(1)
        return task.model(x, training=False)

    counts: list[int] = []
    for x in X:
        np.testing.assert_allclose(loop.call(function, x), expected(task, x), rtol=1e-5, atol=1e-5)
        counts.append(len(runs))
    assert np.diff(counts)[:14].tolist() == [1] * 14  # as Python
    assert not np.diff(counts)[17:].any()  # captured


@pytest.mark.skipif(keras.config.backend() != "torch", reason="only PyTorch captures")
def test_a_function_that_reads_values_in_python_is_not_captured(loop: Any) -> None:
    def positive(x: Any) -> Any:
        return x if float(ops.sum(x)) > 0 else -x

    for x in X:
        np.testing.assert_array_equal(loop.call(positive, x), x if x.sum() > 0 else -x)
