"""Who is timed on TensorFlow, hand-driven loops as the guides write them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .contestants import Contestant, Epoch, Values, fit, treadle_loop
from .workloads import Job

Step = Callable[..., None]


class Hand:
    """A model with its hand-written step: `step(x, y)` trains and counts."""

    def __init__(self, job: Job) -> None:
        self.task = job.make()
        self.counted: dict[str, Any] = {}
        self.step: Step = getattr(self, f"_{job.workload.kind}")()

    def epoch(self, run: Callable[[], None]) -> Epoch:
        """Return an epoch that runs all steps by `run` and fetches what was counted."""

        def epoch() -> Values:
            for metric in self.counted.values():
                metric.reset_state()
            run()
            return {name: float(metric.result()) for name, metric in self.counted.items()}

        return epoch

    def _supervised(self) -> Step:
        model, optimizer, loss_function = self.task.model, self.task.optimizer, self.task.loss
        mean, accuracy = keras.metrics.Mean(), self.task.metrics["accuracy"]
        self.counted = {"loss": mean, "accuracy": accuracy}

        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                logits = model(x, training=True)
                loss = loss_function(y, logits)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            accuracy.update_state(y, logits)
            mean.update_state(loss)

        return step


def over_tf_data(job: Job, compiled: bool = True, part: int = 1) -> Contestant:
    """The loop of the tutorials: `for x, y in dataset: step(x, y)`."""
    hand, steps = Hand(job), max(1, job.steps // part)
    data = tf.data.Dataset.from_tensor_slices(job.arrays).shuffle(1024)
    # All batches are full anyway; said aloud, their shape is static, which makes graphs faster.
    data = data.batch(job.batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE).take(steps)
    step = tf.function(hand.step) if compiled else hand.step

    def run() -> None:
        for batch in data:
            step(*batch)

    return Contestant(hand.epoch(run), steps)


def over_slices(job: Job) -> Contestant:
    """A compiled step that is handed NumPy batches, picked out of the arrays by an order."""
    hand = Hand(job)
    step = tf.function(hand.step)

    def run() -> None:
        for rows in job.order():
            step(*(array[rows] for array in job.arrays))

    return Contestant(hand.epoch(run), job.steps)


def epoch_in_graph(job: Job) -> Contestant:
    """A whole epoch over tf.data in one `@tf.function`."""
    hand = Hand(job)
    data = tf.data.Dataset.from_tensor_slices(job.arrays).shuffle(1024)
    data = data.batch(job.batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

    @tf.function
    def run() -> None:
        for batch in data:
            hand.step(*batch)

    return Contestant(hand.epoch(run), job.steps)


def raw_loop(job: Job, jit: bool = False) -> Contestant:
    """The ceiling: data on the device, an epoch of steps in one graph, nothing around it."""
    hand = Hand(job)
    arrays = [tf.constant(array) for array in job.arrays]
    order = tf.Variable(job.order())

    @tf.function(jit_compile=jit)
    def run() -> None:
        for i in tf.range(job.steps):
            hand.step(*(tf.gather(array, order[i]) for array in arrays))

    def ordered() -> None:
        order.assign(job.order())
        run()

    hand.task.optimizer.build(hand.task.model.trainable_variables)  # not inside a compiled loop
    return Contestant(hand.epoch(ordered), job.steps)


SUPERVISED: dict[str, Callable[[Job], Contestant]] = {
    "treadle": treadle_loop,
    "raw in-graph loop": raw_loop,
    "raw in-graph loop, XLA": partial(raw_loop, jit=True),
    "epoch over tf.data in one @tf.function": epoch_in_graph,
    "@tf.function step over tf.data": over_tf_data,
    "@tf.function step over NumPy slices": over_slices,
    "fit, steps_per_execution=32": partial(fit, steps_per_execution=32),
    "fit": fit,
    "fit, jit_compile=False": partial(fit, jit_compile=False),
    "eager step over tf.data": partial(over_tf_data, compiled=False, part=10),
}


def versions() -> dict[str, str]:
    return {"tensorflow": tf.__version__, "numpy": np.__version__}
