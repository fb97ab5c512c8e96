"""Loops by hand on TensorFlow for single benchmarks; others are in `contestants_tensorflow.py`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from treadle.recipes.actor_critic import network

from .accelerator import Epoch, Job
from .memory import Parts, task
from .reinforcement import DISCOUNT, ENTROPY, RATES, TARGET_RATE, q_network

ACCELERATED: dict[str, Callable[[Job], Epoch]] = {}

# Reinforcement learning: `@tf.function`s over Keras models


class ActorCritic:
    """The networks of the actor-critic, a compiled policy and a compiled update."""

    def __init__(self) -> None:
        actor, critic = network(64, 2), network(64, 1)
        optimizers = keras.optimizers.Adam(RATES[0]), keras.optimizers.Adam(RATES[1])
        for model, optimizer in zip((actor, critic), optimizers, strict=True):
            optimizer.build(model.trainable_variables)
        self._logits = tf.function(actor, jit_compile=True)
        self._values = tf.function(critic, jit_compile=True)

        @tf.function(jit_compile=True)
        def update(batch: Any) -> Any:
            with tf.GradientTape(persistent=True) as tape:
                logs = tf.nn.log_softmax(actor(batch["observations"], training=True))
                chosen = tf.gather(logs, batch["actions"], axis=1, batch_dims=1)
                entropy = -tf.reduce_mean(tf.reduce_sum(tf.exp(logs) * logs, -1))
                policy = -tf.reduce_mean(batch["advantages"] * chosen) - ENTROPY * entropy
                values = critic(batch["observations"], training=True)[:, 0]
                value = tf.reduce_mean((batch["targets"] - values) ** 2)
            losses = policy, value
            for model, loss, optimizer in zip((actor, critic), losses, optimizers, strict=True):
                weights = model.trainable_variables
                optimizer.apply(tape.gradient(loss, [v.value for v in weights]), weights)
            return losses

        self._update = update

    def logits(self, observations: Any) -> Any:
        """Return the logits of the policy."""
        return self._logits(tf.constant(observations)).numpy()

    def values(self, observations: Any) -> Any:
        """Return the estimates of the critic."""
        return self._values(tf.constant(observations)).numpy()[:, 0]

    def update(self, batch: dict[str, Any]) -> list[float]:
        """Update both networks, and return their losses."""
        batch = {name: tf.constant(x) for name, x in batch.items()}
        return [float(x) for x in self._update(batch)]


class DQN:
    """The networks of the DQN, a compiled policy and a compiled update."""

    def __init__(self) -> None:
        model, target, loss = q_network(), q_network(), keras.losses.Huber()
        optimizer = keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)
        target.set_weights(model.get_weights())
        self._q_values = tf.function(model, jit_compile=True)

        @tf.function(jit_compile=True)
        def update(batch: Any) -> Any:
            following = batch["next_observations"]
            best = tf.argmax(model(following), -1)
            values = tf.gather(target(following), best, axis=1, batch_dims=1)
            targets = batch["rewards"] + DISCOUNT["dqn"] * (1 - batch["terminations"]) * values
            with tf.GradientTape() as tape:
                q = model(batch["observations"], training=True)
                value = loss(targets, tf.gather(q, batch["actions"], axis=1, batch_dims=1))
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(value, [v.value for v in weights]), weights)
            for slow, fast in zip(target.trainable_variables, weights, strict=True):
                slow.assign_add(TARGET_RATE * (fast - slow))
            return value

        self._update = update

    def q_values(self, observations: Any) -> Any:
        """Return the values of the actions."""
        return self._q_values(tf.constant(observations)).numpy()

    def update(self, batch: dict[str, Any]) -> float:
        """Update both networks, and return the loss."""
        return float(self._update({name: tf.constant(x) for name, x in batch.items()}))


# Memory


def memory_parts(width: int) -> Parts:
    """A `@tf.function`."""
    made = task(width)
    model, optimizer, loss_function = made.model, made.optimizer, made.loss
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_function(y, model(x, training=True))
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, [v.value for v in weights]), weights)
        return loss

    @tf.function
    def evaluated(x: Any, y: Any) -> Any:
        return loss_function(y, model(x, training=False))

    def save(path: Path) -> None:
        variables = [*model.variables, *optimizer.variables]
        np.savez(path, **{str(i): v.value.numpy() for i, v in enumerate(variables)})

    return (
        lambda x, y: float(step(tf.constant(x), tf.constant(y))),
        lambda x, y: float(evaluated(tf.constant(x), tf.constant(y))),
        save,
    )
