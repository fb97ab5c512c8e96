"""The run that faults are put to, and what must be equal afterwards.

Also a program that runs it, again and again, each time in a process of its own: see `forks`.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from classifier import Classifier, head

import treadle
from treadle.checkpoint import Checkpoints
from treadle.hooks import Checkpoint, EarlyStopping
from treadle.hooks.log_file import read_log

BATCH, BATCHES, EPOCHS, MORE = 16, 13, 3, 6
STEPS = EPOCHS * BATCHES + MORE  # three epochs, and six steps in a second call


class Drill(Classifier):
    """A little of everything that a run has to keep."""

    def __init__(
        self,
        units: int = 16,
        activation: str = "relu",
        optimizer: str = "Adam",
        learning_rate: float = 1e-2,
        deeper: bool = False,
    ) -> None:
        more = [keras.layers.Dense(units)] if deeper else []
        layers = [
            keras.Input((8,)),
            keras.layers.Dense(units, activation=activation),
            *more,
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            head(),
        ]
        schedule = keras.optimizers.schedules.CosineDecay(learning_rate, 60)
        super().__init__(layers, getattr(keras.optimizers, optimizer)(schedule, use_ema=True))
        self.noise = keras.random.SeedGenerator(11)

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        x = x + 0.1 * keras.random.normal(keras.ops.shape(x), seed=self.noise)
        x = x + 0.1 * keras.random.normal(keras.ops.shape(x))
        return super().train_step((x, y))


class Batches(Sequence[Any]):
    """Batches that say when one is asked for."""

    def __init__(self, batches: Sequence[Any], asked: Callable[[int], None] | None = None) -> None:
        self.batches, self.asked = batches, asked

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: Any) -> Any:
        if self.asked is not None:
            self.asked(index)
        return self.batches[index]


class Moments(treadle.Hook):
    """Calls a function at `start 0`, `step 15`, `epoch 2`, `validation 2`, `end 39`, and the like.

    A window ends at every fourth and fifth step, and with each epoch.
    """

    def __init__(self, at: Callable[[str, Any], None]) -> None:
        self._at = at

    def start(self, loop: Any) -> None:
        self._at(f"start {loop.progress.step}", loop)

    def steps(self, loop: Any, logs: Any) -> None:
        self._at(f"step {logs.progress.step}", loop)

    def record(self, loop: Any, record: Any) -> None:
        if record.kind != "log":
            self._at(f"{record.kind} {record.progress.epoch + 1}", loop)

    def end(self, loop: Any, error: BaseException | None) -> None:
        self._at(f"end {loop.progress.step}", loop)


def arrays(rows: int = BATCH * BATCHES, seed: int = 0) -> tuple[Any, Any]:
    """Inputs and labels that follow from them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 8)).astype("float32")
    return x, (x[:, 0] > 0).astype("int32") + (x[:, 1] > 0)


def train_source(rows: int = BATCH * BATCHES, seed: int = 0) -> Any:
    return treadle.data.from_arrays(*arrays(rows, seed), batch_size=BATCH)


def batches(count: int = BATCHES, seed: int = 0) -> list[Any]:
    x, y = arrays(count * BATCH, seed)
    return [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, count * BATCH, BATCH)]


def draw(loop: Any) -> dict[str, float]:
    """Draw from every generator that a user may draw from, and log it."""
    drawn = {"python": random.random(), "numpy": float(np.random.normal())}
    if keras.config.backend() == "torch":
        drawn["torch"] = float(sys.modules["torch"].rand(()))
    return drawn


def run(
    directory: Path,
    task: Callable[[], Any] = Drill,
    train: Any = None,
    validation: Any = None,
    at: Callable[[str, Any], None] | None = None,
    hooks: Sequence[Any] = (),
    every: str = "5 steps",
    epochs: int = EPOCHS,
    more: int = MORE,
    seed: int = 3,
    **how: Any,
) -> treadle.Loop:
    """Train as a script does, which is the same whenever it is run.

    Args:
        directory: Of the run.
        task: Makes it.
        train: A source, if not of the arrays.
        validation: The same.
        at: Called at moments, see `Moments`.
        hooks: Further ones.
        every: When a checkpoint is saved.
        epochs: In the first call of `fit`.
        more: Steps in the second call.
        seed: Of the run.
        how: Arguments of the loop.
    """
    keras.utils.clear_session()
    treadle.setup(seed=seed)
    made = task()
    train = train_source() if train is None else train
    validation = Batches(batches(4, seed=1)) if validation is None else validation
    watching = [Moments(at)] if at is not None else []
    own = [*watching, treadle.every("4 steps", draw), EarlyStopping("val_loss", patience=30)]
    saving = [Checkpoint(every=every)]
    how = {"console": False, **how}
    with treadle.Loop(made, directory, hooks=[*own, *saving, *hooks], **how) as loop:
        loop.fit(train, validation, epochs=epochs)
        if more:
            loop.fit(train, validation, steps=more)
    return loop


