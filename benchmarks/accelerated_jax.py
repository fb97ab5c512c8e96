"""Loops by hand on JAX for `scripts/bench accelerator`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .accelerated import Epoch, Job, made


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


JAX: dict[str, Callable[[Job], Epoch]] = {
    "jitted step": lambda job: jitted(job, reads=False),
    "jitted step, each loss read": lambda job: jitted(job, reads=True),
    "raw lax.scan": raw_scan,
}
