"""Time from a command to its first step: imports, and the starts of three recipes.

`--recipes` compares the first and the second start of `treadle run` with the same program written
by hand and with `fit`; `--write` adds the rounds to those measured before, and writes the page.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from . import BACKENDS, DOCS, ROOT, environment_of, keep, kept, parser_of, write_section

CODE = {
    "python alone": "pass",
    "import treadle": "import treadle",
    "treadle --help": (
        "import treadle.cli, sys; sys.argv = ['treadle', '--help']; treadle.cli.main()"
    ),
    "import keras": "import keras",
    "import keras, treadle": "import keras, treadle",
    "import keras, all of treadle": (
        "import keras, treadle; from treadle import Loop, Task, data, gradients, phase, setup"
    ),
}
ROUNDS = 7


def main(arguments: list[str]) -> None:
    """Time imports, or with `--recipes` the first steps of recipes."""
    parser = parser_of("startup", __doc__, 5, "first-step.md")
    parser.add_argument("--recipes", action="store_true", help="time first steps, not imports")
    parser.add_argument("--recipe", choices=TASKS, action="append", help="only this one")
    parser.add_argument("--afresh", action="store_true", help="discard what was measured before")
    chosen = parser.parse_args(arguments)
    if not chosen.recipes:
        _imports()
        return
    results = kept("startup")
    for backend in chosen.backend or BACKENDS:
        for recipe in chosen.recipe or TASKS:
            key = f"{recipe} {backend}"
            found = {} if chosen.afresh else results.get(key, {})
            for _ in range(chosen.rounds):
                for name, seconds in starts(recipe, backend).items():
                    found.setdefault(name, []).append(round(seconds, 3))
            results[key] = found
            print("\n".join(_rows(recipe, backend, found)), flush=True)
    if chosen.write:
        keep("startup", results)
        write_section(DOCS / "first-step.md", "bench startup --recipes --write", page(results))


def page(results: dict[str, Any]) -> list[str]:
    """Return the lines of the section of `docs/first-step.md`."""
    from .timing import processor

    lines = [
        f"{processor()}.",
        "",
        "| recipe | backend | contestant | starts | seconds (quartiles) | by the first start "
        "| by the program by hand |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for backend in BACKENDS:
        for recipe in TASKS:
            key = f"{recipe} {backend}"
            lines += _rows(recipe, backend, results[key]) if key in results else []
    return lines


def _rows(recipe: str, backend: str, found: dict[str, list[float]]) -> list[str]:
    from .timing import Spread, by_base

    by_first, by_hand = by_base(found, FIRST), by_base(found, "by hand")
    return [
        f"| {recipe} | {backend} | {name} | {len(seconds)} | {Spread.of(seconds):.2f} "
        f"| {by_first[name]:.2f} | {by_hand[name]:.2f} |"
        for name, seconds in found.items()
    ]


def _imports() -> None:
    """Time each in a process of its own, interleaved; print medians in seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in CODE}
    for _ in range(ROUNDS):
        for name, code in CODE.items():
            started = time.monotonic()
            subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
            seconds[name].append(time.monotonic() - started)
    for name, measured in seconds.items():
        print(
            f"{name:30s} {statistics.median(measured):6.2f} s  (of {ROUNDS}: {min(measured):.2f}"
            f" to {max(measured):.2f})"
        )
    probe = (
        "import sys, treadle; print([m for m in ('keras', 'tensorflow', 'jax', 'torch', 'numpy') "
        "if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    print(f"imported by `import treadle` alone: {found.stdout.strip()}")


# Programs that end after their first step

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


# The networks of three recipes, and their data, as a program without Treadle writes them.
RECIPES = {
    "digits": """
import keras, numpy as np
from keras import layers
with np.load(os.environ["DATASETS"] + "/digits.npz") as file:
    x, y = file["x_train"], file["y_train"].astype("int64")
batch_size = 64
model = keras.Sequential([keras.Input((8, 8)), layers.Rescaling(1 / 16), layers.Flatten(),
    layers.Dense(64, activation="relu"), layers.Dense(10)])
optimizer = keras.optimizers.Adam(1e-2)
loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
accuracy = keras.metrics.SparseCategoricalAccuracy()
""",
    "cifar10-cnn": """
import keras, numpy as np
from keras import layers
with np.load(os.environ["TREADLE_DATA"] + "/cifar10.npz") as file:
    x, y, *_ = [file[name] for name in ("x_train", "y_train", "x_test", "y_test")]
y = y.astype("int64").reshape(-1)
batch_size = 64
model = keras.Sequential([keras.Input((32, 32, 3)), layers.Rescaling(1 / 255),
    layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D(2),
    layers.Conv2D(64, 3, activation="relu"), layers.MaxPooling2D(2),
    layers.Conv2D(64, 3, activation="relu"), layers.Flatten(),
    layers.Dense(64, activation="relu"), layers.Dense(10)])
optimizer = keras.optimizers.Adam(1e-3)
loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
accuracy = keras.metrics.SparseCategoricalAccuracy()
""",
    "char-lm": """
import gzip, keras, numpy as np
from keras import layers
book = gzip.open(os.environ["DATASETS"] + "/alice.txt.gz").read().decode()
characters = sorted(set(book))
index = {c: i for i, c in enumerate(characters)}
book = np.array([index[c] for c in book], "int32")
batch_size = 16
starts = np.random.default_rng(0).integers(0, len(book) - 97, 200 * batch_size)
texts = book[starts[:, None] + np.arange(97)]
x, y = texts[:, :-1], texts[:, 1:]
class Position(layers.Layer):
    def build(self, shape):
        self.vectors = self.add_weight(shape=shape[1:], initializer="uniform")
    def call(self, x):
        return x + self.vectors
texts = keras.Input((96,), dtype="int32")
z = Position()(layers.Embedding(len(characters), 128)(texts))
for _ in range(2):
    n = layers.LayerNormalization()(z)
    z = z + layers.MultiHeadAttention(4, 32)(n, n, use_causal_mask=True)
    n = layers.Dense(512, activation="gelu")(layers.LayerNormalization()(z))
    z = z + layers.Dense(128)(n)
model = keras.Model(texts, layers.Dense(len(characters))(layers.LayerNormalization()(z)))
schedule = keras.optimizers.schedules.CosineDecay(
    0.0, 950, warmup_target=3e-3, warmup_steps=50)
optimizer = keras.optimizers.AdamW(schedule, weight_decay=0.01, global_clipnorm=1.0,
    gradient_accumulation_steps=2)
loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
accuracy = keras.metrics.SparseCategoricalAccuracy()
""",
}
KERAS_ON_TORCH = """
import torch
logits = model(x[:64], training=True)
loss = loss_function(y[:64], logits)
loss.backward()
gradients = [v.value.grad for v in model.trainable_variables]
with torch.no_grad():
    optimizer.apply(gradients, model.trainable_variables)
    accuracy.update_state(y[:64], logits)
loss.item()
done()
"""
BY_HAND = {"tensorflow": TENSORFLOW, "jax": JAX, "torch": KERAS_ON_TORCH}
TASKS = {
    "digits": ("digits", "Digits"),
    "cifar10-cnn": ("cifar10_cnn", "Cifar10CNN"),
    "char-lm": ("char_lm", "CharacterModel"),
}
# The recipe, ended after its first step.
COMMAND = """
import treadle
from treadle.recipes.{module} import {task}
class First({task}):
    def hooks(self):
        return [treadle.at("1 step", lambda loop: done())]
"""
FIRST, SECOND = "treadle run, first start", "treadle run, second start"


def starts(workload: str, backend: str) -> dict[str, float]:
    """Time one start of each program of a recipe, each in a process of its own.

    Returns:
        Seconds to the first step, by contestant. The first start of `treadle run` finds no compiled
        programs; the second finds those of the first.
    """
    with tempfile.TemporaryDirectory() as place:
        module, task = TASKS[workload]
        file = Path(place, "first.py")
        file.write_text(DONE + COMMAND.format(module=module, task=task))
        command = ["-m", "treadle", "run", f"{file}:First", "--quiet"]
        written = DONE + RECIPES[workload]
        fit = FIT.replace("batch_size=64", "batch_size=batch_size")
        by_hand = BY_HAND[backend].replace(":64]", ":batch_size]")
        environment = {"TREADLE_COMPILE_CACHE": str(Path(place, "programs"))}
        return {
            FIRST: _seconds(backend, [*command, "--directory", f"{place}/1"], environment),
            SECOND: _seconds(backend, [*command, "--directory", f"{place}/2"], environment),
            "by hand": _seconds(backend, ["-c", written + by_hand]),
            "fit": _seconds(backend, ["-c", written + fit]),
        }


def seconds_to_first_step(backend: str, rounds: int) -> dict[str, list[float]]:
    """Time every program of a backend in turn, each in a process of its own.

    No compiled program is kept, so that every start is a first one.
    """
    found: dict[str, list[float]] = {name: [] for name in PROGRAMS[backend]}
    for _ in range(rounds):
        for name, program in PROGRAMS[backend].items():
            arguments = ["-c", DONE + DATA + program]
            seconds = _seconds(backend, arguments, {"TREADLE_COMPILE_CACHE": "off"})
            found[name].append(seconds)
    return found


def _seconds(backend: str, arguments: list[str], variables: dict[str, str] | None = None) -> float:
    """Return the seconds from the start of a process to the time that its program prints."""
    datasets = {"DATASETS": str(ROOT / "src" / "treadle" / "datasets")}
    started = time.time()
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment_of(backend) | datasets | (variables or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{arguments} on {backend} failed:\n{done.stdout}{done.stderr}")
    return float(done.stdout.split()[-1]) - started
