"""Pairs of programs: each makes one classic mistake, and its twin does the same without it.

A program is a function of `wrong` that returns a task and its data.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

import treadle
from treadle import Datasets, data

ROWS, BATCH = 192, 32
Program = Callable[[bool], tuple[Any, Any]]


PAIRS: list[tuple[str, Program]] = []
"""The programs, with the code of the finding that the wrong form must have if it is certain."""


def finds(code: str) -> Callable[[Program], Program]:
    """Register a program whose wrong form has this finding."""

    def add(program: Program) -> Program:
        PAIRS.append((code, seeded(program)))
        return program

    return add


def seeded(program: Callable[..., Any]) -> Callable[..., Any]:
    """Return a program whose initial weights are the same each time.

    Some hidden layers of these small networks would begin with relu units that are all zero.
    """

    @functools.wraps(program)
    def build(*args: Any) -> Any:
        keras.utils.set_random_seed(1)
        return program(*args)

    return build


def rng(seed: int = 0) -> np.random.Generator:
    """Return a generator of numbers for data."""
    return np.random.default_rng(seed)


def classes(rows: int = ROWS, features: int = 6, count: int = 3, seed: int = 0) -> tuple[Any, Any]:
    """Return inputs and class numbers that depend on them."""
    x = rng(seed).normal(size=(rows, features)).astype("float32")
    y = np.argmax(x[:, :count] + 0.3 * x[:, count : 2 * count], axis=1).astype("int32")
    return x, y


def numbers(rows: int = ROWS, features: int = 6, seed: int = 0) -> tuple[Any, Any]:
    """Return inputs and numbers of shape (rows, 1) that depend on them."""
    x = rng(seed).normal(size=(rows, features)).astype("float32")
    return x, (x[:, :1] - 0.5 * x[:, 1:2] + 0.1).astype("float32")


def source(*arrays: Any, **options: Any) -> Any:
    """Return a shuffled source of batches."""
    return data.from_arrays(*arrays, batch_size=BATCH, seed=0, **options)


def network(outputs: int = 3, activation: str | None = None, **options: Any) -> Any:
    """Return a small network of two layers."""
    return keras.Sequential(
        [
            keras.Input((options.pop("features", 6),)),
            keras.layers.Dense(12, activation="tanh", **options),
            keras.layers.Dense(outputs, activation=activation),
        ]
    )


def supervised(
    model: Any, loss: Any, optimizer: Any = None, metrics: Any = (), **attributes: Any
) -> Any:
    """Return a supervised task with further attributes."""
    task = treadle.Supervised(model, loss, optimizer or keras.optimizers.Adam(0.01), metrics)
    for name, value in attributes.items():
        setattr(task, name, value)
    return task


class Regression(treadle.Task):
    """A regression whose parts can be replaced."""

    def __init__(self, model: Any = None, optimizer: Any = None) -> None:
        self.model = model or network(1)
        self.optimizer = optimizer or keras.optimizers.Adam(0.01)

    def loss_of(self, y: Any, outputs: Any) -> Any:
        return ops.mean((outputs - y) ** 2)

    def objective(self, batch: Any) -> Any:
        x, y = batch[:2]
        return self.loss_of(y, self.model(x, training=True))

    def variables(self) -> Any:
        return self.model.trainable_variables

    def update(self, gradients: Any) -> None:
        self.optimizer.apply(gradients, self.variables())

    def train_step(self, batch: Any) -> Any:
        loss, gradients = treadle.gradients(lambda: self.objective(batch), self.variables())
        self.update(gradients)
        return {"loss": loss}

    def eval_step(self, batch: Any) -> Any:
        x, y = batch[:2]
        return {"loss": self.loss_of(y, self.model(x, training=False))}


def of(task: Any, **methods: Callable[..., Any]) -> Any:
    """Return a task with methods replaced; each gets the task first."""
    kind = type(type(task).__name__, (type(task),), methods)
    task.__class__ = kind
    return task


# Losses


@finds("L-unpaired")
def flat_labels_against_a_column(wrong: bool) -> Any:
    x, y = numbers()
    return Regression(), source(x, y[:, 0] if wrong else y)


@finds("L-logits-not-told")
def logits_to_a_loss_by_name(wrong: bool) -> Any:
    model = network(3, None if wrong else "softmax")
    return supervised(model, "sparse_categorical_crossentropy"), source(*classes())


@finds("L-logits-not-told")
def logits_to_a_function(wrong: bool) -> Any:
    def loss_of(self: Any, y: Any, outputs: Any) -> Any:
        return ops.mean(keras.losses.binary_crossentropy(y, outputs, from_logits=not wrong))

    x, y = numbers()
    return of(Regression(), loss_of=loss_of), source(x, (y > 0).astype("float32"))


@finds("L-probabilities-as-logits")
def softmax_with_from_logits(wrong: bool) -> Any:
    model = network(3, "softmax" if wrong else None)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return supervised(model, loss), source(*classes())


@finds("L-probabilities-as-logits")
def sigmoid_with_from_logits(wrong: bool) -> Any:
    model = network(1, "sigmoid" if wrong else None)
    x, y = numbers()
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return supervised(model, loss), source(x, (y > 0).astype("float32"))


@finds("L-swapped")
def swapped_arguments_of_a_metric(wrong: bool) -> Any:
    task = Regression()
    task.error = keras.metrics.MeanAbsolutePercentageError()

    def eval_step(self: Any, batch: Any) -> Any:
        x, y = batch
        outputs = self.model(x, training=False)
        self.error.update_state(*((outputs, y) if wrong else (y, outputs)))

    return of(task, eval_step=eval_step), Datasets(source(*numbers()), source(*numbers(seed=1)))


@finds("L-sum")
def sum_over_rows(wrong: bool) -> Any:
    def loss_of(self: Any, y: Any, outputs: Any) -> Any:
        return (ops.sum if wrong else ops.mean)((outputs - y) ** 2)

    return of(Regression(optimizer=keras.optimizers.Adam(1e-3)), loss_of=loss_of), source(
        *numbers()
    )


@finds("L-regularizer")
def regularizer_without_its_loss(wrong: bool) -> Any:
    def objective(self: Any, batch: Any) -> Any:
        x, y = batch
        loss = ops.mean((self.model(x, training=True) - y) ** 2)
        return loss if wrong else loss + sum(self.model.losses)

    model = network(1, kernel_regularizer=keras.regularizers.L2(1e-3))
    return of(Regression(model), objective=objective), source(*numbers())


class Penalty(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * ops.mean(inputs**2))
        return inputs


@finds("L-regularizer")
def added_loss_outside_of_the_objective(wrong: bool) -> Any:
    def objective(self: Any, batch: Any) -> Any:
        x, y = batch
        loss = ops.mean((self.model(x, training=True) - y) ** 2)
        return loss if wrong else loss + sum(self.model.losses)

    layers = [keras.Input((6,)), keras.layers.Dense(8), Penalty(), keras.layers.Dense(1)]
    return of(Regression(keras.Sequential(layers)), objective=objective), source(*numbers())


# Metrics


@finds("M-labels")
def categorical_accuracy_of_class_numbers(wrong: bool) -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metric = keras.metrics.CategoricalAccuracy() if wrong else "accuracy"
    x, y = classes()
    return supervised(network(3), loss, metrics=[metric]), source(x, y[:, None])


@finds("M-labels")
def accuracy_of_outputs(wrong: bool) -> Any:
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    metric = keras.metrics.Accuracy() if wrong else "accuracy"
    x, y = numbers()
    return supervised(network(1), loss, metrics=[metric]), source(x, (y > 0).astype("float32"))


# Layers and modes


def _ending(activation: str | None, last: Any) -> Any:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, activation), last])
    return supervised(model, keras.losses.SparseCategoricalCrossentropy()), source(*classes())


@finds("T-softmax-twice")
def softmax_after_softmax(wrong: bool) -> Any:
    return _ending("softmax" if wrong else None, keras.layers.Softmax())


@finds("T-softmax-twice")
def softmax_activation_after_softmax(wrong: bool) -> Any:
    return _ending("softmax" if wrong else "tanh", keras.layers.Activation("softmax"))


# Gradients and optimizers


class TwoParts(Regression):
    """A body and a head."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(network(4), optimizer)
        self.head = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        self.blocks = False

    def objective(self, batch: Any) -> Any:
        x, y = batch
        features = self.model(x, training=True)
        return ops.mean((self.head(self.between(features)) - y) ** 2)

    def between(self, features: Any) -> Any:
        return features

    def variables(self) -> Any:
        return [*self.model.trainable_variables, *self.head.trainable_variables]

    def eval_step(self, batch: Any) -> Any:
        return {"loss": self.objective(batch)}


