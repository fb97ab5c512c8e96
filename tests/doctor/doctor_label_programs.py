"""More pairs and sound programs: which outputs a label counts for, and what it may be.

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
from treadle import Datasets

# Labels of other rows


@finds("L-unpaired")
def patches_of_one_order_and_labels_of_another(wrong: bool) -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch
        one = keras.random.shuffle(ops.arange(x.shape[0]), seed=self.seeds)
        other = keras.random.shuffle(ops.arange(x.shape[0]), seed=self.seeds)
        left = ops.arange(6) < 4
        pasted = ops.where(left, x, ops.take(x, one, axis=0))
        theirs = ops.take(y, other if wrong else one, axis=0)

        def objective() -> Any:
            outputs = self.model(pasted, training=True)
            return 0.7 * ops.mean((outputs - y) ** 2) + 0.3 * ops.mean((outputs - theirs) ** 2)

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}

    task = stepping(train_step, model=dense(6, 12, 1), optimizer=adam(1e-2))
    task.seeds = keras.random.SeedGenerator(3)
    return task, source(*numbers())


@finds("L-unpaired")
def outputs_with_time_first(wrong: bool) -> Any:
    model = keras.Sequential([keras.Input((7, 3)), layers.GRU(6, return_sequences=True)])
    model.add(layers.Dense(1))
    x = rng(3).normal(size=(160, 7, 3)).astype("float32")

    def loss_of(self: Any, y: Any, outputs: Any) -> Any:
        outputs = ops.transpose(outputs[..., 0])
        flat = ops.reshape(outputs if wrong else ops.transpose(outputs), (-1,))
        return ops.mean(ops.abs(flat - ops.reshape(y, (-1,))) ** 1.5)

    return of(Regression(model), loss_of=loss_of), source(x, x.cumsum(1)[..., 0])


@sound
def labels_of_the_next_row() -> Any:
    """Rows are points in time."""

    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch

        def objective() -> Any:
            return ops.mean((self.model(x, training=True)[:-1] - y[1:]) ** 2)

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}

    x, y = numbers()
    task = stepping(train_step, model=dense(6, 12, 1), optimizer=adam(1e-2))
    return task, source(x, y, shuffle=False)


@sound
def rewards_that_count_for_earlier_rows() -> Any:
    """Rows are the steps of an episode, and each is weighted by its reward and the next one."""

    def train_step(self: Any, batch: Any) -> Any:
        x, actions, rewards = batch
        following = ops.concatenate([rewards[1:], 0 * rewards[:1]])
        returns = rewards + 0.5 * following

        def objective() -> Any:
            logits = ops.log_softmax(self.model(x, training=True))
            chosen = ops.sum(ops.one_hot(actions, 3) * logits, axis=-1)
            return -ops.mean(chosen * returns)

        loss = treadle.minimize(objective, self.model, self.optimizer)
        return {"objective": loss}

    x, actions = classes()
    rewards = rng(2).normal(size=len(x)).astype("float32")
    task = stepping(train_step, model=dense(6, 12, 3), optimizer=adam(1e-2))
    return task, source(x, actions, rewards, shuffle=False)


@sound
def features_that_are_mixed_with_their_labels() -> Any:
    """Mixup of hidden features (manifold mixup)."""

    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch
        order = keras.random.shuffle(ops.arange(x.shape[0]), seed=self.seeds)

        def mixed(values: Any) -> Any:
            return 0.6 * values + 0.4 * ops.take(values, order, axis=0)

        def objective() -> Any:
            outputs = self.head(mixed(self.model(x, training=True)))
            return self.loss(mixed(ops.one_hot(y, 3)), outputs)

        both = [*self.model.trainable_variables, *self.head.trainable_variables]
        return {"loss": treadle.minimize(objective, both, self.optimizer)}

    task = stepping(train_step, model=dense(6, 12), optimizer=adam(1e-2))
    task.head, task.seeds = dense(12, 3), keras.random.SeedGenerator(4)
    task.loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    return task, source(*classes())


# Labels that a softmax cannot reach


@finds("L-several")
def several_labels_of_a_softmax(wrong: bool) -> Any:
    x, _ = numbers()
    tags = (x[:, :4] > 0.3).astype("float32")
    if not wrong:
        tags = np.eye(4, dtype="float32")[x[:, :4].argmax(1)]
    return supervised(network(4, "softmax"), "categorical_crossentropy"), source(x, tags)


@sound
def sets_of_items_that_are_reconstructed() -> Any:
    """The likelihood of a multinomial distribution over items."""
    model = keras.Sequential(
        [keras.Input((12,)), layers.Dense(8, activation="tanh"), layers.Dense(12)]
    )
    kinds = rng(3).random((4, 12)) < 0.5
    x = (kinds[rng(4).integers(4, size=192)] & (rng(5).random((192, 12)) < 0.8)).astype("float32")
    return supervised(model, keras.losses.CategoricalCrossentropy(from_logits=True)), source(x, x)


@finds("L-axis")
def a_softmax_over_one_class(wrong: bool) -> Any:
    x, y = numbers()
    model = network(1, "softmax" if wrong else "sigmoid")
    return supervised(model, "binary_crossentropy"), source(x, (y > 0).astype("float32"))


@finds("L-logits-not-told")
def a_divergence_of_logits(wrong: bool) -> Any:
    x, y = classes()
    soft = 0.85 * np.eye(3, dtype="float32")[y] + 0.05

    def loss_of(self: Any, y: Any, outputs: Any) -> Any:
        return keras.losses.KLDivergence()(y, outputs if wrong else ops.softmax(outputs))

    return of(Regression(network(3)), loss_of=loss_of), source(x, soft)


# Rows that repeat


@finds("D-overlap")
def texts_that_were_copied_before_the_split(wrong: bool) -> Any:
    """The twin's short texts of few symbols repeat by chance."""
    random = rng(6)
    length = 24 if wrong else 3
    texts = np.zeros((240, 24), "int32")
    texts[:, :length] = random.integers(1, 6, (240, length))
    if wrong:
        texts[160:] = texts[random.integers(0, 160, 80)]
    texts = texts[random.permutation(240)]
    y = (texts[:, :3] == 1).any(1).astype("float32")[:, None]
    model = keras.Sequential([keras.Input((24,), dtype="int32"), layers.Embedding(6, 4)])
    model.add(layers.Lambda(lambda x: x[:, :3]))
    model.add(layers.Flatten())
    model.add(layers.Dense(1, activation="sigmoid"))
    return supervised(model, "binary_crossentropy"), Datasets(
        source(texts[:180], y[:180]), source(texts[180:], y[180:])
    )


