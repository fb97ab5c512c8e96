"""How long until the first step has been made, from the start of the process."""

import os
import subprocess
import sys
import time

DATA = """
import numpy as np
x, y = np.random.rand(640, 784).astype("float32"), np.random.randint(0, 10, 640).astype("int32")
"""
MODEL = """
import keras
from keras import layers
model = keras.Sequential([keras.Input((784,)), layers.Dense(64, activation="relu"),
    layers.Dense(64, activation="relu"), layers.Dense(10)])
loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.SGD(1e-2)
accuracy = keras.metrics.SparseCategoricalAccuracy()
"""
TREADLE = """
import tempfile
import treadle
task = treadle.Supervised(model, loss_function, optimizer, {"accuracy": accuracy})
train = treadle.data.from_arrays(x, y, batch_size=64)
with treadle.Loop(task, directory=tempfile.mkdtemp()) as loop:
    for logs in loop.steps(train):
        done()
"""
FIT = """
class First(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        float(logs["loss"])
        done()
model.compile(optimizer=optimizer, loss=loss_function, metrics=[accuracy])
model.fit(x, y, batch_size=64, verbose=0, callbacks=[First()])
"""
TENSORFLOW = """
import tensorflow as tf
@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        loss = loss_function(y, logits)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    accuracy.update_state(y, logits)
    return loss
float(step(x[:64], y[:64]))
done()
"""
JAX = """
import jax
optimizer.build(model.trainable_variables)
def objective(trainable, other, x, y):
    logits, other = model.stateless_call(trainable, other, x, training=True)
    return loss_function(y, logits), (other, logits)
@jax.jit
def step(trainable, other, slots, counters, x, y):
    (loss, (other, logits)), gradients = jax.value_and_grad(objective, has_aux=True)(
        trainable, other, x, y)
    trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
    return loss, trainable, other, slots, accuracy.stateless_update_state(counters, y, logits)
state = [[v.value for v in vs] for vs in (model.trainable_variables,
    model.non_trainable_variables, optimizer.variables, accuracy.variables)]
float(step(*state, x[:64], y[:64])[0])
done()
"""
TORCH = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(),
    nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
logits = model(torch.from_numpy(x[:64]))
loss = nn.functional.cross_entropy(logits, torch.from_numpy(y[:64]).long())
optimizer.zero_grad()
loss.backward()
optimizer.step()
loss.item()
done()
"""
DONE = """
import os, time
def done():
    print(time.time(), flush=True)
    os._exit(0)
"""
PROGRAMS = {
    "tensorflow": {
        "treadle": MODEL + TREADLE,
        "fit": MODEL + FIT,
        "@tf.function step": MODEL + TENSORFLOW,
    },
    "jax": {"treadle": MODEL + TREADLE, "fit": MODEL + FIT, "jitted step": MODEL + JAX},
    "torch": {"treadle": MODEL + TREADLE, "fit": MODEL + FIT, "torch.nn, without Keras": TORCH},
}


def seconds_to_first_step(backend: str, rounds: int) -> dict[str, list[float]]:
    """Time every program of a backend in turn, each in a process of its own."""
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    found: dict[str, list[float]] = {name: [] for name in PROGRAMS[backend]}
    for _ in range(rounds):
        for name, program in PROGRAMS[backend].items():
            started = time.time()
            done = subprocess.run(
                [sys.executable, "-c", DONE + DATA + program],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                sys.exit(f"{name} on {backend} failed:\n{done.stderr}")
            found[name].append(float(done.stdout.split()[-1]) - started)
    return found
