"""Branches and loops of `keras.ops` in steps give what Python's own would, with all their state."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from executions import long_to_compile, once
from keras import ops

import treadle
from tests.dying import Dying
from treadle.errors import GradientError, StepError
from treadle.hooks import Checkpoint

BACKEND = keras.config.backend()
BATCHES = [
    np.full((2, 3), i, "float32") + np.arange(6, dtype="float32").reshape(2, 3) / 3
    for i in range(4)
]
STATE = ("variable", "dropout", "metric", "normalization", "optimizer")


def python_scan(
    f: Any, init: Any, xs: Any = None, length: Any = None, reverse: bool = False
) -> Any:
    count = len(xs) if length is None else length
    found: list[Any] = [None] * count
    for i in range(count)[::-1] if reverse else range(count):
        init, y = f(init, None if xs is None else xs[i])
        found[i] = None if y is None else keras.tree.map_structure(ops.copy, y)
    if found[0] is None:
        return init, None
    return init, keras.tree.map_structure(lambda *ys: ops.stack(ys), *found)


def python_while(
    cond: Any, body: Any, loop_vars: Any, maximum_iterations: int | None = None
) -> Any:
    count = 0
    while bool(cond(*loop_vars)) and (maximum_iterations is None or count < maximum_iterations):
        loop_vars, count = body(*loop_vars), count + 1
    return loop_vars


def python_fori(lower: int, upper: int, body: Any, value: Any) -> Any:
    for i in range(lower, upper):
        value = body(i, value)
    return value


PYTHON: Any = SimpleNamespace(  # its conditions depend on arrays of NumPy
    mean=np.mean,
    int=int,
    cond=lambda p, then, otherwise: then() if bool(p) else otherwise(),
    switch=lambda i, branches, *x: branches[min(int(i), len(branches) - 1)](*x),
    map=lambda f, xs: python_scan(lambda _, x: (None, f(x)), None, xs)[1],
    scan=python_scan,
    while_loop=python_while,
    fori_loop=python_fori,
)


def conditional(flow: Any, act: Any, x: Any) -> Any:
    return flow.cond(flow.mean(x) > 2.0, lambda: act(x), lambda: ops.zeros(()))


def switched(flow: Any, act: Any, x: Any) -> Any:
    branches = [lambda a: ops.zeros(()), act, lambda a: act(2.0 * a)]
    return flow.switch(flow.int(flow.mean(x)), branches, x)  # 0, 1, 2, 3 (as 2)


def mapped(flow: Any, act: Any, x: Any) -> Any:
    return ops.sum(flow.map(lambda row: act(row[None]), x) * ops.array([1.0, 2.0]))


def scanned(flow: Any, act: Any, x: Any) -> Any:
    def f(carry: Any, row: Any) -> Any:
        found = act(row[None])
        return carry * 0.5 + found, {"z": found, "a": (row, carry)}

    carry, rows = flow.scan(f, ops.ones(()), x, reverse=True)
    return carry + ops.sum(rows["z"] * ops.array([1.0, 2.0])) + ops.sum(rows["a"][1] ** 2)


def counted(flow: Any, act: Any, x: Any) -> Any:
    def body(i: Any, total: Any) -> Any:
        return total + act(x) * ops.cast(i, "float32")

    return flow.fori_loop(1, 4, body, ops.zeros(()))


def repeated(flow: Any, act: Any, x: Any) -> Any:
    limit = flow.int(flow.mean(x))  # 0 in the first batch
    body = lambda i, total: (i + 1, total + act(x))  # noqa: E731
    start = (0, ops.zeros(()))
    first = flow.while_loop(lambda i, _: i < limit, body, start)[1]
    return first + flow.while_loop(lambda i, _: i < 9, body, start, maximum_iterations=2)[1]


def nested(flow: Any, act: Any, x: Any) -> Any:
    def f(carry: Any, row: Any) -> Any:
        found = flow.cond(row[0] > 1.5, lambda: act(row[None]), lambda: ops.zeros(()))
        return carry + found, None

    return flow.scan(f, ops.zeros(()), x)[0]


KERAS: Any = SimpleNamespace(
    mean=ops.mean,
    int=lambda x: ops.cast(x, "int32"),
    **{name: getattr(ops, name) for name in ("cond", "switch", "map", "scan")},
    **{name: getattr(ops, name) for name in ("while_loop", "fori_loop")},
)

PROGRAMS = (conditional, switched, mapped, scanned, counted, repeated, nested)


class Stateful(treadle.Task):
    """Changes state of these kinds inside of a branch or a loop."""

    def __init__(self, program: Any, kinds: Any = STATE, flow: Any = KERAS) -> None:
        self.program, self.kinds, self.flow = program, tuple(kinds), flow
        self.v = keras.Variable(0.5, trainable=False)
        self.w = keras.Variable(np.ones(3, "float32"))
        self.average = keras.metrics.Mean()
        self.dropout = keras.layers.Dropout(0.5, seed=3)
        self.normalization = keras.layers.BatchNormalization()
        self.normalization.build((None, 3))
        self.optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        self.optimizer.build([self.w])

    def act(self, x: Any) -> Any:
        x = ops.convert_to_tensor(x)
        found = ops.mean(x * self.w)
        if "variable" in self.kinds:
            self.v.assign(self.v * 0.5 + found)
            found = found + self.v
        if "dropout" in self.kinds:
            found = found + ops.sum(self.dropout(x, training=True))
        if "metric" in self.kinds:
            self.average.update_state(found)
        if "normalization" in self.kinds:
            found = found + ops.sum(self.normalization(x, training=True) ** 2)
        if "optimizer" in self.kinds:
            _, grads = treadle.gradients(lambda: ops.mean((self.w * x) ** 2), [self.w])
            self.optimizer.apply(grads, [self.w])
        return found

    def train_step(self, x: Any) -> Any:
        found = self.program(self.flow, self.act, x)
        return {"found": found, "now": self.v + ops.sum(self.w)}


def by_hand(task: Stateful) -> tuple[list[float], dict[str, Any]]:
    found = [float(ops.stop_gradient(task.train_step(x)["found"])) for x in BATCHES]
    return found, treadle.Loop(task, console=False).state.arrays()


def trained(task: Stateful, execution: Any, **how: Any) -> tuple[list[float], dict[str, Any]]:
    options = treadle.Options(execution=execution)
    with treadle.Loop(task, console=False, options=options, **how) as loop:
        return loop.fit(BATCHES, epochs=1).steps("found"), loop.state.arrays()


def check(program: Any, kinds: Any, execution: str) -> None:
    found, state = trained(Stateful(program, kinds), execution)
    values, expected = by_hand(Stateful(program, kinds, PYTHON))
    np.testing.assert_allclose(found, values, rtol=2e-5)
    for path, value in expected.items():
        if not path.startswith("average"):  # a mean of the epoch, which is reset
            np.testing.assert_allclose(state[path], value, rtol=2e-5, atol=1e-6, err_msg=path)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(x, marks=() if x in (nested, repeated, switched) else long_to_compile)
        for x in PROGRAMS
    ],
)
def test_all_kinds_of_state_are_carried(program: Any) -> None:
    check(program, STATE, "auto")


@pytest.mark.parametrize("program", [pytest.param(scanned, marks=long_to_compile), switched])
def test_eager_steps_carry_them_too(program: Any) -> None:
    check(program, STATE, "eager")


def test_metrics_in_loops_count_every_call() -> None:
    task = Stateful(counted, ["metric"])
    with treadle.Loop(task, console=False) as loop:
        means = loop.fit(BATCHES, epochs=1).last["average"]
    np.testing.assert_allclose(means, np.mean(BATCHES), rtol=1e-5)


class Differentiated(Stateful):
    """Runs the program inside of an objective."""

    def train_step(self, x: Any) -> Any:
        loss, (slope,) = treadle.gradients(
            lambda: self.program(self.flow, self.act, x),
            [self.w],
            unreached="zeros",  # on PyTorch, a branch that is not taken is not seen
        )
        self.w.assign_sub(0.01 * slope)
        return {"found": ops.sum(slope) + loss}


@long_to_compile
def test_an_interrupted_run_ends_the_same(tmp_path: Path) -> None:
    expected = trained(Stateful(scanned), "auto")
    hooks = [Checkpoint(every="1 step"), Dying(2)]
    with pytest.raises(OSError, match="killed"):
        trained(Stateful(scanned), "auto", directory=tmp_path, hooks=hooks)
    _, state = trained(Stateful(scanned), "auto", directory=tmp_path, hooks=hooks[:1])
    for path, value in expected[1].items():
        np.testing.assert_array_equal(state[path], value, err_msg=path)


@pytest.mark.parametrize(
    "program",
    [
        scanned,
        pytest.param(nested, marks=long_to_compile),
        *(
            pytest.param(x, marks=(pytest.mark.long, once))
            for x in PROGRAMS
            if x not in (scanned, nested)
        ),
    ],
)
def test_gradients_go_through_branches_and_loops(program: Any) -> None:
    if BACKEND == "jax" and program is repeated:
        pytest.skip("JAX does not differentiate loops of unknown length")
    kinds = STATE[:-1]
    found, state = trained(Differentiated(program, kinds), "auto")
    values, expected = by_hand(Differentiated(program, kinds, PYTHON))
    np.testing.assert_allclose(found, values, rtol=2e-5)
    np.testing.assert_allclose(state["w"], expected["w"], rtol=2e-5)


class Reassigned(treadle.Task):
    """Assigns a weight inside of a loop that is differentiated, as spectral normalization does."""

    def __init__(self) -> None:
        self.w = keras.Variable(2.0)

    def train_step(self, x: Any) -> Any:
        def f(carry: Any, row: Any) -> Any:
            self.w.assign(self.w * 0.5)
            return carry + self.w * row[0], None

        loss, (slope,) = treadle.gradients(lambda: ops.scan(f, ops.zeros(()), x)[0], [self.w])
        return {"found": loss + 10.0 * slope}


def test_a_weight_assigned_in_a_loop_keeps_its_gradient() -> None:
    # By hand: w is halved twice, the loss is w1 x1 + w2 x2, and its slope at w is x1 + x2.
    with treadle.Loop(Reassigned(), console=False) as loop:
        found = loop.fit([BATCHES[1]], epochs=1).steps("found")
    np.testing.assert_allclose(found, [1.0 * 1.0 + 0.5 * 2.0 + 10.0 * 3.0], rtol=1e-6)


def steps_of(function: Callable[[Any], Any], execution: Any = "auto", **state: Any) -> Any:
    options = treadle.Options(execution=execution)
    with treadle.Loop(treadle.task(function, **state), console=False, options=options) as loop:
        return loop.fit(BATCHES, epochs=1).steps("found")


def assigning(flow: Callable[[Any, Any], Any]) -> Any:
    v = keras.Variable(0.0, trainable=False)

    def step(x: Any) -> Any:
        def touch(y: Any) -> Any:
            v.assign_add(1.0)
            return y

        return {"found": ops.sum(flow(touch, x))}

    return steps_of(step, v=v)


def test_vectorized_map_names_what_it_cannot_carry() -> None:
    with pytest.raises(StepError) as caught:
        assigning(lambda touch, x: ops.vectorized_map(touch, x))
    assert str(caught.value).startswith(
        "a function of keras.ops.vectorized_map assigns v, which runs for all rows at once: use "
        "treadle.for_each or keras.ops.map, which run it for one row after another"
    )


def test_associative_scan_names_what_it_cannot_carry() -> None:
    with pytest.raises(StepError) as caught:
        assigning(lambda touch, x: ops.associative_scan(lambda a, b: touch(a + b), x))
    assert str(caught.value).startswith(
        "the function of keras.ops.associative_scan assigns v, which runs for many pairs at once: "
        "use keras.ops.scan, which runs one after another"
    )


def test_the_condition_of_a_loop_assigns_nothing() -> None:
    with pytest.raises(StepError) as caught:
        assigning(
            lambda touch, x: ops.while_loop(lambda i: touch(i) < 3, lambda i: (i + 1,), (0,))[0]
        )
    assert str(caught.value).startswith(
        "the condition of keras.ops.while_loop assigns v, which only its body can: assign "
        "variables and draw random numbers there"
    )


def test_a_scan_without_a_length_is_rejected() -> None:
    with pytest.raises(StepError) as caught:
        assigning(lambda touch, x: ops.scan(lambda c, _: (c, None), x)[0])
    assert str(caught.value).startswith(
        "keras.ops.scan got neither xs nor length: pass one of them"
    )


def test_bodies_that_never_run_are_found_by_the_dry_run() -> None:
    v = keras.Variable(0.0, trainable=False)

    def step(x: Any) -> Any:
        def body(i: Any, y: Any = None) -> Any:
            v.assign_add(1.0)
            return i if y is None else y

        nothing = ops.cast(ops.mean(x) * 0, "int32")
        ops.while_loop(lambda i: i < nothing, lambda i: (body(i + 1),), (0,))
        ops.fori_loop(0, 0, body, ops.zeros(()))
        ops.map(body, x[:0])
        return {"found": ops.sum(ops.scan(lambda c, row: (body(c), row), 0.0, x[:0])[1])}

    assert steps_of(step, v=v).tolist() == [0.0] * 4
    assert float(v) == 0.0


def test_lengths_unrolling_and_empty_structures_are_as_in_keras() -> None:
    def step(x: Any) -> Any:
        count = ops.scan(lambda c, _: (c + 1.0, None), 0.0, length=3, unroll=2)[0]
        total, _ = ops.scan(lambda c, row: (c + ops.sum(row["a"]), None), 0.0, {"a": x, "b": x})
        (last,) = ops.while_loop(lambda i: i < 5, lambda i: [i + 2], [0])
        single = ops.while_loop(lambda i: i < 5, lambda i: i + 2, 0)
        several = [ops.cast(i, "float32") for i in (last, single)]
        return {"found": total + 100.0 * count + 1000.0 * (several[0] + several[1])}

    found = steps_of(step)
    np.testing.assert_allclose(found, [x.sum() + 300 + 12000 for x in BATCHES], rtol=1e-6)


def test_layers_with_given_state_have_it_in_branches() -> None:
    layer = keras.layers.Dense(3, kernel_initializer="ones")
    layer.build((None, 3))

    class Branching(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return ops.cond(ops.mean(x) > -1.0, lambda: layer(x), lambda: x)

    outer = Branching()
    outer.inner = layer
    outer.build((None, 3))

    def step(x: Any) -> Any:
        given = [2.0 * v for v in outer.trainable_variables]
        found, _ = outer.stateless_call(given, [], x)
        return {"found": ops.sum(found)}

    found = steps_of(step, outer=outer)
    np.testing.assert_allclose(found, [6.0 * x.sum() for x in BATCHES], rtol=1e-5)


class PerExample(treadle.Task):
    """Gradients of each row, by a loop or for all rows at once."""

    def __init__(self, how: str) -> None:
        self.map: Any = {"loop": treadle.for_each, "map": ops.vectorized_map}[how]
        self.model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(2, "tanh"), keras.layers.Dense(1)]
        )
        rng = np.random.default_rng(0)
        self.model.set_weights([rng.normal(size=v.shape) for v in self.model.weights])

    def loss(self, row: Any) -> Any:
        return ops.mean(self.model(row[None]) ** 2)

    def own(self, row: Any) -> Any:
        loss, grads = treadle.gradients(lambda: self.loss(row), self.model)
        return loss, [ops.sum(g) for g in grads]

    def penalized(self, row: Any) -> Any:
        def objective() -> Any:
            _, (slope,) = treadle.input_gradients(self.loss, row)
            return ops.sum(slope**2), {"size": ops.sum(slope)}

        (loss, aux), grads = treadle.gradients(objective, self.model, unreached="zeros")
        return loss + aux["size"], [ops.sum(g) for g in grads]

    def two(self, row: Any) -> Any:
        first, second = self.model.trainable_variables[:2]

        def objective() -> Any:
            loss = self.loss(row)
            return {"a": loss, "b": treadle.weighted(loss**2, 3.0)}

        losses, grads = treadle.gradients(objective, {"a": [first], "b": [first, second]})
        return losses["a"], [ops.sum(g) for part in grads.values() for g in part]

    def train_step(self, x: Any) -> Any:
        found: dict[str, Any] = {}
        for function in (self.own, self.penalized, self.two):
            loss, grads = self.map(function, x)
            found[function.__name__] = ops.sum(loss)
            found |= {f"{function.__name__}_{i}": ops.sum(g**2) for i, g in enumerate(grads)}

        def around() -> Any:
            return ops.sum(self.map(self.own, x)[0])

        loss, grads = treadle.gradients(around, self.model)
        return {**found, "around": loss + ops.sum(grads[0])}


@long_to_compile
def test_gradients_inside_vectorized_map_are_those_of_each_row() -> None:
    found: dict[str, Any] = {}
    for how in ("loop", "map"):
        with treadle.Loop(PerExample(how), console=False) as loop:
            found[how] = loop.fit(BATCHES[:2], epochs=1)
    names = list(found["loop"].last)
    assert len(names) > 10
    for name in names:
        if name not in ("step", "epoch"):
            a, b = (found[how].steps(name) for how in ("loop", "map"))
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-6, err_msg=name)


def test_an_unreached_variable_is_an_error_inside_vectorized_map() -> None:
    w = keras.Variable(1.0)

    def step(x: Any) -> Any:
        found = ops.vectorized_map(lambda r: treadle.gradients(lambda: ops.sum(r), [w])[0], x)
        return {"found": ops.sum(found)}

    with pytest.raises(GradientError, match="no gradient for w: the loss does not depend on it"):
        steps_of(step, w=w)


class Slots(treadle.Task):
    """Assigns a slot of its optimizer and applies the optimizer, in each row of a batch."""

    def __init__(self, loop: str) -> None:
        self.loop, self.w = loop, keras.Variable(1.0)
        self.optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        self.optimizer.build([self.w])
        self.mean = keras.metrics.Mean(name="mean")

    def row(self, x: Any) -> None:
        slot = self.optimizer.momentums[0]
        slot.assign(slot * 0.5 + ops.mean(x))
        self.optimizer.apply([ops.mean(x)], [self.w])
        self.mean.update_state(ops.mean(x))

    def train_step(self, batch: Any) -> Any:
        if self.loop == "for_each":
            treadle.for_each(self.row, batch)
        elif self.loop == "scan":
            ops.scan(lambda carry, x: (carry, self.row(x)), ops.zeros(()), batch)
        else:
            for i in range(2):
                self.row(batch[i])
        return {"w": self.w + 0.0, "slot": self.optimizer.momentums[0] + 0.0}


@pytest.mark.parametrize("loop", ["for_each", pytest.param("scan", marks=long_to_compile)])
def test_an_optimizer_is_applied_after_its_slot_was_assigned(loop: str) -> None:
    found: list[Any] = []
    for name in (loop, "python"):
        with treadle.Loop(Slots(name), console=False) as trained:
            trained.fit(BATCHES, epochs=1)
            history = trained.history
            found.append([*history.steps("w"), *history.steps("slot"), *history["mean"]])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)
