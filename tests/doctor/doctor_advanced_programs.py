"""More pairs of programs, of schedules, penalties, averages, accumulation and two-pass updates.

They are added to the pairs of `doctor_programs`, which explains them.
"""

from typing import Any

import keras
from keras import layers, ops

import treadle
from tests.doctor.doctor_programs import (
    ROWS,
    Regression,
    finds,
    numbers,
    of,
    rng,
    source,
    supervised,
)
from tests.doctor.doctor_sound import adam, sound, stepping
from treadle import Datasets


class Staircase(keras.optimizers.schedules.LearningRateSchedule):
    """A warmup to 0.01 over 40 steps."""

    def __init__(self, whole: bool) -> None:
        self.whole = whole

    def __call__(self, step: Any) -> Any:
        step = ops.cast(step, "float32")
        part = ops.floor(step / 40) if self.whole else step / 40
        return 0.01 * ops.minimum(part, 1.0)

    def get_config(self) -> dict[str, Any]:
        return {"whole": self.whole}


@finds("O-small-updates")
def a_warmup_in_whole_parts(wrong: bool) -> Any:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    return supervised(model, "mse", keras.optimizers.SGD(Staircase(wrong))), source(*numbers())


@sound
def a_critic_with_clipped_weights() -> Any:
    def train_step(self: Any, real: Any) -> Any:
        fake = keras.random.normal(real.shape, seed=self.seed)
        loss, grads = treadle.gradients(
            lambda: ops.mean(self.critic(fake)) - ops.mean(self.critic(real)), self.critic
        )
        self.optimizer.apply(grads, self.critic.trainable_variables)
        for v in self.critic.trainable_variables:
            v.assign(ops.clip(v, -0.02, 0.02))
        return {"distance": -loss}

    critic = keras.Sequential(
        [keras.Input((6,)), layers.Dense(16, "relu"), layers.Dense(1, use_bias=False)]
    )
    seed = keras.random.SeedGenerator(0)
    rate = keras.optimizers.RMSprop(5e-5)
    return stepping(train_step, critic=critic, seed=seed, optimizer=rate), source(numbers()[0] + 1)


def normalizing() -> Any:
    """Return a network with moving statistics."""
    body = [layers.Dense(8, use_bias=False), layers.BatchNormalization(), layers.ReLU()]
    return keras.Sequential([keras.Input((6,)), *body, layers.Dense(1)])


class Averaged(Regression):
    """Evaluates an average of its model."""

    def __init__(self, wrong: bool, rate: float = 0.05) -> None:
        super().__init__(normalizing())
        self.average, self.wrong, self.rate = treadle.frozen_copy(self.model), wrong, rate

    def update(self, gradients: Any) -> None:
        super().update(gradients)
        for kept, layer in zip(self.average.layers, self.model.layers, strict=True):
            owned = layer.trainable_weights if self.wrong else layer.weights
            for old, new in zip(kept.weights, owned, strict=False):
                old.assign(old + self.rate * (new - old))

    def eval_step(self, batch: Any) -> Any:
        x, y = batch
        return {"loss": self.loss_of(y, self.average(x, training=False))}


@finds("O-not-updated")
def an_average_without_statistics(wrong: bool) -> Any:
    return Averaged(wrong), Datasets(source(*numbers()), source(*numbers(seed=1)))


@sound
def an_average_whose_statistics_a_hook_computes() -> Any:
    class Later(Averaged):
        def hooks(self) -> Any:
            return [treadle.every("1 epoch", self.normalize)]

        def normalize(self, loop: Any) -> None:
            self.average(numbers()[0], training=True)

    return Later(True), Datasets(source(*numbers()), source(*numbers(seed=1)))


@finds("G-constant-term")
def a_penalty_before_the_objective(wrong: bool) -> Any:
    def penalty(self: Any) -> Any:
        return 0.1 * sum(ops.sum(ops.abs(v)) for v in self.model.trainable_variables)

    def train_step(self: Any, batch: Any) -> Any:
        before = penalty(self)

        def objective() -> Any:
            return Regression.objective(self, batch) + (before if wrong else penalty(self))

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}

    return of(Regression(), train_step=train_step), source(*numbers())


