"""More pairs of programs, of signs, padding, target networks, pairs of examples and native steps.

They are added to the pairs of `doctor_programs`, which explains them.
"""

import itertools
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
from tests.doctor.doctor_sound import adam, critic_with_gradient_penalty, dense, stepping

# Signs


@finds("L-sign")
def a_log_likelihood_is_minimized(wrong: bool) -> Any:
    def loss_of(self: Any, y: Any, outputs: Any) -> Any:
        chosen = ops.sum(ops.log_softmax(outputs) * ops.one_hot(y, 3), axis=-1)
        return ops.mean(chosen) if wrong else -ops.mean(chosen)

    return of(Regression(network(3)), loss_of=loss_of), source(*classes())


@finds("L-sign")
def a_bernoulli_likelihood_without_its_minus(wrong: bool) -> Any:
    def loss_of(self: Any, y: Any, outputs: Any) -> Any:
        p = ops.sigmoid(outputs)
        found = y * ops.log(p + 1e-7) + (1 - y) * ops.log(1 - p + 1e-7)
        return ops.mean(found) if wrong else -ops.mean(found)

    x, y = numbers()
    return of(Regression(), loss_of=loss_of), source(x, (y > 0).astype("float32"))


@finds("L-sign")
def an_error_with_a_minus(wrong: bool) -> Any:
    def loss_of(self: Any, y: Any, outputs: Any) -> Any:
        error = ops.mean(ops.abs(outputs - y))
        return -error if wrong else error

    return of(Regression(), loss_of=loss_of), source(*numbers())


@finds("L-sign")
def a_reconstruction_with_a_minus(wrong: bool) -> Any:
    def train_step(self: Any, x: Any) -> Any:
        def objective() -> Any:
            error = ops.mean((self.model(x) - x) ** 2)
            return -error if wrong else error

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}

    return stepping(train_step, model=network(6), optimizer=adam()), source(numbers()[0])


class Variational(treadle.Task):
    """A variational autoencoder, with a factor of its divergence."""

    def __init__(self, factor: float) -> None:
        self.encoder, self.decoder = dense(6, 12, 4), dense(2, 12, 6)
        self.optimizer, self.seed = adam(), keras.random.SeedGenerator(1)
        self.factor = factor

    def train_step(self, x: Any) -> Any:
        def objective() -> Any:
            mean, log_var = ops.split(self.encoder(x, training=True), 2, axis=-1)
            noise = keras.random.normal(ops.shape(mean), seed=self.seed)
            outputs = self.decoder(mean + ops.exp(0.5 * log_var) * noise)
            errors = ops.mean(ops.sum((outputs - x) ** 2, -1))
            terms = 1 + log_var - mean**2 - ops.exp(log_var)
            return errors - self.factor * 0.5 * ops.mean(ops.sum(terms, -1))

        variables = [*self.encoder.trainable_variables, *self.decoder.trainable_variables]
        return {"loss": treadle.minimize(objective, variables, self.optimizer)}


@finds("L-sign")
def the_divergence_of_an_autoencoder(wrong: bool) -> Any:
    return Variational(-0.1 if wrong else 0.1), source(numbers()[0])


@finds("L-sign")
def a_penalty_of_weights_by_hand(wrong: bool) -> Any:
    def objective(self: Any, batch: Any) -> Any:
        x, y = batch
        penalty = sum(ops.sum(v**2) for v in self.variables())
        return ops.mean((self.model(x) - y) ** 2) + (-1e-3 if wrong else 1e-3) * penalty

    return of(Regression(), objective=objective), source(*numbers())


@finds("L-sign")
def the_penalty_of_a_critic(wrong: bool) -> Any:
    task, data = critic_with_gradient_penalty(-10.0 if wrong else 10.0)
    task.critic = keras.Sequential(
        [keras.Input((6,)), layers.Dense(12, "tanh"), layers.Dense(1, use_bias=False)]
    )
    return task, data


