"""Who is timed on TensorFlow: loops driven by hand, as the guides write them, and `fit`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import treadle

from .contestants import (
    Contestant,
    Entry,
    Epoch,
    Fit,
    TreadleLoop,
    Values,
    checked,
    fit,
    sliced,
)
from .workloads import NOISE, Job, augmented, d_loss, g_loss

Step = Callable[..., None]


class Hand:
    """A task's parts with a hand-written step: `step(x, y)` trains and counts.

    Args:
        job: What to train.
        replicas: Of how many parts of a batch the step computes one: an optimizer of Keras adds up
            the gradients of all.
    """

    def __init__(self, job: Job, replicas: int = 1) -> None:
        self.task, self.metrics, self.replicas = job.make(), job.metrics(), replicas
        self.counted: dict[str, Any] = {}
        self.step: Step = self._gan() if job.workload.kind == "gan" else self._supervised()

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
        mean, accuracy = keras.metrics.Mean(), self.metrics["accuracy"]
        self.counted = {"loss": mean, "accuracy": accuracy}
        optimizer.build(model.trainable_variables)  # a compiled loop could not

        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                logits = model(x, training=True)
                loss = loss_function(y, logits)
                part = loss / self.replicas if self.replicas > 1 else loss
            gradients = tape.gradient(part, model.trainable_variables)
            # Keras' Adam takes an embedding's repeated rows one by one; dense they are summed,
            # which is the true gradient and costs less.
            gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            accuracy.update_state(y, logits)
            mean.update_state(loss)

        return step

    def _gan(self) -> Step:
        d_mean, g_mean = keras.metrics.Mean(), keras.metrics.Mean()
        self.counted = {"d_loss": d_mean, "g_loss": g_mean}
        gan = gan_step(self.task)

        def step(real: Any) -> None:
            d, g = gan(real)
            d_mean.update_state(d)
            g_mean.update_state(g)

        return step


def gan_step(task: Any) -> Callable[[Any], tuple[Any, Any]]:
    """Return the step of a GAN, written by hand: two tapes, two optimizers."""
    generator, discriminator = task.generator, task.discriminator
    task.d_optimizer.build(discriminator.trainable_variables)
    task.g_optimizer.build(generator.trainable_variables)

    def step(real: Any) -> tuple[Any, Any]:
        fake = generator(tf.random.normal((real.shape[0], NOISE)), training=True)
        with tf.GradientTape() as tape:
            d = d_loss(discriminator(real), discriminator(fake))
        gradients = tape.gradient(d, discriminator.trainable_variables)
        task.d_optimizer.apply(gradients, discriminator.trainable_variables)
        noise = tf.random.normal((real.shape[0], NOISE))
        with tf.GradientTape() as tape:
            g = g_loss(discriminator(generator(noise, training=True)))
        gradients = tape.gradient(g, generator.trainable_variables)
        task.g_optimizer.apply(gradients, generator.trainable_variables)
        return d, g

    return step


def dataset(job: Job) -> Any:
    """Return a job's data as `tf.data`, shuffled and batched as the tutorials do."""
    if job.workload.kind == "streaming":
        return augmented(job.arrays, job.batch_size)
    data = tf.data.Dataset.from_tensor_slices(job.arrays).shuffle(1024)
    # All batches are full anyway; said aloud, their shape is static, which makes graphs faster.
    return data.batch(job.batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def over_tf_data(job: Job, compiled: bool = True, part: int = 1) -> Contestant:
    """The loop of the tutorials: `for x, y in dataset: step(x, y)`."""
    hand, steps = Hand(job), max(1, job.steps // part)
    data = dataset(job).take(steps)
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


def reading_loss(job: Job) -> Callable[..., float]:
    """A compiled step over NumPy batches whose loss is read each time."""
    step = tf.function(_with_loss(job))
    return lambda x, y: float(step(tf.constant(x), tf.constant(y)))


def ten_steps(job: Job) -> Contestant:
    """Ten steps in one call that XLA compiles, data on the device, and their losses read."""
    step = _with_loss(job)
    arrays = [tf.constant(array) for array in job.arrays]

    @tf.function(jit_compile=True)
    def run(rows: Any) -> Any:
        losses = tf.TensorArray(tf.float32, 10)
        for i in tf.range(10):
            losses = losses.write(i, step(*(tf.gather(array, rows[i]) for array in arrays)))
        return losses.stack()

    def epoch() -> Values:
        order = np.asarray(job.order())[: job.steps // 10 * 10].reshape(-1, 10, job.batch_size)
        return {"loss": float(np.mean([run(tf.constant(rows)).numpy() for rows in order]))}

    return Contestant(epoch, job.steps // 10 * 10)


def _with_loss(job: Job) -> Callable[..., Any]:
    """Return a step that returns its loss."""
    task = job.make()
    model, optimizer, loss_function = task.model, task.optimizer, task.loss
    metrics = job.metrics()
    optimizer.build(model.trainable_variables)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = loss_function(y, outputs)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        for metric in metrics.values():
            metric.update_state(y, outputs)
        return loss

    return step


def evaluating(job: Job, over_dataset: bool) -> Contestant:
    """A compiled step that updates the mean loss and the metrics, and a loop over all batches."""
    task = job.make()
    model, loss_function, mean = task.model, task.loss, keras.metrics.Mean()
    metrics = job.metrics()

    @tf.function
    def step(x: Any, y: Any) -> None:
        outputs = model(x, training=False)
        mean.update_state(loss_function(y, outputs))
        for metric in metrics.values():
            metric.update_state(y, outputs)

    batches = stored_order(job.arrays, job.batch_size, over_dataset)

    def run() -> Values:
        for metric in (mean, *metrics.values()):
            metric.reset_state()
        for x, y in batches():
            step(x, y)
        results = {name: float(metric.result()) for name, metric in metrics.items()}
        return {"loss": float(mean.result()), **results}

    return Contestant(run, job.steps)


def predicting(job: Job, over_dataset: bool) -> Contestant:
    """A compiled forward pass, whose outputs are collected and joined."""
    model = job.make().model
    batches = stored_order(job.arrays[:1], job.batch_size, over_dataset)

    @tf.function
    def step(x: Any) -> Any:
        return model(x, training=False)

    def run() -> Values:
        return checked(np.concatenate([step(x).numpy() for (x,) in batches()]))

    return Contestant(run, job.steps)


def stored_order(arrays: Any, batch_size: int, over_dataset: bool) -> Callable[[], Any]:
    """Return a function that iterates over all batches, by `tf.data` or as NumPy slices."""
    if over_dataset:
        data = tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size, drop_remainder=True)
        return data.prefetch(tf.data.AUTOTUNE).__iter__
    return lambda: sliced(arrays, batch_size)


def epoch_in_graph(job: Job) -> Contestant:
    """A whole epoch over tf.data in one `@tf.function`."""
    hand, data = Hand(job), dataset(job)

    @tf.function
    def run() -> None:
        for batch in data:
            hand.step(*batch)

    return Contestant(hand.epoch(run), job.steps)


def iterator_in_graph(job: Job, jit: bool = False) -> Contestant:
    """An epoch of steps in one graph that asks a tf.data iterator for its batches."""
    hand, data = Hand(job), dataset(job)
    step = tf.function(hand.step, jit_compile=jit)

    @tf.function
    def epoch(iterator: Any) -> None:
        for _ in tf.range(job.steps):
            step(*next(iterator))

    return Contestant(hand.epoch(lambda: epoch(iter(data))), job.steps)


def raw_loop(job: Job, jit: bool = False) -> Contestant:
    """The ceiling: data on the device, an epoch of steps in one graph, nothing around it."""
    hand = Hand(job)
    arrays = [tf.constant(array) for array in job.arrays]
    order = tf.Variable(job.order())
    # Inside of XLA's own loop a convolution takes 50 times as long, so there it compiles the step.
    jit_step = jit and job.workload.convolves
    step = tf.function(hand.step, jit_compile=True) if jit_step else hand.step

    @tf.function(jit_compile=jit and not jit_step)
    def run() -> None:
        for i in tf.range(job.steps):
            step(*(tf.gather(array, order[i]) for array in arrays))

    def ordered() -> None:
        order.assign(job.order())
        run()

    return Contestant(hand.epoch(ordered), job.steps)


def pipeline_alone(job: Job) -> Contestant:
    """No training: how fast the data come at best."""
    data = dataset(job)

    @tf.function
    def run() -> Any:
        total = 0
        for _, labels in data:
            total += tf.reduce_sum(labels)
        return total

    return Contestant(lambda: {"labels": float(run())}, job.steps)


class FitGAN(keras.Model):
    """The GAN as Keras' guide for `train_step` writes it."""

    def __init__(self, task: Any) -> None:
        super().__init__()
        self.task_step, self.parts = gan_step(task), [task.generator, task.discriminator]
        self.d_mean = keras.metrics.Mean(name="d_loss")
        self.g_mean = keras.metrics.Mean(name="g_loss")

    def train_step(self, data: Any) -> Any:
        (real,) = data if isinstance(data, tuple) else (data,)
        d, g = self.task_step(real)
        self.d_mean.update_state(d)
        self.g_mean.update_state(g)
        return {"d_loss": self.d_mean.result(), "g_loss": self.g_mean.result()}


def fit_gan(job: Job, **compile_arguments: Any) -> Contestant:
    """`fit` of a model that overrides `train_step`."""
    model = FitGAN(job.make())
    model.compile(**compile_arguments)
    return Fit(model, job.arrays, job.steps, batch_size=job.batch_size)


def _fits(make: Callable[..., Contestant]) -> list[Entry]:
    return [
        Entry("fit", "fit", make),
        Entry("fit, jit_compile=False", "fit", partial(make, jit_compile=False)),
        Entry("fit, steps_per_execution=32", "fit", partial(make, steps_per_execution=32)),
    ]


OVER_TF_DATA = [
    Entry("epoch over tf.data in one @tf.function", "hand", epoch_in_graph),
    Entry("@tf.function step over tf.data", "hand", over_tf_data),
    Entry("eager step over tf.data", "hand", partial(over_tf_data, compiled=False, part=10)),
]
OVER_ARRAYS = [
    Entry("treadle", "treadle", TreadleLoop),
    Entry("raw in-graph loop", "raw", raw_loop),
    Entry("raw in-graph loop, XLA", "raw", partial(raw_loop, jit=True)),
    *OVER_TF_DATA,
    Entry("@tf.function step over NumPy slices", "hand", over_slices),
]
# The plan that the rule gives too: the row shows how far equal programs differ.
XLA_BY_STEP = Entry(
    "treadle, Options(fused=True, jit=True)",
    "part",
    lambda job: TreadleLoop(job, options=treadle.Options(fused=True, jit=True)),
)
ENTRIES: dict[str, list[Entry]] = {
    "supervised": [*OVER_ARRAYS, *_fits(fit)],
    "gan": [*OVER_ARRAYS, XLA_BY_STEP, *_fits(fit_gan)],
    "streaming": [
        Entry("treadle", "treadle", lambda job: TreadleLoop(job, dataset(job))),
        Entry("raw in-graph loop over an iterator", "raw", iterator_in_graph),
        Entry(
            "raw in-graph loop over an iterator, XLA",
            "raw",
            partial(iterator_in_graph, jit=True),
        ),
        *OVER_TF_DATA,
        *_fits(lambda job, **arguments: fit(job, dataset(job), **arguments)),
        Entry("the pipeline alone, no training", "part", pipeline_alone),
    ],
}


EVALUATING = {
    "`@tf.function` step over tf.data": partial(evaluating, over_dataset=True),
    "`@tf.function` step over NumPy slices": partial(evaluating, over_dataset=False),
}
PREDICTING = {
    "`@tf.function` over tf.data": partial(predicting, over_dataset=True),
    "`@tf.function` over NumPy slices": partial(predicting, over_dataset=False),
}


def versions() -> dict[str, str]:
    return {"tensorflow": tf.__version__}