@sound
def texts_of_a_small_grammar() -> Any:
    """Each symbol follows from the one before it, so rows repeat in both sets."""
    random = rng(8)
    steps = random.integers(1, 3, (288, 1)) + (random.random((288, 12)) < 0.1)
    texts = ((random.integers(0, 9, (288, 1)) + steps.cumsum(1)) % 9).astype("int32")
    inputs = keras.Input((11,), dtype="int32")
    hidden = layers.GRU(8, return_sequences=True)(layers.Embedding(9, 4)(inputs))
    model = keras.Model(inputs, layers.Dense(9)(hidden))
    task = supervised(model, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    train, held_out = texts[:192], texts[192:]
    return task, Datasets(
        source(train[:, :-1], train[:, 1:]), source(held_out[:, :-1], held_out[:, 1:])
    )


# Targets


@sound
def an_actor_and_a_critic_of_one_body() -> Any:
    """The target is computed outside of the objective: no gradient flows through it."""

    def train_step(self: Any, batch: Any) -> Any:
        state, action, reward, following, goes_on = batch
        target = reward + 0.9 * goes_on * self.critic(self.body(following))[:, 0]

        def objective() -> Any:
            hidden = self.body(state)
            advantage = target - self.critic(hidden)[:, 0]
            chosen = ops.one_hot(action, 3) * ops.log_softmax(self.actor(hidden))
            policy = -ops.mean(ops.sum(chosen, axis=1) * ops.stop_gradient(advantage))
            return policy + 0.5 * ops.mean(advantage**2)

        models = [self.body, self.actor, self.critic]
        weights = [v for model in models for v in model.trainable_variables]
        return {"loss": treadle.minimize(objective, weights, self.optimizer)}

    parts = {"body": dense(4, 32, 32), "actor": dense(32, 3), "critic": dense(32, 1)}
    # So that the features count in the loss as discounted values would.
    parts["critic"].layers[-1].kernel.assign(np.full((32, 1), 0.025))
    random = rng(9)
    state, following = random.normal(size=(2, 192, 4)).astype("float32")
    action = random.integers(0, 3, 192).astype("int32")
    reward = state[:, 0] * (action - 1) + 0.3 * state[:, 1]
    goes_on = (random.random(192) < 0.9).astype("float32")
    task = stepping(train_step, optimizer=adam(1e-2), **parts)
    return task, source(state, action, reward, following, goes_on)