@finds("G-blocked")
def rounding_between_layers(wrong: bool) -> Any:
    def between(self: Any, features: Any) -> Any:
        return ops.stop_gradient(features) + 0 * features if wrong else features

    return of(TwoParts(), between=between), source(*numbers())


@finds("O-not-updated")
def half_of_the_variables(wrong: bool) -> Any:
    def variables(self: Any) -> Any:
        every = self.model.trainable_variables
        return every[:2] if wrong else every

    return of(Regression(), variables=variables), source(*numbers())


@finds("O-ascent")
def gradients_with_the_wrong_sign(wrong: bool) -> Any:
    def update(self: Any, gradients: Any) -> None:
        sign = -1.0 if wrong else 1.0
        self.optimizer.apply([sign * g for g in gradients], self.variables())

    return of(Regression(), update=update), source(*numbers())


@finds("O-ascent")
def minus_learning_rate_times_gradient(wrong: bool) -> Any:
    def update(self: Any, gradients: Any) -> None:
        clipped, _ = treadle.clip_by_global_norm(gradients, 1.0)
        clipped = [-g for g in clipped] if wrong else clipped
        self.optimizer.apply(clipped, self.variables())

    return of(Regression(optimizer=keras.optimizers.SGD(0.01)), update=update), source(*numbers())


