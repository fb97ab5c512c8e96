"""More programs with certain mistakes: numbers that are not finite, Python state, one class.

They are added to the pairs of `doctor_programs`, which explains them.
"""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

import treadle
from tests.doctor.doctor_programs import (
    ROWS,
    Regression,
    finds,
    network,
    numbers,
    of,
    rng,
    source,
    supervised,
)
from tests.doctor.doctor_sound import adam, dense, stepping


@finds("G-not-finite")
def a_logarithm_of_zero(wrong: bool) -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch

        def objective() -> Any:
            found = self.model(x, training=True)
            return -ops.mean(ops.log(ops.maximum(found, 0.0 if wrong else 1e-7)) * y**2)

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}

    return of(Regression(dense(6, 12, 1, last="relu")), train_step=train_step), source(*numbers())


@finds("G-not-finite")
def a_norm_of_zeros(wrong: bool) -> Any:
    """The distance of equal embeddings is zero, where its gradient is infinite times zero."""

    def train_step(self: Any, x: Any) -> Any:
        def objective() -> Any:
            found = self.encoder(x, training=True)
            squares = ops.sum((found[:, None] - found[None]) ** 2, axis=-1)
            return ops.mean(ops.relu(1.0 - ops.sqrt(squares + (0.0 if wrong else 1e-6))))

        return {"loss": treadle.minimize(objective, self.encoder, self.optimizer)}

    return stepping(train_step, encoder=dense(6, 12, 8), optimizer=adam()), source(numbers()[0])


@finds("G-not-finite")
def a_batch_with_nan(wrong: bool) -> Any:
    x, y = numbers()
    if wrong:
        x[:, 2] = np.nan
    return Regression(), source(x, y)


@finds("G-not-finite")
def a_layer_that_divides_by_zero(wrong: bool) -> Any:
    class Standardized(keras.layers.Layer):
        """Standardizes each row, of which some are constant."""

        def call(self, x: Any) -> Any:
            deviation = ops.std(x, axis=-1, keepdims=True)
            return (x - ops.mean(x, axis=-1, keepdims=True)) / (deviation + (0 if wrong else 1))

    x, y = numbers()
    x[: ROWS // 2] = 1.0
    model = keras.Sequential([keras.Input((6,)), Standardized(), keras.layers.Dense(1)])
    return Regression(model), source(x, y)


@finds("L-axis")
def a_softmax_over_one_class(wrong: bool) -> Any:
    x, y = numbers()
    model = network(1, "softmax" if wrong else "sigmoid")
    return supervised(model, "binary_crossentropy"), source(x, (y > 0).astype("float32"))


def positive() -> tuple[Any, Any]:
    """Return inputs, and 0 or 1 as floats of shape (rows, 1)."""
    x, y = numbers()
    return x, (y > 0).astype("float32")


@finds("L-axis")
def a_softmax_over_one_unit(wrong: bool) -> Any:
    model = network(1, "softmax" if wrong else "sigmoid")
    return supervised(model, "binary_crossentropy"), source(*positive())


@finds("R-python-state")
def losses_kept_in_a_list(wrong: bool) -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        if wrong:
            self.steps_seen.append(len(self.steps_seen))
        return Regression.train_step(self, batch)

    task = of(Regression(), train_step=train_step)
    task.steps_seen = []
    return task, source(*numbers())


@finds("R-python-state")
def a_counter_of_steps(wrong: bool) -> Any:
    def objective(self: Any, batch: Any) -> Any:
        self.seen += 1 if wrong else 0
        warmup = min(1.0, self.seen / 10) if wrong else 1.0
        return warmup * Regression.objective(self, batch)

    task = of(Regression(), objective=objective)
    task.seen = 0
    return task, source(*numbers())


class NextToken(treadle.Task):
    """Predicts each next token of a text in one array."""

    def __init__(self, mixing: Any) -> None:
        tokens = keras.Input((8,), dtype="int32")
        x = mixing(layers.Embedding(12, 8)(tokens))
        self.model = keras.Model(tokens, layers.Dense(12)(x))
        self.optimizer = keras.optimizers.Adam(0.01)
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def train_step(self, tokens: Any) -> Any:
        def objective() -> Any:
            return self.loss(tokens[:, 1:], self.model(tokens[:, :-1], training=True))

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}


def texts() -> Any:
    """Return texts of 9 tokens."""
    return source(rng(5).integers(0, 12, (96, 9)).astype("int32"))


@finds("D-label-in-inputs")
def attention_without_a_causal_mask(wrong: bool) -> Any:
    attention = layers.MultiHeadAttention(2, 4)
    return NextToken(lambda x: x + attention(x, x, use_causal_mask=not wrong)), texts()
