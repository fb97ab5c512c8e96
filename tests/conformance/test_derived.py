"""State that layers compute from their variables, and arrays that objects of Keras hold."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from executions import EXECUTIONS, long_to_compile
from keras import ops

import treadle
from tests.dying import killed
from treadle import data
from treadle.doctor import replay
from treadle.errors import StepError
from treadle.hooks import Checkpoint, NonFinite
from treadle.steps.derived import is_derived

ROWS, BATCH = 16, 4
X = np.random.default_rng(0).normal(5.0, 3.0, (ROWS, 3)).astype("float32")


class Whitening(keras.layers.Layer):
    """A layer of one's own, whose derived state is a matrix, a list, and what is in a list."""

    def build(self, shape: Any) -> None:
        self.center = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)
        self.spread = self.add_weight(shape=(shape[-1],), initializer="ones", trainable=False)
        self.finalize_state()

    def adapt(self, x: Any) -> None:
        self.center.assign(x.mean(0))
        self.spread.assign(x.std(0))
        self.finalize_state()

    def finalize_state(self) -> None:
        self._matrix = ops.diag(1.0 / ops.convert_to_tensor(self.spread))
        self.parts = [ops.convert_to_tensor(self.center)]

    def call(self, x: Any) -> Any:
        return (x - self.parts[0]) @ self._matrix


@dataclass
class Shift:
    """An object that is no layer."""

    by: Any
    doubled: Any = None

    def finalize_state(self) -> None:
        self.doubled = 2.0 * ops.convert_to_tensor(self.by)


class Scaled(treadle.Task):
    """Predicts with two layers and an object that have derived state."""

    def __init__(self) -> None:
        layers = [keras.layers.Normalization(), Whitening()]
        for layer in layers:
            layer.build((None, 3))
        self.model = keras.Sequential([keras.Input((3,)), *layers])
        self.target = treadle.frozen_copy(self.model)
        self.shift = Shift(keras.Variable(0.0))
        self.w = keras.Variable(1.0)
        self.optimizer = keras.optimizers.SGD(0.01)

    def adapt(self, x: Any) -> None:
        first, second = self.model.layers
        first.adapt(x)
        second.adapt(x * np.float32(2.0) + np.float32(1.0))  # not what `first` makes of it

    def train_step(self, batch: Any) -> Any:
        loss = treadle.minimize(
            lambda: ops.mean((self.w * self.model(batch)) ** 2), [self.w], self.optimizer
        )
        before = ops.mean(self.target(batch))
        odd = ops.equal(treadle.step() % 2, 1)
        treadle.cond(odd, lambda: treadle.blend(self.target, self.model, 1.0), lambda: None)
        self.shift.by.assign(self.shift.by + 1.0)
        values = {"online": self.model(batch), "before": before, "after": self.target(batch)}
        means = {name: ops.mean(value) for name, value in values.items()}
        return {"loss": loss, "shift": self.shift.doubled, **means}

    def predict_step(self, batch: Any) -> Any:
        return self.model(batch) + self.shift.doubled


def expected(x: Any, adapted_to: Any) -> Any:
    once = (x - adapted_to.mean(0)) / adapted_to.std(0)
    other = adapted_to * 2.0 + 1.0
    return (once - other.mean(0)) / other.std(0)


def assert_predicts(task: Any, adapted_to: Any, loop: Any = None) -> None:
    """Check the predictions, compiled and as Python, against NumPy."""
    wanted = expected(X, adapted_to)
    if loop is None:
        loop = treadle.Loop(task, console=False)
    found = loop.predict(source())
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    plain = keras.ops.convert_to_numpy(task.model(X))
    np.testing.assert_allclose(plain, wanted, rtol=1e-5, atol=1e-5)


def source() -> Any:
    return data.from_arrays(X, batch_size=BATCH)


def adapted() -> Scaled:
    task = Scaled()
    task.adapt(X)
    return task


def trained(directory: Path) -> None:
    with treadle.Loop(adapted(), directory, console=False) as loop:
        loop.fit(source(), steps=1)


def by_blend(task: Scaled, tmp_path: Path) -> None:
    treadle.blend(task.model, adapted().model, 1.0)


def by_blend_of_variables(task: Scaled, tmp_path: Path) -> None:
    treadle.blend(task.model.variables, adapted().model.variables, 1.0)


def by_frozen_copy(task: Scaled, tmp_path: Path) -> None:
    task.model = treadle.frozen_copy(adapted().model)


def by_warm_start(task: Scaled, tmp_path: Path) -> None:
    trained(tmp_path)
    treadle.warm_start(task, tmp_path, only=["model/*"])


@pytest.mark.parametrize(
    "operation", [by_blend, by_blend_of_variables, by_frozen_copy, by_warm_start]
)
def test_derived_state_follows_what_assigns_variables(
    operation: Callable[[Scaled, Path], None], tmp_path: Path
) -> None:
    task = Scaled()
    assert is_derived(task.model.layers[0]) and is_derived(task.model.layers[1])
    operation(task, tmp_path)
    assert_predicts(task, X)


