"""More pairs of programs, of supervised learning: labels, weights, mixtures and evaluation.

They are added to the pairs of `doctor_programs`, which explains them.
"""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

import treadle
from tests.doctor.doctor_programs import (
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
from tests.doctor.doctor_sound import adam, dense, sound, stepping


def positive() -> tuple[Any, Any]:
    """Return inputs, and 0 or 1 as floats of shape (rows, 1)."""
    x, y = numbers()
    return x, (y > 0).astype("float32")


# Losses


@finds("L-unpaired")
def weights_of_another_shape(wrong: bool) -> Any:
    x, y = numbers()
    cost = 0.2 + (y > 0)  # "cost" is the first array of the batch

    def objective(self: Any, batch: Any) -> Any:
        errors = ops.mean((self.model(batch["x"]) - batch["y"]) ** 2, axis=-1)
        return ops.mean(errors * (batch["cost"] if wrong else batch["cost"][:, 0]))

    columns = {"cost": cost.astype("float32"), "x": x, "y": y}
    return of(Regression(), objective=objective), source(columns)


@finds("L-sign")
def an_f1_score_is_minimized(wrong: bool) -> Any:
    def loss_of(self: Any, y: Any, outputs: Any) -> Any:
        both, every = ops.sum(y * outputs, axis=(1, 2)), ops.sum(y + outputs, axis=(1, 2))
        score = ops.mean(2 * both / every)
        return score if wrong else 1 - score

    images = numbers(features=36)[0].reshape(-1, 6, 6, 1)
    convolution = layers.Conv2D(1, 3, padding="same", activation="sigmoid")
    model = keras.Sequential([keras.Input((6, 6, 1)), convolution])
    return of(Regression(model), loss_of=loss_of), source(images, (images > 0).astype("float32"))


@finds("L-sign")
def the_chance_of_the_label_is_minimized(wrong: bool) -> Any:
    def loss_of(self: Any, y: Any, outputs: Any) -> Any:
        p = ops.sigmoid(outputs)
        chance = y * p + (1 - y) * (1 - p)
        return ops.mean(chance if wrong else 1 - chance)

    return of(Regression(), loss_of=loss_of), source(*positive())


@finds("L-logits-not-told")
def a_divergence_of_logits(wrong: bool) -> Any:
    teacher = dense(6, 8, 3)
    teacher.trainable = False
    divergence = keras.losses.KLDivergence()

    def train_step(self: Any, x: Any) -> Any:
        def objective() -> Any:
            given = self.teacher(x), self.student(x)
            return divergence(*(given if wrong else map(ops.softmax, given)))

        return {"loss": treadle.minimize(objective, self.student, self.optimizer)}

    for variable in teacher.variables:  # no initial values, as of a teacher that was loaded
        variable.assign(variable + 0.1)
    parts = {"teacher": teacher, "student": dense(6, 8, 3), "optimizer": adam()}
    return stepping(train_step, **parts), source(classes()[0])


@finds("L-axis")
def a_softmax_over_positions(wrong: bool) -> Any:
    x, _ = numbers(features=8)
    steps = x.reshape(-1, 4, 2)
    tags = (steps[..., 0] > 0).astype("int32") + (steps[..., 1] > 0)
    model = keras.Sequential([keras.Input((4, 2)), layers.Dense(12, "tanh"), layers.Dense(3)])

    def loss_of(self: Any, y: Any, outputs: Any) -> Any:
        chances = ops.log_softmax(outputs, axis=1 if wrong else -1)
        return -ops.mean(ops.sum(ops.one_hot(y, 3) * chances, axis=-1))

    return of(Regression(model), loss_of=loss_of), source(steps, tags)


@finds("L-axis")
def a_softmax_over_one_unit(wrong: bool) -> Any:
    model = network(1, "softmax" if wrong else "sigmoid")
    return supervised(model, "binary_crossentropy"), source(*positive())


@sound
def features_without_a_domain() -> Any:
    """An encoder whose loss falls as a model of the domain, with labels 0.0 and 1.0, fails."""
    entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    def train_step(self: Any, batch: Any) -> Any:
        x, y, domain = batch

        def judged() -> Any:
            return entropy(domain, self.judge(ops.stop_gradient(self.encoder(x))))

        def learned() -> Any:
            features = self.encoder(x)
            return ops.mean((self.head(features) - y) ** 2) - 0.5 * entropy(
                domain, self.judge(features)
            )

        own = [*self.encoder.trainable_variables, *self.head.trainable_variables]
        return {
            "judge": treadle.minimize(judged, self.judge, self.optimizers[0]),
            "learned": treadle.minimize(learned, own, self.optimizers[1]),
        }

    parts = {"encoder": dense(6, 8, 4), "head": dense(4, 1), "judge": dense(4, 8, 1)}
    task = stepping(train_step, **parts, optimizers=[adam(), adam()])
    return task, source(*numbers(), (numbers()[0][:, 2:3] > 0).astype("float32"))


# Mixtures


def mixture(partner: str, share: float = 0.0) -> Any:
    """Return a classifier of mixtures of examples.

    Args:
        partner: "its own" if the labels are mixed too, "another's" if those of other rows are, or
            "none".
        share: The least share of the first example; at 0 the shares are drawn from 0 to 1.
    """

    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch
        order = keras.random.shuffle(ops.arange(ops.shape(x)[0]), seed=self.seeds)
        a = keras.random.uniform((ops.shape(x)[0], 1), share, 1.0, seed=self.seeds)
        mixed, target = a * x + (1 - a) * ops.take(x, order, axis=0), ops.one_hot(y, 3)
        if partner != "none":
            of = ops.roll(order, 1) if partner == "another's" else order
            target = a * target + (1 - a) * ops.take(target, of, axis=0)

        def objective() -> Any:
            chances = ops.log_softmax(self.model(mixed, training=True))
            return -ops.mean(ops.sum(target * chances, axis=-1))

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}

    seeds = keras.random.SeedGenerator(2)
    return stepping(train_step, model=network(3), optimizer=adam(), seeds=seeds), source(*classes())


