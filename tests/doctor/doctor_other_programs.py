"""More pairs of programs, of averages, accumulation, precision, forms of batches and other styles.

They are added to the pairs of `doctor_programs`, which explains them.
"""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

import treadle
from tests.doctor.doctor_programs import (
    BATCH,
    Regression,
    classes,
    finds,
    network,
    numbers,
    of,
    rng,
    source,
    supervised,
)
from treadle import Datasets

# Averages


class Averaging(Regression):
    """A regression that keeps averages of its weights."""

    def __init__(self, measured: bool) -> None:
        super().__init__()
        self.average = treadle.frozen_copy(self.model)
        self.measured = self.average if measured else self.model

    def update(self, gradients: Any) -> None:
        super().update(gradients)
        treadle.blend(self.average, self.model, 0.05)

    def eval_step(self, batch: Any) -> Any:
        x, y = batch[:2]
        return {"loss": self.loss_of(y, self.measured(x, training=False))}


@finds("O-average-unused")
def averages_that_no_evaluation_reads(wrong: bool) -> Any:
    return Averaging(not wrong), Datasets(source(*numbers()), source(*numbers(seed=1)))


@finds("O-average-unused")
def averages_in_variables_of_their_own(wrong: bool) -> Any:
    class Shadowed(Regression):
        """Averages its weights by hand."""

        def __init__(self) -> None:
            super().__init__()
            self.shadow = [
                keras.Variable(ops.convert_to_numpy(v.value).copy(), trainable=False)
                for v in self.variables()
            ]

        def update(self, gradients: Any) -> None:
            super().update(gradients)
            for average, variable in zip(self.shadow, self.variables(), strict=True):
                average.assign(0.9 * average + 0.1 * variable)

        def eval_step(self, batch: Any) -> Any:
            if wrong:
                return super().eval_step(batch)
            with treadle.substituted(self.variables(), self.shadow):
                return super().eval_step(batch)

    return Shadowed(), Datasets(source(*numbers()), source(*numbers(seed=1)))


def averaged(momentum: float, epochs: int) -> Any:
    """Return a regression that ends with the averages of its optimizer."""
    optimizer = keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=momentum)
    task = Regression(optimizer=optimizer)
    task.epochs = epochs
    return task, source(*numbers())


@finds("O-average-slow")
def averages_over_more_steps_than_there_are(wrong: bool) -> Any:
    return averaged(0.9999 if wrong else 0.9, 5)


@finds("O-average-slow")
def a_run_too_short_for_its_averages(wrong: bool) -> Any:
    return averaged(0.99, 2 if wrong else 100)


# Accumulation


class Summing(Regression):
    """Accumulates the gradients of four batches by hand."""

    def __init__(self, divisor: float, clipped: str = "") -> None:
        super().__init__()
        self.sums = [keras.Variable(np.zeros(v.shape), trainable=False) for v in self.variables()]
        self.divisor, self.clipped = divisor, clipped

    def update(self, gradients: Any) -> None:
        if self.clipped == "parts":
            gradients = treadle.transforms.clip_by_norm(gradients, 0.1)
        for total, gradient in zip(self.sums, gradients, strict=True):
            total.assign_add(gradient / self.divisor)

        def apply() -> None:
            means = [total.value for total in self.sums]
            if self.clipped == "update":
                means = treadle.transforms.clip_by_norm(means, 0.1)
            self.optimizer.apply(means, self.variables())
            for total in self.sums:
                total.assign(ops.zeros(total.shape))

        treadle.cond(ops.equal(treadle.step() % 4, 3), apply, lambda: None)


@finds("O-summed")
def batches_summed_by_hand(wrong: bool) -> Any:
    return Summing(1.0 if wrong else 4.0), source(*numbers())


@finds("O-summed")
def parts_of_a_batch_summed(wrong: bool) -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        parts = [tuple(array[i : i + 8] for array in batch) for i in range(0, BATCH, 8)]
        found: list[Any] = []
        for part in parts:
            found.append(treadle.gradients(lambda p=part: self.objective(p), self.variables()))
        divisor = 1.0 if wrong else len(parts)
        gradients = [sum(same) / divisor for same in zip(*(g for _, g in found), strict=True)]
        self.update(gradients)
        return {"loss": sum(loss for loss, _ in found) / len(parts)}

    return of(Regression(), train_step=train_step), source(*numbers(), drop_last=True)


@finds("O-clips-parts")
def clipped_before_it_is_accumulated(wrong: bool) -> Any:
    return Summing(4.0, "parts" if wrong else "update"), source(*numbers())


@finds("O-clips-parts")
def an_accumulator_of_clipped_gradients(wrong: bool) -> Any:
    class Accumulating(Regression):
        """Applies the mean of two batches."""

        def __init__(self) -> None:
            super().__init__()
            self.accumulator = treadle.Accumulator(2)

        def update(self, gradients: Any) -> None:
            if wrong:
                gradients, _ = treadle.clip_by_global_norm(gradients, 0.1)

            def apply(mean: Any) -> None:
                if not wrong:
                    mean, _ = treadle.clip_by_global_norm(mean, 0.1)
                self.optimizer.apply(mean, self.variables())

            self.accumulator.add(gradients, apply)

    return Accumulating(), source(*numbers())


