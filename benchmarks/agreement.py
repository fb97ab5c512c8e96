"""Programs on several workers, compared with one: `scripts/devices agreement`.

Every program trains for two epochs of a few batches and validates after each. The table has the
largest differences from one device in the values of all steps, the logs of all epochs with
validation, and all variables at the end. That of an array with entries above 1 is relative to its
largest one. All variables of all processes, and on all devices, must have the same bits at the end.

Seven programs train on every topology: several processes, virtual devices of one process, and both.
Every recipe trains on two workers of one backend.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import treadle
from treadle import data, recipes
from treadle.recipes import find, resolve

# Settings that make recipes small; a short batch at the end of an epoch where the data allow it.
SMALL: dict[str, tuple[str, ...]] = {
    "actor-critic": ("environments=4", "rollout_steps=8"),
    "adversarial-training": ("units=8", "attack_steps=2", "batch_size=20"),
    "char-lm": ("width=16", "depth=1", "heads=2", "context_length=16", "batch_size=5"),
    "distillation": ("teacher_steps=2", "units=8", "batch_size=47"),
    "dqn": ("epsilon_decay_steps=10", "environments=2"),
    "maml": ("tasks=4",),
    "reinforce": ("episodes=2",),
    "self-supervised": ("features=16", "projection_size=8", "batch_size=20"),
    "tabular": ("units=8",),
    "teacher-forcing": ("units=8", "batch_size=9"),
    "vae": ("units=16", "batch_size=47"),
    "wgan-gp": ("batch_size=20", "critic_steps=2"),
}
BATCHES, EPOCHS = 4, 2
GROUPS = ("steps", "logs", "state")
CLOSE = 1e-5
REFERENCE = (
    *("reference", "accumulator", "token-weighted"),
    *("mnist-gan", "wgan-gp", "maml", "self-supervised"),
)
# Variables of these may differ by more, for reasons that docs/devices.md gives: rounding can decide
# which units of a ReLU are active, and a gradient that is rounding is divided by its own size.
CLOSE_VARIABLES = {"self-supervised": 1e-3, "whole-loop": 1e-3}
# Where the recipe trains that PyTorch refuses, and those that several processes refuse: they use
# tf.GradientTape.
ELSEWHERE = {"activity-regularization": "jax"}
REFUSED = ("linear-native", "mnist-mlp-native")


@dataclass(frozen=True)
class Topology:
    """The workers that train together.

    Attributes:
        processes: Their processes.
        devices: The virtual devices of each process.
    """

    processes: int = 1
    devices: int = 1

    def __str__(self) -> str:
        if self.devices == 1:
            return f"{self.processes} processes"
        if self.processes == 1:
            return f"{self.devices} virtual devices"
        return f"{self.processes} processes × {self.devices} devices"


ONE = Topology()
TOPOLOGIES = {
    "torch": (Topology(2), Topology(4)),
    "jax": (Topology(2), Topology(1, 2), Topology(1, 4), Topology(2, 2)),
    "tensorflow": (Topology(2), Topology(4)),
}
Results = dict[str, Any]


# Tasks that are no recipes

FEATURES, CLASSES, WORDS, LENGTH = 6, 4, 11, 5


def labelled(count: int) -> Any:
    """Examples with labels, in batches of 8: the last one of an epoch is short."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, FEATURES)).astype("float32")
    return data.from_arrays(x, rng.integers(0, CLASSES, count).astype("int32"), batch_size=8)