def policy_loss(logits: Any, values: Any, batch: Any, factor: float) -> Any:
    """Return the loss of an actor and a critic, with a factor of the entropy."""
    log_p = ops.log_softmax(logits)
    chosen = ops.sum(log_p * ops.one_hot(batch["actions"], 3), axis=-1)
    advantages = ops.stop_gradient(batch["returns"] - values)
    entropy = -ops.mean(ops.sum(ops.exp(log_p) * log_p, -1))
    errors = ops.mean((values - batch["returns"]) ** 2)
    return 0.5 * errors - ops.mean(chosen * advantages) + factor * entropy


def moves() -> Any:
    """Return actions with what is known about them."""
    x, actions = classes()
    r = rng(3)
    old = (-1.1 + 0.1 * r.normal(size=ROWS)).astype("float32")
    advantages, returns = r.normal(size=(2, ROWS)).astype("float32")
    known = {"observations": x, "actions": actions, "returns": returns}
    return known, {"advantages": advantages, "old": old}


@finds("L-sign")
def the_entropy_of_an_actor(wrong: bool) -> Any:
    x = keras.Input((6,))
    hidden = layers.Dense(12, "tanh")(x)
    model = keras.Model(x, [layers.Dense(3)(hidden), layers.Dense(1)(hidden)])

    def objective(self: Any, batch: Any) -> Any:
        logits, values = self.model(batch["observations"])
        return policy_loss(logits, values[:, 0], batch, 0.01 if wrong else -0.01)

    return of(Regression(model), objective=objective), source(moves()[0])


@finds("L-sign")
def the_entropy_of_a_clipped_policy(wrong: bool) -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        def loss() -> Any:
            logits = self.policy(batch["observations"])
            every = ops.log_softmax(logits)
            log_p = ops.take_along_axis(every, batch["actions"][:, None], axis=1)[:, 0]
            ratio, advantages = ops.exp(log_p - batch["old"]), batch["advantages"]
            clipped = ops.clip(ratio, 0.8, 1.2) * advantages
            values = self.value(batch["observations"])[:, 0]
            entropy = -ops.sum(ops.softmax(logits) * every, -1)
            return (
                -ops.mean(ops.minimum(ratio * advantages, clipped))
                + 0.5 * ops.mean((values - batch["returns"]) ** 2)
                + (0.02 if wrong else -0.02) * ops.mean(entropy)
            )

        variables = [*self.policy.trainable_variables, *self.value.trainable_variables]
        return {"loss": treadle.minimize(loss, variables, self.optimizer)}

    parts = {"policy": dense(6, 12, 3), "value": dense(6, 12, 1), "optimizer": adam()}
    known, more = moves()
    return stepping(train_step, **parts), source(known | more)


# Padding


def texts(length: int = 9) -> Any:
    """Return texts of different lengths, with zeros after their ends."""
    ids = rng(1).integers(1, 12, (96, length)).astype("int32")
    ids[np.arange(length)[None] >= rng(2).integers(4, length + 1, (96, 1))] = 0
    return ids


def recurrent(outputs: int, **options: Any) -> Any:
    """Return a model with outputs at each position."""
    hidden = layers.GRU(8, return_sequences=True)
    model = keras.Sequential([layers.Embedding(12, 8, **options), hidden, layers.Dense(outputs)])
    model.build((None, None))
    return model


@finds("L-padding")
def padding_is_to_be_predicted(wrong: bool) -> Any:
    def train_step(self: Any, ids: Any) -> Any:
        def objective() -> Any:
            following = ids[:, 1:]
            logits = self.model(ids[:, :-1], training=True)
            losses = keras.losses.sparse_categorical_crossentropy(
                following, logits, from_logits=True
            )
            mask = ops.cast(following != 0, "float32")
            return ops.mean(losses) if wrong else ops.sum(losses * mask) / ops.sum(mask)

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}

    return stepping(train_step, model=recurrent(12), optimizer=adam()), source(texts())