@finds("O-wrong-pairs")
def variables_in_another_order(wrong: bool) -> Any:
    model = keras.Sequential([keras.Input((6,)), *(keras.layers.Dense(6) for _ in range(3))])

    def update(self: Any, gradients: Any) -> None:
        order = [4, 5, 2, 3, 0, 1] if wrong else range(6)
        self.optimizer.apply([gradients[i] for i in order], self.variables())

    x, _ = numbers()
    return of(Regression(model), update=update), source(x, np.roll(x, 1, axis=1))


# Randomness


@finds("R-constant-seed")
def noise_with_a_constant_seed(wrong: bool) -> Any:
    task = Regression()
    task.seed = keras.random.SeedGenerator(1)

    def objective(self: Any, batch: Any) -> Any:
        x, y = batch
        noise = keras.random.normal((BATCH, 6), seed=7 if wrong else self.seed)
        return ops.mean((self.model(x + 0.1 * noise) - y) ** 2)

    return of(task, objective=objective), source(*numbers(), drop_last=True)


@finds("R-not-repeatable")
def a_loss_that_reads_the_clock(wrong: bool) -> Any:
    def objective(self: Any, batch: Any) -> Any:
        x, y = batch
        factor = 1.0 + (time.perf_counter() % 1.0 if wrong else 0.5)
        return factor * ops.mean((self.model(x) - y) ** 2)

    return of(Regression(), objective=objective), source(*numbers())


# Evaluation


@finds("E-trains")
def evaluation_that_trains(wrong: bool) -> Any:
    def eval_step(self: Any, batch: Any) -> Any:
        if wrong:
            return self.train_step(batch)
        return {"loss": self.objective(batch)}

    return of(Regression(), eval_step=eval_step), Datasets(
        source(*numbers()), source(*numbers(seed=1))
    )


# Second programs for what lies deeper


@finds("O-clip-unused")
def values_clipped_too_late(wrong: bool) -> Any:
    def update(self: Any, gradients: Any) -> None:
        if wrong:
            self.optimizer.apply(gradients, self.variables())
            treadle.transforms.clip_by_value(gradients, 0.01)
        else:
            clipped = treadle.transforms.clip_by_value(gradients, 0.01)
            self.optimizer.apply(clipped, self.variables())

    return of(Regression(optimizer=keras.optimizers.SGD(0.01)), update=update), source(*numbers())


@finds("O-wrong-pairs")
def gradients_sorted_by_name(wrong: bool) -> Any:
    task = TwoParts()
    task.model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6), keras.layers.Dense(6)])
    task.head = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6)])

    def update(self: Any, gradients: Any) -> None:
        variables = self.variables()
        pairs = list(zip(gradients, variables, strict=True))
        if wrong:
            kernels = [g for g, v in pairs if len(v.shape) == 2]
            biases = [g for g, v in pairs if len(v.shape) == 1]
            turned = {2: kernels[1:] + kernels[:1], 1: biases[1:] + biases[:1]}
            gradients = [turned[len(v.shape)].pop(0) for v in variables]
        self.optimizer.apply(gradients, variables)

    def objective(self: Any, batch: Any) -> Any:
        x, y = batch
        return ops.mean((self.head(self.model(x)) - y) ** 2)

    x, _ = numbers()
    return of(task, update=update, objective=objective), source(x, np.roll(x, 2, axis=1))


@finds("R-constant-seed")
def a_mask_with_a_constant_seed(wrong: bool) -> Any:
    task = Regression()
    task.seed = keras.random.SeedGenerator(2)

    def objective(self: Any, batch: Any) -> Any:
        x, y = batch
        mask = keras.random.uniform((6,), seed=3 if wrong else self.seed) > 0.2
        return ops.mean((self.model(x * ops.cast(mask, "float32")) - y) ** 2)

    return of(task, objective=objective), source(*numbers())


@finds("R-not-repeatable")
def a_counter_outside_of_the_task(wrong: bool) -> Any:
    calls = [0]

    def objective(self: Any, batch: Any) -> Any:
        x, y = batch
        calls[0] += 1
        weight = 1.0 + (0.01 * calls[0] if wrong else 0.0)
        return weight * ops.mean((self.model(x) - y) ** 2)

    return of(Regression(), objective=objective), source(*numbers())


@finds("M-labels")
def binary_accuracy_of_three_classes(wrong: bool) -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy()
    metric = keras.metrics.BinaryAccuracy() if wrong else "accuracy"
    x, y = classes()
    return supervised(network(3, "softmax"), loss, metrics=[metric]), source(x, y[:, None])