def texts(count: int) -> Any:
    """Texts of 0 to 5 words, with their lengths."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, WORDS, (count, LENGTH + 1)).astype("int32")
    lengths = rng.integers(0, LENGTH + 1, count).astype("int32")
    return data.from_arrays(words, lengths, batch_size=8)


class Reference(treadle.Supervised):
    """What is computed over a whole batch, or drawn: statistics, masks, norms, averages."""

    def __init__(self) -> None:
        model = keras.Sequential(
            [
                keras.Input((FEATURES,)),
                layers.Dense(8, activation="relu", kernel_regularizer="l2"),
                layers.BatchNormalization(),
                layers.Dropout(0.2, seed=3),
                layers.Dropout(0.1),
                layers.Dense(CLASSES),
            ]
        )
        super().__init__(
            model,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            keras.optimizers.Adam(1e-2, global_clipnorm=0.5, use_ema=True),
            metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        )


class Accumulating(Reference):
    """Updates with the mean of the gradients of three batches."""

    def __init__(self) -> None:
        super().__init__()
        self.accumulator = treadle.Accumulator(steps=3)

    def train_step(self, batch: Any) -> Any:
        """Add the gradients of a batch."""
        x, y = batch
        weights = self.model.trainable_variables
        loss, grads = treadle.gradients(lambda: self.loss(y, self.model(x, training=True)), weights)
        self.accumulator.add(grads, lambda mean: self.optimizer.apply(mean, weights))
        return {"loss": loss}


class Tokens(treadle.Task):
    """A language model whose loss is a mean over the words of all texts of a batch."""

    def __init__(self) -> None:
        self.model = keras.Sequential(
            [
                keras.Input((LENGTH,), dtype="int32"),
                layers.Embedding(WORDS, 8),
                layers.GRU(8, return_sequences=True),
                layers.Dense(WORDS),
            ]
        )
        self.optimizer = keras.optimizers.Adam(1e-2)

    def train_step(self, batch: Any) -> Any:
        """Predict each next word."""
        words, lengths = batch

        def objective() -> Any:
            logits = ops.log_softmax(self.model(words[:, :-1], training=True))
            losses = -ops.sum(ops.one_hot(words[:, 1:], WORDS) * logits, axis=-1)
            mask = ops.cast(ops.arange(LENGTH)[None] < lengths[:, None], "float32")
            count = ops.sum(mask)
            return treadle.weighted(ops.sum(losses * mask) / ops.maximum(count, 1.0), count)

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}


# What a process does


def of_task(make: Callable[[], Any], train: Any, validation: Any) -> Results:
    """The values of every step, the logs of every epoch, and all variables at the end."""
    with treadle.Loop(make(), console=False, options=treadle.Options(window=4)) as loop:
        history = loop.fit(train, validation, epochs=EPOCHS)
        require_equal_copies(loop.state.variables)
        return {
            **{f"steps/{name}": history.steps(name) for name in history.step_names},
            **{
                f"logs/{name}": history[name]
                for name in history.names()
                if _is_number(history[name])
            },
            **{f"state/{path}": value for path, value in loop.state.arrays().items()},
        }


def require_equal_copies(variables: Any) -> None:
    """Check that the devices of this process hold the same bits of each variable."""
    if keras.config.backend() != "jax":
        return
    for path, variable in variables.items():
        value = variable.value
        if len(value.sharding.addressable_devices) == 1:
            continue
        copies = value.addressable_shards
        if len({bytes(memoryview(copy.data).cast("B")) for copy in copies}) > 1:
            raise AssertionError(f"the devices hold different bits of {path}")


def digest(found: Results) -> str:
    """Return a hash of all variables, values and logs, but for times."""
    raw = hashlib.sha256()
    for name, value in found.items():
        if not name.endswith("/seconds"):
            raw.update(name.encode() + np.asarray(value).tobytes())
    return raw.hexdigest()


def _is_number(values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values)


def of_recipe(name: str) -> Results:
    """Train a recipe on the first batches of each epoch."""
    recipe = resolve(name)
    made = recipes.make(recipe, recipe.settings(SMALL.get(name, ())))
    found = made.datasets()
    validation = found.validation
    if validation is not None:
        validation = data.limited(validation, BATCHES)
    return of_task(lambda: made.task, data.limited(found.train, BATCHES), validation)


def programs() -> dict[str, Callable[[], Results]]:
    """All programs by name."""
    own = {
        "reference": lambda: of_task(Reference, labelled(51), labelled(333)),
        "accumulator": lambda: of_task(Accumulating, labelled(51), labelled(333)),
        "token-weighted": lambda: of_task(Tokens, texts(51), None),
    }
    return {**own, **{name: lambda name=name: of_recipe(name) for name in find()}}


def recipes_of(backend: str) -> list[str]:
    """The recipes that train on two workers of a backend, each on one backend."""
    return [
        name
        for name, recipe in find().items()
        if backend == (recipe.backend or ELSEWHERE.get(name, "torch"))
    ]


def member(folder: Path, names: list[str]) -> None:
    """Train programs in this process, or together with others; process 0 writes the results."""
    treadle.setup(seed=0, devices=int(os.environ.get("DEVICES", "0")) or None)
    from treadle.core.processes import process_group

    distribution, group = keras.distribution.distribution(), process_group()
    vars(group)["fail"] = lambda error: None  # programs that are refused end no process
    known = programs()
    for name in names:
        keras.backend.clear_session()
        if distribution is not None:
            keras.distribution.set_distribution(distribution)
        treadle.setup(seed=0)
        found: Results = {}
        try:
            found = known[name]()
            why = ""
        except Exception as error:
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}"
        ends = group.exchange([why, digest(found)], "the end of a program")
        failed = [f"process {i}: {other}" for i, (other, _) in enumerate(ends) if other]
        why = why or next(iter(failed), "")
        if not why and len({bits for _, bits in ends}) > 1:
            why = "the processes have different bits"
        if group.rank == 0 and why:
            (folder / f"{name}.txt").write_text(why)
        elif group.rank == 0:
            arrays: Results = {str(i): np.asarray(x) for i, x in enumerate(found.values())}
            np.savez(folder / f"{name}.npz", **arrays, names=list(found))


# Starting processes, and comparing their results


def start(how: Topology, backend: str, names: Iterable[str], folder: Path) -> None:
    """Train programs one way, and wait."""
    folder.mkdir(parents=True)
    launch = ["-m", "treadle", "launch", "--workers", str(how.processes), "--"]
    script = [__file__, str(folder), *names]
    environment = {**os.environ, "KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1"}
    if how.devices > 1:
        count = f"--xla_force_host_platform_device_count={how.devices}"
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {count}".strip()
        if how.processes == 1:  # several processes use all devices
            environment["DEVICES"] = str(how.devices)
    with (folder / "output.txt").open("w") as output:
        subprocess.run(
            [sys.executable, *(launch if how.processes > 1 else []), *script],
            env=environment,
            stdout=output,
            stderr=output,
        )


def results(folder: Path, name: str) -> Results | str:
    """The results of a program, or why there are none."""
    path = folder / f"{name}.npz"
    if not path.exists():
        why = folder / f"{name}.txt"
        return why.read_text() if why.exists() else "did not end; see output.txt"
    with np.load(path, allow_pickle=False) as found:
        return {key: found[str(i)] for i, key in enumerate(found["names"].tolist())}


def difference(found: Results, expected: Results, group: str) -> tuple[float, str]:
    """The largest difference in a group of results, and where it is."""
    worst, where = 0.0, ""
    for name, value in expected.items():
        if not name.startswith(f"{group}/") or name.endswith("/seconds"):
            continue
        if name not in found or np.shape(found[name]) != np.shape(value):
            return float("inf"), name
        a, b = np.asarray(found[name]), np.asarray(value)
        if b.dtype.kind == "f":
            same_nan = np.isnan(a) == np.isnan(b)
            size = max(1.0, float(np.nanmax(np.abs(b), initial=0)))
            apart = float(np.nanmax(np.abs(a - b), initial=0)) / size if same_nan.all() else np.inf
        else:
            apart = 0.0 if (a == b).all() else float("inf")
        if apart > worst:
            worst, where = apart, name
    return worst, where


@dataclass
class Row:
    """A program on some workers.

    Attributes:
        name: The program.
        on: The backend and the workers.
        apart: The largest difference of each group of results, and where it is.
        why: Why there are no results.
    """

    name: str
    on: str
    apart: list[tuple[float, str]]
    why: str = ""

    @property
    def values(self) -> float:
        """The largest difference of steps' values and logs."""
        return max((apart for apart, _ in self.apart[:2]), default=0.0)

    @property
    def variables(self) -> float:
        """The largest difference of variables."""
        return self.apart[2][0] if self.apart else 0.0

    @property
    def is_wrong(self) -> bool:
        """Whether the results differ by more than rounding, or there are none."""
        if self.name in REFUSED:
            return not self.why.startswith("StepError: train_step computes no gradients with")
        close = CLOSE_VARIABLES.get(self.name, CLOSE)
        return bool(self.why) or self.values > CLOSE or self.variables > close

    def __str__(self) -> str:
        numbers = [f"{apart:.1e}" for apart, _ in self.apart] or ["", "", ""]
        last = self.why.splitlines()[0] if self.why else max(self.apart)[1]
        return f"| {' | '.join([self.name, self.on, *numbers, last])} |"