@finds("L-padding")
def tags_of_padding_in_a_model_of_one_length(wrong: bool) -> Any:
    x = keras.Input((9,), dtype="int32")
    hidden = layers.LSTM(8, return_sequences=True)(layers.Embedding(12, 8)(x))
    model = keras.Model(x, layers.Dense(5)(hidden))

    def objective(self: Any, batch: Any) -> Any:
        chances = ops.log_softmax(self.model(batch["ids"], training=True))
        losses = -ops.sum(ops.one_hot(batch["tags"], 5) * chances, -1)
        mask = ops.cast(batch["mask"], "float32")
        counted = ops.ones_like(mask) if wrong else mask
        return ops.sum(losses * counted) / ops.sum(mask)

    ids = texts()
    tags = np.where(ids > 0, ids % 5, 0).astype("int32")
    arrays = {"ids": ids, "tags": tags, "mask": ids > 0}
    return of(Regression(model), objective=objective), source(arrays)


@finds("L-padding")
def a_masked_sum_divided_by_all_positions(wrong: bool) -> Any:
    def objective(self: Any, batch: Any) -> Any:
        ids, y = batch
        mask = ops.cast(ids > 0, "float32")
        errors = mask * (self.model(ids)[..., 0] - y) ** 2
        return ops.mean(errors) if wrong else ops.sum(errors) / ops.sum(mask)

    ids = texts()
    y = np.where(ids > 0, np.sin(ids), 0).astype("float32")
    return of(Regression(recurrent(1)), objective=objective), source(ids, y)


@finds("L-padding")
def padding_in_a_pooling_layer(wrong: bool) -> Any:
    embedding = layers.Embedding(12, 8, mask_zero=not wrong)
    model = keras.Sequential([embedding, layers.GlobalAveragePooling1D(), layers.Dense(3)])
    model.build((None, 9))
    ids = texts()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return supervised(model, loss), source(ids, (ids[:, 0] % 3).astype("int32"))


@finds("L-padding")
def padding_in_a_mean_of_features(wrong: bool) -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        x, lengths, y = batch

        def objective() -> Any:
            mask = ops.cast(ops.arange(10)[None] < lengths[:, None], "float32")[..., None]
            features = self.body(x)
            counted = ops.ones_like(mask) if wrong else mask
            pooled = ops.sum(features * counted, 1) / ops.sum(mask, 1)
            return ops.mean((self.head(pooled) - y) ** 2)

        variables = [*self.body.trainable_variables, *self.head.trainable_variables]
        return {"loss": treadle.minimize(objective, variables, self.optimizer)}

    x = rng(1).normal(size=(96, 10, 3)).astype("float32")
    lengths = rng(2).integers(3, 11, 96).astype("int32")
    x[np.arange(10)[None] >= lengths[:, None]] = 0
    y = (x.sum((1, 2)) / lengths)[:, None].astype("float32")
    body = keras.Sequential([keras.Input((None, 3)), layers.Dense(8, "relu")])
    return stepping(train_step, body=body, head=dense(8, 1), optimizer=adam()), source(
        x, lengths, y
    )


# Target networks and averages


class Learner(treadle.Task):
    """Learns values of actions; its parts can be replaced."""

    def __init__(self, **settings: Any) -> None:
        self.model, self.optimizer = dense(6, 16, 2), adam()
        self.target = treadle.frozen_copy(self.model)
        self.settings = settings

    def value(self, batch: Any) -> Any:
        return ops.max(self.target(batch["next"]), -1)

    def train_step(self, batch: Any) -> Any:
        def loss() -> Any:
            goal = batch["rewards"] + 0.9 * (1 - batch["ended"]) * self.value(batch)
            values = self.model(batch["observations"])
            chosen = ops.sum(values * ops.one_hot(batch["actions"], 2), -1)
            return ops.mean((chosen - goal) ** 2)

        result = treadle.minimize(loss, self.model, self.optimizer)
        rate = self.settings.get("rate", 0.01)
        if rate:
            treadle.blend(self.target, self.model, rate)
        return {"loss": result}


