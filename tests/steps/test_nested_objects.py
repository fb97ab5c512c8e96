"""Objects of Keras in objects of Keras: their variables are found, compiled in, saved, restored."""

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from executions import EXECUTIONS, some
from keras import ops

import treadle
from treadle.errors import StateError
from treadle.steps.state import State

BATCHES = [np.full((2, 1), i + 1, "float32") for i in range(4)]


def used(part: Any, w: Any) -> Any:
    """Use an object, or all in a container, so that the variables inside change."""
    if isinstance(part, dict):
        return sum(used(value, w) for value in part.values())
    if isinstance(part, (list, tuple)):
        return sum(used(value, w) for value in part)
    if isinstance(part, keras.Variable):
        part.assign(part + 1.0)
        return ops.convert_to_tensor(part)
    return part.use(w)


class Loss(keras.losses.Loss):
    def __init__(self, part: Any) -> None:
        super().__init__()
        self.part = part

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.mean(y_true - y_pred, axis=-1) + used(self.part, y_true)

    def use(self, w: Any) -> Any:
        return self(w, ops.zeros((1, 1)))


class Metric(keras.metrics.Metric):
    def __init__(self, part: Any) -> None:
        super().__init__()
        self.total = self.add_variable((), "zeros", name="total")
        object.__setattr__(self, "part", part)  # which Keras does not track

    def update_state(self, value: Any) -> None:
        self.total.assign(self.total + ops.mean(value))

    def result(self) -> Any:
        return ops.convert_to_tensor(self.total)

    def use(self, w: Any) -> Any:
        self.update_state(used(self.part, w))
        return self.result()


class Regularizer(keras.regularizers.Regularizer):
    def __init__(self, part: Any) -> None:
        self._part = part

    def __call__(self, x: Any) -> Any:
        return ops.sum(x) + used(self._part, x)

    def use(self, w: Any) -> Any:
        return self(w)


class Constraint(keras.constraints.Constraint):
    def __init__(self, part: Any) -> None:
        self.part = part

    def __call__(self, w: Any) -> Any:
        return w * used(self.part, w)

    def use(self, w: Any) -> Any:
        return ops.sum(self(w))


class Initializer(keras.initializers.Initializer):
    def __init__(self, part: Any) -> None:
        self.part = part

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        return ops.ones(shape, dtype) * used(self.part, ops.ones(shape, dtype))

    def use(self, w: Any) -> Any:
        return ops.sum(self((1, 1), "float32")) + ops.sum(w)


class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, part: Any) -> None:
        self.part = part

    def __call__(self, step: Any) -> Any:
        return 0.1 / used(self.part, ops.ones((1, 1)))

    def use(self, w: Any) -> Any:
        return self(3) + ops.sum(w)


class Layer(keras.layers.Layer):
    def __init__(self, part: Any) -> None:
        super().__init__()
        self.part = part

    def call(self, x: Any) -> Any:
        return x + used(self.part, x)

    def use(self, w: Any) -> Any:
        return ops.sum(self.call(w))


class Optimizer(keras.optimizers.SGD):
    """Trains a weight of its own, and uses what it holds in each update."""

    def __init__(self, part: Any) -> None:
        super().__init__(0.1, momentum=0.5)
        self.own = Record(keras.Variable([[1.0]]))
        self.part = part

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        used(self.part, ops.ones((1, 1)))
        return super().apply(grads, trainable_variables)

    def use(self, w: Any) -> Any:
        self.apply([ops.ones((1, 1))], [self.own.part])
        return ops.sum(self.own.part) + ops.sum(w)


@dataclass
class Record:
    part: Any

    def use(self, w: Any) -> Any:
        return used(self.part, w)


KINDS: dict[str, Callable[[Any], Any]] = {
    kind.__name__: kind
    for kind in (
        Loss, Metric, Regularizer, Constraint, Initializer, Schedule, Layer, Optimizer, Record,
    )
}  # fmt: skip
CONTAINERS: list[Callable[[Any], Any]] = [lambda x: x, lambda x: [x], lambda x: {"a": x}]


