"""Programs that fail on several processes, by name."""

from collections.abc import Callable
from typing import Any

import keras
from keras import layers, ops
from process_tasks import FEATURES, TORCH, Small, rank, rows, source, usual

import treadle
from treadle.core.randomness import seed_everything

MESSAGES: dict[str, Callable[[], None]] = {}


def fails(function: Callable[[], None]) -> Callable[[], None]:
    MESSAGES[function.__name__.replace("_", "-")] = function
    return function


def fit(step: Callable[[Any, Any, Any], Any], count: int = 19, units: int = 5) -> None:
    treadle.setup(seed=0)
    with treadle.Loop(Small(step, units), console=False) as loop:
        loop.fit(source(count, 8), epochs=1)


@fails
def sum_of_losses() -> None:
    fit(lambda task, x, y: task.minimized(lambda: ops.sum(task.model(x) ** 2)))


@fails
def coupled_examples() -> None:
    def similarity(task: Any, x: Any, y: Any) -> Any:
        z = task.model(x)
        return ops.mean(ops.logsumexp(ops.matmul(z, ops.transpose(z)), axis=1))

    fit(lambda task, x, y: task.minimized(lambda: similarity(task, x, y)))


@fails
def sum_that_is_logged() -> None:
    fit(lambda task, x, y: {**usual(task, x, y), "labels": ops.sum(y)})


@fails
def variable_of_own_rows() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        task.mean.assign(ops.mean(x))
        return usual(task, x, y)

    fit(step)


@fails
def backward() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        if TORCH:
            loss = task.loss(y, task.model(x))
            loss.backward()
            return {"loss": loss}
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = task.loss(y, task.model(x))
        tape.gradient(loss, task.model.layers[0].kernel.value)
        return {"loss": loss}

    fit(step)


@fails
def loop_over_rows() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        losses = [usual(task, x[i : i + 1], y[i : i + 1])["loss"] for i in range(x.shape[0])]
        return {"loss": sum(losses) / len(losses)}

    fit(step, count=3)


@fails
def error_for_some_rows() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        if x.shape[0] == 1:
            raise ValueError("too few rows")
        return usual(task, x, y)

    fit(step, count=3)


@fails
def shuffled_rows() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        if TORCH:
            import torch

            return usual(task, x + 0 * torch.randperm(x.shape[0])[:, None], y)
        return usual(task, keras.random.shuffle(x), y)

    fit(step)


@fails
def poisson_draw() -> None:
    import tensorflow as tf

    fit(lambda task, x, y: usual(task, x + tf.random.poisson(x.shape, 1.0), y))


@fails
def concrete_function() -> None:
    import tensorflow as tf

    normalized = layers.BatchNormalization()
    normalize = tf.function(lambda x: normalized(x, training=True))

    class Normalizing(Small):
        def __init__(self) -> None:
            super().__init__(
                lambda task, x, y: usual(task, normalize.get_concrete_function(x)(x), y)
            )
            self.normalized = normalized

    with treadle.Loop(Normalizing(), console=False) as loop:
        loop.fit(source(16, 8), epochs=1)


@fails
def ambiguous_draw() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        noise = keras.random.normal((x.shape[0],)), keras.random.normal((4,))
        return usual(task, x + noise[0][:, None] + ops.sum(noise[1]), y)

    fit(step, count=8)


@fails
def draw_along_the_second_axis() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        noise = keras.random.normal((FEATURES, x.shape[0]))
        return usual(task, x + ops.transpose(noise), y)

    fit(step, count=8)


@fails
def other_data() -> None:
    x, y = rows(16)
    batches = [(x[:8] + rank(), y[:8]), (x[8:], y[8:])]  # a list has no facts to compare
    with treadle.Loop(Small(usual), console=False) as loop:
        loop.fit(batches, epochs=1)


@fails
def other_seed() -> None:
    treadle.setup(seed=rank())
    try:
        treadle.Loop(Small(usual), console=False)
    finally:
        seed_everything(0)


@fails
def gathered_without_rows() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        treadle.gathered(task.mean)
        return usual(task, x, y)

    fit(step)


@fails
def other_variables() -> None:
    class Unlike(Small):
        def __init__(self) -> None:
            super().__init__(usual, 5 + rank())

    with treadle.Loop(Unlike(), console=False) as loop:
        loop.fit(source(19, 8), epochs=1)


@fails
def changed_by_hand() -> None:
    treadle.setup(seed=0)
    with treadle.Loop(Small(usual), console=False) as loop:
        loop.fit(source(16, 8), epochs=1)
        loop.task.model.layers[0].bias.assign_add(ops.ones((5,)) * rank())
        loop.fit(source(6, 6), epochs=1)


def message_of(name: str) -> str:
    try:
        MESSAGES[name]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error was raised")