def test_derived_state_follows_an_assignment_of_the_state() -> None:
    task = Scaled()
    loop = treadle.Loop(task, console=False)
    fresh = loop.view.snapshot()
    loop.predict(source())  # compiled before
    task.adapt(X)
    assert_predicts(task, X, loop)  # by the program that is compiled already
    values, snapshot = loop.state.arrays(), loop.view.snapshot()
    task.adapt(2 * X)
    assert_predicts(task, 2 * X, loop)
    loop.state.assign(values)
    assert_predicts(task, X, loop)
    loop.view.restore(fresh)
    np.testing.assert_allclose(loop.predict(source()), X, rtol=1e-5)
    loop.view.restore(snapshot)
    assert_predicts(task, X, loop)


def means(adapted_to: Any, batches: range, updated: range) -> Any:
    """Return what steps log, before and after the target becomes the online model."""
    found = []
    target = None
    for i in batches:
        batch = X[i * BATCH : (i + 1) * BATCH]
        online = expected(batch, adapted_to(i))
        before = batch if target is None else expected(batch, target)
        if i in updated:
            target = adapted_to(i)
        after = batch if target is None else expected(batch, target)
        found.append([online.mean(), before.mean(), after.mean(), 2.0 * i])
    return np.asarray(found)


@EXECUTIONS
@pytest.mark.parametrize("window", [1, 4])
def test_steps_compute_derived_state_from_their_variables(execution: Any, window: int) -> None:
    def adapting(loop: Any) -> None:
        loop.task.adapt(3 * X)

    task = adapted()
    options = treadle.Options(execution=execution, window=window)
    hooks = [treadle.at("2 steps", adapting)] if window == 1 else []
    with treadle.Loop(task, hooks=hooks, options=options, console=False) as loop:
        history = loop.fit(list(X.reshape(4, 4, 3)), epochs=1)
        found = [[row[n] for n in ("online", "before", "after", "shift")] for row in rows(history)]
        changed = (lambda i: X if i < 2 else 3 * X) if window == 1 else lambda i: X
        np.testing.assert_allclose(found, means(changed, range(4), range(1, 4, 2)), atol=1e-5)
        assert "note" not in history.names()
        # Outside of the steps, derived state is that of the variables too.
        plain = keras.ops.convert_to_numpy(task.target(X))
        np.testing.assert_allclose(plain, expected(X, changed(3)), rtol=1e-4, atol=1e-5)
        assert float(keras.ops.convert_to_numpy(task.shift.doubled)) == 8.0
        if window == 4:  # between two calls
            task.adapt(3 * X)
            history = loop.fit([X[:4]], epochs=1)
            assert rows(history)[-1]["online"] == pytest.approx(
                expected(X[:4], 3 * X).mean(), abs=1e-5
            )


def rows(history: Any) -> list[dict[str, float]]:
    names = history.step_names
    return [
        dict(zip(names, row, strict=True)) for row in zip(*map(history.steps, names), strict=True)
    ]


def adapt_late(loop: Any) -> None:
    loop.task.adapt(3 * X)


@long_to_compile
def test_a_run_resumes_whose_task_is_not_adapted_yet(tmp_path: Path) -> None:
    def run(directory: str, *hooks: Any, adapt: bool = True) -> Any:
        task = adapted() if adapt else Scaled()
        every = [treadle.at("3 steps", adapt_late), Checkpoint(every="1 step"), *hooks]
        with treadle.Loop(task, tmp_path / directory, hooks=every, console=False) as loop:
            loop.fit(source(), epochs=2)
            assert_predicts_now(task, 3 * X, loop)
            return loop.history

    whole = run("whole")
    for step in (2, 5):  # before and after the hook has adapted the layers
        with pytest.raises(OSError, match="killed"):
            run(f"cut{step}", treadle.at(f"{step} steps", killed))
        assert rows(run(f"cut{step}", adapt=False)) == rows(whole)
    run("whole", adapt=False)  # finished
    found = replay(
        adapted(), source(), tmp_path / "whole", 6, hooks=[treadle.at("3 steps", adapt_late)]
    )
    assert found.agreement.exact and found.values["online"] == rows(whole)[5]["online"]


def assert_predicts_now(task: Scaled, adapted_to: Any, loop: Any) -> None:
    task.shift.by.assign(0.0)
    assert_predicts(task, adapted_to, loop)


def test_a_rollback_computes_derived_state_again(tmp_path: Path) -> None:
    batches = list(np.repeat(X[:4][None], 6, axis=0))
    batches[4] = np.full_like(batches[4], np.nan)
    hooks = [treadle.at("3 steps", adapt_late), NonFinite("rollback"), Checkpoint(every="2 steps")]
    with treadle.Loop(adapted(), tmp_path, hooks=hooks, console=False) as loop:
        history = loop.fit(batches, epochs=1)
        assert_predicts_now(loop.task, 3 * X, loop)
    found = [row["online"] for row in rows(history)]
    first, second = expected(X[:4], X).mean(), expected(X[:4], 3 * X).mean()
    np.testing.assert_allclose(found, [first] * 3 + [second] * 2, atol=1e-5)