def rows(backend: str, chosen: dict[Topology, list[str]], folder: Path) -> Iterable[Row]:
    """Train in one process and all other ways, and compare."""
    start(ONE, backend, dict.fromkeys(chain(*chosen.values())), folder / "one")
    for how, names in chosen.items():
        start(how, backend, names, folder / str(how))
        for name in names:
            expected = results(folder / "one", name)
            found = results(folder / str(how), name)
            on = f"{backend}, {how}"
            if isinstance(expected, str) or isinstance(found, str):
                why = f"in one process: {expected}" if isinstance(expected, str) else found
                yield Row(name, on, [], str(why))
            else:
                yield Row(name, on, [difference(found, expected, group) for group in GROUPS])


def programs_for(backend: str, names: list[str], short: bool) -> dict[Topology, list[str]]:
    """The programs that train on each of the topologies of a backend."""
    if short:
        return {TOPOLOGIES[backend][-1]: names or ["reference"]}
    if names:
        return {how: names for how in TOPOLOGIES[backend]}
    others = [name for name in recipes_of(backend) if name not in REFERENCE]
    return {
        how: [*REFERENCE, *(others if how == Topology(2) else [])] for how in TOPOLOGIES[backend]
    }


def summary(found: list[Row]) -> None:
    """Print the largest differences by topology, and of which program those of variables are."""
    print("\n| trained on | programs | steps, logs | variables | of |")
    print("| --- | --- | --- | --- | --- |")
    for on in dict.fromkeys(row.on for row in found):
        compared = [row for row in found if row.on == on and not row.why]
        row = max(compared, key=lambda row: row.variables, default=Row("", on, []))
        values = max((row.values for row in compared), default=0.0)
        print(f"| {on} | {len(compared)} | {values:.1e} | {row.variables:.1e} | {row.name} |")


