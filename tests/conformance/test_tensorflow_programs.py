"""Programs as their authors write them for TensorFlow give the numbers of the loop by hand.

Each program is a function that returns a step and the objects that the step uses. Once the step is
called in a loop, once it is a task; losses and all variables must be equal.
"""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

if keras.config.backend() != "tensorflow":
    pytest.skip("programs written in TensorFlow", allow_module_level=True)

import tensorflow as tf
from by_hand import BATCHES, Program, cross_entropy, descend, equals_by_hand, network, weights


def gradient_penalty() -> Program:
    """A custom gradient, a watched tensor, and statistics that the tape does not record."""
    w, seen = weights(3, 2), tf.Variable(0.0)

    @tf.custom_gradient
    def straight(x: Any) -> Any:
        return tf.round(x * 4) / 4, lambda slope: tf.clip_by_value(slope, -0.05, 0.05)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                energy = tf.reduce_sum(tf.tanh(x @ w))
            slopes = inner.gradient(energy, x)
            loss = cross_entropy(y, straight(x @ w)) + tf.reduce_mean(slopes**2)
            with tape.stop_recording():
                seen.assign_add(tf.reduce_max(tf.abs(w)))
        descend(tape, loss, [w])
        return loss

    return step, {"w": w, "seen": seen}


def loops() -> Program:
    """`tf.while_loop`, a `TensorArray` filled by AutoGraph, `tf.scan` and `tf.map_fn`."""
    w, u = weights(3, 3), weights(3, 2, seed=1)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            _, v = tf.while_loop(
                lambda i, v: i < 3,
                lambda i, v: (i + 1, tf.linalg.normalize(tf.linalg.matvec(w, v))[0]),
                (0, tf.ones([3])),
            )
            state, states = tf.zeros([3]), tf.TensorArray(tf.float32, 4)
            for i in tf.range(4):
                if tf.reduce_sum(x[i]) > 0:
                    state = tf.tanh(tf.linalg.matvec(w, state) + x[i])
                states = states.write(i, state)
            sums = tf.scan(lambda total, row: 0.5 * total + row, states.stack())
            rows = tf.map_fn(lambda row: row * tf.reduce_sum(v * row), sums)
            loss = cross_entropy(y, rows @ u)
        descend(tape, loss, [w, u])
        return loss

    return step, {"w": w, "u": u}


class Momentum(tf.Module):
    """An optimizer of the author's own, whose slots exist after the first step."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.slots, self.count = rate, [], tf.Variable(0, trainable=False)

    def apply(self, slopes: Any, variables: Any) -> None:
        if not self.slots:
            self.slots = [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables]
        self.count.assign_add(1)
        for slope, slot, variable in zip(slopes, self.slots, variables, strict=True):
            slot.assign(0.9 * slot + slope)
            variable.assign_sub(self.rate * slot / tf.sqrt(tf.cast(self.count, tf.float32)))


def own_optimizer() -> Program:
    module = tf.Module()
    module.w, module.b = weights(3, 2), tf.Variable(tf.zeros([2]))
    optimizer = Momentum(0.1)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = cross_entropy(y, x @ module.w + module.b)
        variables = module.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    return step, {"module": module, "optimizer": optimizer}


def clipped_slices() -> Program:
    """Gradients of a table, which stay `IndexedSlices` through the clipping."""
    table, optimizer = weights(6, 2), keras.optimizers.SGD(0.5, momentum=0.9)
    optimizer.build([table])

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            rows = tf.gather(table, tf.stack([y, y + 2, y + 2], axis=1))
            loss = cross_entropy(y, tf.reduce_sum(rows, axis=1))
        slopes, norm = tf.clip_by_global_norm(tape.gradient(loss, [table]), 0.3)
        assert isinstance(slopes[0], tf.IndexedSlices)
        optimizer.apply_gradients(zip(slopes, [table], strict=True))
        return loss + 0.0 * norm

    return step, {"table": table, "optimizer": optimizer}


def accumulation() -> Program:
    """An optimizer that is applied in every second step, and first in a branch."""
    model, optimizer = network(), keras.optimizers.Adam(0.01)
    sums = [tf.Variable(tf.zeros(v.shape), trainable=False) for v in model.trainable_variables]
    count = tf.Variable(0, trainable=False)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = cross_entropy(y, model(x))
        for total, slope in zip(sums, tape.gradient(loss, model.trainable_variables), strict=True):
            total.assign_add(slope)
        count.assign_add(1)

        def update() -> Any:
            means = [total / 2.0 for total in sums]
            optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
            for total in sums:
                total.assign(tf.zeros_like(total))
            return True

        tf.cond(tf.equal(count % 2, 0), update, lambda: False)
        return loss

    return step, {"model": model, "optimizer": optimizer, "sums": sums, "count": count}


def images() -> Program:
    """Augmentation in the step, with numbers of the program's own seed."""
    kernel, number = weights(3, 3, 1, 2), tf.Variable(0, trainable=False)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        pictures = tf.reshape(tf.tile(x, [1, 12]), [-1, 6, 6, 1])
        seed = tf.stack([number, 5])
        pictures = tf.image.stateless_random_flip_left_right(pictures, seed)
        pictures = tf.image.stateless_random_brightness(pictures, 0.2, seed)
        pictures = tf.image.resize(tf.image.central_crop(pictures, 0.7), [5, 5])
        number.assign_add(1)
        with tf.GradientTape() as tape:
            maps = tf.nn.conv2d(pictures, kernel, 1, "SAME")
            loss = cross_entropy(y, tf.reduce_mean(maps, axis=[1, 2]))
        descend(tape, loss, [kernel])
        return loss

    return step, {"kernel": kernel, "number": number}