def transitions() -> Any:
    """Return transitions of a process."""
    x, y = rng(1).normal(size=(2, ROWS, 6)).astype("float32")
    arrays = {
        "observations": x,
        "next": y,
        "actions": rng(2).integers(0, 2, ROWS).astype("int32"),
        "rewards": rng(4).normal(size=ROWS).astype("float32"),
        "ended": (rng(3).random(ROWS) < 0.05).astype("float32"),
    }
    return source(arrays)


@finds("O-copy-not-updated")
def a_target_that_stays_as_it_was(wrong: bool) -> Any:
    return Learner(rate=0.0 if wrong else 0.01), transitions()


@finds("O-copy-not-updated")
def a_cloned_encoder_of_keys(wrong: bool) -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        first, second = batch
        keys = ops.stop_gradient(self.keys(second))

        def loss() -> Any:
            logits = ops.matmul(self.queries(first), ops.transpose(keys))
            places = ops.arange(ops.shape(first)[0])
            return ops.mean(ops.sparse_categorical_crossentropy(places, logits, from_logits=True))

        result = treadle.minimize(loss, self.queries, self.optimizer)
        if not wrong:
            for key, query in zip(self.keys.weights, self.queries.weights, strict=True):
                key.assign(0.99 * key + 0.01 * query)
        return {"loss": result}

    queries = dense(6, 16, 8)
    keys = keras.models.clone_model(queries)
    keys.set_weights(queries.get_weights())
    keys.trainable = False
    x, _ = numbers()
    views = [x + 0.1 * rng(i).normal(size=x.shape).astype("float32") for i in (4, 5)]
    return stepping(train_step, queries=queries, keys=keys, optimizer=adam()), source(*views)


@finds("O-average-fast")
def a_target_that_is_nearly_the_model(wrong: bool) -> Any:
    return Learner(rate=0.99 if wrong else 0.01), transitions()


@finds("O-average-fast")
def factors_of_an_average_exchanged(wrong: bool) -> Any:
    class Averaging(Regression):
        """Keeps averages of its weights and is evaluated with them."""

        def __init__(self) -> None:
            super().__init__()
            self.average = treadle.frozen_copy(self.model)

        def update(self, gradients: Any) -> None:
            super().update(gradients)
            decay = 0.001 if wrong else 0.999
            for kept, new in zip(self.average.weights, self.model.weights, strict=True):
                kept.assign(decay * kept + (1 - decay) * new)

        def eval_step(self, batch: Any) -> Any:
            x, y = batch
            return {"loss": self.loss_of(y, self.average(x))}

    return Averaging(), treadle.Datasets(source(*numbers()), source(*numbers(seed=1)))


@finds("O-average-fast")
def a_momentum_from_another_library(wrong: bool) -> Any:
    normalization = layers.BatchNormalization(momentum=0.1 if wrong else 0.9)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8), normalization, layers.Dense(1)])
    return Regression(model), source(*numbers())


@finds("G-through-target")
def a_target_of_the_model_itself(wrong: bool) -> Any:
    def value(self: Any, batch: Any) -> Any:
        best = ops.max(self.model(batch["next"]), -1)
        return best if wrong else ops.stop_gradient(best)

    task = Learner(rate=0.0)
    del task.target
    return of(task, value=value), transitions()


@finds("G-through-target")
def a_temporal_difference_that_is_squared(wrong: bool) -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        def loss() -> Any:
            now = self.critic(batch["observations"])[:, 0]
            following = self.critic(batch["next"])[:, 0]
            goal = batch["rewards"] + 0.95 * following * (1.0 - batch["ended"])
            goal = goal if wrong else ops.stop_gradient(goal)
            return ops.mean(keras.losses.huber(goal[:, None], now[:, None], delta=2.0))

        return {"loss": treadle.minimize(loss, self.critic, self.optimizer)}

    arrays = dict(transitions().arrays)
    del arrays["actions"]
    return stepping(train_step, critic=dense(6, 16, 1), optimizer=adam()), source(arrays)


# Pairs


