"""More pairs of programs, of evaluation, adversaries, views, rows, schedules and frozen layers.

They are added to the pairs of `doctor_programs`, which explains them.
"""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

import treadle
from tests.doctor.doctor_programs import (
    BATCH,
    ROWS,
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
from tests.doctor.doctor_sound import adam, dense, stepping
from treadle import Datasets

# Evaluation and modes


class Noise(layers.Layer):
    """Adds noise, always or in training only."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always, self.seeds = always, keras.random.SeedGenerator(1)

    def call(self, x: Any, training: bool = False) -> Any:
        if not (training or self.always):
            return x
        return x + keras.random.normal(ops.shape(x), stddev=0.1, seed=self.seeds)


@finds("T-on-in-eval")
def a_layer_that_ignores_its_mode(wrong: bool) -> Any:
    model = keras.Sequential([keras.Input((6,)), Noise(wrong), layers.Dense(1)])
    return Regression(model), Datasets(source(*numbers()), source(*numbers(seed=1)))


@finds("E-random")
def augmentation_in_evaluation(wrong: bool) -> Any:
    def varied(self: Any, x: Any) -> Any:
        return x * keras.random.uniform(x.shape, 0.8, 1.2, seed=self.seeds)

    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch
        return Regression.train_step(self, (varied(self, x), y))

    def eval_step(self: Any, batch: Any) -> Any:
        x, y = batch
        x = varied(self, x) if wrong else x
        return {"loss": self.loss_of(y, self.model(x, training=False))}

    task = of(Regression(), train_step=train_step, eval_step=eval_step)
    task.seeds = keras.random.SeedGenerator(2)
    return task, Datasets(source(*numbers()), source(*numbers(seed=1)))


def teacher_and_student(noisy: bool, swapped: bool) -> Any:
    """Return a distillation from a teacher that was compiled to be trained by `fit`."""
    body = [layers.Dense(16, activation="relu"), layers.Dropout(0.5), layers.Dense(3)]
    teacher = keras.Sequential([keras.Input((6,)), *body])
    teacher.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    teacher.fit(*classes(), verbose=0)
    teacher.trainable = False

    def train_step(self: Any, x: Any) -> Any:
        target = ops.softmax(self.teacher(x, training=noisy))

        def objective() -> Any:
            given = target, ops.softmax(self.student(x, training=True))
            return keras.losses.KLDivergence()(*(given[::-1] if swapped else given))

        return {"loss": treadle.minimize(objective, self.student, self.optimizer)}

    student = dense(6, 8, 3)
    return stepping(train_step, teacher=teacher, student=student, optimizer=adam())


@finds("T-on-in-target")
def a_teacher_with_dropout(wrong: bool) -> Any:
    return teacher_and_student(wrong, False), source(classes()[0])


# Losses


@finds("L-swapped")
def a_divergence_from_the_student(wrong: bool) -> Any:
    return teacher_and_student(False, wrong), source(classes()[0])


@finds("L-swapped")
def a_percentage_of_the_prediction(wrong: bool) -> Any:
    error = keras.losses.MeanAbsolutePercentageError()
    x, y = numbers()

    def loss_of(self: Any, y: Any, outputs: Any) -> Any:
        # A symmetric error is right with both orders.
        squared = keras.losses.MeanSquaredError()(outputs, y)
        return squared + (error(outputs, y) if wrong else error(y, outputs))

    return of(Regression(), loss_of=loss_of), source(x, np.exp(y))


@finds("L-not-logged")
def a_penalty_that_is_only_logged(wrong: bool) -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        def penalty() -> Any:
            return 0.01 * sum(ops.sum(w * w) for w in self.variables())

        def objective() -> Any:
            return self.objective(batch) if wrong else self.objective(batch) + penalty()

        loss = treadle.minimize(objective, self.model, self.optimizer)
        return {"loss": loss + penalty() if wrong else loss}

    return of(Regression(), train_step=train_step), source(*numbers())


@finds("L-not-logged")
def another_loss_that_is_logged(wrong: bool) -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch

        def error() -> Any:
            return ops.mean(ops.abs(self.model(x, training=True) - y))

        loss = treadle.minimize(error, self.model, self.optimizer)
        squared = ops.mean((self.model(x) - y) ** 2)
        return {"loss": squared if wrong else loss, "squared": squared}

    return of(Regression(), train_step=train_step), source(*numbers())


@finds("T-softmax-twice")
def log_softmax_of_probabilities(wrong: bool) -> Any:
    def loss_of(self: Any, y: Any, outputs: Any) -> Any:
        return -ops.mean(ops.sum(ops.one_hot(y, 3) * ops.log_softmax(outputs / 2.0), axis=-1))

    model = network(3, activation="softmax" if wrong else None)
    return of(Regression(model), loss_of=loss_of), source(*classes())


@finds("T-softmax-twice")
def sigmoid_of_probabilities(wrong: bool) -> Any:
    def loss_of(self: Any, y: Any, outputs: Any) -> Any:
        shares = ops.sigmoid(outputs)
        return -ops.mean(y * ops.log(shares) + (1 - y) * ops.log(1 - shares))

    x, y = numbers()
    model = network(1, activation="sigmoid" if wrong else None)
    return of(Regression(model), loss_of=loss_of), source(x, (y > 0).astype("float32"))


@finds("L-sign")
def weights_of_terms_that_are_learned(wrong: bool) -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch

        def objective() -> Any:
            outputs = self.model(x, training=True)
            terms = ops.mean((outputs - y) ** 2, axis=0)
            s = ops.convert_to_tensor(self.weights)
            return ops.sum(s * terms if wrong else ops.exp(-s) * terms + s)

        variables = [*self.model.trainable_variables, self.weights]
        return {"loss": treadle.minimize(objective, variables, self.optimizer)}

    x, y = numbers()
    weights = keras.Variable([1.0, 1.0])
    task = stepping(train_step, model=network(2), weights=weights, optimizer=adam())
    return task, source(x, np.concatenate([y, x[:, 2:3]], axis=1))


@finds("L-range")
def a_decoder_that_cannot_reach_its_inputs(wrong: bool) -> Any:
    def train_step(self: Any, x: Any) -> Any:
        def objective() -> Any:
            return ops.mean((self.model(x, training=True) - x) ** 2)

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}

    task = stepping(train_step, model=dense(6, 12, 6, last="sigmoid"), optimizer=adam())
    x = rng().uniform(size=(ROWS, 6)).astype("float32")
    return task, source(2 * x - 1 if wrong else x)


def adversaries(targets: Any, last: str = "tanh") -> Any:
    """Return a GAN: targets for data, for generated examples, and for the generator."""
    of_data, of_generated, of_generator = targets

    def train_step(self: Any, x: Any) -> Any:
        entropy = keras.losses.BinaryCrossentropy(from_logits=True)
        noise = keras.random.normal((x.shape[0], 4), seed=self.seeds)

        def judged() -> Any:
            real, fake = self.critic(x), self.critic(self.generator(noise))
            first = entropy(of_data * ops.ones_like(real), real)
            return first + entropy(of_generated * ops.ones_like(fake), fake)

        def generated() -> Any:
            fake = self.critic(self.generator(noise))
            return entropy(of_generator * ops.ones_like(fake), fake)

        return {
            "d": treadle.minimize(judged, self.critic, self.d_optimizer),
            "g": treadle.minimize(generated, self.generator, self.g_optimizer),
        }

    return stepping(
        train_step,
        critic=dense(6, 12, 1),
        generator=dense(4, 12, 6, last=last),
        seeds=keras.random.SeedGenerator(3),
        d_optimizer=adam(),
        g_optimizer=adam(),
    )


def bounded() -> Any:
    """Return data from -1 to 1."""
    return source(rng().uniform(-1, 1, size=(ROWS, 6)).astype("float32"))


@finds("L-adversary")
def a_discriminator_with_one_target(wrong: bool) -> Any:
    return adversaries((1.0, 1.0 if wrong else 0.0, 1.0)), bounded()


@finds("L-adversary")
def a_generator_that_helps(wrong: bool) -> Any:
    return adversaries((1.0, 0.0, 0.0 if wrong else 1.0)), bounded()


@finds("L-range")
def a_generator_that_cannot_reach_the_data(wrong: bool) -> Any:
    return adversaries((1.0, 0.0, 1.0), last="sigmoid" if wrong else "tanh"), bounded()


def contrastive(twice: bool, apart: int) -> Any:
    """Return a contrastive task of two views, whose positives are some rows apart."""

    def train_step(self: Any, x: Any) -> Any:
        def view() -> Any:
            return x + keras.random.normal(x.shape, stddev=0.1, seed=self.seeds)

        first = view()
        views = ops.concatenate([first, view() if twice else first])

        def objective() -> Any:
            found = ops.normalize(self.encoder(views, training=True), axis=-1)
            count = found.shape[0]
            alike = ops.matmul(found, ops.transpose(found)) / 0.2 - 1e9 * ops.eye(count)
            positives = ops.roll(ops.arange(count), apart)
            loss = keras.losses.sparse_categorical_crossentropy
            return ops.mean(loss(positives, alike, from_logits=True))

        return {"loss": treadle.minimize(objective, self.encoder, self.optimizer)}

    seeds = keras.random.SeedGenerator(4)
    return stepping(train_step, encoder=dense(6, 12, 8), seeds=seeds, optimizer=adam())


@finds("L-views")
def one_view_twice(wrong: bool) -> Any:
    return contrastive(not wrong, BATCH), source(numbers()[0])


@finds("L-views")
def positives_of_other_examples(wrong: bool) -> Any:
    return contrastive(True, 1 if wrong else BATCH), source(numbers()[0])


# Numbers that are not finite


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


# Rows


@finds("B-rows-mixed")
def a_reshape_after_a_transpose(wrong: bool) -> Any:
    """Entries of a row end in others; the twin standardizes inputs by their batch, on purpose."""

    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch
        mixed = ops.reshape(ops.transpose(x), x.shape)
        x = mixed if wrong else (x - ops.mean(x, axis=0)) / ops.std(x, axis=0)
        return Regression.train_step(self, (x, y))

    return of(Regression(), train_step=train_step), source(*numbers())


@finds("B-rows-mixed")
def a_reshape_in_the_place_of_a_transpose(wrong: bool) -> Any:
    def loss_of(self: Any, y: Any, x: Any) -> Any:
        rows, length, features = x.shape
        steps = ops.reshape(x, (length, rows, features)) if wrong else ops.transpose(x, (1, 0, 2))
        state = ops.zeros((rows, 4))
        for number in range(length):
            state = self.cell(ops.concatenate([steps[number], state], axis=-1))
        return ops.mean((self.head(state) - y) ** 2)

    def train_step(self: Any, batch: Any) -> Any:
        variables = [*self.cell.trainable_variables, *self.head.trainable_variables]
        x, y = batch
        return {"loss": treadle.minimize(lambda: loss_of(self, y, x), variables, self.optimizer)}

    parts = {"cell": dense(6, 4, last="tanh"), "head": dense(4, 1), "optimizer": adam()}
    x = rng().normal(size=(ROWS, 5, 2)).astype("float32")
    return stepping(train_step, **parts), source(x, x.sum(axis=1)[:, :1])


# Metrics


@finds("M-labels")
def binary_accuracy_of_one_hot_labels(wrong: bool) -> Any:
    x, y = classes()
    metric = keras.metrics.BinaryAccuracy() if wrong else keras.metrics.CategoricalAccuracy()
    loss = keras.losses.CategoricalCrossentropy()
    task = supervised(network(3, activation="softmax"), loss, metrics=[metric])
    return task, source(x, np.eye(3, dtype="float32")[y])


@finds("L-padding")
def a_metric_that_counts_padding(wrong: bool) -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        tokens, mask, tags = batch

        def objective() -> Any:
            logits = self.model(tokens, training=True)
            loss = keras.losses.sparse_categorical_crossentropy(tags, logits, from_logits=True)
            return ops.sum(loss * mask) / ops.sum(mask), logits

        loss, logits = treadle.minimize(objective, self.model, self.optimizer)
        self.accuracy.update_state(tags, logits, sample_weight=None if wrong else mask)
        return {"loss": loss}

    embedding = layers.Embedding(12, 8)
    parts = [keras.Input((8,), dtype="int32"), embedding, layers.Dense(3)]
    task = stepping(
        train_step,
        model=keras.Sequential(parts),
        accuracy=keras.metrics.SparseCategoricalAccuracy(),
        optimizer=adam(),
    )
    mask = np.arange(8) < rng().integers(3, 9, size=(ROWS, 1))
    tokens = (rng(1).integers(1, 12, size=(ROWS, 8)) * mask).astype("int32")
    return task, source(tokens, mask.astype("float32"), (tokens % 3).astype("int32"))


# Data


@finds("D-overlap")
def copies_made_before_the_split(wrong: bool) -> Any:
    x, y = classes(rows=240)
    if wrong:
        copies = np.flatnonzero(y == 0).repeat(3)
        x, y = np.concatenate([x, x[copies]]), np.concatenate([y, y[copies]])
    order = rng(5).permutation(len(x))
    x, y = x[order], y[order]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return supervised(network(3), loss), Datasets(
        source(x[:180], y[:180]), source(x[180:], y[180:])
    )


@finds("D-label-in-inputs")
def a_scaled_label_among_the_inputs(wrong: bool) -> Any:
    x, y = numbers()
    y = y + 0.1 * rng(7).normal(size=y.shape).astype("float32")
    if wrong:
        x = np.concatenate([x[:, :5], (y - y.mean()) / y.std()], axis=1)
    return Regression(), source(x, y)


# Optimizers and Python values


@finds("O-frozen-updated")
def a_list_of_variables_from_before_freezing(wrong: bool) -> Any:
    body, head = dense(6, 12, last="tanh"), dense(12, 1)
    body.set_weights([rng(8).normal(size=w.shape).astype("float32") for w in body.get_weights()])
    model = keras.Sequential([keras.Input((6,)), body, head])
    every = list(model.trainable_variables)
    body.trainable = False

    def variables(self: Any) -> Any:
        return every if wrong else self.model.trainable_variables

    return of(Regression(model), variables=variables), source(*numbers())


@finds("O-schedule-unused")
def a_rate_from_the_first_value_of_a_schedule(wrong: bool) -> Any:
    schedule = keras.optimizers.schedules.CosineDecay(0.01, 100)

    def train_step(self: Any, batch: Any) -> Any:
        amount = self.schedule(treadle.step())  # as the twin's weight of a penalty, it counts

        def objective() -> Any:
            penalty = sum(ops.mean(w * w) for w in self.variables())
            return self.objective(batch) + (0.0 if wrong else amount) * penalty

        loss = treadle.minimize(objective, self.model, self.optimizer)
        return {"loss": loss, "amount": amount}

    task = of(Regression(optimizer=keras.optimizers.Adam(0.01)), train_step=train_step)
    task.schedule = schedule
    return task, source(*numbers())


@finds("S-recompiles")
def a_hook_that_changes_a_number_in_each_step(wrong: bool) -> Any:
    def cool(self: Any, loop: Any) -> None:
        self.scale = max(0.1, 0.99 * self.scale)

    def hooks(self: Any) -> Any:
        return [treadle.every("1 step" if wrong else "1 epoch", self.cool)]

    def train_step(self: Any, batch: Any) -> Any:
        scale = self.scale
        loss = treadle.minimize(lambda: scale * self.objective(batch), self.model, self.optimizer)
        return {"loss": loss}

    task = of(Regression(), cool=cool, hooks=hooks, train_step=train_step)
    task.scale = 1.0
    return task, source(*numbers())