class Everything(treadle.Task):
    """Holds a chain of three objects for each pair of kinds, with a variable in the last one."""

    def __init__(self, every: int = 1) -> None:
        self.w = keras.Variable([[1.0]], name="w")
        self.chains: dict[str, Any] = {}
        names = list(KINDS)
        for i, (first, second) in list(enumerate(product(names, names)))[::every]:
            third = names[(i * 5 + i // 9) % len(names)]
            part: Any = keras.Variable(1.0)
            for kind in (third, second):
                part = CONTAINERS[i % 3](KINDS[kind](part))
            self.chains[f"{first}-{second}-{third}"] = KINDS[first](part)

    def train_step(self, batch: Any) -> Any:
        values = {name: used(chain, self.w) for name, chain in self.chains.items()}
        self.w.assign(self.w + ops.mean(batch))
        return {f"used-{name}": ops.mean(value) for name, value in values.items()}


def source() -> Any:
    return treadle.data.from_arrays(np.concatenate(BATCHES), batch_size=2, shuffle=False)


@pytest.fixture(scope="module")
def by_hand() -> tuple[list[dict[str, float]], dict[str, Any]]:
    """The values of each step, and the state after a loop without Treadle."""
    task = Everything()
    for optimizer in State.discover(task).all_optimizers.values():
        optimizer.build([optimizer.own.part])
    logs = [task.train_step(ops.convert_to_tensor(batch)) for batch in BATCHES]
    return (
        [{name: float(ops.convert_to_numpy(x)) for name, x in log.items()} for log in logs],
        State.discover(task).arrays(),
    )


class Seen(treadle.Hook):
    """Keeps what each step logs, and the state after it; ends the process at a step."""

    def __init__(self, ends_at: int = 0) -> None:
        self.ends_at, self.logs, self.arrays = ends_at, [], {}

    def steps(self, loop: Any, logs: Any) -> None:
        self.logs.append({name: float(values[-1]) for name, values in logs.values.items()})
        self.arrays = loop.state.arrays()  # at the end of the epoch, metrics are reset
        if loop.progress.step == self.ends_at:
            raise OSError("killed")


def trained(
    execution: Any, directory: Path | None = None, ends_at: int = 0, make: Any = Everything
) -> Seen:
    """Train, and return what was seen; every step is a window of its own."""
    seen, hooks = Seen(ends_at), []
    if directory is not None:
        hooks = [treadle.hooks.Checkpoint(every="1 step")]
    options = treadle.Options(execution=execution, window=1)
    loop = treadle.Loop(make(), directory, hooks=[*hooks, seen], console=False, options=options)
    loop.fit(source(), epochs=1)
    return seen


def same(resumed: Seen, found: Seen) -> None:
    """Assert that a resumed run ended as one that was not interrupted, bit for bit."""
    assert 0 < len(resumed.logs) < len(found.logs)
    assert resumed.logs == found.logs[-len(resumed.logs) :]
    assert set(resumed.arrays) == set(found.arrays)
    for path, value in found.arrays.items():
        np.testing.assert_array_equal(resumed.arrays[path], value, err_msg=path)


@EXECUTIONS
def test_every_pair_of_kinds_three_deep(execution: Any, by_hand: Any) -> None:
    logs, state = by_hand
    found = trained(execution)
    for step, expected in enumerate(logs):
        for name, value in expected.items():
            assert found.logs[step][name] == pytest.approx(value, rel=1e-5), (step, name)
    assert set(found.arrays) == set(state)
    for path, value in state.items():
        np.testing.assert_allclose(found.arrays[path], value, rtol=1e-5, err_msg=path)


def test_every_kind_is_restored(tmp_path: Path) -> None:
    def make() -> Everything:
        return Everything(every=4)  # each kind is in each place

    with pytest.raises(OSError, match="killed"):
        trained("eager", tmp_path, 3, make)
    same(trained("eager", tmp_path, make=make), trained("eager", make=make))


# Optimizers in optimizers


class Lookahead(keras.optimizers.Optimizer):
    """Moves slow weights half of the way to those of another optimizer, every two updates."""

    def __init__(self, inner: Any) -> None:
        super().__init__(learning_rate=0.5)
        self._inner = inner

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.slow = self.add_optimizer_variables(variables, "slow")

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        if not self.built:
            self.build(trainable_variables)
        self._inner.apply(grads, trainable_variables)
        self._iterations.assign_add(1)
        due = ops.equal(self._iterations % 2, 0)
        for variable in trainable_variables:
            slow = self.slow[self._get_variable_index(variable)]
            fast, kept = ops.convert_to_tensor(variable), ops.convert_to_tensor(slow)
            mean = kept + self.learning_rate * (fast - kept)
            slow.assign(ops.where(due, mean, kept))
            variable.assign(ops.where(due, mean, fast))


class BuiltAtOnce(Lookahead):
    """Builds the other one, as Keras' own wrappers do."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self._inner.build(variables)


class Sharp(keras.optimizers.Optimizer):
    """Steps up along the gradient, and applies that of another place (SAM), by one of several."""

    def __init__(self, parts: Any) -> None:
        super().__init__(learning_rate=0.1)
        self.parts = parts

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        if not self.built:
            self.build(trainable_variables)
        held = self.parts
        inner = held["a"] if isinstance(held, dict) else getattr(held, "part", None) or held[0]
        before = [ops.copy(ops.convert_to_tensor(v)) for v in trainable_variables]
        for variable, gradient in zip(trainable_variables, grads, strict=True):
            variable.assign_add(0.1 * gradient)
        again = [2.0 * ops.convert_to_tensor(v) for v in trainable_variables]
        for variable, value in zip(trainable_variables, before, strict=True):
            variable.assign(value)
        inner.apply(again, trainable_variables)
        self._iterations.assign_add(1)


class Delegating(keras.optimizers.Optimizer):
    """Calls the `update_step` of another one, which it builds."""

    def __init__(self, inner: Any) -> None:
        super().__init__(learning_rate=0.1)
        self.inner = inner

    def build(self, variables: Any) -> None:
        if not self.built:
            super().build(variables)
            self.inner.build(variables)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.inner.update_step(gradient, variable, self.inner.learning_rate)


def inner() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.5)


OPTIMIZERS: dict[str, tuple[Callable[[], Any], str]] = {
    "lookahead": (lambda: Lookahead(inner()), "optimizer/inner"),
    "built at once": (lambda: BuiltAtOnce(inner()), "optimizer/inner"),
    "in a list": (lambda: Sharp([inner()]), "optimizer/parts/0"),
    "in a dict": (lambda: Sharp({"a": inner()}), "optimizer/parts/a"),
    "by update_step": (lambda: Delegating(inner()), "optimizer/inner"),
    "two deep": (lambda: Lookahead(Sharp([inner()])), "optimizer/inner/parts/0"),
    "in a dataclass": (lambda: Sharp(Record(inner())), "optimizer/parts/part"),
    "Keras' own": (
        lambda: keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(BuiltAtOnce(inner()))
        ),
        "optimizer/inner_optimizers/0/inner",
    ),
}


class Pair(treadle.Task):
    """Trains two weights by one optimizer."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.optimizer = make()
        self.a = keras.Variable([1.0, -2.0], name="a")
        self.b = keras.Variable([[3.0]], name="b")

    def train_step(self, batch: Any) -> Any:
        weights = [self.a, self.b]

        def loss() -> Any:
            return sum(ops.sum(ops.square(w)) for w in weights) + 0.0 * ops.mean(batch)

        value, grads = treadle.gradients(loss, weights)
        self.optimizer.apply(grads, weights)
        return {"value": value}


@EXECUTIONS
@pytest.mark.parametrize("name", some(OPTIMIZERS))
def test_optimizers_in_optimizers(name: str, execution: Any, tmp_path: Path) -> None:
    make, path = OPTIMIZERS[name]
    by_hand = Pair(make)
    for batch in BATCHES:
        by_hand.train_step(ops.convert_to_tensor(batch))
    expected = State.discover(by_hand).arrays()
    found = trained(execution, make=lambda: Pair(make))
    assert set(found.arrays) == set(expected)
    assert {f"{path}/momentums/a", f"{path}/momentums/b", f"{path}/iterations"} < set(expected)
    for place, value in expected.items():
        np.testing.assert_allclose(found.arrays[place], value, rtol=1e-5, err_msg=place)
    if execution == "eager":
        return
    with pytest.raises(OSError, match="killed"):
        trained(execution, tmp_path, 3, make=lambda: Pair(make))
    same(trained(execution, tmp_path, make=lambda: Pair(make)), found)


def test_optimizers_in_optimizers_get_more_variables() -> None:
    """Batches of a later form train another weight: the inner optimizer is built again too."""

    class Growing(Pair):
        def train_step(self, batch: Any) -> Any:
            weights = [self.a] if batch.shape[-1] == 1 else [self.a, self.b]
            grads = [ops.convert_to_tensor(w) for w in weights]
            self.optimizer.apply(grads, weights)
            return {"value": ops.mean(batch)}

    given = [np.ones((1, size), "float32") for size in (1, 2, 1, 2)]
    for make in (OPTIMIZERS["lookahead"][0], OPTIMIZERS["built at once"][0]):
        by_hand = Growing(make)
        by_hand.optimizer._inner.build([by_hand.a, by_hand.b])
        keras.optimizers.Optimizer.build(by_hand.optimizer, [by_hand.a, by_hand.b])
        by_hand.optimizer.slow = by_hand.optimizer.add_optimizer_variables(
            [by_hand.a, by_hand.b], "slow"
        )
        for batch in given:
            by_hand.train_step(batch)
        task = Growing(make)
        loop = treadle.Loop(task, console=False)
        loop.fit(given, epochs=1)
        expected = State.discover(by_hand).arrays()
        assert list(loop.view.optimizers) == ["optimizer", "optimizer/inner"]
        assert set(expected) == set(loop.state.arrays())
        for place, value in loop.state.arrays().items():
            np.testing.assert_allclose(value, expected[place], rtol=1e-5, err_msg=place)


# What is not reached


class Hiding(keras.optimizers.SGD):
    """Reads and changes what no attribute reaches in its updates."""

    def __init__(self, hidden: Any) -> None:
        super().__init__(0.1)
        self.hidden = UserDict(part=hidden)

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        used(self.hidden["part"], ops.ones((1, 1)))
        return super().apply(grads, trainable_variables)


class Applied:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.own = optimizer, keras.Variable([[1.0]])

    def use(self, w: Any) -> Any:
        self.optimizer.apply([w], [self.own])
        return w


@EXECUTIONS
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Hiding(keras.Variable(1.0, name="hid")), "train_step uses hid, which no attr"),
        (
            lambda: Lookahead(Hiding(keras.Variable(1.0, name="hid"))),
            "train_step uses hid, which no attribute",
        ),
        (
            lambda: Hiding(Applied(keras.optimizers.SGD(0.1, name="sgd_hid"))),
            r"train_step applies the optimizer 'sgd_hid' \(SGD\), which no attribute of the task",
        ),
        (
            lambda: keras.optimizers.SGD(
                partial(ops.convert_to_tensor, keras.Variable(0.1, name="hid"))
            ),
            "train_step uses hid, which no attribute",
        ),
    ],
    ids=["variable", "in an inner one", "optimizer", "schedule"],
)
def test_updates_are_checked(make: Any, message: str, execution: Any) -> None:
    with pytest.raises(StateError, match=message):
        trained(execution, make=lambda: Pair(make))