def metrics() -> Program:
    """A tutorial's step: a model that it builds, Dropout, metrics that are called, one of which is
    reset every third step, in a branch."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(5, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(2)]
    model, loss_object = keras.Sequential(layers), keras.losses.SparseCategoricalCrossentropy(True)
    optimizer, count = keras.optimizers.Adam(), tf.Variable(0, trainable=False)
    mean, accuracy = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = loss_object(y, logits)
        slopes = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(slopes, model.trainable_variables, strict=True))
        count.assign_add(1)
        if count % 3 == 0:
            accuracy.reset_state()
        mean(loss)
        accuracy(y, logits)
        return loss

    parts = {"model": model, "optimizer": optimizer, "count": count}
    return step, {**parts, "mean": mean, "accuracy": accuracy}


def noise() -> Program:
    """A generator whose state is passed, and one that is passed itself; shapes of the batch."""
    passed, own = tf.random.Generator.from_seed(1), tf.random.Generator.from_seed(2)
    w = weights(3, 2)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        size = tf.shape(x)[0]
        fake = passed.normal([size, 3]) + own.uniform([size, 1])
        share = tf.random.stateless_uniform([size, 1], [7, 8])
        mixed = share * x + (1.0 - share) * fake
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(mixed)
                energy = tf.reduce_sum(tf.tanh(mixed @ w))
            penalty = (tf.norm(inner.gradient(energy, mixed), axis=1) - 1.0) ** 2
            loss = cross_entropy(y, x @ w) + tf.reduce_mean(penalty)
        descend(tape, loss, [w])
        return loss

    return step, {"state": passed.state, "own": own, "w": w}


def averaged() -> Program:
    """An average of weights, which is named after the weights."""
    average, w = tf.train.ExponentialMovingAverage(0.9), weights(3, 2)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = cross_entropy(y, x @ w)
        descend(tape, loss, [w])
        average.apply([w])
        return loss + tf.reduce_sum(average.average(w))

    return step, {"average": average, "w": w}


def on_a_strategy() -> Program:
    """`strategy.run` with the strategy that TensorFlow has without one."""
    model, strategy = network(), tf.distribute.get_strategy()

    def replica(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(
                tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x)), global_batch_size=4
            )
        descend(tape, loss, model.trainable_variables)
        return loss

    @tf.function
    def step(x: Any, y: Any) -> Any:
        losses = strategy.run(replica, args=(x, y))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    return step, {"model": model}


class Trainer:
    """A class of the author's own, with state in attributes, slots and containers."""

    __slots__ = ("__weakref__", "parts", "rate", "scale")

    def __init__(self) -> None:
        self.rate = 0.1
        self.scale = tf.Variable(1.0)
        self.parts = {"model": network(), "optimizer": keras.optimizers.SGD(0.1)}

    @tf.function
    def step(self, x: Any, y: Any) -> Any:
        model = self.parts["model"]
        with tf.GradientTape() as tape:
            loss = cross_entropy(y, model(x) * self.scale)
        slopes = tape.gradient(loss, model.trainable_variables)
        self.parts["optimizer"].apply_gradients(zip(slopes, model.trainable_variables, strict=True))
        self.scale.assign_add(self.rate)
        return loss


def plain_class() -> Program:
    trainer = Trainer()
    return trainer.step, {"trainer": trainer}


PROGRAMS = [
    *(gradient_penalty, loops, own_optimizer, clipped_slices, accumulation, images),
    *(metrics, noise, averaged, on_a_strategy, plain_class),
]


@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_a_program_equals_its_loop_by_hand(make: Any) -> None:
    equals_by_hand(make)


def test_a_program_continues_from_its_own_checkpoint(tmp_path: Path) -> None:
    """A `CheckpointManager` restores weights, slots and counters before training."""

    def make() -> Program:
        step, state = own_optimizer()
        state["checkpoint"] = tf.train.Checkpoint(**state)
        return step, state

    step, state = make()
    for x, y in BATCHES:
        step(tf.constant(x), tf.constant(y))
    tf.train.CheckpointManager(state["checkpoint"], str(tmp_path), 2).save()

    def restored() -> Program:
        step, state = make()
        manager = tf.train.CheckpointManager(state["checkpoint"], str(tmp_path), 2)
        state["checkpoint"].restore(manager.latest_checkpoint)
        return step, state

    found = equals_by_hand(restored)
    assert found["optimizer/count"] == 2 * len(BATCHES)


def test_ragged_rows_that_the_pipeline_fills_up() -> None:
    rows = tf.ragged.constant([[1.0], [2.0, 3.0], [], [4.0, 5.0, 6.0]] * 4, ragged_rank=1)
    data = tf.data.Dataset.from_tensor_slices((rows, np.tile([0, 1], 8).astype("int32"))).batch(4)
    data = data.map(lambda x, y: (x.to_tensor(shape=[None, 3]), y))
    w = []

    def make() -> Program:
        w[:] = [weights(3, 2)]

        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = cross_entropy(y, x @ w[0])
            descend(tape, loss, w)
            return loss

        return step, {"w": w[0]}

    equals_by_hand(make, data)