@finds("G-constant-term")
def a_penalty_of_slopes_that_is_stopped(wrong: bool) -> Any:
    def objective(self: Any, batch: Any) -> Any:
        _, (slope,) = treadle.input_gradients(lambda x: ops.sum(self.model(x)), batch[0])
        slope = ops.stop_gradient(slope) if wrong else slope
        return Regression.objective(self, batch) + ops.mean(ops.sum(slope**2, axis=-1))

    return of(Regression(), objective=objective), source(*numbers())


@sound
def a_term_whose_weight_is_stopped() -> Any:
    def objective(self: Any, batch: Any) -> Any:
        size = sum(ops.sum(v**2) for v in self.model.trainable_variables)
        error = Regression.objective(self, batch)
        return ops.stop_gradient(1 / (1 + size)) * error

    return of(Regression(), objective=objective), source(*numbers())


class TwoPasses(Regression):
    """Applies the gradients at weights that were moved up the loss (SAM)."""

    def __init__(self, chosen: Any) -> None:
        super().__init__()
        self.chosen = chosen

    def train_step(self, batch: Any) -> Any:
        loss, first = treadle.gradients(lambda: self.objective(batch), self.variables())
        scale = 0.05 / (treadle.transforms.global_norm(first) + 1e-12)
        moved = [v + scale * g for v, g in zip(self.variables(), first, strict=True)]
        with treadle.substituted(self.variables(), moved):
            sharp, second = treadle.gradients(lambda: self.objective(batch), self.variables())
        self.update([self.chosen(a, b) for a, b in zip(first, second, strict=True)])
        return {"loss": loss, "sharpness": sharp - loss}


@finds("G-unused")
def the_first_of_two_gradients_is_applied(wrong: bool) -> Any:
    return TwoPasses(lambda a, b: a if wrong else b), source(*numbers())


@sound
def a_second_gradient_every_five_steps() -> Any:
    def chosen(first: Any, second: Any) -> Any:
        return ops.where(ops.equal(treadle.step() % 5, 4), second, first)

    return TwoPasses(chosen), source(*numbers())


@sound
def a_second_gradient_after_some_updates() -> Any:
    task = TwoPasses(None)
    task.chosen = lambda a, b: ops.where(task.optimizer.iterations > 100, b, a)
    return task, source(*numbers())


@finds("G-unused")
def inputs_that_are_moved_and_not_used(wrong: bool) -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch
        clean, (slope,) = treadle.input_gradients(
            lambda x: self.loss_of(y, self.model(x, training=True)), x
        )
        moved = x + 0.1 * ops.sign(slope)
        loss = treadle.minimize(
            lambda: self.loss_of(y, self.model(x if wrong else moved)), self.model, self.optimizer
        )
        return {"loss": loss, "clean": clean}

    return of(Regression(), train_step=train_step), source(*numbers())


@sound
def a_second_update_that_is_masked() -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        loss = treadle.minimize(lambda: self.objective(batch), self.model, self.optimizer)
        later, grads = treadle.gradients(lambda: self.objective(batch), self.variables())
        allowed = ops.cast(later > 1.5 * loss, "float32")
        self.update([allowed * g for g in grads])
        return {"loss": loss}

    return of(Regression(), train_step=train_step), source(*numbers())


@finds("L-sign")
def inputs_that_are_moved_down_the_loss(wrong: bool) -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch
        _, (slope,) = treadle.input_gradients(
            lambda x: self.loss_of(y, self.model(x, training=True)), x
        )
        moved = x + (-0.05 if wrong else 0.05) * slope / (ops.max(ops.abs(slope)) + 1e-6)
        loss, grads = treadle.gradients(
            lambda: self.loss_of(y, self.model(moved, training=True)), self.variables()
        )
        self.update(grads)
        return {"loss": loss}

    return of(Regression(), train_step=train_step), source(*numbers())


