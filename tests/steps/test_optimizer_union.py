"""An optimizer that is applied to several lists of variables is built with the union of them."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from executions import EXECUTIONS, long_to_compile
from keras import ops

import treadle
from treadle.errors import StateError
from treadle.steps.optimizers import build_optimizers
from treadle.steps.state import State

KINDS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.5),
    "Adam": lambda: keras.optimizers.Adam(0.1),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.1),
    "Nadam": lambda: keras.optimizers.Nadam(0.1),
    "Muon": lambda: keras.optimizers.Muon(0.1, exclude_layers=["c"]),
    "averaged": lambda: keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.5),
}
OFTEN = ("momentum", "Adam", "Muon")  # those that differ most in what they keep for a variable


class Two(treadle.Task):
    """Trains `a` and `b` by one optimizer, in turn or by what a batch says."""

    def __init__(self, make: Callable[[], Any] = KINDS["momentum"], how: str = "form") -> None:
        self.how = how
        self.a = keras.Variable([[1.0, 3.0]] * 2, name="a")
        self.b = keras.Variable([[2.0, 4.0]] * 2, name="b")
        self.optimizer = make()

    def train_step(self, batch: Any) -> Any:
        ((name, x),) = batch.items()
        if self.how == "form":
            return {"loss": self.learn(self.a if name == "a" else self.b, x)}
        if self.how == "twice":
            return {"loss": self.learn(self.a, x) + self.learn(self.b, x)}
        first = ops.mean(x) > 0
        return {
            "loss": treadle.cond(
                first, lambda: self.learn(self.a, x), lambda: self.learn(self.b, x)
            )
        }

    def learn(self, v: Any, x: Any) -> Any:
        return treadle.minimize(lambda: ops.mean((v * x) ** 2), [v], self.optimizer)


def trained(task: Two, order: str, execution: Any = "auto") -> dict[str, Any]:
    """Train on batches named by letters; upper case ones hold negative numbers."""
    one = np.ones((1, 2), "float32")
    given = [{x.lower(): one if x.islower() else -one} for x in order]
    options = treadle.Options(execution=execution)
    treadle.Loop(task, console=False, options=options).fit(given, epochs=1)
    return State.discover(task).arrays()


def by_hand(task: Two, order: str) -> dict[str, Any]:
    """Return the state after a loop by hand, its optimizer built with both from the start."""
    task.optimizer.build([task.a, task.b])
    for name in order:
        v = task.a if name == "a" else task.b
        task.optimizer.apply([2 * ops.convert_to_tensor(v) / 4], [v])
    task.optimizer.finalize_variable_values([task.a, task.b])  # which ends `use_ema=True`
    return State.discover(task).arrays()


def agree(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, rtol=2e-5, atol=1e-6, err_msg=path)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in OFTEN else long_to_compile) for k in KINDS]
)
def test_a_form_that_comes_late_extends_the_optimizer(kind: str) -> None:
    agree(trained(Two(KINDS[kind]), "aababb"), by_hand(Two(KINDS[kind]), "aababb"))


@EXECUTIONS
def test_both_branches_of_cond_count(execution: Any) -> None:
    found = trained(Two(how="cond"), "aAaAA", execution)
    agree(found, by_hand(Two(how="cond"), "ababb"))


@EXECUTIONS
def test_two_calls_in_a_step_count(execution: Any) -> None:
    agree(trained(Two(how="twice"), "aa", execution), by_hand(Two(how="twice"), "abab"))


def test_an_optimizer_that_the_user_built_is_not_extended() -> None:
    task = Two()
    task.optimizer.build([task.a])
    with pytest.raises(StateError) as caught:
        trained(task, "ab")
    assert str(caught.value) == (
        "train_step applies the optimizer optimizer (SGD) to b, but it was built with 1 other "
        "variables before. Build it with all variables that it trains: call optimizer.build([…]) "
        "in the task's __init__"
    )


def test_a_multi_optimizer_is_not_extended() -> None:
    inner = keras.optimizers.SGD(0.1, momentum=0.9)
    task = Two(lambda: keras.optimizers.MultiOptimizer(lambda variable: inner))
    assert build_optimizers(task, [(task.optimizer, [task.a])], "train_step")
    with pytest.raises(StateError, match=r"optimizer \(MultiOptimizer\) to b, but it was built"):
        build_optimizers(task, [(task.optimizer, [task.b])], "train_step")


def test_the_union_is_in_the_order_of_the_calls_and_is_built_once() -> None:
    task = Two()
    calls = [(task.optimizer, [task.b]), (task.optimizer, [task.a, task.b])]
    assert build_optimizers(task, calls, "train_step")
    assert [v.name for v in task.optimizer._trainable_variables] == ["b", "a"]
    assert not build_optimizers(task, calls, "train_step")
    assert not build_optimizers(task, [(task.optimizer, [])], "train_step")
