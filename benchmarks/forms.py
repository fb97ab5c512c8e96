"""Batches of many shapes, `scripts/bench forms --backend NAME`: a sentence classifier by length.

Each row trains on batches of so many lengths, each of which comes so many times, in a mixed order.
Shown are the seconds of the whole training from its first step, without the import and the model:
with Treadle, with a loop by hand that runs as Python, and with one that compiles each length
(`jax.jit`, `tf.function(jit_compile=True)`; PyTorch has none, since `torch.compile` takes minutes).
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LENGTHS, TIMES = (1, 5, 20, 100), (1, 10, 100)
MOST = 2000  # batches of a row
HOW = {
    "torch": ("treadle", "python"),
    "tensorflow": ("treadle", "python", "compiled"),
    "jax": ("treadle", "python", "compiled"),
}
ROWS, WORDS = 16, 1000


def main(arguments: list[str]) -> None:
    """Print a row for each number of lengths and of times."""
    parser = argparse.ArgumentParser(prog="scripts/bench forms", description=__doc__)
    parser.add_argument("--backend", choices=list(HOW), default="torch")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--times", type=int, nargs="+", default=TIMES)
    chosen = parser.parse_args(arguments)
    names = HOW[chosen.backend]
    print(f"| lengths | times | {', s | '.join(names)}, s |")
    print("| --- " * (2 + len(names)) + "|")
    for lengths in chosen.lengths:
        for times in chosen.times:
            if lengths * times > MOST:
                continue
            found = [_seconds(chosen.backend, how, lengths, times) for how in names]
            print(f"| {lengths} | {times} | {' | '.join(f'{x:.2f}' for x in found)} |", flush=True)


def _seconds(backend: str, how: str, lengths: int, times: int) -> float:
    """Train in a new process, which has no compiled programs and finds none on disk."""
    root = Path(__file__).parents[1]
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TREADLE_COMPILE_CACHE": "off",
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, __file__, how, str(lengths), str(times)]
    printed = subprocess.check_output(command, env=environment, text=True)
    return float(printed.split()[-1])


def train(how: str, lengths: int, times: int) -> None:
    """Train, and print the seconds."""
    import keras
    import numpy as np

    rng = np.random.default_rng(0)
    order = rng.permutation(np.repeat(np.arange(10, 10 + lengths), times))
    words = [rng.integers(0, WORDS, (ROWS, n)).astype("int32") for n in order]
    batches = [(x, rng.integers(0, 2, ROWS).astype("int32")) for x in words]
    model, loss = _model(), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    step = _treadle if how == "treadle" else globals()[f"_{keras.backend.backend()}"]
    run = step(model, loss, optimizer, how == "compiled")
    started = time.perf_counter()
    for batch in batches:
        run(batch)
    print(time.perf_counter() - started)


def _model() -> Any:
    import keras

    layers = keras.layers
    keras.utils.set_random_seed(0)
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(WORDS, 32)(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 16)(x, x))
    x = layers.GlobalAveragePooling1D()(layers.Dense(64, activation="relu")(x))
    return keras.Model(inputs, layers.Dense(2)(x))


def _treadle(model: Any, loss: Any, optimizer: Any, _: bool) -> Any:
    import treadle

    loop = treadle.Loop(treadle.Supervised(model, loss, optimizer), console=False)
    loop.__enter__()  # until the process ends
    return lambda batch: loop.step(batch)["loss"]


def _torch(model: Any, loss: Any, optimizer: Any, _: bool) -> Any:
    import torch

    def step(batch: Any) -> float:
        x, y = map(torch.as_tensor, batch)
        model.zero_grad()
        value = loss(y, model(x, training=True))
        value.backward()
        with torch.no_grad():
            gradients = [v.value.grad for v in model.trainable_weights]
            optimizer.apply(gradients, model.trainable_weights)
        return float(value)

    return step


def _tensorflow(model: Any, loss: Any, optimizer: Any, compiled: bool) -> Any:
    import tensorflow as tf

    def train(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        gradients = tape.gradient(value, model.trainable_weights)
        optimizer.apply(gradients, model.trainable_weights)
        return value

    run = tf.function(train, jit_compile=True) if compiled else train
    return lambda batch: float(run(*map(tf.constant, batch)))


def _jax(model: Any, loss: Any, optimizer: Any, compiled: bool) -> Any:
    import jax

    def objective(trained: Any, others: Any, x: Any, y: Any) -> Any:
        outputs, others = model.stateless_call(trained, others, x, training=True)
        return loss(y, outputs), others

    def train(trained: Any, others: Any, slots: Any, x: Any, y: Any) -> Any:
        differentiated = jax.value_and_grad(objective, has_aux=True)
        (value, others), gradients = differentiated(trained, others, x, y)
        trained, slots = optimizer.stateless_apply(slots, gradients, trained)
        return value, trained, others, slots

    run = jax.jit(train) if compiled else train
    parts = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    state = [[v.value for v in part] for part in parts]

    def step(batch: Any) -> float:
        value, *state[:] = run(*state, *batch)
        return float(value)

    return step


if __name__ == "__main__":
    train(sys.argv[1], *map(int, sys.argv[2:]))