# Frozen layers, precision


def headed(body: Any) -> Any:
    """Return a classifier with a frozen body."""
    body.trainable = False
    model = keras.Sequential([body, layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return supervised(model, loss), source(*classes())


@finds("O-frozen-initial")
def a_frozen_body_without_weights(wrong: bool) -> Any:
    body = network(8)
    if not wrong:
        body.set_weights([rng(1).normal(size=value.shape) for value in body.get_weights()])
    return headed(body)


@finds("O-frozen-initial")
def frozen_before_its_weights_are_loaded(wrong: bool) -> Any:
    x = keras.Input((6,))
    hidden = layers.Dense(8, "relu", name="hidden")
    body = keras.Model(x, layers.BatchNormalization()(hidden(x)))
    if not wrong:
        hidden.set_weights([rng(1).normal(size=value.shape) for value in hidden.get_weights()])
    return headed(body)


class HalfDense(keras.layers.Layer):
    """A dense layer that casts by itself."""

    def __init__(self, units: int, kind: str) -> None:
        super().__init__()
        self.units, self.kind = units, kind

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")

    def call(self, x: Any) -> Any:
        product = ops.matmul(ops.cast(x, self.kind), ops.cast(self.kernel, self.kind))
        return ops.cast(product, "float32")


@finds("G-half")
def a_layer_that_casts_to_float16(wrong: bool) -> Any:
    head = HalfDense(1, "float16" if wrong else "bfloat16")
    model = keras.Sequential([keras.Input((6,)), layers.Dense(12, "tanh"), head])
    return Regression(model), source(*numbers())


@finds("G-half")
def an_objective_in_float16(wrong: bool) -> Any:
    def loss_of(self: Any, y: Any, outputs: Any) -> Any:
        kind = "float16" if wrong else "float32"
        difference = ops.cast(outputs, kind) - ops.cast(y, kind)
        return ops.cast(ops.mean(difference * difference), "float32")

    return of(Regression(), loss_of=loss_of), source(*numbers())


# Forms of batches, Python values


def sequences(lengths: Any) -> Any:
    """Return a regression on sequences of these lengths, one batch for each."""
    model = keras.Sequential(
        [keras.Input((None, 4)), layers.GlobalAveragePooling1D(), layers.Dense(1)]
    )
    batches: list[Any] = []
    for number, length in enumerate(lengths):
        x = rng(number).normal(size=(8, length, 4)).astype("float32")
        batches.append((x, x.mean((1, 2))[:, None]))
    return Regression(model), batches


@finds("S-recompiles")
def batches_of_their_own_length(wrong: bool) -> Any:
    return sequences(range(5, 17) if wrong else [8, 16] * 6)


@finds("S-recompiles")
def batches_of_their_own_size(wrong: bool) -> Any:
    x, y = numbers()
    sizes = range(8, 20) if wrong else [8] * 12
    ends = np.cumsum(sizes)
    pairs = zip(ends - list(sizes), ends, strict=True)
    return Regression(), [(x[i:j], y[i:j]) for i, j in pairs]


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


# Programs in other styles


@finds("L-unpaired")
def a_value_head_of_another_shape(wrong: bool) -> Any:
    x = keras.Input((6,))
    hidden = layers.Dense(12, "tanh")(x)
    model = keras.Model(x, [layers.Dense(3)(hidden), layers.Dense(1)(hidden)])

    def objective(self: Any, batch: Any) -> Any:
        observations, actions, returns = batch
        logits, values = self.model(observations)
        values = values if wrong else values[:, 0]
        advantages = ops.stop_gradient(returns - values)
        chosen = ops.sum(ops.log_softmax(logits) * ops.one_hot(actions, 3), axis=-1)
        return ops.mean((values - returns) ** 2) - ops.mean(chosen * advantages)

    inputs, actions = classes()
    returns = numbers()[1][:, 0]
    task = of(Regression(model), objective=objective)
    return task, source(inputs, actions, returns)


@finds("L-divided")
def a_mean_divided_by_the_global_batch_size(wrong: bool) -> Any:
    def objective(self: Any, batch: Any) -> Any:
        x, y = batch
        loss = keras.losses.MeanSquaredError()(y, self.model(x, training=True))
        return loss / BATCH if wrong else loss

    return of(Regression(), objective=objective), source(*numbers())


@finds("L-swapped")
def a_divergence_from_the_model(wrong: bool) -> Any:
    divergence = keras.losses.KLDivergence()

    def objective(self: Any, batch: Any) -> Any:
        x, teacher = batch
        student = ops.softmax(self.model(x))
        return divergence(student, teacher) if wrong else divergence(teacher, student)

    teacher = rng(2).dirichlet(np.ones(3), size=192).astype("float32")
    return of(Regression(network(3)), objective=objective), source(numbers()[0], teacher)


@finds("L-range")
def a_relu_layer_for_negative_targets(wrong: bool) -> Any:
    last = [layers.ReLU()] if wrong else []
    model = keras.Sequential([keras.Input((6,)), layers.Dense(12, "tanh"), layers.Dense(1), *last])
    return supervised(model, keras.losses.LogCosh()), source(*numbers())


@finds("D-label-in-inputs")
def a_language_model_without_a_shift(wrong: bool) -> Any:
    tokens = rng().integers(0, 12, (96, 9)).astype("int32")
    model = keras.Sequential([layers.Embedding(12, 8), layers.GRU(8, return_sequences=True)])
    model.add(layers.Dense(12))

    def objective(self: Any, batch: Any) -> Any:
        targets = batch[:, :-1] if wrong else batch[:, 1:]
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return loss(targets, self.model(batch[:, :-1], training=True))

    model.build((None, 8))
    return of(Regression(model), objective=objective), source(tokens)


@finds("O-not-updated")
def a_decoder_of_its_own_is_forgotten(wrong: bool) -> Any:
    class Autoencoder(treadle.Task):
        """Two models and one optimizer."""

        def __init__(self) -> None:
            self.encoder, self.decoder = network(3), network(6, features=3)
            self.optimizer = keras.optimizers.Adam(0.01)

        def train_step(self, batch: Any) -> Any:
            variables = list(self.encoder.trainable_variables)
            variables += [] if wrong else self.decoder.trainable_variables

            def objective() -> Any:
                return ops.mean((self.decoder(self.encoder(batch)) - batch) ** 2)

            return {"loss": treadle.minimize(objective, variables, self.optimizer)}

    return Autoencoder(), source(numbers()[0])


@finds("O-over-late")
def a_warmup_longer_than_the_run(wrong: bool) -> Any:
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, 9000 if wrong else 50, warmup_target=0.01, warmup_steps=1000 if wrong else 10
    )
    task = Regression(optimizer=keras.optimizers.Adam(schedule))
    task.epochs = 10
    return task, source(*numbers())


@finds("D-sorted")
def a_list_of_batches_in_order_of_classes(wrong: bool) -> Any:
    x, y = classes()
    order = np.argsort(y, kind="stable") if wrong else rng(3).permutation(len(y))
    batches = [(x[rows], y[rows]) for rows in order.reshape(-1, BATCH)]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return supervised(network(3), loss), batches


@finds("M-unused")
def a_metric_of_a_task_without_evaluation(wrong: bool) -> Any:
    class Measuring(treadle.Task):
        """Holds a metric."""

        def __init__(self) -> None:
            self.model, self.optimizer = network(1), keras.optimizers.Adam(0.01)
            self.error = keras.metrics.MeanAbsoluteError()

        def train_step(self, batch: Any) -> Any:
            x, y = batch

            def objective() -> Any:
                outputs = self.model(x)
                return ops.mean((outputs - y) ** 2), outputs

            loss, outputs = treadle.minimize(objective, self.model, self.optimizer)
            if not wrong:
                self.error.update_state(y, outputs)
            return {"loss": loss}

    return Measuring(), source(*numbers())


# Outputs and targets, in losses that are written by hand


def of_outputs(objective: Any, model: Any) -> Any:
    """Return a task that trains one model on a loss of its outputs and the second array."""
    return of(Regression(model=model), loss_of=lambda self, y, outputs: objective(y, outputs))


@finds("L-axis")
def a_softmax_over_the_rows(wrong: bool) -> Any:
    def loss(y: Any, outputs: Any) -> Any:
        chances = ops.softmax(outputs, axis=0 if wrong else -1)
        return -ops.mean(ops.sum(ops.one_hot(y, 3) * ops.log(chances + 1e-7), axis=-1))

    return of_outputs(loss, network(3)), source(*classes())


@finds("L-range")
def negative_targets_of_a_relu_by_hand(wrong: bool) -> Any:
    x, y = numbers()
    model = network(1, "relu")
    return of_outputs(lambda y, out: ops.mean((out - y) ** 2), model), source(
        x, y if wrong else np.abs(y)
    )


@finds("L-range")
def labels_of_minus_one_for_a_sigmoid(wrong: bool) -> Any:
    def loss(y: Any, outputs: Any) -> Any:
        p = ops.clip(outputs, 1e-6, 1 - 1e-6)
        return -ops.mean(y * ops.log(p) + (1 - y) * ops.log(1 - p))

    x, y = numbers()
    positive = (y > 0).astype("float32")
    return of_outputs(loss, network(1, "sigmoid")), source(
        x, 2 * positive - 1 if wrong else positive
    )


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


@finds("D-label-in-inputs")
def a_recurrent_network_in_both_directions(wrong: bool) -> Any:
    recurrent = layers.GRU(8, return_sequences=True)
    return NextToken(layers.Bidirectional(recurrent) if wrong else recurrent), texts()
