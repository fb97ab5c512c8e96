"""Reinforcement learning by hand on JAX: jitted functions over Keras' stateless functions."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from treadle.recipes.actor_critic import network

from .reinforcement import DISCOUNT, ENTROPY, RATES, TARGET_RATE, q_network


def _weights(model: Any) -> list[Any]:
    return [jnp.array(v.value, copy=True) for v in model.trainable_variables]


def _forward(model: Any, weights: Any, x: Any) -> Any:
    return model.stateless_call(weights, [], x)[0]


class ActorCritic:
    """The networks of the actor-critic, a jitted policy and a jitted update."""

    def __init__(self) -> None:
        actor, critic = network(64, 2), network(64, 1)
        optimizers = keras.optimizers.Adam(RATES[0]), keras.optimizers.Adam(RATES[1])
        for model, optimizer in zip((actor, critic), optimizers, strict=True):
            optimizer.build(model.trainable_variables)
        self._state: Any = tuple(
            (_weights(model), [jnp.array(v.value, copy=True) for v in optimizer.variables])
            for model, optimizer in zip((actor, critic), optimizers, strict=True)
        )
        self._logits = jax.jit(partial(_forward, actor))
        self._values = jax.jit(partial(_forward, critic))

        def policy_loss(weights: Any, batch: Any) -> Any:
            logs = jax.nn.log_softmax(_forward(actor, weights, batch["observations"]))
            chosen = jnp.take_along_axis(logs, batch["actions"][:, None], 1)[:, 0]
            entropy = -(jnp.exp(logs) * logs).sum(-1).mean()
            return -(batch["advantages"] * chosen).mean() - ENTROPY * entropy

        def value_loss(weights: Any, batch: Any) -> Any:
            values = _forward(critic, weights, batch["observations"])[:, 0]
            return ((batch["targets"] - values) ** 2).mean()

        @partial(jax.jit, donate_argnums=0)
        def update(state: Any, batch: Any) -> Any:
            new, losses = [], []
            for (weights, slots), loss, optimizer in zip(
                state, (policy_loss, value_loss), optimizers, strict=True
            ):
                value, gradients = jax.value_and_grad(loss)(weights, batch)
                new.append(optimizer.stateless_apply(slots, gradients, weights))
                losses.append(value)
            return tuple(new), losses

        self._update = update

    def logits(self, observations: Any) -> Any:
        """Return the logits of the policy."""
        return np.asarray(self._logits(self._state[0][0], observations))

    def values(self, observations: Any) -> Any:
        """Return the estimates of the critic."""
        return np.asarray(self._values(self._state[1][0], observations))[:, 0]

    def update(self, batch: dict[str, Any]) -> list[float]:
        """Update both networks, and return their losses."""
        self._state, losses = self._update(self._state, batch)
        return [float(x) for x in losses]


class DQN:
    """The networks of the DQN, a jitted policy and a jitted update."""

    def __init__(self) -> None:
        model, loss, optimizer = q_network(), keras.losses.Huber(), keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)
        slots = [jnp.array(v.value, copy=True) for v in optimizer.variables]
        self._state: Any = _weights(model), _weights(model), slots
        self._q_values = jax.jit(partial(_forward, model))

        def objective(weights: Any, targets: Any, batch: Any) -> Any:
            q = _forward(model, weights, batch["observations"])
            return loss(targets, jnp.take_along_axis(q, batch["actions"][:, None], 1)[:, 0])

        @partial(jax.jit, donate_argnums=0)
        def update(state: Any, batch: Any) -> Any:
            weights, target, slots = state
            following = batch["next_observations"]
            best = _forward(model, weights, following).argmax(-1)
            values = jnp.take_along_axis(_forward(model, target, following), best[:, None], 1)[:, 0]
            targets = batch["rewards"] + DISCOUNT["dqn"] * (1 - batch["terminations"]) * values
            value, gradients = jax.value_and_grad(objective)(weights, targets, batch)
            weights, slots = optimizer.stateless_apply(slots, gradients, weights)
            target = jax.tree.map(lambda a, b: a + TARGET_RATE * (b - a), target, weights)
            return (weights, target, slots), value

        self._update = update

    def q_values(self, observations: Any) -> Any:
        """Return the values of the actions."""
        return np.asarray(self._q_values(self._state[0], observations))

    def update(self, batch: dict[str, Any]) -> float:
        """Update both networks, and return the loss."""
        self._state, loss = self._update(self._state, batch)
        return float(loss)
