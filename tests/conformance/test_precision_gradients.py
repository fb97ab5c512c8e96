"""Half precision: true gradients where float16 is too coarse for them."""

from typing import Any

import keras
import numpy as np
import pytest
from classifier import FEATURES, ROWS, head
from executions import long_to_compile
from half_precision import (
    BATCHES,
    EXECUTIONS,
    clean,  # noqa: F401 - a fixture that every test uses
    full,
    half,
)
from keras import ops

import treadle
from treadle.testing import run_steps
from treadle.testing.trace import same_bits


class Gradients(treadle.Task):
    """Keeps the gradients of its loss, which float16 is too coarse for, where they can be seen."""

    size = 1e-8

    def __init__(self) -> None:
        self.model = keras.Sequential(
            [keras.Input((FEATURES,)), keras.layers.Dense(5, activation="tanh"), head()]
        )
        self.found = [keras.Variable(ops.zeros(v.shape)) for v in self.model.trainable_variables]

    def loss(self, x: Any) -> Any:
        return ops.mean(ops.cast(self.model(x), "float32") ** 2) * self.size

    def differentiated(self, x: Any) -> Any:
        return treadle.gradients(lambda: self.loss(x), self.model.trainable_variables)

    def train_step(self, batch: Any) -> Any:
        loss, grads = self.differentiated(batch[0])
        for variable, gradient in zip(self.found, grads, strict=True):
            variable.assign(gradient)
        return {"loss": loss}


class SecondDerivatives(Gradients):
    """The loss after an inner gradient step (MAML): differentiated through the inner gradient."""

    size = 1e-6  # both derivatives are scaled by a root of the scale

    def differentiated(self, x: Any) -> Any:
        variables = self.model.trainable_variables

        def objective() -> Any:
            _, inner = treadle.gradients(lambda: self.loss(x), variables)
            rate = 0.5 / self.size
            adapted = [
                ops.convert_to_tensor(v) - rate * g for v, g in zip(variables, inner, strict=True)
            ]
            with treadle.substituted(variables, adapted):
                return self.loss(x)

        return treadle.gradients(objective, variables)


class Penalty(Gradients):
    """The size of the slope alone: its gradient is a second derivative and nothing else."""

    size = 1e-6

    def differentiated(self, x: Any) -> Any:
        def objective() -> Any:
            _, (slope,) = treadle.input_gradients(self.loss, x)
            return ops.sum((slope / self.size) ** 2) * self.size

        return treadle.gradients(objective, self.model.trainable_variables, unreached="zeros")


class InBranches(Gradients):
    """Gradients in a mapped function in a branch."""

    def differentiated(self, x: Any) -> Any:
        def each(x: Any) -> Any:
            return Gradients.differentiated(self, x[None])

        def rows() -> Any:
            losses, grads = treadle.for_each(each, x)
            return ops.mean(losses), [ops.mean(g, axis=0) for g in grads]

        def nothing() -> Any:
            return ops.zeros(()), [ops.zeros(v.shape) for v in self.found]

        return treadle.cond(treadle.step() < 5, rows, nothing)


DIFFERENTIATED = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(SecondDerivatives, id="inner-step"),
        pytest.param(InBranches, id="in-branches"),
        pytest.param(Gradients, id="plain", marks=long_to_compile),
        pytest.param(Penalty, id="penalty", marks=long_to_compile),
    ],
)


def error(found: Any, right: Any) -> float:
    """How far gradients are off, relative to the largest number."""
    return max(
        float(np.abs(np.asarray(a) - b).max() / np.abs(b).max())
        for a, b in zip(found, right, strict=True)
        if np.abs(b).max() > 0
    )


def found_by(trace: Any) -> list[Any]:
    found = [x for path, x in trace.state.items() if path.startswith("found/")]
    assert found
    return found


@long_to_compile
@DIFFERENTIATED
@EXECUTIONS
def test_gradients_are_true_where_float16_has_none(kind: Any, options: Any) -> None:
    narrow, wide = (run_steps(make(kind), BATCHES[:1], options) for make in (half, full))
    assert narrow.values["undone"].tolist() == [0.0]
    assert error(found_by(narrow), found_by(wide)) < 0.03


@DIFFERENTIATED
def test_without_a_scale_they_would_be_wrong(kind: Any) -> None:
    """Outside of a step nothing is scaled."""
    narrow, wide = (make(kind).differentiated(tensor(BATCHES[0][0]))[1] for make in (half, full))
    assert error(arrays_of(narrow), arrays_of(wide)) > 0.3


def arrays_of(tensors: Any) -> list[Any]:
    return [ops.convert_to_numpy(x) for x in tensors]


def tensor(array: Any) -> Any:
    return ops.convert_to_tensor(array)


@long_to_compile
def test_several_losses_and_inputs_in_float16() -> None:
    class Several(Gradients):
        def differentiated(self, x: Any) -> Any:
            variables = self.model.trainable_variables
            losses, grads = treadle.gradients(
                lambda: {"a": self.loss(x), "b": 2 * self.loss(x)},
                {"a": variables[:2], "b": variables[2:]},
            )
            return losses["a"], [*grads["a"], *grads["b"]]

    class Inputs(Gradients):
        def __init__(self) -> None:
            super().__init__()
            self.found = [keras.Variable(ops.zeros((ROWS, FEATURES)))]
            self.dtype = keras.config.dtype_policy().compute_dtype

        def differentiated(self, x: Any) -> Any:
            loss, grads = treadle.input_gradients(self.loss, ops.cast(x, self.dtype))
            assert keras.backend.standardize_dtype(grads[0].dtype) == "float32"
            return loss, grads

    for kind in (Several, Inputs):
        narrow, wide = (run_steps(make(kind), BATCHES[:1]) for make in (half, full))
        assert error(found_by(narrow), found_by(wide)) < 0.03


def test_a_method_that_is_called_gets_true_gradients_and_leaves_the_scale_alone() -> None:
    class Called(Gradients):
        def __init__(self) -> None:
            super().__init__()
            self.size = 1e-8

        def slopes(self, x: Any) -> Any:
            return self.differentiated(x)[1]

    task = half(Called)
    with treadle.Loop(task, console=False) as loop:
        found = loop.call(task.slopes, BATCHES[0][0])
        before = loop.state.arrays()
        task.size = 1e30  # overflows
        assert not np.isfinite(loop.call(task.slopes, BATCHES[0][0])[0]).all()
        assert all(same_bits(before[path], x) for path, x in loop.state.arrays().items())
    right = full(Called).differentiated(tensor(BATCHES[0][0]))[1]
    assert error(found, arrays_of(right)) < 0.03
