"""The main jobs: what people do with the library, each as short as it can be.

They run on one Keras and one backend, in processes of their own; in forks of one that has imported
both, since importing takes longer than most of them.
"""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.forked import python

ROOT = Path(__file__).parents[2]
BACKENDS = ("torch", "jax", "tensorflow")
EPOCHS = 3
INSTALLED = "installed"
"""The installed version of Keras, in the place of the number of one."""
PATIENCE = 300  # seconds for one command

# Saves after each epoch and dies in the third one. The hooks of a run change no result.
KILLED = """
import os, signal, treadle
from treadle.cli import main
from treadle.hooks import Checkpoint
from treadle.recipes.digits import Digits

def kill(loop):
    os.kill(os.getpid(), signal.SIGKILL)

Digits.hooks = lambda self: [Checkpoint("23 steps"), treadle.at("60 steps", kill)]
main()
"""
# A compiled model, trained by `fit` of Keras and by `treadle.fit`.
COMPILED = """
import keras, numpy as np, treadle

def trained(fit):
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(8, activation="relu")
    model = keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=3, restore_best_weights=True)
    more = {"validation_split": 0.25, "callbacks": [stopping], "shuffle": False, "verbose": 0}
    history = fit(model)(x, (x[:, 0] > 0).astype("int32"), epochs=3, **more).history
    return history, [*model.get_weights(), *history.values()]

def own(model):
    return lambda *data, **more: treadle.fit(model, *data, directory="compiled", **more)

history, found = trained(own)
again, _ = trained(own)  # the run is finished
assert again == history, (history, again)
try:
    expected, values = trained(lambda model: model.fit)
except AttributeError as error:
    # Keras 3.9 itself does not train on the JAX versions that have no such function.
    if "spmd_mode" not in str(error):
        raise
else:
    assert list(history) == list(expected), (history, expected)
    for one, other in zip(found, values, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
"""
SMALL_TEXTS = {
    **{"width": 16, "depth": 1, "heads": 2, "context_length": 16, "batch_size": 4},
    "decay_updates": 60,
}


class Failed(Exception):
    """A job fails; the message ends with the end of its output."""


@dataclass
class Cell:
    """A version of Keras on a backend: a cell of the table.

    Attributes:
        keras: The folder that the version is unpacked in; None for the installed one.
        backend: The backend.
        folder: An empty folder, for the files of the jobs.
        failures: By job: why it fails.
        switched_off: What the runs say that this version lacks, and what is lost by that.
        tests: The closing lines of the conformance tests.
        root: The checkout whose Treadle runs.
    """

    keras: Path | None
    backend: str
    folder: Path
    failures: dict[str, str] = field(default_factory=dict)
    switched_off: dict[str, None] = field(default_factory=dict)
    tests: list[str] = field(default_factory=list)
    root: Path = ROOT

    @property
    def environment(self) -> dict[str, str]:
        """The variables of the processes: they find this Keras, and write into the folder only."""
        first = [str(self.keras)] if self.keras else []
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*first, str(self.root / "src"), str(ROOT)]),
            "KERAS_BACKEND": self.backend,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "OMP_NUM_THREADS": "1",  # tiny tensors: threads only wait for one another
            "NO_COLOR": "1",
            "COLUMNS": "200",
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "XDG_STATE_HOME": str(self.folder / "state"),
        }

    def python(self, *words: object, code: int = 0) -> str:
        """Run Python in the folder, and return what it prints to the standard output.

        Raises:
            Failed: It ends with another code.
        """
        command = [python(), *map(str, words)]
        try:
            done = subprocess.run(
                command,
                cwd=self.folder,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
        except subprocess.TimeoutExpired as error:
            raise Failed(f"{_shown(words)} takes more than {PATIENCE} s") from error
        if done.returncode != code:
            raise Failed(
                f"{_shown(words)} ended with {done.returncode}, expected {code}:\n"
                f"{_end(done.stdout + done.stderr)}"
            )
        return done.stdout

    def treadle(self, *words: object) -> str:
        """Run a command of Treadle."""
        return self.python("-m", "treadle", *words)


def _shown(words: Iterable[object]) -> str:
    texts = ["…" if "\n" in str(word) else str(word) for word in words]
    return " ".join(["python", *texts])


def _end(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-15:]) or "(no output)"


def digits(cell: Cell) -> None:
    cell.treadle("run", "digits", "--epochs", EPOCHS, "--directory", "digits", "--quiet")
    accuracy = _epochs(cell, "digits")[-1]["val_accuracy"]
    _expect(accuracy > 0.85, f"the validation accuracy is {accuracy:.3f}, expected above 0.85")


