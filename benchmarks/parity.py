"""Do recipes learn what they should: as by hand, on every backend alike, and better by a search?"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import treadle
from treadle import data
from treadle.recipes.activity_regularization import Regularized
from treadle.recipes.cifar10_cnn import Cifar10CNN
from treadle.recipes.digits import Digits
from treadle.recipes.mnist_functional import MnistFunctional
from treadle.recipes.mnist_mlp import MnistMLP
from treadle.recipes.mnist_mlp_native import MnistMLPNative
from treadle.testing import same_start

from . import BACKENDS, DOCS, in_process, parser_of, write_section

Epoch = dict[str, float]
SAME_STEPS = 300
SAME = "The same batches in the same order, by hand and by Treadle"
TENSORFLOW = keras.backend.backend() == "tensorflow"


def by_hand(task: Any, sources: treadle.Datasets, epochs: int) -> list[Epoch]:
    """Train a task's model as tutorials do: a tape, `apply`, metrics updated and reset."""
    import tensorflow as tf

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
    """Return how far apart the losses of both are over the same batches in the same order."""
    import tensorflow as tf

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


def _tf_data(source: Any) -> Any:
    import tensorflow as tf

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
    """Do recipes learn what the loop that everybody writes by hand learns?

    Each recipe runs next to a plain `@tf.function` loop over the same data: the same architecture,
    start, optimizer, batch size and number of epochs, each with its own shuffling. Then both run
    over the same batches in the same order, which must give the same losses. The figures go to
    docs/results.md. On another backend (`KERAS_BACKEND=jax`) they run next to `fit` instead.
    """
    parser = parser_of("parity", main.__doc__, page="results.md", backends=False)
    parser.add_argument("--only", choices=PROGRAMS, action="append", help="run this program alone")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds, from 0")
    chosen = parser.parse_args(arguments)
    names = chosen.only or list(PROGRAMS)
    if not chosen.write:
        for name in names:
            if TENSORFLOW:
                print(same_batches(name))
            print(_section(name, chosen.seeds))
        return
    page = DOCS / "results.md"
    head, *parts = page.read_text().split("\n## ")
    sections = {part.split("\n")[0]: f"## {part.rstrip()}\n" for part in parts}
    if TENSORFLOW:
        sections[SAME] = _same_section()
    sections |= {_title(name): _section(name, chosen.seeds) for name in names}
    ordered = sorted(sections, key=_place)
    page.write_text("\n".join([f"{head.rstrip()}\n", *(sections[title] for title in ordered)]))
    if TENSORFLOW:
        write_section(page, "bench parity --write", [_versions()])


def _versions() -> str:
    import tensorflow as tf

    versions = f"Keras {keras.__version__}, TensorFlow {tf.__version__}"
    return f"{versions}, Python {platform.python_version()}, {os.cpu_count()} CPU cores."


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


COMPARED_STEPS = 50


