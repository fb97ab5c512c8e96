"""Stateful RNN layers train as a layer without state whose states are passed by hand."""

from collections.abc import Callable
from itertools import product
from typing import Any

import keras
import numpy as np
import pytest
from executions import EAGER_ONCE, long_to_compile, once
from keras import layers, ops

import treadle

ROWS, STEPS, FEATURES, UNITS, CALLS = 4, 5, 3, 2, 3
SEQUENCE, FRAMES = (ROWS, STEPS, FEATURES), (ROWS, STEPS, 3, 3, FEATURES)


class OwnCell(layers.Layer):
    """A cell whose backward pass needs its state, which it multiplies by a weight."""

    state_size = UNITS

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], UNITS), name="kernel")
        self.decay = self.add_weight(shape=(UNITS,), name="decay")

    def call(self, x: Any, states: Any) -> Any:
        state = ops.tanh(ops.matmul(x, self.kernel) + states[0] * self.decay)
        return state, [state]


def stacked(**how: Any) -> Any:
    return layers.RNN([layers.LSTMCell(UNITS), layers.GRUCell(UNITS), OwnCell()], **how)


def conv(**how: Any) -> Any:
    return layers.ConvLSTM2D(UNITS, 2, padding="same", **how)


def both(**how: Any) -> Any:
    return layers.Bidirectional(layers.GRU(UNITS, **how))


LAYERS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "LSTM": (lambda **how: layers.LSTM(UNITS, **how), SEQUENCE),
    "GRU": (lambda **how: layers.GRU(UNITS, **how), SEQUENCE),
    "GRU of version 1": (lambda **how: layers.GRU(UNITS, reset_after=False, **how), SEQUENCE),
    "SimpleRNN": (lambda **how: layers.SimpleRNN(UNITS, **how), SEQUENCE),
    "unrolled": (lambda **how: layers.SimpleRNN(UNITS, unroll=True, **how), SEQUENCE),
    "own cell": (lambda **how: layers.RNN(OwnCell(), **how), SEQUENCE),
    "stacked": (stacked, SEQUENCE),
    "both directions": (both, SEQUENCE),
    "ConvLSTM2D": (conv, FRAMES),
}
OFTEN = {
    ("GRU", "auto"): (),
    ("GRU", "eager"): once,
    ("stacked", "auto"): long_to_compile,
    # What compilers get differs from a GRU only here: two layers, and states that are images.
    ("both directions", "auto"): pytest.mark.long,
    ("ConvLSTM2D", "auto"): pytest.mark.long,
}
EVERY = [
    pytest.param(*pair, marks=OFTEN.get(pair, (pytest.mark.long, once)))
    for pair in product(LAYERS, ("auto", "eager"))
]


class Stateful(treadle.Task):
    """Calls a stateful layer several times in an objective: its own state changes in between."""

    def __init__(self, layer: Any, shape: tuple[int, ...]) -> None:
        self.layer, self.optimizer = layer, keras.optimizers.SGD(0.5)
        layer.build(shape)

    def train_step(self, x: Any) -> Any:
        def objective() -> Any:
            return ops.mean(sum(self.layer(x) ** 2 for _ in range(2)))

        return {"loss": treadle.minimize(objective, self.layer.trainable_variables, self.optimizer)}

    def eval_step(self, x: Any) -> Any:
        return {"loss": ops.mean(self.layer(x) ** 2)}

    def reset(self) -> None:
        for state in keras.tree.flatten(self.layer.states):
            state.assign(ops.zeros(state.shape))


class ByHand(Stateful):
    """Passes the states to a layer that keeps none."""

    def __init__(self, layer: Any, shape: tuple[int, ...], states: Any) -> None:
        super().__init__(layer, shape)
        self.layout = states
        self.states = [keras.Variable(ops.zeros(s.shape)) for s in keras.tree.flatten(states)]

    def train_step(self, x: Any) -> Any:
        def objective() -> Any:
            total, states = 0.0, [ops.convert_to_tensor(v) for v in self.states]
            for _ in range(2):
                given = keras.tree.pack_sequence_as(self.layout, states)
                output, *now = self.layer(x, initial_state=list(given))
                # The state of a layer carries no gradient from one call to the next.
                states = [ops.stop_gradient(s) for s in keras.tree.flatten(now)]
                total += output**2
            return ops.mean(total), states

        (loss, states), gradients = treadle.gradients(objective, self.layer.trainable_variables)
        self.optimizer.apply(gradients, self.layer.trainable_variables)
        for variable, state in zip(self.states, states, strict=True):
            variable.assign(state)
        return {"loss": loss}

    def reset(self) -> None:
        for state in self.states:
            state.assign(ops.zeros(state.shape))


def trained(task: Any, shape: tuple[int, ...], execution: Any) -> tuple[list[float], list[Any]]:
    rng = np.random.default_rng(0)
    batches = [rng.normal(size=shape).astype("float32") for _ in range(CALLS)]
    with treadle.Loop(task, options=treadle.Options(execution=execution), console=False) as loop:
        losses = list(loop.fit(batches, epochs=1).steps("loss"))
        task.reset()
        losses = [*losses, *loop.fit(batches, epochs=2).steps("loss")]
        assert execution == "eager" or loop.plan != "eager"
    return losses, [ops.convert_to_numpy(w) for w in task.layer.trainable_variables]


def pair(name: str) -> tuple[Any, Any, tuple[int, ...]]:
    make, shape = LAYERS[name]
    keras.utils.set_random_seed(3)
    one = Stateful(make(stateful=True), shape)
    other = ByHand(make(return_state=True), shape, one.layer.states)
    other.layer.set_weights(one.layer.get_weights())
    return one, other, shape


@pytest.mark.parametrize(("name", "execution"), EVERY)
def test_a_stateful_layer_equals_states_passed_by_hand(name: str, execution: Any) -> None:
    one, other, shape = pair(name)
    losses, weights = trained(one, shape, execution)
    expected, by_hand = trained(other, shape, execution)
    assert len(losses) >= 2 * CALLS
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    for x, y in zip(weights, by_hand, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
    states = keras.tree.flatten(one.layer.states)
    for state, held in zip(states, other.states, strict=True):
        np.testing.assert_allclose(*map(ops.convert_to_numpy, (state, held)), rtol=1e-4, atol=1e-6)


@long_to_compile
@EAGER_ONCE
def test_mixed_precision_keeps_the_state(execution: Any) -> None:
    layer = layers.GRU(UNITS, stateful=True, dtype="mixed_bfloat16")
    task = Stateful(layer, SEQUENCE)
    x = np.random.default_rng(0).normal(size=SEQUENCE).astype("float32")
    with treadle.Loop(task, options=treadle.Options(execution=execution), console=False) as loop:
        before = loop.evaluate([x])["loss"]
        list(loop.steps([x]))
        state = ops.convert_to_numpy(layer.states[0])
        assert layer.states[0].dtype == "float32" and np.abs(state).min() > 0
        assert loop.evaluate([x])["loss"] != before