def main(arguments: list[str]) -> None:
    """Print the table; the exit code is 1 if a program does not agree."""
    parser = argparse.ArgumentParser(prog="scripts/devices agreement", description=__doc__)
    parser.add_argument("names", nargs="*", help="programs, on all topologies; default: all")
    parser.add_argument("--backend", choices=[*TOPOLOGIES], action="append")
    parser.add_argument("--short", action="store_true", help="the reference on one topology")
    parser.add_argument("--keep", type=Path, help="a folder for results and output")
    chosen = parser.parse_args(arguments)
    started, found = time.monotonic(), list[Row]()
    print("| program | trained on | steps | logs, validation | variables | largest in |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    with TemporaryDirectory() as temporary:
        for backend in chosen.backend or TOPOLOGIES:
            trained = programs_for(backend, chosen.names, chosen.short)
            for row in rows(backend, trained, (chosen.keep or Path(temporary)) / backend):
                found.append(row)
                print(row, flush=True)
    summary(found)
    wrong = [row for row in found if row.is_wrong]
    refused = sum(row.name in REFUSED for row in found)
    agree = len(found) - refused - sum(row.name not in REFUSED for row in wrong)
    print(
        f"\n{agree} of {len(found) - refused} agree within rounding, with the same bits in all "
        f"processes; {refused} are refused ({time.monotonic() - started:.0f} s)"
    )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":  # a process that `start` has started
    member(Path(sys.argv[1]), sys.argv[2:])