@finds("L-unpaired")
def a_mixture_with_labels_of_other_rows(wrong: bool) -> Any:
    return mixture("another's" if wrong else "its own")


@finds("L-unpaired")
def a_mixture_without_the_labels(wrong: bool) -> Any:
    return mixture("none" if wrong else "its own")


@finds("L-unpaired")
def inputs_that_the_step_shuffles(wrong: bool) -> Any:
    def objective(self: Any, batch: Any) -> Any:
        x, y = batch
        order = keras.random.shuffle(ops.arange(ops.shape(x)[0]), seed=self.seeds)
        x, shuffled = ops.take(x, order, axis=0), ops.take(y, order, axis=0)
        return self.loss_of(y if wrong else shuffled, self.model(x, training=True))

    task = of(Regression(), objective=objective)
    task.seeds = keras.random.SeedGenerator(3)
    return task, source(*numbers())


@sound
def examples_with_others_in_the_background() -> Any:
    return mixture("none", 0.7)


# Evaluation


@finds("O-copy-not-updated")
def an_evaluated_average_that_nothing_updates(wrong: bool) -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch
        loss = treadle.minimize(
            lambda: ops.mean((self.model(x) - y) ** 2), self.model, self.optimizer
        )
        if not wrong:
            treadle.blend(self.average, self.model, 0.05)
        return {"loss": loss}

    def eval_step(self: Any, batch: Any) -> Any:
        x, y = batch
        return {"loss": ops.mean((self.average(x) - y) ** 2)}

    model = network(1)
    parts = {"model": model, "average": treadle.frozen_copy(model), "optimizer": adam()}
    data = treadle.Datasets(source(*numbers()), source(*numbers(seed=1)))
    return stepping(train_step, eval_step, **parts), data


@sound
def dropout_that_samples_predictions() -> Any:
    def eval_step(self: Any, batch: Any) -> Any:
        x, y = batch
        sampled = ops.stack([self.model(x, training=True) for _ in range(8)])
        return {"loss": self.loss_of(y, ops.mean(sampled, axis=0))}

    body = [layers.Dense(12, "tanh"), layers.Dropout(0.3), layers.Dense(1)]
    task = of(Regression(keras.Sequential([keras.Input((6,)), *body])), eval_step=eval_step)
    return task, treadle.Datasets(source(*numbers()), source(*numbers(seed=1)))