class Copies:
    """Copies of a run's directory, each as it was at a moment.

    Resuming in one is as resuming after a kill at that moment, without a process of its own.

    Args:
        directory: Of the run.
        moments: When.

    Attributes:
        directory: The same.
        taken: Copies by moment.
    """

    def __init__(self, directory: Path, *moments: str) -> None:
        self.directory, self._moments = directory, moments
        self.taken: dict[str, Path] = {}

    def at(self, moment: str, loop: Any = None) -> None:
        if moment in self._moments and moment not in self.taken:
            self.taken[moment] = self.directory.with_name(moment.replace(" ", "-"))
            self._copy(self.taken[moment])

    def _copy(self, to: Path) -> None:
        """Copy as it is between two operations: a thread may be writing."""
        while True:  # how often depends on how slow the disk is
            shutil.rmtree(to, ignore_errors=True)
            try:
                before = sorted(self.directory.rglob("*"))
                shutil.copytree(self.directory, to)
                if sorted(self.directory.rglob("*")) == before:
                    return
            except (shutil.Error, FileNotFoundError):  # something was renamed or removed meanwhile
                continue


def newest(directory: Path) -> int:
    """The step of a run's newest checkpoint."""
    found = Checkpoints(directory / "checkpoints").latest()
    assert found is not None
    return found.progress.step


def outcome(loop: treadle.Loop) -> dict[str, Any]:
    """What must be the same in every bit: all arrays, all that was logged; no clocks."""
    steps, records = read_log(loop.directory / "log.jsonl")
    table = (loop.directory / "epochs.csv").read_text().splitlines()
    rows = [",".join(cell for i, cell in enumerate(row.split(",")) if i != 2) for row in table]
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in [*steps, *records]]
    return {
        "step": loop.progress.step,
        "arrays": hash_of(loop.state.arrays()),
        "logged": hashlib.sha256(json.dumps([lines, rows]).encode()).hexdigest()[:16],
        "lines": len(lines),
        "history": hash_of({name: loop.history[name] for name in ("loss", "val_loss")}),
    }


def hash_of(values: Mapping[str, Any]) -> str:
    """Hash arrays by name, of whatever type."""
    digest = hashlib.sha256()
    for name, value in values.items():
        array = np.asarray(value)
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()[:16]


def told(
    directory: Path,
    pace: float = 0.0,
    signals: Mapping[str, str] | None = None,
    every: str = "5 steps",
    settles: Sequence[str] = (),
    holds: str = "",
) -> None:
    """Run, tell of each moment on a line, and of the outcome on the last one.

    Args:
        directory: Of the run.
        pace: Seconds that are slept after each window.
        signals: What this process sends itself, by moment.
        every: When a checkpoint is saved.
        settles: The moments at which what is being saved is waited for.
        holds: The moment at which it waits to be killed, so that it does not end before.
    """

    def at(moment: str, loop: Any) -> None:
        if moment in settles:
            settle(loop)
        print(moment, flush=True)
        if moment == holds:
            time.sleep(900)  # longer than a test may take
        for name in (signals or {}).get(moment, "").split():
            os.kill(os.getpid(), getattr(signal, name))
        time.sleep(pace if moment.startswith("step") else 0.0)

    print(json.dumps(outcome(run(directory, at=at, every=every))), flush=True)


def settle(loop: Any) -> None:
    """Wait until what is being saved is on the disk; hooks get the run, and not the loop."""
    saving = getattr(loop, "_run", loop).services.checkpointer
    assert saving is not None
    saving.saved.settle()


def golden(directory: Path) -> None:
    """Leave the directory of a run that was killed at step 20, with no more than it needs."""

    def at(moment: str, loop: Any) -> None:
        if moment == "step 20":
            settle(loop)
            shutil.copytree(directory.with_name("whole"), directory)

    run(directory.with_name("whole"), at=at, every="15 steps")
    shutil.rmtree(directory.with_name("whole"))
    for left in (directory / ".lock", *(directory / "checkpoints").glob("step-000000000000*")):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


if __name__ == "__main__":
    from forks import serve

    if len(sys.argv) > 1:  # as KERAS_BACKEND=jax python tests/conformance/drill.py DIRECTORY
        sys.exit(golden(Path(sys.argv[1])))

    if keras.config.backend() == "torch":
        sys.modules["torch"].set_num_threads(1)  # as all tests: two of them wait for one another
    arguments = serve()
    if arguments is not None:  # this is a forked process
        told(Path(arguments.pop("directory")), **arguments)
