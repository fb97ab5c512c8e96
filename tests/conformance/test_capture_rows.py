"""PyTorch: `for_each` is captured as a loop over one row, and does what Python does to the bit."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from executions import some
from keras import layers, ops
from own_step import CAPTURED

import treadle
from treadle.testing import run_steps
from treadle.testing.running import Runner
from treadle.testing.trace import compare

if keras.config.backend() != "torch":
    pytest.skip("PyTorch's way to compile a step", allow_module_level=True)

STEPS = 4
Row = Callable[["Rows", Any], Any]


class Rows(treadle.Task):
    """Maps `row(task, x)` over the first axis of a batch; `given` makes other inputs of it."""

    def __init__(self, row: Row, *parts: Any, given: Callable[[Any], Any] = lambda x: x) -> None:
        self.model = keras.Sequential(
            [keras.Input((6, 6, 2)), *(parts or (layers.Flatten(), layers.Dense(3)))]
        )
        self.optimizer = keras.optimizers.Adam(0.01)
        self.total = keras.Variable(np.zeros(3, "float32"))
        self.row, self.given = row, given

    def train_step(self, batch: Any) -> Any:
        found = treadle.for_each(lambda x: self.row(self, x), self.given(batch))
        return {f"value_{i}": ops.mean(x) for i, x in enumerate(keras.tree.flatten(found))}


def batches(rows: int = 5, steps: int = STEPS) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(rows, 4, 6, 6, 2)).astype("float32") for _ in range(steps)]


def captured(task: Rows, batch: Any) -> Any:
    runner = Runner(task, batch)
    runner.run([batch])
    (made,) = runner._prepared._programs.values()
    return made.executor._captured


def is_rolled(make: Callable[[], Rows]) -> bool:
    """Say whether the number of operations does not depend on that of rows."""
    few, many = (captured(make(), batches(rows, 1)[0]).length for rows in (2, 7))
    return few == many


def assert_exact(make: Callable[[], Rows]) -> None:
    found = []
    for execution in ("auto", "eager"):
        keras.utils.set_random_seed(3)
        options = treadle.Options(execution=execution)
        found.append(run_steps(make(), batches(), options, (3, 1)))
    assert found[0].plan == CAPTURED
    compare(found[0], found[1], "captured", "run eagerly", tolerance=None)
    assert found[0].changed


def learn(task: Rows, x: Any) -> Any:
    return treadle.minimize(
        lambda: ops.mean((task.model(x, training=True) - 1.0) ** 2), task.model, task.optimizer
    )


def gradients(task: Rows, x: Any) -> Any:
    loss, grads = treadle.gradients(lambda: ops.mean(task.model(x) ** 2), task.model)
    task.total.assign_add(grads[1])  # a bias
    return {"loss": loss, "grads": grads, "unused": ops.sum(x)}


def carried(task: Rows, x: Any) -> Any:
    task.total.assign(task.total * 0.5 + learn(task, x))
    return task.total.value, ops.sum(task.total.value)


def branches(task: Rows, x: Any) -> Any:
    def add() -> Any:
        task.total.assign_add(ops.ones(3))
        return ops.mean(x)

    return treadle.cond(ops.mean(x) > 0, add, lambda: ops.sum(x)) + learn(task, x)


def drawn(task: Rows, x: Any) -> Any:
    task.total.assign_add(keras.random.normal((3,)))
    return learn(task, x)


def nested(task: Rows, x: Any) -> Any:
    return treadle.for_each(lambda part: learn(task, part[None]) + ops.mean(part), x)


def numbered(task: Rows, given: Any) -> Any:
    x, number = given
    task.total.assign_add(ops.ones(3) * ops.cast(number, "float32"))
    return learn(task, x) * ops.cast(number, "float32")


def with_numbers(x: Any) -> Any:  # which are the same in every step
    return x, ops.arange(x.shape[0])


RECURRENT = layers.Reshape((6, 12)), layers.LSTM(4), layers.Dense(3)
POOLED = layers.Conv2D(4, 3), layers.MaxPooling2D(), layers.Flatten(), layers.Dense(3)
NORMALIZED = layers.Flatten(), layers.Dense(3), layers.BatchNormalization(), layers.Dropout(0.5)


def copies(parts: Any) -> Any:
    return [layer.from_config(layer.get_config()) for layer in parts]


ROWS: dict[str, Callable[[], Rows]] = {
    "learn": lambda: Rows(learn),
    "gradients": lambda: Rows(gradients),
    "carried": lambda: Rows(carried),
    "branches": lambda: Rows(branches),
    "drawn": lambda: Rows(drawn),
    "nested": lambda: Rows(nested),
    "numbers": lambda: Rows(numbered, given=with_numbers),
    "recurrent": lambda: Rows(learn, *copies(RECURRENT)),
    "normalized": lambda: Rows(learn, *copies(NORMALIZED)),
}


@pytest.mark.parametrize("name", some(ROWS))
def test_rows_are_captured_as_a_loop(name: str) -> None:
    assert_exact(ROWS[name])
    assert is_rolled(ROWS[name])


@pytest.mark.long
def test_pooling_of_rows_may_use_the_memory_layout_of_images() -> None:
    def make() -> Rows:
        return Rows(learn, *copies(POOLED))

    found = captured(make(), batches()[0])
    assert not any("clone" in line and "3, 4" in line for line in found.source)
    assert is_rolled(make)
    trace = run_steps(make(), batches(), treadle.Options())
    assert trace.plan == CAPTURED


class Keeps(Rows):
    """A tensor of each row is used by the next one, through Python."""

    def train_step(self, batch: Any) -> Any:
        last = [ops.zeros(())]

        def row(x: Any) -> Any:
            last.append(learn(self, x) + 0.5 * last[-1])
            return last[-1]

        return {"loss": ops.mean(treadle.for_each(row, batch))}


def test_rows_that_depend_on_one_another_in_python_are_captured_row_by_row() -> None:
    assert_exact(lambda: Keeps(learn))
    assert not is_rolled(lambda: Keeps(learn))


class Objective(Rows):
    def train_step(self, batch: Any) -> Any:
        def objective() -> Any:
            return ops.mean(treadle.for_each(lambda x: ops.mean(self.model(x) ** 2), batch))

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}


def test_rows_that_are_differentiated_are_captured_row_by_row() -> None:
    assert_exact(lambda: Objective(learn))
    assert not is_rolled(lambda: Objective(learn))