def test_constraints_of_updates_are_checked() -> None:
    hidden = keras.Variable(1.0, name="hid")
    task = Pair(inner)
    task.b.constraint = lambda w: w * hidden
    with pytest.raises(StateError, match="train_step uses hid, which no attribute"):
        trained("auto", make=lambda: task)


def test_inner_optimizers_that_scale_the_loss_are_refused() -> None:
    scaling = Lookahead(keras.optimizers.SGD(0.1, loss_scale_factor=2.0))
    with pytest.raises(StateError, match="optimizer/inner scales its loss itself"):
        State.discover(Pair(lambda: scaling))


class Careless(keras.optimizers.SGD):
    """Needs values, which a trace does not have."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if float(ops.convert_to_numpy(ops.sum(variable))) > -100:
            super().update_step(gradient, variable, learning_rate)


@pytest.mark.parametrize("make", [inner, lambda: Lookahead(inner()), lambda: Careless(0.1, 0.5)])
def test_a_dry_run_updates_nothing(make: Any) -> None:
    task = Pair(make)
    loop = treadle.Loop(task, console=False, options=treadle.Options(execution="eager"))
    before = State.discover(task).arrays()
    loop.prepare(source())
    after = loop.state.arrays()
    np.testing.assert_array_equal(after["a"], [1.0, -2.0])
    np.testing.assert_array_equal(after["b"], [[3.0]])
    slots = [value for path, value in after.items() if "/momentums/" in path]
    assert len(slots) == 2 and not any(value.any() for value in slots)
    for path, value in before.items():
        np.testing.assert_array_equal(after[path], value, err_msg=path)


# Python values


class Scaled(keras.losses.Loss):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self.scale * ops.mean(y_true - y_pred, axis=-1)


class Weighted(keras.regularizers.Regularizer):
    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self, x: Any) -> Any:
        return self.weight * ops.sum(x)


class Values(treadle.Task):
    """Computes with numbers of objects, and trains with the learning rate of an inner optimizer."""

    def __init__(self) -> None:
        self.w = keras.Variable([[1.0]], name="w")
        self.loss = Scaled()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones", kernel_regularizer=Weighted())
        self.dense.build((None, 1))
        self.optimizer = Sharp([keras.optimizers.SGD(0.125)])

    def train_step(self, batch: Any) -> Any:
        before = ops.sum(self.w)
        self.optimizer.apply([0.0 * ops.convert_to_tensor(self.w)], [self.w])
        return {
            "loss": self.loss(batch, ops.zeros((2, 1))),
            "penalty": self.dense.kernel_regularizer(self.dense.kernel),
            "rate": (before - ops.sum(self.w)) / (2.0 * before),
        }


def test_python_values_of_nested_objects_are_constants() -> None:
    task = Values()
    loop = treadle.Loop(task, console=False)
    batch = np.ones((2, 1), "float32")
    assert dict(loop.step(batch)) == {"loss": 1.0, "penalty": 1.0, "rate": 0.125}
    task.loss.scale = 3.0
    assert loop.step(batch)["loss"] == 3.0
    task.dense.kernel_regularizer.weight = 5.0
    assert loop.step(batch)["penalty"] == 5.0
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([100], [0.25, 0.0])
    task.optimizer.parts[0].learning_rate = rate
    assert loop.step(batch)["rate"] == 0.25
    rate.values = [0.375, 0.0]
    assert loop.step(batch)["rate"] == 0.375
    task.optimizer.parts[0] = keras.optimizers.SGD(0.0625)
    assert loop.step(batch)["rate"] == 0.0625


# Metrics


class Outer(keras.metrics.Mean):
    """Holds another metric where Keras does not track it."""

    def __init__(self) -> None:
        super().__init__()
        self.record = Record(keras.metrics.Mean())

    def update_state(self, values: Any) -> None:
        super().update_state(values)
        self.record.part.update_state(2.0 * values)


class Measuring(treadle.Task):
    def __init__(self) -> None:
        self.outer = Outer()
        self.loss = Scaled()
        self.loss.measured = keras.metrics.Mean()

    def train_step(self, batch: Any) -> Any:
        self.outer.update_state(ops.mean(batch))
        self.loss.measured.update_state(4.0 * ops.mean(batch))
        return {"loss": self.loss(batch, ops.zeros((2, 1)))}


@EXECUTIONS
def test_metrics_of_other_objects(execution: Any) -> None:
    """One in a loss is one of the task; one in a metric belongs to that, as in Keras."""
    task = Measuring()
    loop = treadle.Loop(task, console=False, options=treadle.Options(execution=execution))
    history = loop.fit(source(), epochs=1)
    assert list(loop.state.metrics) == ["outer", "measured"]
    assert history["outer"][-1] == pytest.approx(2.5)
    assert history["measured"][-1] == pytest.approx(10.0)
    arrays = loop.state.arrays()
    assert arrays["outer/record/part/total"] == pytest.approx(20.0)
    assert arrays["outer/total"] == arrays["loss/measured/total"] == 0.0