# Sequences


def texts(rows: int = 192, seed: int = 0) -> Any:
    """Return short texts of one grammar, padded with zeros, some of which occur several times."""
    random = rng(seed)
    found = np.zeros((rows, 8), "int32")
    for row in found:
        token = random.integers(1, 9)
        for place in range(random.integers(2, 8)):
            row[place] = token
            token = 1 + token % 8 if random.random() < 0.9 else random.integers(1, 9)
    return found


class Reader(treadle.Task):
    """Tells the last token of a text from the outputs of a recurrent layer."""

    def __init__(self, read: Any, masked: bool = False) -> None:
        self.words = layers.Embedding(9, 8, mask_zero=masked)
        self.recurrent = layers.GRU(8, return_sequences=True)
        self.scores, self.head = layers.Dense(1), layers.Dense(9)
        self.optimizer, self.read = adam(), read

    def train_step(self, batch: Any) -> Any:
        x, y = batch

        def objective() -> Any:
            hidden = self.read(self, self.recurrent(self.words(x)), x)
            return ops.mean(
                keras.losses.sparse_categorical_crossentropy(y, self.head(hidden), from_logits=True)
            )

        objective()
        parts = (self.words, self.recurrent, self.scores, self.head)
        variables = [v for part in parts for v in part.trainable_variables]
        return {"loss": treadle.minimize(objective, variables, self.optimizer)}


def labelled_texts() -> Any:
    x = texts()
    return source(x, x[np.arange(len(x)), (x > 0).sum(1) - 1])


@finds("L-padding")
def attention_to_padding_alone(wrong: bool) -> Any:
    def read(self: Any, hidden: Any, x: Any) -> Any:
        keep = x == 0 if wrong else x != 0
        scores = ops.where(keep, self.scores(hidden)[..., 0], -1e9)
        return ops.sum(ops.softmax(scores)[..., None] * hidden, axis=1)

    return Reader(read), labelled_texts()


@sound
def the_last_state_that_a_mask_carries_on() -> Any:
    def read(self: Any, hidden: Any, x: Any) -> Any:
        last = hidden[:, -1]
        return last * ops.sigmoid(self.scores(last))

    return Reader(read, masked=True), labelled_texts()


@sound
def short_texts_that_occur_in_both_sets() -> Any:
    def step(self: Any, x: Any) -> Any:
        logits = self.model(x[:, :-1])
        each = keras.losses.sparse_categorical_crossentropy(x[:, 1:], logits, from_logits=True)
        keep = ops.cast(x[:, 1:] > 0, "float32")
        return ops.sum(each * keep) / ops.sum(keep)

    def train_step(self: Any, x: Any) -> Any:
        return {"loss": treadle.minimize(lambda: step(self, x), self.model, self.optimizer)}

    recurrent = layers.GRU(8, return_sequences=True)
    body = [layers.Embedding(9, 8), recurrent, layers.Dense(9)]
    model = keras.Sequential([keras.Input((7,), dtype="int32"), *body])
    task = stepping(train_step, lambda self, x: {"loss": step(self, x)}, model=model)
    task.optimizer = adam()
    return task, treadle.Datasets(source(texts()), source(texts(64, 1)))


# Labels and values


@finds("L-several")
def several_labels_for_one_softmax(wrong: bool) -> Any:
    x, _ = numbers()
    labels = (x[:, :3] > 0.5).astype("float32")
    loss = "categorical_crossentropy" if wrong else "binary_crossentropy"
    return supervised(network(3, "softmax" if wrong else "sigmoid"), loss), source(x, labels)


@sound
def several_words_that_share_one_softmax() -> Any:
    x, _ = numbers()
    labels = (x[:, :3] >= np.sort(x[:, :3])[:, 1:2]).astype("float32")  # two of three
    return supervised(network(3, "softmax"), "categorical_crossentropy"), source(x, labels)


@finds("L-sign")
def the_logarithm_of_a_variance(wrong: bool) -> Any:
    def loss_of(self: Any, y: Any, outputs: Any) -> Any:
        mean, s = outputs[:, :1], outputs[:, 1:]
        return ops.mean((y - mean) ** 2 * ops.exp(-s) + (-s if wrong else s))

    return of(Regression(network(2)), loss_of=loss_of), source(*numbers())