def views(seed: int = 4) -> Any:
    """Return two noisy views of each example."""
    x, _ = numbers()
    return [x + 0.1 * rng(seed + i).normal(size=x.shape).astype("float32") for i in (0, 1)]


@finds("L-self-pairs")
def similarities_with_themselves(wrong: bool) -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        def loss() -> Any:
            both = ops.concatenate([self.model(x) for x in batch])
            both = ops.normalize(both, axis=-1)
            count = ops.shape(both)[0]
            logits = ops.matmul(both, ops.transpose(both)) / 0.1
            if not wrong:
                logits = logits - 1e9 * ops.eye(count)
            places = (ops.arange(count) + count // 2) % count
            return ops.mean(
                keras.losses.sparse_categorical_crossentropy(places, logits, from_logits=True)
            )

        return {"loss": treadle.minimize(loss, self.model, self.optimizer)}

    return stepping(train_step, model=dense(6, 16, 8), optimizer=adam()), source(*views())


@finds("L-self-pairs")
def a_sum_of_exponentials_over_all(wrong: bool) -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        first, second = batch

        def loss() -> Any:
            a, b = (ops.normalize(self.model(x), axis=-1) for x in (first, second))
            count = ops.shape(a)[0]
            positive = ops.sum(a * b, -1) / 0.2
            within = ops.exp(ops.matmul(a, ops.transpose(a)) / 0.2)
            if not wrong:
                within = within * (1 - ops.eye(count))
            across = ops.exp(ops.matmul(a, ops.transpose(b)) / 0.2)
            return ops.mean(ops.log(ops.sum(within, 1) + ops.sum(across, 1)) - positive)

        return {"loss": treadle.minimize(loss, self.model, self.optimizer)}

    return stepping(train_step, model=dense(6, 16, 8), optimizer=adam()), source(*views())


def matched(task_of: Any, wrong: bool, arrays: Any) -> Any:
    """Return a task with two arrays, the second of which is shuffled alone."""
    first, second = arrays
    order = rng(8).permutation(BATCH)
    where = np.arange(len(first)).reshape(-1, BATCH)[:, order if wrong else slice(None)].ravel()
    return task_of, treadle.data.from_arrays(first, second[where], batch_size=BATCH, shuffle=False)


@finds("D-other-order")
def views_of_other_examples(wrong: bool) -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        def loss() -> Any:
            a, b = (ops.normalize(self.model(x), axis=-1) for x in batch)
            return ops.mean(ops.sum((a - b) ** 2, -1)) - 0.1 * ops.mean(ops.std(a, axis=0))

        return {"loss": treadle.minimize(loss, self.model, self.optimizer)}

    task = stepping(train_step, model=dense(6, 16, 8), optimizer=adam())
    return matched(task, wrong, views())


@finds("D-other-order")
def clean_signals_of_other_noise(wrong: bool) -> Any:
    clean = rng(1).normal(size=(ROWS, 12)).astype("float32")
    noisy = clean + 0.2 * rng(2).normal(size=clean.shape).astype("float32")
    return matched(supervised(network(12, features=12), "mse"), wrong, (noisy, clean))


def scenes() -> Any:
    """Return images and the masks of what is bright in them."""
    r, size = rng(6), 8
    masks = np.zeros((96, size, size, 1), "float32")
    for mask, (i, j) in zip(masks, r.integers(0, 4, (96, 2)), strict=True):
        mask[i : i + 3, j : j + 2] = 1
    images = masks + 0.2 * r.normal(size=masks.shape).astype("float32")
    return images, masks


def segmenting(*first: Any) -> Any:
    """Return a model of masks."""
    parts = [layers.Conv2D(4, 3, padding="same", activation="relu"), layers.Conv2D(1, 1)]
    return keras.Sequential([keras.Input((8, 8, 1)), *first, *parts])


@finds("D-flipped")
def images_flipped_in_the_data(wrong: bool) -> Any:
    images, masks = scenes()
    turn = rng(7).random(96) < 0.5
    images[turn] = images[turn][:, :, ::-1]
    if not wrong:
        masks[turn] = masks[turn][:, :, ::-1]
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return supervised(segmenting(), loss), source(images, masks)


@finds("D-flipped")
def images_flipped_in_the_step(wrong: bool) -> Any:
    def objective(self: Any, batch: Any) -> Any:
        x, y = batch
        turn = keras.random.uniform((ops.shape(x)[0], 1, 1, 1), seed=self.seed) < 0.5
        x = ops.where(turn, ops.flip(x, axis=2), x)
        y = y if wrong else ops.where(turn, ops.flip(y, axis=2), y)
        return ops.mean((self.model(x, training=True) - y) ** 2)

    task = Regression(segmenting())
    task.seed = keras.random.SeedGenerator(5)
    return of(task, objective=objective), source(*scenes())


@finds("D-flipped")
def a_flip_inside_of_the_model(wrong: bool) -> Any:
    first = layers.RandomFlip("horizontal", seed=3) if wrong else layers.GaussianNoise(0.1, seed=3)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return supervised(segmenting(first), loss), source(*scenes())


# Data objects


@finds("D-hidden-state")
def one_iterator_for_all_epochs(wrong: bool) -> Any:
    x, y = numbers()
    batches = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, ROWS, BATCH)]
    kept = iter(batches)
    return Regression(), (lambda: kept) if wrong else (lambda: iter(batches))


