"""Programs in TensorFlow, run by Treadle and by a loop by hand. Imported on TensorFlow only."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import treadle
from treadle.steps.state import State

Program = tuple[Callable[..., Any], dict[str, Any]]

_rng = np.random.default_rng(7)
X = _rng.normal(size=(5, 4, 3)).astype("float32")
Y = _rng.integers(0, 2, (5, 4)).astype("int32")
BATCHES = list(zip(X, Y, strict=True))


def weights(*shape: int, seed: int = 0) -> tf.Variable:
    return tf.Variable(np.random.default_rng(seed).normal(size=shape).astype("float32") / 2)


def network() -> Any:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(2)])
    model.build((None, 3))
    return model


def cross_entropy(y: Any, logits: Any) -> Any:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))


def descend(tape: Any, loss: Any, variables: Any, rate: float = 0.1) -> None:
    for variable, slope in zip(variables, tape.gradient(loss, variables), strict=True):
        variable.assign_sub(rate * tf.convert_to_tensor(slope))


def values(step: Any, state: dict[str, Any]) -> dict[str, Any]:
    return State.discover(treadle.task(step, **state)).arrays()


def equals_by_hand(
    make: Callable[[], Program], batches: Any = BATCHES, **options: Any
) -> dict[str, Any]:
    step, state = make()
    by_hand = [float(step(*map(tf.convert_to_tensor, batch))) for batch in batches]
    metrics = {
        k: float(x.result()) for k, x in state.items() if isinstance(x, keras.metrics.Metric)
    }
    expected = values(step, state)
    step, state = make()
    task = treadle.task(step, **state)
    with treadle.Loop(task, options=treadle.Options(**options), console=False) as loop:
        history = loop.fit(batches, epochs=1)
    np.testing.assert_allclose(history.steps("loss"), by_hand, rtol=1e-6, atol=1e-6)
    found = values(step, state)
    assert set(found) == set(expected)
    for name, value in metrics.items():
        assert history[name][-1] == pytest.approx(value, rel=1e-6)
    for path, value in expected.items():
        if path.partition("/")[0] not in metrics:  # which are reset at the end of an epoch
            np.testing.assert_allclose(found[path], value, rtol=1e-6, atol=1e-6, err_msg=path)
    return found
