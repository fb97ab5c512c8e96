"""Loops by hand on JAX for single benchmarks; others are in `contestants_jax.py`."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from treadle.recipes.actor_critic import network

from . import workloads
from .accelerator import Epoch, Job, made
from .contestants import Contestant, TreadleLoop
from .contestants_jax import over_batches
from .memory import Parts, task
from .reinforcement import DISCOUNT, ENTROPY, RATES, TARGET_RATE, q_network
from .streams import batches_of

# On an accelerator


def _step(job: Job) -> tuple[Callable[..., Any], Any]:
    """Return a pure step, and its first state."""
    model, loss, optimizer = made(job)
    optimizer.build(model.trainable_variables)

    def objective(weights: Any, others: Any, x: Any, y: Any) -> Any:
        outputs, others = model.stateless_call(weights, others, x, training=True)
        return loss(y, outputs), others

    differentiated = jax.value_and_grad(objective, has_aux=True)

    def step(state: Any, x: Any, y: Any) -> Any:
        weights, others, slots = state
        (found, others), gradients = differentiated(weights, others, x, y)
        weights, slots = optimizer.stateless_apply(slots, gradients, weights)
        return (weights, others, slots), found

    groups = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    return step, tuple([jnp.array(v.value, copy=True) for v in group] for group in groups)


def jitted(job: Job, reads: bool) -> Epoch:
    """Return an epoch of a jitted step that gathers its batch on the device."""
    step, state = _step(job)
    x, y = map(jnp.asarray, job.arrays)
    run = jax.jit(lambda state, rows, x, y: step(state, x[rows], y[rows]), donate_argnums=0)

    def epoch() -> float:
        nonlocal state
        loss: Any = 0.0
        for rows in job.order():
            state, loss = run(state, rows, x, y)
            loss = float(loss) if reads else loss
        return float(loss)

    return epoch


def raw_scan(job: Job) -> Epoch:
    """Return an epoch in one `lax.scan`, with nothing around it."""
    step, state = _step(job)
    x, y = map(jnp.asarray, job.arrays)
    run = jax.jit(
        lambda state, order, x, y: jax.lax.scan(
            lambda state, rows: step(state, x[rows], y[rows]), state, order
        ),
        donate_argnums=0,
    )

    def epoch() -> float:
        nonlocal state
        state, losses = run(state, job.order(), x, y)
        return float(losses[-1])

    return epoch


ACCELERATED: dict[str, Callable[[Job], Epoch]] = {
    "jitted step": lambda job: jitted(job, reads=False),
    "jitted step, each loss read": lambda job: jitted(job, reads=True),
    "raw lax.scan": raw_scan,
}


# Reinforcement learning: jitted functions over Keras' stateless functions


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


# Memory


def memory_parts(width: int) -> Parts:
    """A jitted step that donates its state."""
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


# Streams: Grain and generators


def streaming(job: workloads.Job, stream: str) -> dict[str, Callable[[], Contestant]]:
    """Return the contestants by name."""
    if stream == "generator":
        source: Any = partial(batches_of, job)
        epochs: Callable[[], Iterable[Any]] = source
    else:
        source = grain_stream(job)
        epochs = source.__iter__
    return {
        "treadle": lambda: TreadleLoop(job, source),
        "jitted step by hand": lambda: over_batches(job, epochs),
    }


def grain_stream(job: workloads.Job) -> Any:
    """Return a Grain data set of augmented batches, which two threads prepare."""
    import grain

    images, labels = job.arrays

    def augmented(index: int, rng: np.random.Generator) -> Any:
        image = images[index]
        if rng.random() < 0.5:
            image = image[:, ::-1]
        padded = np.pad(image, ((4, 4), (4, 4), (0, 0)))
        top, left = rng.integers(0, 9, 2)
        return padded[top : top + 32, left : left + 32], labels[index]

    data = grain.MapDataset.range(len(images)).seed(0).shuffle()
    data = data.random_map(augmented).batch(job.batch_size)
    return data.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=16))
