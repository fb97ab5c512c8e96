"""Who is timed on JAX: loops over Keras' stateless functions, as its guides write them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras

from .contestants import Contestant, Epoch, Values, fit, treadle_loop
from .workloads import Job

State = Any
Step = Callable[..., State]


class Hand:
    """A model with its hand-written pure step: `step(state, x, y)` returns the next state."""

    def __init__(self, job: Job) -> None:
        self.task = job.make()
        self.mean = keras.metrics.Mean()
        step, start = getattr(self, f"_{job.workload.kind}")()
        self.step: Step = step
        # Copies: a call that donates its state must not be given one buffer twice.
        self.state: State = jax.tree.map(lambda v: jnp.array(v, copy=True), start)

    def epoch(self, run: Callable[[State], State]) -> Epoch:
        """Return an epoch that runs all steps by `run` and fetches what was counted."""

        def epoch() -> Values:
            *trained, counted = self.state
            counted = {name: [jnp.zeros_like(v) for v in vs] for name, vs in counted.items()}
            self.state = run((*trained, counted))
            return {
                name: float(metric.stateless_result(self.state[-1][name]))
                for name, metric in self.counted.items()
            }

        return epoch

    def _supervised(self) -> tuple[Step, State]:
        model, optimizer, loss_function = self.task.model, self.task.optimizer, self.task.loss
        mean, accuracy = self.mean, self.task.metrics["accuracy"]
        optimizer.build(model.trainable_variables)

        self.counted = {"loss": mean, "accuracy": accuracy}

        def objective(trainable: Any, other: Any, x: Any, y: Any) -> Any:
            logits, other = model.stateless_call(trainable, other, x, training=True)
            return loss_function(y, logits), (other, logits)

        differentiate = jax.value_and_grad(objective, has_aux=True)

        def step(state: State, x: Any, y: Any) -> State:
            trainable, other, slots, counted = state
            (loss, (other, logits)), gradients = differentiate(trainable, other, x, y)
            trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
            counted = {
                "loss": mean.stateless_update_state(counted["loss"], loss),
                "accuracy": accuracy.stateless_update_state(counted["accuracy"], y, logits),
            }
            return trainable, other, slots, counted

        return step, (
            _values(model.trainable_variables),
            _values(model.non_trainable_variables),
            _values(optimizer.variables),
            {name: _values(metric.variables) for name, metric in self.counted.items()},
        )


def over_slices(job: Job) -> Contestant:
    """A jitted step that donates its state and is handed NumPy batches."""
    hand = Hand(job)
    step = jax.jit(hand.step, donate_argnums=0)

    def run(state: State) -> State:
        for rows in job.order():
            state = step(state, *(array[rows] for array in job.arrays))
        return state

    return Contestant(hand.epoch(run), job.steps)


def gathering(job: Job) -> Contestant:
    """A jitted step that picks its batch out of arrays on the device."""
    hand = Hand(job)
    arrays = [jnp.asarray(array) for array in job.arrays]

    @partial(jax.jit, donate_argnums=0)
    def step(state: State, rows: Any, arrays: Any) -> State:
        return hand.step(state, *(array[rows] for array in arrays))

    def run(state: State) -> State:
        for rows in job.order():
            state = step(state, rows, arrays)
        return state

    return Contestant(hand.epoch(run), job.steps)


def raw_scan(job: Job) -> Contestant:
    """The ceiling: data on the device, an epoch in one `lax.scan`, nothing around it."""
    hand = Hand(job)
    arrays = [jnp.asarray(array) for array in job.arrays]

    @partial(jax.jit, donate_argnums=0)
    def scan(state: State, order: Any, arrays: Any) -> State:
        def one(state: State, rows: Any) -> tuple[State, None]:
            return hand.step(state, *(array[rows] for array in arrays)), None

        return jax.lax.scan(one, state, order)[0]

    return Contestant(hand.epoch(lambda state: scan(state, job.order(), arrays)), job.steps)


def _values(variables: Any) -> list[Any]:
    return [variable.value for variable in variables]


SUPERVISED: dict[str, Callable[[Job], Contestant]] = {
    "treadle": treadle_loop,
    "raw lax.scan": raw_scan,
    "jitted step, data on device": gathering,
    "jitted step over NumPy slices": over_slices,
    "fit, steps_per_execution=32": partial(fit, steps_per_execution=32),
    "fit": fit,
}


def versions() -> dict[str, str]:
    return {"jax": jax.__version__}