def test_a_layer_that_a_step_builds_has_its_derived_state() -> None:
    class Late(treadle.Task):
        def __init__(self) -> None:
            self.model = keras.Sequential([keras.layers.Normalization(), Whitening()])

        def predict_step(self, batch: Any) -> Any:
            return self.model(batch)

    loop = treadle.Loop(Late(), console=False)
    np.testing.assert_allclose(loop.predict(source()), X, rtol=1e-5)
    plain = keras.ops.convert_to_numpy(loop.task.model(X))
    np.testing.assert_allclose(plain, X, rtol=1e-5)


class Valued(keras.layers.Layer):
    def build(self, shape: Any) -> None:
        self.w = self.add_weight(shape=(), initializer="ones")

    def finalize_state(self) -> None:
        self.scale = float(keras.ops.convert_to_numpy(self.w))

    def call(self, x: Any) -> Any:
        return x * self.scale


def test_derived_state_that_needs_values_is_an_error() -> None:
    layer = Valued()
    layer.build((None, 3))
    task = Scaled()
    task.model = layer
    message = (
        r"model\.finalize_state\(\) \(Valued\) failed in a step with \w+: .*\. It must compute "
        r"from variables with keras\.ops, since it is compiled with the step"
    )
    loop = treadle.Loop(task, console=False)
    if keras.backend.backend() == "torch":  # where such a step runs as Python
        layer.w.assign(2.0)
        np.testing.assert_allclose(loop.predict(source()), 2 * X, rtol=1e-6)
    else:
        with pytest.raises(StepError, match=message):
            loop.predict(source())


@dataclass(slots=True)
class Slotted:
    variable: Any

    def finalize_state(self) -> None:
        self.variable = None


def test_derived_state_in_slots_is_an_error() -> None:
    with pytest.raises(StepError, match=r"Slotted has finalize_state.*without slots"):
        is_derived(Slotted(keras.Variable(0.0)))


def test_layers_that_adapt_without_variables_are_left_alone() -> None:
    bins = keras.layers.Discretization(num_bins=3)
    assert not is_derived(bins) and bins.bin_boundaries is None
    bins.adapt(np.arange(9.0))
    boundaries = bins.bin_boundaries
    assert not is_derived(bins) and bins.bin_boundaries is boundaries
    assert not is_derived(Whitening())  # not built
    assert not is_derived(Whitening)


class Table(keras.layers.Layer):
    """A layer with arrays that are no variables; it keeps its last output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        make = np.asarray if kind == "numpy" else ops.convert_to_tensor
        self._table = make(np.ones(3, "float32"))
        self.tables = {"a": [make(np.ones(3, "float32"))], "b": make(np.ones(3, "float32"))}
        self.output_kept: Any = None

    def call(self, x: Any) -> Any:
        x = ops.multiply(ops.multiply(x, self._table), self.tables["b"])
        self.output_kept = ops.add(x, self.tables["a"][0])
        return self.output_kept


class Loss(keras.losses.Loss):
    def __init__(self) -> None:
        super().__init__()
        self.weights = ops.ones(3)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.mean((y_true - y_pred) * self.weights, axis=-1)


class Tabular(treadle.Task):
    def __init__(self, kind: str) -> None:
        self.model = keras.Sequential([keras.Input((3,)), Table(kind)])
        self.loss = Loss()
        self.w = keras.Variable(1.0)

    def train_step(self, batch: Any) -> Any:
        return {"loss": -self.loss(ops.zeros_like(batch), self.model(batch))}

    def eval_step(self, batch: Any) -> Any:
        return {"mean": ops.mean(self.model(batch))}


@long_to_compile
@pytest.mark.parametrize("kind", ["numpy", "tensor"])
def test_arrays_of_layers_and_losses_are_constants_that_are_compared(kind: str) -> None:
    make = np.asarray if kind == "numpy" else ops.convert_to_tensor
    task = Tabular(kind)
    layer, ones = task.model.layers[-1], np.ones((4, 3), "float32")

    def change(loop: Any) -> None:
        step = loop.progress.step
        if step == 1:
            layer._table = make(np.full(3, 2, "float32"))
        elif step == 2:
            layer.tables["a"][0] = make(np.full(3, 3, "float32"))
        elif step == 3:
            task.loss.weights = 2.0 * ops.ones(3)
        elif step == 4 and kind == "numpy":
            layer._table[:] = 4  # in place

    hooks = [treadle.every("1 step", change)]
    with treadle.Loop(task, hooks=hooks, console=False) as loop:
        history = loop.fit([ones] * 5, [ones], steps=5, validate_every="1 step")
        programs = loop.history["note"]
    in_place = kind == "numpy"
    last = 14.0 if in_place else 10.0
    assert list(history.steps("loss")) == [2.0, 3.0, 5.0, 10.0, last]
    assert history["val_mean"][:5] == [2.0, 3.0, 5.0, 5.0, last / 2]
    where = ["layers/0/_table", "layers/0/tables/a/0", "loss/weights", "layers/0/_table"]
    assert len(programs) == (4 if in_place else 3)  # its last output is none of them
    for note, path in zip(programs, where, strict=False):
        assert note.startswith("recompiled because ") and path in note
