"""More pairs of programs, of supervised learning: labels, weights, mixtures and evaluation.

They are added to the pairs of `doctor_programs`, which explains them.
"""

from typing import Any

import keras
from doctor_programs import Regression, classes, finds, network, numbers, of, source, supervised
from doctor_sound import adam, dense, sound, stepping
from keras import layers, ops

import treadle


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