def backends(arguments: list[str]) -> None:
    """Is one step source the same program on every backend?

    Each backend trains in a process of its own, from the same initial weights (drawn with NumPy)
    and in the same order of the data: the first 50 losses, and the validation accuracy after one
    epoch of MNIST. The figures go to docs/backends.md.
    """
    parser = parser_of("backends", backends.__doc__, page="backends.md", backends=False)
    parser.add_argument("--recipe", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.child:
        print(json.dumps(_one_epoch(chosen.recipe)))
        return
    rows: list[str] = []
    versions: dict[str, str] = {}
    for recipe in ("mnist-mlp", "activity-regularization"):
        results = {name: in_process("backends", name, "--recipe", recipe) for name in BACKENDS}
        first = results[BACKENDS[0]]["losses"]
        for backend, result in results.items():
            apart = max(abs(a - b) / abs(a) for a, b in zip(first, result["losses"], strict=True))
            rows.append(
                f"| {recipe} | {backend} | {result['losses'][0]:.6f} | {result['losses'][-1]:.6f} "
                f"| {apart:.1e} | {result['val_accuracy']:.2%} |"
            )
            print(rows[-1], flush=True)
            versions[backend] = result["version"]
    if chosen.write:
        told = ", ".join(f"{name} {number}" for name, number in versions.items())
        lines = [
            f"{told}; Python {platform.python_version()}, {os.cpu_count()} CPU cores.",
            "",
            f"| recipe | backend | loss of step 1 | loss of step {COMPARED_STEPS} | largest "
            f"relative difference from {BACKENDS[0]} in {COMPARED_STEPS} steps "
            "| validation accuracy after one epoch |",
            "| --- | --- | --- | --- | --- | --- |",
            *rows,
        ]
        write_section(DOCS / "backends.md", "bench backends --write", lines)


def _one_epoch(recipe: str) -> dict[str, Any]:
    treadle.setup(seed=0)
    task: Any = MnistMLP() if recipe == "mnist-mlp" else Regularized()
    sources = task.datasets()
    with treadle.Loop(task, console=False) as loop:
        loop.prepare(sources.train)
        same_start(task)
        history = loop.fit(sources.train, validation=sources.validation, epochs=1)
    return {
        "losses": history.steps("loss")[:COMPARED_STEPS].tolist(),
        "val_accuracy": history["val_accuracy"][-1],
        "version": version(keras.config.backend()),
    }


NEVER_SEEN = f"{Path(__file__)}:NeverSeen"


class NeverSeen(Digits):
    """The recipe, validated on a quarter of its training rows: held-out ones are not touched."""

    def datasets(self) -> treadle.Datasets:
        """Return 1,077 digits to train on and 360 others of the recipe's training rows."""
        digits = treadle.datasets.digits()
        x, y = digits.x_train, digits.y_train
        return treadle.Datasets(
            train=data.from_arrays(x[360:], y[360:], batch_size=self.batch_size),
            validation=data.from_arrays(x[:360], y[:360], batch_size=360, shuffle=False),
        )


def tuning(arguments: list[str]) -> None:
    """Does a search beat the defaults? On the recipe `digits`, killed once, judged by other seeds.

    Two searches: one judges its trials by the recipe's own 360 held-out rows; the other never sees
    them, and judges by a quarter of the training rows. The best settings of each then train from
    seeds that no trial had, on all training rows, compared with the defaults.
    """
    parser = parser_of("tuning", tuning.__doc__, backends=False)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=10)
    chosen = parser.parse_args(arguments)
    rows: dict[str, Mapping[str, Any]] = {"defaults": {}}
    for name, task in (("searched", "digits"), ("searched, rows never seen", NEVER_SEEN)):
        with TemporaryDirectory() as folder:
            rows[name] = searched(task, chosen.trials, Path(folder))
    print("| settings | loss | accuracy | lower loss than the defaults |")
    print("| --- | --- | --- | --- |")
    results = {name: trained(settings, chosen.seeds) for name, settings in rows.items()}
    for name, found in results.items():
        pairs = zip(found[0], results["defaults"][0], strict=True)
        better = sum(loss < defaults for loss, defaults in pairs)
        told = f"{better} of {chosen.seeds}" if name != "defaults" else ""
        print(f"| {name} | {_spread(found[0])} | {_spread(found[1])} | {told} |", flush=True)


def searched(task: str, trials: int, folder: Path) -> dict[str, Any]:
    """Return the best settings of a search that is killed and resumed."""
    command = [sys.executable, "-c", "from treadle.cli import main; main()", "tune", task]
    command += ["--trials", str(trials), "--directory", str(folder)]
    began = time.monotonic()
    process = subprocess.Popen(command)
    while not (folder / "trials" / f"{trials // 2:04}" / "run.json").exists():
        time.sleep(0.1)
        if process.poll() is not None:
            sys.exit("the search ended before it could be killed")
    process.kill()
    process.wait()
    print(f"killed in trial {trials // 2:04}", flush=True)
    subprocess.run(command, check=True)
    print(f"{task}: {trials} trials in {time.monotonic() - began:.0f} s, the kill included")
    found = json.loads(subprocess.check_output([*command, "--json"]))
    assert len(found["trials"]) == trials and found["before"]
    print(f"best: {found['best']['parameters']}", flush=True)
    return found["best"]["parameters"]


def trained(settings: Mapping[str, Any], seeds: int) -> tuple[list[float], list[float]]:
    """Return the last losses and accuracies of the recipe on held-out rows, of seeds from 1 on."""
    losses: list[float] = []
    accuracies: list[float] = []
    for seed in range(1, seeds + 1):
        keras.backend.clear_session()
        treadle.setup(seed=seed)
        task = Digits(**settings)
        sets = task.datasets()
        with treadle.Loop(task, console=False) as loop:
            history = loop.fit(sets.train, sets.validation, epochs=Digits.epochs)
        losses.append(history["val_loss"][-1])
        accuracies.append(history["val_accuracy"][-1])
    return losses, accuracies


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"