@sound
def a_utility_that_grows_with_its_outputs() -> Any:
    """Shares of three assets; the loss is linear in the outputs of the last layer."""

    def loss_of(self: Any, y: Any, outputs: Any) -> Any:
        return -ops.mean(ops.sum(y * outputs, axis=-1)) + 0.1 * ops.mean(ops.sum(outputs**2, -1))

    x, _ = numbers()
    returns = (x[:, :3] + 0.3 * x[:, 3:6]).astype("float32")
    return of(Regression(network(3, "softmax")), loss_of=loss_of), source(x, returns)


@finds("D-constant")
def pixels_that_an_integer_division_makes_zero(wrong: bool) -> Any:
    x, y = classes()
    pixels = np.clip(100 + 40 * x, 0, 254).astype("uint8")
    return supervised(network(3, "softmax"), "sparse_categorical_crossentropy"), source(
        (pixels // 255 if wrong else pixels / 255).astype("float32"), y
    )


def evaluated(value: Any) -> Any:
    """Return a classifier whose eval_step returns a value of the labels and the logits."""

    def objective(self: Any, batch: Any) -> Any:
        x, y = batch
        logits = self.model(x, training=True)
        return ops.mean(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))

    def eval_step(self: Any, batch: Any) -> Any:
        x, y = batch
        return {"value": value(y, self.model(x, training=False))}

    task = of(Regression(network(3)), objective=objective, eval_step=eval_step)
    return task, treadle.Datasets(source(*classes()), source(*classes(seed=1)))


@finds("L-unpaired")
def an_accuracy_of_all_pairs(wrong: bool) -> Any:
    def value(y: Any, logits: Any) -> Any:
        answers = ops.cast(ops.argmax(logits, axis=-1), "int32")
        answers = answers[:, None] if wrong else answers
        return ops.mean(ops.cast(ops.equal(answers, ops.cast(y, "int32")), "float32"))

    return evaluated(value)


@sound
def a_difference_of_shares() -> Any:
    def value(y: Any, logits: Any) -> Any:
        chances = ops.mean(ops.softmax(logits), axis=0)
        return ops.sum((chances - ops.mean(ops.one_hot(y, 3), axis=0)) ** 2)

    return evaluated(value)


@sound
def a_bias_of_the_answers() -> Any:
    def value(y: Any, logits: Any) -> Any:
        answers = ops.cast(ops.argmax(logits, axis=-1), "float32")
        return ops.mean(answers) - ops.mean(ops.cast(y, "float32"))

    return evaluated(value)


@sound
def positions_next_to_pixels_that_the_step_rescales() -> Any:
    """The positions, which are the same in each row, are all that a layer gets as it is."""

    def objective(self: Any, batch: Any) -> Any:
        places = self.places(batch["position"])[..., 0]
        outputs = self.model(ops.cast(batch["pixels"], "float32") / 255 + places)
        return ops.mean((outputs - batch["y"]) ** 2)

    def variables(self: Any) -> Any:
        return [*self.model.trainable_variables, *self.places.trainable_variables]

    x, y = numbers()
    task = of(Regression(), objective=objective, variables=variables)
    task.places = layers.Embedding(6, 1)
    task.places.build(None)
    position = np.broadcast_to(np.arange(6, dtype="int32"), x.shape)
    pixels = np.clip(100 + 40 * x, 0, 255).astype("uint8")
    return task, source({"position": position, "pixels": pixels, "y": y})


@finds("O-not-updated")
def learned_weights_of_two_losses(wrong: bool) -> Any:
    def objective(self: Any, batch: Any) -> Any:
        x, y = batch
        outputs = self.model(x)
        first, second = ops.mean((outputs - y) ** 2), ops.mean(ops.abs(outputs - y))
        return sum(
            ops.exp(-s) * each + s for s, each in zip(self.logs, (first, second), strict=True)
        )

    def variables(self: Any) -> Any:
        return self.model.trainable_variables + ([] if wrong else self.logs)

    task = of(Regression(), objective=objective, variables=variables)
    task.logs = [keras.Variable(0.1), keras.Variable(0.2)]
    return task, source(*numbers())
