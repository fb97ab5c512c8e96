"""Do recipes learn what the loop that everybody writes by hand learns?

Each recipe runs next to a plain `@tf.function` loop over the same data: the same architecture,
start, optimizer, batch size and number of epochs, each with its own shuffling. Then both run over
the same batches in the same order, which must give the same losses. The figures go to
docs/results.md. On another backend (`KERAS_BACKEND=jax`) they run next to `fit` instead.
"""

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import treadle
from treadle.recipes.cifar10_cnn import Cifar10CNN
from treadle.recipes.mnist_functional import MnistFunctional
from treadle.recipes.mnist_mlp import MnistMLP
from treadle.recipes.mnist_mlp_native import MnistMLPNative

from . import parser_of

Epoch = dict[str, float]
SAME_STEPS = 300
SAME = "The same batches in the same order, by hand and by Treadle"
TENSORFLOW = keras.backend.backend() == "tensorflow"
PAGE = Path(__file__).parent.parent / "docs" / "results.md"


def by_hand(task: Any, sources: treadle.Datasets, epochs: int) -> list[Epoch]:
    """Train a task's model as tutorials do: a tape, `apply`, metrics updated and reset."""
    model, optimizer, loss_function = task.model, task.optimizer, task.loss
    metric = keras.metrics.CategoricalAccuracy
    if isinstance(loss_function, keras.losses.SparseCategoricalCrossentropy):
        metric = keras.metrics.SparseCategoricalAccuracy
    accuracy, mean = metric(), keras.metrics.Mean()
    val_accuracy, val_mean = metric(), keras.metrics.Mean()

    @tf.function
    def train_step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = loss_function(y, logits)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(y, logits)
        mean.update_state(loss, sample_weight=tf.shape(x)[0])

    @tf.function
    def eval_step(x: Any, y: Any) -> None:
        logits = model(x, training=False)
        val_accuracy.update_state(y, logits)
        val_mean.update_state(loss_function(y, logits), sample_weight=tf.shape(x)[0])

    train, validation = (_tf_data(source) for source in (sources.train, sources.validation))
    history: list[Epoch] = []
    for _ in range(epochs):
        for m in (accuracy, mean, val_accuracy, val_mean):
            m.reset_state()
        for x, y in train:
            train_step(x, y)
        for x, y in validation:
            eval_step(x, y)
        results = {"loss": mean, "accuracy": accuracy}
        results |= {"val_loss": val_mean, "val_accuracy": val_accuracy}
        history.append({name: float(m.result()) for name, m in results.items()})
    return history


def same_batches(name: str) -> str:
    """Say how far apart the losses of both are over the same batches in the same order."""
    make = PROGRAMS[name][1]["treadle"][0]
    keras.utils.set_random_seed(0)
    task = make()
    sources = task.datasets()
    with treadle.Loop(task, console=False) as loop:
        ours = loop.fit(sources.train, steps=SAME_STEPS).steps("loss")
    keras.utils.set_random_seed(0)
    task = make()

    @tf.function
    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = task.loss(y, task.model(x, training=True))
        gradients = tape.gradient(loss, task.model.trainable_variables)
        task.optimizer.apply_gradients(zip(gradients, task.model.trainable_variables, strict=True))
        return loss

    reader = sources.train.read(0)
    by_hand: list[float] = []
    while len(by_hand) < SAME_STEPS:
        x, y = reader.take(1).batches
        by_hand.append(float(train_step(tf.constant(x[0]), tf.constant(y[0]))))
    apart = np.abs(ours - by_hand) / np.abs(by_hand)
    return f"| {name} | {by_hand[0]:.4f} → {by_hand[-1]:.4f} | {apart.max():.1e} |"


def by_treadle(task: Any, sources: treadle.Datasets, epochs: int) -> list[Epoch]:
    """Train the recipe as it stands."""
    with treadle.Loop(task, console=False) as loop:
        return loop.fit(sources.train, validation=sources.validation, epochs=epochs).epochs


def by_fit(task: Any, sources: treadle.Datasets, epochs: int) -> list[Epoch]:
    """Train a task's model as Keras does."""
    (x, y), batch_size = sources.train.arrays, sources.train.batch_size
    task.model.compile(task.optimizer, task.loss, metrics=["accuracy"])
    history = task.model.fit(
        *(x, y, batch_size, epochs),
        verbose=0,
        validation_data=sources.validation.arrays,
        validation_batch_size=sources.validation.batch_size,
    ).history
    return [{name: values[i] for name, values in history.items()} for i in range(epochs)]


def _tf_data(source: Any) -> tf.data.Dataset:
    x, y = source.arrays
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    if source.shuffle:
        dataset = dataset.shuffle(len(x))
    return dataset.batch(source.batch_size).prefetch(2)