def resume(cell: Cell) -> None:
    words = ("run", "digits", "--epochs", EPOCHS, "--directory", "killed", "--quiet")
    cell.python("-c", KILLED, *words, code=-signal.SIGKILL)
    printed = cell.treadle("resume", "killed")
    # Checkpoints are written in the background: the newest one may not be complete.
    resumed = any(f"resuming after step {step}" in printed for step in (23, 46))
    _expect(resumed, f"it is not resumed:\n{_end(printed)}")
    for name in ("state.safetensors", "log.jsonl"):
        contents = [comparable(cell.folder / run / name) for run in ("digits", "killed")]
        _expect(contents[0] == contents[1], f"{name} differs from that of an uninterrupted run")


def evaluate(cell: Cell) -> None:
    found = json.loads(cell.treadle("evaluate", "digits", "--json"))["validation"]["accuracy"]
    expected = _epochs(cell, "digits")[-1]["val_accuracy"]
    _expect(found == expected, f"the accuracy is {found}, expected {expected} as in the run")


def replay(cell: Cell) -> None:
    found = cell.treadle("replay", "digits", "--step", 30)
    _expect("all values are finite" in found, f"values are not finite:\n{_end(found)}")


def report(cell: Cell) -> None:
    cell.treadle("report", "digits", "--out", "report.html")
    size = (cell.folder / "report.html").stat().st_size
    _expect(size > 20_000, f"the report has {size} bytes, expected above 20000")


def export(cell: Cell) -> None:
    # The format that needs no further package.
    cell.treadle("export", "digits", "--output", "digits.keras")
    _expect((cell.folder / "digits.keras").exists(), "there is no digits.keras")


def doctor(cell: Cell) -> None:
    found = json.loads(cell.treadle("doctor", "digits", "--json"))
    _expect(not found["findings"], f"it finds mistakes: {found['findings']}")


def char_lm(cell: Cell) -> None:
    settings = [
        word for item in SMALL_TEXTS.items() for word in ("--set", "=".join(map(str, item)))
    ]
    cell.treadle("run", "char-lm", "--steps", 6, *settings, "--directory", "char-lm", "--quiet")
    _expect_finite(cell, "char-lm", "bits_per_character", 6)


def mnist_gan(cell: Cell) -> None:
    words = ("--steps", 6, "--data-dir", write_mnist(cell), "--directory", "mnist-gan", "--quiet")
    cell.treadle("run", "mnist-gan", *words)
    _expect_finite(cell, "mnist-gan", "g_loss", 6)


def write_mnist(cell: Cell) -> Path:
    """Write noise of MNIST's shape: networks learn, whatever the images show; return its folder."""
    images = np.random.default_rng(0).integers(0, 256, (640, 28, 28)).astype("uint8")
    labels = np.zeros(640, "int64")
    arrays = dict(x_train=images, y_train=labels, x_test=images[:64], y_test=labels[:64])
    folder = cell.folder / "data"
    folder.mkdir()
    np.savez(folder / "mnist.npz", **arrays)
    return folder


def compiled_model(cell: Cell) -> None:
    cell.python("-c", COMPILED)


JOBS: dict[str, Callable[[Cell], None]] = {
    "digits": digits,
    "resume": resume,
    "evaluate": evaluate,
    "replay": replay,
    "report": report,
    "export": export,
    "doctor": doctor,
    "char-lm": char_lm,
    "mnist-gan": mnist_gan,
    "treadle.fit": compiled_model,
}
OF_DIGITS = ("resume", "evaluate", "replay", "report", "export")
"""These jobs need the run of the job `digits`."""


def run(cell: Cell, names: Iterable[str] = JOBS) -> None:
    """Run jobs, and keep why they fail."""
    for name in names:
        if name in OF_DIGITS and "digits" in cell.failures:
            cell.failures[name] = "needs the run of digits"
            continue
        try:
            JOBS[name](cell)
        except Failed as error:
            cell.failures[name] = str(error)
    for path in sorted(cell.folder.glob("*/run.json")):
        cell.switched_off |= dict.fromkeys(json.loads(path.read_text()).get("switched_off", ()))


def _log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _epochs(cell: Cell, run: str) -> list[dict[str, Any]]:
    return [line for line in _log(cell.folder / run / "log.jsonl") if line.get("kind") == "epoch"]


def comparable(path: Path) -> Any:
    """Return the content of a file of a run, without the times in a log."""
    if path.suffix != ".jsonl":
        return path.read_bytes()
    return [{key: line[key] for key in line if key != "seconds"} for line in _log(path)]


def _expect_finite(cell: Cell, run: str, name: str, steps: int) -> None:
    lines = _log(cell.folder / run / "log.jsonl")
    values = [line[name] for line in lines if "kind" not in line]
    found = len(values), bool(np.isfinite(values).all())
    _expect(found == (steps, True), f"{name} has the values {values}, expected {steps} finite ones")


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise Failed(message)