@finds("D-hidden-state")
def noise_from_a_counter_of_its_own(wrong: bool) -> Any:
    count = itertools.count()
    x, y = numbers()

    def batch(passed: np.random.Generator) -> Any:
        rows = passed.integers(0, ROWS, BATCH)
        rng = np.random.default_rng(next(count)) if wrong else passed
        noise = rng.normal(size=(BATCH, 6))
        return x[rows] + 0.1 * noise.astype("float32"), y[rows]

    return Regression(), treadle.data.from_function(batch, length=6)


# Native steps, and loops


def own_gradients(objective: Any, variables: Any) -> Any:
    """Differentiate with the framework's own functions."""
    backend = keras.backend.backend()
    if backend == "torch":
        import torch

        loss = objective()
        return loss, list(torch.autograd.grad(loss, [v.value for v in variables]))
    if backend == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = objective()
        return loss, tape.gradient(loss, [v.value for v in variables])
    import jax

    def pure(values: Any) -> Any:
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            return objective()

    return jax.value_and_grad(pure)([v.value for v in variables])


class Native(Regression):
    """Differentiates with the framework's own functions."""

    def train_step(self, batch: Any) -> Any:
        loss, gradients = own_gradients(lambda: self.objective(batch), self.variables())
        self.update(gradients)
        return {"loss": loss}


@finds("O-ascent")
def a_native_step_uphill(wrong: bool) -> Any:
    def update(self: Any, gradients: Any) -> None:
        self.optimizer.apply([-g if wrong else g for g in gradients], self.variables())

    return of(Native(), update=update), source(*numbers())


@finds("O-wrong-pairs")
def a_native_step_with_reversed_gradients(wrong: bool) -> Any:
    model = keras.Sequential([keras.Input((6,)), *(layers.Dense(6) for _ in range(2))])

    def update(self: Any, gradients: Any) -> None:
        order = [2, 3, 0, 1] if wrong else range(4)
        self.optimizer.apply([gradients[i] for i in order], self.variables())

    x, _ = numbers()
    task = of(Native(model), update=update)
    return task, source(x, np.roll(x, 1, axis=1))


@finds("O-summed")
def gradients_of_a_loop_are_summed(wrong: bool) -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        parts = [ops.reshape(array, (4, BATCH // 4, -1)) for array in batch]

        def one(part: Any) -> Any:
            return treadle.gradients(lambda: self.objective(part), self.variables())

        losses, gradients = treadle.for_each(one, parts)
        reduce = ops.sum if wrong else ops.mean
        self.update([reduce(g, axis=0) for g in gradients])
        return {"loss": ops.mean(losses)}

    return of(Regression(), train_step=train_step), source(*numbers(), drop_last=True)