PROGRAMS: dict[str, tuple[int, dict[str, tuple[Callable[[], Any], Callable[..., list[Epoch]]]]]] = {
    "mnist-functional": (
        2,
        {"by hand": (MnistFunctional, by_hand), "treadle": (MnistFunctional, by_treadle)},
    ),
    "mnist-mlp": (
        10,
        {
            "by hand": (MnistMLP, by_hand),
            "treadle": (MnistMLP, by_treadle),
            "treadle, native": (MnistMLPNative, by_treadle),
        },
    ),
    "cifar10-cnn": (
        10,
        {"by hand": (Cifar10CNN, by_hand), "treadle": (Cifar10CNN, by_treadle)},
    ),
}


def main(arguments: list[str]) -> None:
    """Run the programs and write the page."""
    parser = parser_of("parity", __doc__)
    parser.add_argument("--only", choices=PROGRAMS, action="append", help="run this program alone")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds, from 0")
    parser.add_argument("--write", action="store_true", help="write docs/results.md")
    chosen = parser.parse_args(arguments)
    names = chosen.only or list(PROGRAMS)
    if not chosen.write:
        for name in names:
            if TENSORFLOW:
                print(same_batches(name))
            print(_section(name, chosen.seeds))
        return
    parts = PAGE.read_text().split("\n## ") if PAGE.exists() else []
    sections = {part.split("\n")[0]: f"## {part.rstrip()}\n" for part in parts[1:]}
    if TENSORFLOW:
        sections[SAME] = _same_section()
    sections |= {_title(name): _section(name, chosen.seeds) for name in names}
    ordered = sorted(sections, key=_place)
    PAGE.write_text("\n".join([_head(), *(sections[title] for title in ordered)]))


def _head() -> str:
    versions = f"Keras {keras.__version__}, TensorFlow {tf.__version__}"
    return (
        "# Results\n\n"
        "Results of recipes on the real data, compared with a plain hand-written `@tf.function` "
        "loop with the same\nmodel, initial weights, optimizer, batch size and epochs, in one run. "
        "Written by `scripts/bench parity --write`.\n\n"
        f"{versions}, Python {platform.python_version()}, {os.cpu_count()} CPU cores. The data are "
        "JPEG copies, slightly harder\nthan the originals. Seconds include compilation; this "
        "page is about results, not speed.\n\n"
        "In sections that name a backend, Keras' `fit` replaces the hand-written loop; they are "
        "written by `KERAS_BACKEND=jax\nscripts/bench parity --only mnist-functional --write`.\n"
    )


def _same_section() -> str:
    rows = [same_batches(name) for name in PROGRAMS]
    head = [
        f"## {SAME}\n",
        f"The losses of the first {SAME_STEPS} steps from the same initial weights.\n",
        "| program | loss, first → last step | largest relative difference |",
        "| --- | --- | --- |",
    ]
    return "\n".join([*head, *rows]) + "\n"


def _title(name: str) -> str:
    where = "" if TENSORFLOW else f", {keras.backend.backend()}"
    return f"{name}, {PROGRAMS[name][0]} epochs{where}"


def _place(title: str) -> int:
    names = (SAME, *PROGRAMS)
    return next(i for i, name in enumerate(names) if title.startswith(name))


def _section(name: str, seeds: int) -> str:
    epochs, runs = PROGRAMS[name]
    if not TENSORFLOW:
        make = runs["treadle"][0]
        runs = {"fit": (make, by_fit), "treadle": (make, by_treadle)}
    rows: list[str] = []
    finals: dict[str, list[Epoch]] = {}
    for seed in range(seeds):  # the loops take turns, so that a noisy machine is fair to both
        for label, (make, train) in runs.items():
            keras.utils.set_random_seed(seed)
            task = make()
            sources = task.datasets()
            started = time.monotonic()
            history = train(task, sources, epochs)
            seconds = time.monotonic() - started
            first, last = history[0], history[-1]
            rows.append(
                f"| {label} | {seed} | {first['loss']:.3f} → {last['loss']:.3f} "
                f"| {first['accuracy']:.1%} → {last['accuracy']:.1%} "
                f"| {last['val_loss']:.3f} | {last['val_accuracy']:.1%} | {seconds:.0f} |"
            )
            print(rows[-1], flush=True)
            finals.setdefault(label, []).append(last)
    for label, lasts in finals.items():
        mean = {name: sum(last[name] for last in lasts) / seeds for name in lasts[0]}
        if seeds > 1:
            rows.append(
                f"| **{label}, mean** | | {mean['loss']:.3f} | {mean['accuracy']:.1%} "
                f"| {mean['val_loss']:.3f} | {mean['val_accuracy']:.1%} | |"
            )
    table = [
        f"## {_title(name)}\n",
        "| loop | seed | training loss, first → last epoch | training accuracy | validation loss "
        "| validation accuracy | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *rows,
    ]
    return "\n".join(table) + "\n"
