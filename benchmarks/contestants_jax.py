"""Who is timed on JAX: loops over Keras' stateless functions, as its guides write them."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from .contestants import Contestant, Entry, Epoch, TreadleLoop, Values, checked, fit, sliced
from .workloads import NOISE, Job, d_loss, g_loss

State = Any
Step = Callable[..., State]


class Hand:
    """A task's parts with a hand-written pure step: `step(state, x, y)` returns the next state."""

    def __init__(self, job: Job) -> None:
        self.task, self.metrics = job.make(), job.metrics()
        self.counted: dict[str, Any] = {}
        self.step: Step
        self.step, start = self._gan() if job.workload.kind == "gan" else self._supervised()
        counters = {name: _values(metric.variables) for name, metric in self.counted.items()}
        # Copies: a call that donates its state must not be given one buffer twice.
        self.state: State = jax.tree.map(lambda v: jnp.array(v, copy=True), (*start, counters))

    def epoch(self, run: Callable[[State], State]) -> Epoch:
        """Return an epoch that runs all steps by `run` and fetches what was counted."""

        def epoch() -> Values:
            *trained, counters = self.state
            zeros = {name: [jnp.zeros_like(v) for v in vs] for name, vs in counters.items()}
            self.state = run((*trained, zeros))
            return {
                name: float(metric.stateless_result(self.state[-1][name]))
                for name, metric in self.counted.items()
            }

        return epoch

    def _supervised(self) -> tuple[Step, State]:
        model, optimizer, loss_function = self.task.model, self.task.optimizer, self.task.loss
        mean, accuracy = keras.metrics.Mean(), self.metrics["accuracy"]
        self.counted = {"loss": mean, "accuracy": accuracy}
        optimizer.build(model.trainable_variables)

        def objective(trainable: Any, other: Any, x: Any, y: Any) -> Any:
            logits, other = model.stateless_call(trainable, other, x, training=True)
            return loss_function(y, logits), (other, logits)

        differentiate = jax.value_and_grad(objective, has_aux=True)

        def step(state: State, x: Any, y: Any) -> State:
            trainable, other, slots, counters = state
            (loss, (other, logits)), gradients = differentiate(trainable, other, x, y)
            trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
            counters = {
                "loss": mean.stateless_update_state(counters["loss"], loss),
                "accuracy": accuracy.stateless_update_state(counters["accuracy"], y, logits),
            }
            return trainable, other, slots, counters

        return step, (
            _values(model.trainable_variables),
            _values(model.non_trainable_variables),
            _values(optimizer.variables),
        )

    def _gan(self) -> tuple[Step, State]:
        task = self.task
        generator, discriminator = task.generator, task.discriminator
        task.d_optimizer.build(discriminator.trainable_variables)
        task.g_optimizer.build(generator.trainable_variables)
        mean = keras.metrics.Mean()
        self.counted = {"d_loss": mean, "g_loss": mean}

        def generated(weights: Any, other: Any, key: Any, count: int) -> Any:
            noise = jax.random.normal(key, (count, NOISE))
            return generator.stateless_call(weights, other, noise, training=True)

        def judged(weights: Any, other: Any, images: Any) -> Any:
            return discriminator.stateless_call(weights, other, images)[0]

        @jax.value_and_grad
        def for_d(weights: Any, other: Any, real: Any, fake: Any) -> Any:
            return d_loss(judged(weights, other, real), judged(weights, other, fake))

        @partial(jax.value_and_grad, has_aux=True)
        def for_g(weights: Any, other: Any, d: Any, d_other: Any, key: Any, count: int) -> Any:
            fake, other = generated(weights, other, key, count)
            return g_loss(judged(d, d_other, fake)), other

        def step(state: State, real: Any) -> State:
            (d, d_other, d_slots), (g, g_other, g_slots), key, counters = state
            key, first, second = jax.random.split(key, 3)
            fake, g_other = generated(g, g_other, first, len(real))
            d_value, gradients = for_d(d, d_other, real, fake)
            d, d_slots = task.d_optimizer.stateless_apply(d_slots, gradients, d)
            (g_value, g_other), gradients = for_g(g, g_other, d, d_other, second, len(real))
            g, g_slots = task.g_optimizer.stateless_apply(g_slots, gradients, g)
            counters = {
                name: mean.stateless_update_state(counters[name], value)
                for name, value in (("d_loss", d_value), ("g_loss", g_value))
            }
            return (d, d_other, d_slots), (g, g_other, g_slots), key, counters

        def parts(model: Any, optimizer: Any) -> State:
            found = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
            return tuple(_values(variables) for variables in found)

        return step, (
            parts(discriminator, task.d_optimizer),
            parts(generator, task.g_optimizer),
            jax.random.PRNGKey(0),
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


def over_batches(job: Job, batches: Callable[[], Iterable[Any]]) -> Contestant:
    """A jitted step that donates its state, over the batches of another library."""
    hand = Hand(job)
    step = jax.jit(hand.step, donate_argnums=0)

    def run(state: State) -> State:
        for batch in batches():
            state = step(state, *batch)
        return state

    return Contestant(hand.epoch(run), job.steps)


def reading_loss(job: Job) -> Callable[..., float]:
    """A jitted step over NumPy batches that donates its state, and whose loss is read each time."""
    task = job.make()
    model, optimizer, loss_function = task.model, task.optimizer, task.loss
    metrics = job.metrics()
    optimizer.build(model.trainable_variables)

    def objective(trainable: Any, other: Any, x: Any, y: Any) -> Any:
        outputs, other = model.stateless_call(trainable, other, x, training=True)
        return loss_function(y, outputs), (other, outputs)

    differentiate = jax.value_and_grad(objective, has_aux=True)

    @partial(jax.jit, donate_argnums=0)
    def step(state: State, x: Any, y: Any) -> tuple[State, Any]:
        trainable, other, slots, counters = state
        (loss, (other, outputs)), gradients = differentiate(trainable, other, x, y)
        trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
        counters = {
            name: metric.stateless_update_state(counters[name], y, outputs)
            for name, metric in metrics.items()
        }
        return (trainable, other, slots, counters), loss

    state: State = (
        _values(model.trainable_variables),
        _values(model.non_trainable_variables),
        _values(optimizer.variables),
        {name: _values(metric.variables) for name, metric in metrics.items()},
    )
    state = jax.tree.map(lambda v: jnp.array(v, copy=True), state)

    def run(x: Any, y: Any) -> float:
        nonlocal state
        state, loss = step(state, x, y)
        return float(loss)

    return run


def evaluating(job: Job) -> Contestant:
    """A jitted step over NumPy slices that updates the mean loss and the metrics."""
    task = job.make()
    model, loss_function = task.model, task.loss
    metrics = {"loss": keras.metrics.Mean(), **job.metrics()}
    weights = _values(model.trainable_variables), _values(model.non_trainable_variables)

    @jax.jit
    def step(weights: Any, counters: State, x: Any, y: Any) -> State:
        outputs, _ = model.stateless_call(*weights, x, training=False)
        given = {"loss": (loss_function(y, outputs),)}
        return {
            name: metric.stateless_update_state(counters[name], *given.get(name, (y, outputs)))
            for name, metric in metrics.items()
        }

    def run() -> Values:
        counters = {
            name: [jnp.zeros_like(v) for v in _values(metric.variables)]
            for name, metric in metrics.items()
        }
        for x, y in sliced(job.arrays, job.batch_size):
            counters = step(weights, counters, x, y)
        return {
            name: float(metric.stateless_result(counters[name])) for name, metric in metrics.items()
        }

    return Contestant(run, job.steps)


def predicting(job: Job) -> Contestant:
    """A jitted forward pass over NumPy slices; the outputs are fetched when all have begun."""
    model = job.make().model
    weights = _values(model.trainable_variables), _values(model.non_trainable_variables)

    @jax.jit
    def step(weights: Any, x: Any) -> Any:
        return model.stateless_call(*weights, x, training=False)[0]

    def run() -> Values:
        outputs = [step(weights, x) for (x,) in sliced(job.arrays[:1], job.batch_size)]
        return checked(np.concatenate(outputs))

    return Contestant(run, job.steps)


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


LOOPS = [
    Entry("treadle", "treadle", TreadleLoop),
    Entry("raw lax.scan", "raw", raw_scan),
    Entry("jitted step, data on device", "hand", gathering),
    Entry("jitted step over NumPy slices", "hand", over_slices),
]
ENTRIES: dict[str, list[Entry]] = {
    "supervised": [
        *LOOPS,
        Entry("fit", "fit", fit),
        Entry("fit, steps_per_execution=32", "fit", partial(fit, steps_per_execution=32)),
    ],
    "gan": LOOPS,  # a stateless train_step of Keras' `fit` has one optimizer
}


EVALUATING = {"jitted step over NumPy slices": evaluating}
PREDICTING = {"jitted forward pass over NumPy slices": predicting}


def versions() -> dict[str, str]:
    return {"jax": jax.__version__}
