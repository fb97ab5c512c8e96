"""PyTorch: Keras' LSTM calls PyTorch's operator for a whole sequence, with the same results."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from classifier import FEATURES, Classifier, batches, head
from executions import some
from keras import layers, ops
from own_step import CAPTURED, Steps

import treadle
from treadle.testing import run_steps
from treadle.testing.trace import Tolerance, compare

if keras.config.backend() != "torch":
    pytest.skip("PyTorch's LSTM", allow_module_level=True)

import torch

X, Y = batches(6)
BATCHES = list(zip(X, Y, strict=True))
CLOSE = Tolerance(rtol=1e-4, atol=1e-6)

LSTMS: dict[str, Callable[[], Any]] = {
    "plain": lambda: layers.LSTM(4),
    "no bias": lambda: layers.LSTM(4, use_bias=False),
    "backwards": lambda: layers.LSTM(4, go_backwards=True),
    "both directions": lambda: layers.Bidirectional(layers.LSTM(3)),
    "stateful": lambda: layers.LSTM(4, stateful=True),
    "dropout": lambda: layers.LSTM(4, dropout=0.3, seed=1),
}
BY_CELLS: dict[str, Callable[[], Any]] = {
    "activation": lambda: layers.LSTM(4, activation="relu"),
    "recurrent activation": lambda: layers.LSTM(4, recurrent_activation="hard_sigmoid"),
    "recurrent dropout": lambda: layers.LSTM(4, recurrent_dropout=0.3, seed=1),
    "float64": lambda: layers.LSTM(4, dtype="float64"),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Count the calls of PyTorch's operator."""
    found: list[Any] = []
    original = torch.lstm

    def lstm(*args: Any) -> Any:
        found.append(args)
        return original(*args)

    monkeypatch.setattr(torch, "lstm", lstm)
    return found


def trace(make: Callable[[], Any], execution: str = "auto") -> Any:
    keras.utils.set_random_seed(3)
    sequence = [keras.Input((FEATURES,), batch_size=len(X[0])), layers.Reshape((FEATURES // 2, 2))]
    task = Classifier([*sequence, make(), layers.LSTM(3), head()])
    return run_steps(task, BATCHES, treadle.Options(execution=execution), (4, 1))


@pytest.mark.parametrize("name", some(LSTMS))
def test_one_operator_computes_a_sequence(name: str, calls: Any, monkeypatch: Any) -> None:
    def make() -> Any:
        layer = LSTMS[name]()
        inner = layer.forward_layer if name == "both directions" else layer
        inner.return_sequences = True
        if name == "both directions":
            layer.backward_layer.return_sequences = layer.return_sequences = True
        return layer

    captured = trace(make)
    assert captured.plan == CAPTURED and calls
    compare(captured, trace(make, "eager"), "captured", "run eagerly", tolerance=None)
    calls.clear()
    monkeypatch.setattr("treadle.backends.torch.patches._is_fusible", lambda inputs: False)
    compare(captured, trace(make), "one operator", "cells", CLOSE)
    assert not calls


@pytest.mark.parametrize("name", BY_CELLS)
def test_other_configurations_are_left_to_keras(name: str, calls: Any) -> None:
    keras.utils.set_random_seed(3)
    task = Classifier([layers.Reshape((FEATURES // 2, 2)), BY_CELLS[name](), head()])
    run_steps(task, BATCHES, treadle.Options(), (4, 1))
    assert not calls


@pytest.mark.parametrize("kind", ["plain", "differentiated twice", "mapped"])
def test_what_the_operator_has_no_rule_for_uses_cells(kind: str, calls: Any) -> None:
    """It can be differentiated only once, and `torch.vmap` has no rule for it."""
    lstm = layers.LSTM(3)

    def step(task: Any, x: Any, y: Any) -> Any:
        def objective() -> Any:
            rows = ops.reshape(x, (-1, FEATURES // 2, 2))
            if kind == "plain":
                return ops.mean(lstm(rows) ** 2)
            if kind == "mapped":
                return ops.mean(ops.vectorized_map(lambda row: lstm(row[None])[0], rows) ** 2)
            _, (slope,) = treadle.input_gradients(lambda rows: ops.sum(lstm(rows)), rows)
            return ops.mean(slope**2)

        return treadle.minimize(objective, lstm, task.optimizer)

    lstm.build((None, FEATURES // 2, 2))
    found = run_steps(Steps(step, lstm=lstm), BATCHES, treadle.Options(), (4, 1))
    assert found.plan == CAPTURED and np.isfinite(found.values["loss"]).all()
    assert bool(calls) == (kind == "plain")


@pytest.mark.parametrize("own", [False, True])
def test_compiled_models_use_it_unless_their_step_may_differentiate_twice(
    own: bool, calls: Any
) -> None:
    class Own(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    keras.utils.set_random_seed(3)
    inner = [keras.Input((FEATURES // 2, 2)), layers.LSTM(3), layers.Dense(1)]
    model = (Own if own else keras.Sequential)(inner)
    model.compile("sgd", "mse")
    x = X[0].reshape(-1, FEATURES // 2, 2)
    treadle.fit(model, x, x[:, 0, :1], verbose=0)
    assert bool(calls) != own


def test_outside_of_steps_keras_is_unchanged(calls: Any) -> None:
    layers.LSTM(2)(np.ones((1, 3, 2), "float32"))
    assert not calls


def test_evaluation_and_prediction_use_it(calls: Any) -> None:
    sequence = [layers.Reshape((FEATURES // 2, 2)), layers.LSTM(3), head()]
    with treadle.Loop(Classifier([keras.Input((FEATURES,)), *sequence]), console=False) as loop:
        loop.evaluate(BATCHES)
        assert calls
        calls.clear()
        rows = treadle.data.from_arrays(X[0], batch_size=4)
        assert loop.predict(rows).shape[0] == len(X[0]) and calls


def test_a_native_step_may_differentiate_twice(calls: Any) -> None:
    lstm = layers.LSTM(3)
    lstm.build((None, FEATURES // 2, 2))

    def step(task: Any, x: Any, y: Any) -> Any:
        rows = torch.reshape(x, (-1, FEATURES // 2, 2)).requires_grad_()
        (slope,) = torch.autograd.grad(lstm(rows).sum(), rows, create_graph=True)
        kernel = lstm.cell.kernel
        (gradient,) = torch.autograd.grad((slope**2).mean(), kernel.value)
        with torch.no_grad():
            kernel.assign(kernel.value - 0.1 * gradient)
        return {"loss": (slope**2).mean().detach()}

    found = run_steps(Steps(step, lstm=lstm), BATCHES, treadle.Options(), (4, 1))
    assert np.isfinite(found.values["loss"]).all() and not calls
