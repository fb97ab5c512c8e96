"""Pairs of programs: each makes one classic mistake, and its twin does the same without it.

A program is a function of `wrong` that returns a task and its data.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

import treadle
from treadle import Datasets, data

ROWS, BATCH = 192, 32
Program = Callable[[bool], tuple[Any, Any]]


@dataclass(frozen=True)
class Pair:
    """A program in a wrong and a sound form.

    Attributes:
        code: The finding that the wrong form must have.
        program: The program.
    """

    code: str
    program: Program

    @property
    def name(self) -> str:
        return f"{self.code}:{self.program.__name__}"


PAIRS: list[Pair] = []


def finds(code: str) -> Callable[[Program], Program]:
    """Register a program whose wrong form has this finding."""

    def add(program: Program) -> Program:
        PAIRS.append(Pair(code, seeded(program)))
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


@finds("L-unpaired")
def columns_of_weights_against_flat_losses(wrong: bool) -> Any:
    def loss_of(self: Any, y: Any, outputs: Any) -> Any:
        outputs = ops.squeeze(outputs, -1)
        return ops.mean(ops.abs(outputs - (y if wrong else ops.squeeze(y, -1))))

    x, y = numbers()
    return of(Regression(), loss_of=loss_of), source(x, y)


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
def swapped_arguments_of_a_loss(wrong: bool) -> Any:
    loss = keras.losses.KLDivergence()

    def loss_of(self: Any, y: Any, outputs: Any) -> Any:
        return loss(outputs, y) if wrong else loss(y, outputs)

    x, y = classes()
    return of(Regression(network(3, "softmax")), loss_of=loss_of), source(
        x, np.eye(3, dtype="float32")[y] * 0.7 + 0.1
    )


@finds("L-swapped")
def swapped_arguments_of_a_metric(wrong: bool) -> Any:
    task = Regression()
    task.error = keras.metrics.MeanAbsolutePercentageError()

    def eval_step(self: Any, batch: Any) -> Any:
        x, y = batch
        outputs = self.model(x, training=False)
        self.error.update_state(*((outputs, y) if wrong else (y, outputs)))

    return of(task, eval_step=eval_step), Datasets(source(*numbers()), source(*numbers(seed=1)))


@finds("L-range")
def targets_beyond_a_sigmoid(wrong: bool) -> Any:
    x, y = numbers()
    y = 4 * y if wrong else 1 / (1 + np.exp(-y))
    return supervised(network(1, "sigmoid"), "mse"), source(x, y.astype("float32"))


@finds("L-range")
def negative_targets_of_a_relu(wrong: bool) -> Any:
    x, y = numbers()
    return supervised(network(1, "relu"), "mse"), source(x, y if wrong else np.abs(y))


@finds("L-sum")
def sum_over_rows(wrong: bool) -> Any:
    def loss_of(self: Any, y: Any, outputs: Any) -> Any:
        return (ops.sum if wrong else ops.mean)((outputs - y) ** 2)

    return of(Regression(optimizer=keras.optimizers.Adam(1e-3)), loss_of=loss_of), source(
        *numbers()
    )


@finds("L-sum")
def reduction_sum_of_a_class(wrong: bool) -> Any:
    loss = keras.losses.MeanSquaredError(reduction="sum" if wrong else "sum_over_batch_size")
    return supervised(network(1), loss), source(*numbers())


@finds("L-divided")
def mean_divided_by_the_batch(wrong: bool) -> Any:
    def loss_of(self: Any, y: Any, outputs: Any) -> Any:
        loss = ops.mean((outputs - y) ** 2)
        return loss / ops.shape(y)[0] if wrong else loss

    return of(Regression(), loss_of=loss_of), source(*numbers())


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


@finds("M-logits")
def binary_accuracy_of_logits(wrong: bool) -> Any:
    x, y = numbers()
    metric = keras.metrics.BinaryAccuracy(threshold=0.5)
    model = network(1, None if wrong else "sigmoid")
    loss = keras.losses.BinaryCrossentropy(from_logits=wrong)
    return supervised(model, loss, metrics=[metric]), source(x, (y > 0).astype("float32"))


@finds("M-logits")
def precision_of_logits(wrong: bool) -> Any:
    task = Regression()
    task.precision = keras.metrics.Precision()

    def eval_step(self: Any, batch: Any) -> Any:
        x, y = batch
        outputs = self.model(x, training=False)
        self.precision.update_state(y, outputs if wrong else ops.sigmoid(outputs))

    def loss_of(self: Any, y: Any, outputs: Any) -> Any:
        return ops.mean(ops.binary_crossentropy(y, outputs, from_logits=True))

    def part(seed: int) -> Any:
        x, y = numbers(seed=seed)
        return source(x, (y > 0).astype("float32"))

    return of(task, eval_step=eval_step, loss_of=loss_of), Datasets(part(0), part(1))


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


def dropping(rate: float = 0.5) -> Any:
    """Return a network with Dropout."""
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(12, activation="tanh"),
            keras.layers.Dropout(rate, seed=1),
            keras.layers.Dense(1),
        ]
    )


def normalizing() -> Any:
    """Return a network with BatchNormalization."""
    layers = [keras.layers.Dense(12), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((6,)), *layers])


def _trained_in_mode(training: bool) -> Callable[..., Any]:
    def objective(self: Any, batch: Any) -> Any:
        x, y = batch
        return ops.mean((self.model(x, training=training) - y) ** 2)

    return objective


def _evaluated_in_mode(training: bool) -> Callable[..., Any]:
    def eval_step(self: Any, batch: Any) -> Any:
        x, y = batch
        return {"loss": ops.mean((self.model(x, training=training) - y) ** 2)}

    return eval_step


@finds("T-off-in-train")
def dropout_in_inference_mode(wrong: bool) -> Any:
    return of(Regression(dropping()), objective=_trained_in_mode(not wrong)), source(*numbers())


@finds("T-off-in-train")
def normalization_in_inference_mode(wrong: bool) -> Any:
    return of(Regression(normalizing()), objective=_trained_in_mode(not wrong)), source(*numbers())


@finds("T-on-in-eval")
def dropout_in_evaluation(wrong: bool) -> Any:
    task = of(Regression(dropping()), eval_step=_evaluated_in_mode(wrong))
    return task, Datasets(source(*numbers()), source(*numbers(seed=1)))


@finds("T-on-in-eval")
def normalization_in_evaluation(wrong: bool) -> Any:
    task = of(Regression(normalizing()), eval_step=_evaluated_in_mode(wrong))
    return task, Datasets(source(*numbers()), source(*numbers(seed=1)))


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


@finds("G-blocked")
def a_sign_before_the_head(wrong: bool) -> Any:
    def between(self: Any, features: Any) -> Any:
        signs = ops.sign(features) + 0 * features
        return signs if wrong else features + ops.stop_gradient(signs - features)

    return of(TwoParts(), between=between), source(*numbers())


@finds("G-dead")
def a_branch_without_effect(wrong: bool) -> Any:
    def objective(self: Any, batch: Any) -> Any:
        x, y = batch
        loss = ops.mean((self.model(x)[:, :1] - y) ** 2)
        return loss + (0.0 if wrong else 0.1) * ops.mean(self.head(self.model(x)) ** 2)

    return of(TwoParts(), objective=objective), source(*numbers())


@finds("G-dead")
def zeros_for_unreached(wrong: bool) -> Any:
    def objective(self: Any, batch: Any) -> Any:
        x, y = batch
        outputs = self.model(x)
        return ops.mean(((outputs[:, :1] if wrong else self.head(outputs)) - y) ** 2)

    def train_step(self: Any, batch: Any) -> Any:
        loss, gradients = treadle.gradients(
            lambda: self.objective(batch), self.variables(), unreached="zeros"
        )
        self.update(gradients)
        return {"loss": loss}

    return of(TwoParts(), objective=objective, train_step=train_step), source(*numbers())


@finds("O-unused")
def an_optimizer_that_is_never_applied(wrong: bool) -> Any:
    def update(self: Any, gradients: Any) -> None:
        count = len(self.model.trainable_variables)
        self.optimizer.apply(gradients[:count], self.model.trainable_variables)
        if not wrong:
            self.head_optimizer.apply(gradients[count:], self.head.trainable_variables)

    task = TwoParts()
    task.head_optimizer = keras.optimizers.SGD(0.01)
    return of(task, update=update), source(*numbers())


@finds("O-not-updated")
def half_of_the_variables(wrong: bool) -> Any:
    def variables(self: Any) -> Any:
        every = self.model.trainable_variables
        return every[:2] if wrong else every

    return of(Regression(), variables=variables), source(*numbers())


@finds("O-not-updated")
def variables_taken_before_unfreezing(wrong: bool) -> Any:
    task = Regression()
    task.model.layers[0].trainable = False
    early = task.model.trainable_variables
    task.model.layers[0].trainable = True

    def variables(self: Any) -> Any:
        return early if wrong else self.model.trainable_variables

    return of(task, variables=variables), source(*numbers())


class Spare(keras.Model):
    """A model with a layer that its call may forget."""

    def __init__(self, uses: bool) -> None:
        super().__init__()
        self.first, self.second = keras.layers.Dense(6), keras.layers.Dense(6)
        self.out = keras.layers.Dense(1)
        self.uses = uses
        for layer in (self.first, self.second, self.out):
            layer.build((None, 6))
        self.built = True

    def call(self, inputs: Any) -> Any:
        x = ops.tanh(self.first(inputs))
        return self.out(ops.tanh(self.second(x)) if self.uses else x)


@finds("O-never-used")
def a_layer_that_call_forgets(wrong: bool) -> Any:
    def variables(self: Any) -> Any:
        used = [self.model.first, self.model.out] + ([] if wrong else [self.model.second])
        return [v for layer in used for v in layer.trainable_variables]

    return of(Regression(Spare(not wrong)), variables=variables), source(*numbers())


@finds("O-two-optimizers")
def both_optimizers_get_everything(wrong: bool) -> Any:
    task = TwoParts()
    task.second = keras.optimizers.SGD(0.01)

    def update(self: Any, gradients: Any) -> None:
        count = 0 if wrong else len(self.model.trainable_variables)
        first = len(gradients) if wrong else count
        self.optimizer.apply(gradients[:first], self.variables()[:first])
        self.second.apply(gradients[count:], self.variables()[count:])

    return of(task, update=update), source(*numbers())


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


@finds("O-large-updates")
def a_rate_of_one_for_adam(wrong: bool) -> Any:
    return Regression(optimizer=keras.optimizers.Adam(1.0 if wrong else 1e-2)), source(*numbers())


@finds("O-small-updates")
def a_rate_of_nearly_nothing(wrong: bool) -> Any:
    return Regression(optimizer=keras.optimizers.SGD(1e-12 if wrong else 1e-2)), source(*numbers())


@finds("O-decays-biases")
def decay_of_everything(wrong: bool) -> Any:
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.01)
    if not wrong:
        optimizer.exclude_from_weight_decay(var_names=["bias"])
    return Regression(optimizer=optimizer), source(*numbers())


@finds("O-accumulates")
def accumulation_with_a_schedule(wrong: bool) -> Any:
    rate = keras.optimizers.schedules.CosineDecay(0.01, 1000) if wrong else 0.01
    return Regression(optimizer=keras.optimizers.SGD(rate, gradient_accumulation_steps=4)), source(
        *numbers()
    )


@finds("O-over-early")
def a_schedule_in_epochs(wrong: bool) -> Any:
    rate = keras.optimizers.schedules.CosineDecay(0.01, 10 if wrong else 60)
    task = Regression(optimizer=keras.optimizers.SGD(rate))
    task.epochs = 10
    return task, source(*numbers())


@finds("O-over-late")
def a_schedule_in_examples(wrong: bool) -> Any:
    rate = keras.optimizers.schedules.CosineDecay(0.01, 10 * ROWS if wrong else 60)
    task = Regression(optimizer=keras.optimizers.SGD(rate))
    task.epochs = 10
    return task, source(*numbers())


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


# Data


@finds("B-no-influence")
def sample_weights_that_are_dropped(wrong: bool) -> Any:
    def objective(self: Any, batch: Any) -> Any:
        x, y, weight = batch
        losses = ops.mean((self.model(x) - y) ** 2, axis=-1)
        return ops.mean(losses if wrong else losses * weight)

    x, y = numbers()
    weight = rng(5).uniform(0.5, 1.5, ROWS).astype("float32")
    return of(Regression(), objective=objective), source(x, y, weight)


@finds("B-no-influence")
def a_second_input_that_is_not_used(wrong: bool) -> Any:
    def objective(self: Any, batch: Any) -> Any:
        outputs = self.model(batch["x"] if wrong else batch["x"] + batch["extra"])
        return ops.mean((outputs - batch["y"]) ** 2)

    x, y = numbers()
    extra = rng(6).normal(size=x.shape).astype("float32")
    return of(Regression(), objective=objective), source({"x": x, "extra": extra, "y": y})


@finds("D-label-in-inputs")
def the_target_in_a_column(wrong: bool) -> Any:
    x, y = numbers()
    if wrong:
        x[:, 3:4] = y
    return Regression(), source(x, y)


@finds("D-unscaled")
def pixels_up_to_255(wrong: bool) -> Any:
    x, y = classes()
    x = np.clip(128 + 50 * x, 0, 255).astype("float32")
    layers: list[Any] = [] if wrong else [keras.layers.Rescaling(1 / 255)]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return supervised(model, loss), source(x, y)


@finds("E-scale")
def validation_in_another_scale(wrong: bool) -> Any:
    x, y = numbers(seed=1)
    return Regression(), Datasets(source(*numbers()), source(255 * x if wrong else x, y))


@finds("D-sorted")
def sorted_and_not_shuffled(wrong: bool) -> Any:
    x, y = classes()
    order = np.argsort(y)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return supervised(network(3), loss), source(x[order], y[order], shuffle=not wrong)


@finds("D-overlap")
def training_rows_in_the_validation(wrong: bool) -> Any:
    x, y = numbers()
    a, b = numbers(seed=1)
    held_out = (x[:96], y[:96]) if wrong else (a, b)
    return Regression(), Datasets(source(x, y), source(*held_out))


@finds("D-imbalance")
def accuracy_of_rare_classes(wrong: bool) -> Any:
    x, _ = classes()
    share = 0.95 if wrong else 0.6
    y = (rng(7).random(ROWS) > share).astype("int32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return supervised(network(2), loss, metrics=["accuracy"]), source(x, y)


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


@finds("E-trains")
def evaluation_that_counts(wrong: bool) -> Any:
    task = Regression()
    task.count = keras.Variable(0.0, trainable=False)

    def eval_step(self: Any, batch: Any) -> Any:
        if wrong:
            self.count.assign_add(1.0)
        return {"loss": self.objective(batch)}

    return of(task, eval_step=eval_step), Datasets(source(*numbers()), source(*numbers(seed=1)))


# Second programs for what lies deeper


@finds("L-not-logged")
def maximized_but_logged_positive(wrong: bool) -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch

        def gain() -> Any:
            return -ops.mean((self.model(x) - y) ** 2)

        loss, gradients = treadle.gradients(lambda: gain() if wrong else -gain(), self.variables())
        self.update(gradients)
        return {"loss": -loss if wrong else loss}

    return of(Regression(), train_step=train_step), source(*numbers())


@finds("L-not-logged")
def logged_loss_divided_again(wrong: bool) -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        loss, gradients = treadle.gradients(lambda: self.objective(batch), self.variables())
        self.update(gradients)
        return {"loss": loss / len(batch[0]) if wrong else loss}

    return of(Regression(), train_step=train_step), source(*numbers())


@finds("L-divided")
def losses_divided_twice(wrong: bool) -> Any:
    def mean_of(self: Any, y: Any, outputs: Any) -> Any:
        losses = keras.losses.mean_squared_error(y, outputs)
        rows = ops.cast(ops.shape(y)[0], "float32")
        return ops.sum(losses) / (rows * rows if wrong else rows)

    return of(Regression(), loss_of=mean_of), source(*numbers())


@finds("M-unused")
def a_metric_that_nobody_updates(wrong: bool) -> Any:
    task = Regression()
    task.error = keras.metrics.MeanAbsoluteError()

    def eval_step(self: Any, batch: Any) -> Any:
        x, y = batch
        outputs = self.model(x, training=False)
        if not wrong:
            self.error.update_state(y, outputs)
        return {"loss": self.loss_of(y, outputs)}

    return of(task, eval_step=eval_step), Datasets(source(*numbers()), source(*numbers(seed=1)))


@finds("M-unused")
def one_of_two_metrics(wrong: bool) -> Any:
    task = supervised(network(1), "mse", metrics=["mae"])
    task.extra = keras.metrics.Mean()

    def update_metrics(self: Any, y: Any, outputs: Any, weight: Any = None) -> None:
        treadle.Supervised.update_metrics(self, y, outputs, weight)
        if not wrong:
            self.extra.update_state(ops.abs(outputs))

    return of(task, update_metrics=update_metrics), Datasets(
        source(*numbers()), source(*numbers(seed=1))
    )


@finds("O-clip-unused")
def clipped_gradients_are_dropped(wrong: bool) -> Any:
    def update(self: Any, gradients: Any) -> None:
        clipped, _ = treadle.clip_by_global_norm(gradients, 0.1)
        self.optimizer.apply(gradients if wrong else clipped, self.variables())

    return of(Regression(optimizer=keras.optimizers.SGD(0.01)), update=update), source(*numbers())


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


@finds("O-unused")
def a_critic_without_its_update(wrong: bool) -> Any:
    task = TwoParts()
    task.critic_optimizer = keras.optimizers.Adam(0.01)

    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch
        features = self.model(x)
        critic = treadle.gradients(
            lambda: ops.mean((self.head(features) - y) ** 2), self.head.trainable_variables
        )
        if not wrong:
            self.critic_optimizer.apply(critic[1], self.head.trainable_variables)
        loss = treadle.minimize(
            lambda: ops.mean(self.head(self.model(x)) ** 2), self.model, self.optimizer
        )
        return {"loss": loss, "critic_loss": critic[0]}

    return of(task, train_step=train_step), source(*numbers())


@finds("O-never-used")
def a_block_that_is_skipped(wrong: bool) -> Any:
    task = TwoParts()
    task.model = Spare(not wrong)

    def variables(self: Any) -> Any:
        return self.model.out.trainable_variables + self.model.first.trainable_variables

    def both(self: Any) -> Any:
        return variables(self) + ([] if wrong else self.model.second.trainable_variables)

    def objective(self: Any, batch: Any) -> Any:
        x, y = batch
        return ops.mean((self.model(x) - y) ** 2)

    del task.head
    return of(task, variables=both, objective=objective), source(*numbers())


@finds("O-two-optimizers")
def the_encoder_belongs_to_both(wrong: bool) -> Any:
    task = TwoParts()
    task.second = keras.optimizers.Adam(0.01)

    def train_step(self: Any, batch: Any) -> Any:
        loss = treadle.minimize(lambda: self.objective(batch), self.model, self.optimizer)
        of_second = [*self.model.trainable_variables] if wrong else []
        treadle.minimize(
            lambda: self.objective(batch), [*of_second, *self.head.trainable_variables], self.second
        )
        return {"loss": loss}

    return of(task, train_step=train_step), source(*numbers())


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


@finds("O-large-updates")
def an_initial_rate_for_examples(wrong: bool) -> Any:
    x, y = numbers()
    optimizer = keras.optimizers.RMSprop(0.5 if wrong else 1e-3)
    return Regression(optimizer=optimizer), source(x, y)


@finds("O-small-updates")
def a_loss_scaled_to_nothing(wrong: bool) -> Any:
    def loss_of(self: Any, y: Any, outputs: Any) -> Any:
        return (1e-12 if wrong else 1.0) * ops.mean((outputs - y) ** 2)

    optimizer = keras.optimizers.SGD(0.01)
    return of(Regression(optimizer=optimizer), loss_of=loss_of), source(*numbers())


@finds("O-decays-biases")
def decay_of_normalization(wrong: bool) -> Any:
    optimizer = keras.optimizers.SGD(0.01, weight_decay=1e-4)
    if not wrong:
        optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    return Regression(normalizing(), optimizer), source(*numbers())


@finds("O-accumulates")
def accumulation_with_averages(wrong: bool) -> Any:
    optimizer = keras.optimizers.Adam(
        0.01, gradient_accumulation_steps=4, use_ema=wrong, ema_momentum=0.9
    )
    return Regression(optimizer=optimizer), source(*numbers())


@finds("O-over-early")
def decay_in_epochs_not_steps(wrong: bool) -> Any:
    rate = keras.optimizers.schedules.PolynomialDecay(0.01, 20 if wrong else 120, 1e-5)
    task = Regression(optimizer=keras.optimizers.SGD(rate))
    task.steps = 120
    return task, source(*numbers())


@finds("O-over-late")
def decay_for_a_longer_run(wrong: bool) -> Any:
    rate = keras.optimizers.schedules.PolynomialDecay(0.01, 5000 if wrong else 120, 1e-5)
    task = Regression(optimizer=keras.optimizers.SGD(rate))
    task.steps = 120
    return task, source(*numbers())


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


@finds("B-no-influence")
def a_mask_that_is_not_applied(wrong: bool) -> Any:
    def objective(self: Any, batch: Any) -> Any:
        errors = (self.model(batch["x"]) - batch["y"]) ** 2
        mask = ops.cast(batch["mask"], "float32")[:, None]
        return ops.mean(errors) if wrong else ops.sum(errors * mask) / ops.sum(mask)

    x, y = numbers()
    mask = rng(8).random(ROWS) > 0.3
    return of(Regression(), objective=objective), source({"x": x, "y": y, "mask": mask})


@finds("D-label-in-inputs")
def the_class_among_the_features(wrong: bool) -> Any:
    x, y = classes(count=3)
    x[:, 5] = y if wrong else x[:, 5]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return supervised(network(3), loss), source(x, y)


@finds("D-unscaled")
def images_of_bytes(wrong: bool) -> Any:
    x = rng().integers(0, 256, (ROWS, 8, 8, 1)).astype("float32")
    y = (x.mean((1, 2, 3)) > 128).astype("int32")
    x = x if wrong else x / 255
    layers = [keras.layers.Conv2D(4, 3), keras.layers.GlobalAveragePooling2D()]
    model = keras.Sequential([keras.Input((8, 8, 1)), *layers, keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return supervised(model, loss), source(x, y)


@finds("E-scale")
def validation_that_was_not_normalized(wrong: bool) -> Any:
    x, y = numbers(seed=1)
    shifted = (100 + 30 * x) if wrong else x
    return Regression(), Datasets(
        source(*numbers()), source(shifted.astype("float32"), y, shuffle=False)
    )


@finds("D-sorted")
def one_class_after_the_other(wrong: bool) -> Any:
    x, y = classes(count=2)
    order = np.argsort(y, kind="stable") if wrong else rng(9).permutation(ROWS)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return supervised(network(2), loss), source(x[order], y[order], shuffle=False)


@finds("D-overlap")
def copies_in_both_sets(wrong: bool) -> Any:
    x, y = numbers()
    a, b = numbers(rows=64, seed=1)
    if wrong:
        a[:10], b[:10] = x[:10], y[:10]
    return Regression(), Datasets(source(x, y), source(a, b))


@finds("D-imbalance")
def hardly_any_positive(wrong: bool) -> Any:
    x, _ = numbers()
    y = (rng(10).random((ROWS, 1)) < (0.04 if wrong else 0.4)).astype("float32")
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return supervised(network(1), loss, metrics=["accuracy"]), source(x, y)


@finds("M-labels")
def binary_accuracy_of_three_classes(wrong: bool) -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy()
    metric = keras.metrics.BinaryAccuracy() if wrong else "accuracy"
    x, y = classes()
    return supervised(network(3, "softmax"), loss, metrics=[metric]), source(x, y[:, None])


@finds("L-unpaired")
def a_baseline_of_another_shape(wrong: bool) -> Any:
    def loss_of(self: Any, y: Any, outputs: Any) -> Any:
        targets = ops.reshape(y, (-1,)) if wrong else y
        return ops.mean(ops.log(ops.cosh(outputs - targets)))

    return of(Regression(), loss_of=loss_of), source(*numbers())


@finds("G-blocked")
def argmax_as_an_index(wrong: bool) -> Any:
    def between(self: Any, features: Any) -> Any:
        hard = ops.one_hot(ops.argmax(features, -1), 4)
        return hard + 0 * features if wrong else ops.softmax(features)

    return of(TwoParts(), between=between), source(*numbers())


@finds("O-not-updated")
def the_head_is_forgotten(wrong: bool) -> Any:
    def variables(self: Any) -> Any:
        kernels = [v for v in self.model.trainable_variables if len(v.shape) == 2]
        return kernels if wrong else self.model.trainable_variables

    return of(Regression(), variables=variables), source(*numbers())


@finds("T-off-in-train")
def noise_without_the_flag(wrong: bool) -> Any:
    layers = [keras.layers.GaussianNoise(0.1, seed=1), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6), *layers])
    return of(Regression(model), objective=_trained_in_mode(not wrong)), source(*numbers())