@sound
def inputs_that_are_moved_down_an_energy() -> Any:
    def train_step(self: Any, x: Any) -> Any:
        noisy = x + 0.3 * keras.random.normal(x.shape, seed=self.seed)

        def objective() -> Any:
            _, (slope,) = treadle.input_gradients(lambda x: ops.sum(self.model(x)), noisy)
            return ops.mean((noisy - 0.1 * slope - x) ** 2)

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}

    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(16, "tanh"), layers.Dense(1, use_bias=False)]
    )
    seed = keras.random.SeedGenerator(1)
    return stepping(train_step, model=model, seed=seed, optimizer=adam()), source(numbers()[0])


@finds("L-norm-over-batch")
def a_penalty_of_the_slope_of_all_rows(wrong: bool) -> Any:
    def objective(self: Any, batch: Any) -> Any:
        _, (slope,) = treadle.input_gradients(lambda x: ops.sum(self.model(x)), batch[0])
        norms = ops.sqrt(ops.sum(slope**2, axis=None if wrong else 1) + 1e-12)
        return Regression.objective(self, batch) + 3.0 * ops.mean((norms - 1.0) ** 2)

    return of(Regression(), objective=objective), source(*numbers())


@sound
def a_penalty_of_slopes_towards_zero() -> Any:
    def objective(self: Any, batch: Any) -> Any:
        _, (slope,) = treadle.input_gradients(lambda x: ops.sum(self.model(x)), batch[0])
        return Regression.objective(self, batch) + ops.mean(ops.sum(slope**2, axis=-1))

    return of(Regression(), objective=objective), source(*numbers())


@finds("O-not-reset")
def sums_that_are_not_reset(wrong: bool) -> Any:
    def update(self: Any, gradients: Any) -> None:
        for kept, gradient in zip(self.kept, gradients, strict=True):
            kept.assign_add(gradient)
        self.count.assign_add(1)

        def apply() -> None:
            self.optimizer.apply([kept / 3 for kept in self.kept], self.variables())
            for variable in [] if wrong else self.kept:
                variable.assign(ops.zeros(variable.shape))

        treadle.cond(ops.equal(self.count % 3, 0), apply, lambda: None)

    task = of(Regression(), update=update)
    task.kept = [keras.Variable(ops.zeros(v.shape)) for v in task.model.trainable_variables]
    task.count = keras.Variable(0, dtype="int32", trainable=False)
    return task, source(*numbers())


class Reversed(treadle.Task):
    """Learns to reverse sequences, with the previous token as a further input."""

    def __init__(self, wrong: bool, length: int = 6) -> None:
        given, before = keras.Input((length,), dtype="int32"), keras.Input((length,), dtype="int32")
        read = layers.Flatten()(layers.Embedding(7, 4)(given))
        state = layers.RepeatVector(length)(layers.Dense(8, "tanh")(read))
        seen = layers.Conv1D(8, 3, padding="causal")(layers.Embedding(7, 4)(before))
        scores = layers.Dense(7)(layers.Concatenate()([state, seen]))
        self.model, self.wrong = keras.Model([given, before], scores), wrong
        self.optimizer = adam(1e-2)

    def train_step(self, batch: Any) -> Any:
        tokens, target = batch
        before = target if self.wrong else ops.pad(target[:, :-1], ((0, 0), (1, 0)))

        def objective() -> Any:
            scores = self.model([tokens, before], training=True)
            entropy = keras.losses.sparse_categorical_crossentropy(target, scores, True)
            return ops.mean(entropy)

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}


@finds("D-label-in-inputs")
def a_decoder_that_gets_its_target(wrong: bool) -> Any:
    tokens = rng(4).integers(1, 7, (ROWS, 6)).astype("int32")
    return Reversed(wrong), source(tokens, tokens[:, ::-1].copy())


@sound
def outputs_that_are_normalized_over_the_batch() -> Any:
    def train_step(self: Any, x: Any) -> Any:
        noise = [0.2 * keras.random.normal(x.shape, seed=self.seed) for _ in range(2)]

        def objective() -> Any:
            a, b = (ops.normalize(self.model(x + part), axis=0) for part in noise)
            product = ops.matmul(ops.transpose(a), b)
            return ops.mean((product - ops.eye(4)) ** 2)

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}

    seed = keras.random.SeedGenerator(1)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(16, "tanh"), layers.Dense(4)])
    return stepping(train_step, model=model, seed=seed, optimizer=adam()), source(numbers()[0])
