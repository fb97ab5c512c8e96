"""Loops by hand whose memory is measured: for each backend a step, an evaluation and a save."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from .memory import HIDDEN, INPUTS, task

Parts = tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any], Callable[[Path], None]]


def jax(width: int) -> Parts:
    """A jitted step that donates its state."""
    import jax
    import jax.numpy as jnp

    made = task(width)
    model, optimizer, loss_function = made.model, made.optimizer, made.loss
    optimizer.build(model.trainable_variables)

    def objective(weights: Any, x: Any, y: Any) -> Any:
        return loss_function(y, model.stateless_call(weights, [], x, training=True)[0])

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, x: Any, y: Any) -> Any:
        weights, slots = state
        loss, gradients = jax.value_and_grad(objective)(weights, x, y)
        return optimizer.stateless_apply(slots, gradients, weights), loss

    evaluated = jax.jit(objective)
    variables = [*model.trainable_variables, *optimizer.variables]
    state = (
        [v.value for v in model.trainable_variables],
        [v.value for v in optimizer.variables],
    )
    for variable in variables:  # the state alone holds the values, so that they can be donated
        variable._value = jnp.zeros((), variable.dtype)

    def train(x: Any, y: Any) -> float:
        nonlocal state
        state, loss = step(state, x, y)
        return float(loss)

    def save(path: Path) -> None:
        np.savez(path, *[np.asarray(x) for x in jax.tree.leaves(state)])

    return train, lambda x, y: float(evaluated(state[0], x, y)), save


def tensorflow(width: int) -> Parts:
    """A `@tf.function`."""
    import tensorflow as tf

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


def torch(width: int) -> Parts:
    """`torch.nn` and `torch.optim`, without Keras."""
    import torch
    from torch import nn

    sizes = [INPUTS, *[width] * (HIDDEN + 1)]
    hidden = [
        layer
        for before, after in pairwise(sizes)
        for layer in (nn.Linear(before, after), nn.ReLU())
    ]
    model = nn.Sequential(*hidden, nn.Linear(width, 10))
    optimizer, loss_function = torch.optim.Adam(model.parameters(), 1e-5), nn.CrossEntropyLoss()

    def loss_of(x: Any, y: Any) -> torch.Tensor:
        return loss_function(model(torch.from_numpy(x)), torch.from_numpy(y).long())

    def train(x: Any, y: Any) -> float:
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    def evaluate(x: Any, y: Any) -> float:
        with torch.inference_mode():
            return float(loss_of(x, y))

    def save(path: Path) -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

    return train, evaluate, save
