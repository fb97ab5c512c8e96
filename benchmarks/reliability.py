"""How many runs survive a kill bit for bit, and how many with what a user of Keras has today?

Processes are killed (SIGKILL) at random instants and started again; in the end all arrays and all
that was logged must be the same as without a kill. Results are kept in benchmarks/reliability.json,
from which the figures in docs/reliability.md are written.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests" / "conformance"
# This file is also a program that is killed. What kills it is shared with tests.
sys.path[:0] = [str(TESTS), str(ROOT)]

from forks import Forks, killed_at_random, serve  # noqa: E402

from benchmarks import BACKENDS, DOCS, keep, kept, parser_of, write_section  # noqa: E402
from benchmarks.timing import machine  # noqa: E402

TRIALS = {"power_losses": "runs that lost power", "damages": "damaged run directories"}
OPTIONS = {"power_losses": "--power-losses", "damages": "--cases"}
PACKAGES = ("keras", "tensorflow", "jax", "torch", "numpy")


def main(arguments: list[str]) -> None:
    """Kill what was chosen, show what became of it, and keep that if asked to."""
    parser = parser_of("reliability", __doc__, page="reliability.md")
    parser.add_argument("--kills", type=int, default=50, help="kills of runs on each backend (50)")
    parser.add_argument("--fits", type=int, default=10, help="kills of Keras' fit (10)")
    parser.add_argument("--saves", type=int, default=40, help="kills of ModelCheckpoint (40)")
    parser.add_argument(
        "--power-losses", type=int, default=0, help="instead, cut the power of runs"
    )
    parser.add_argument("--damages", type=int, default=0, help="instead, damage run directories")
    parser.add_argument("--seed", type=int, default=0, help="of the instants")
    chosen = parser.parse_args(arguments)
    trials = [name for name in TRIALS if getattr(chosen, name)]
    for name in trials:
        totals = of_directories(OPTIONS[name], getattr(chosen, name), chosen.seed)
        print(TRIALS[name], totals, flush=True)
        if chosen.write:
            results = kept("reliability")
            results.setdefault("directories", {})[name] = totals
            write(results)
    for backend in () if trials else chosen.backend or BACKENDS:
        found = measured(backend, chosen)
        print(backend, json.dumps(found, indent=2), flush=True)
        if chosen.write:
            results = kept("reliability")
            results[backend] = {**results.get(backend, {}), **found}
            write(results)


def write(results: dict[str, Any]) -> None:
    """Keep the results, and write the tables of `docs/reliability.md`."""
    order = [name for name in (*BACKENDS, "directories") if name in results]
    keep("reliability", {name: results[name] for name in order})
    page = DOCS / "reliability.md"
    write_section(page, "bench reliability --write", figures(results))
    write_section(page, "bench reliability --damages --write", directories(results["directories"]))


def measured(backend: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Return what became of the kills on a backend: of as many of each kind as were asked for."""
    about = {"machine": machine(), "versions": {name: version(name) for name in PACKAGES}}
    found: dict[str, Any] = {}
    for name, program, how, count in (
        ("treadle", TESTS / "drill.py", killed_at_random, chosen.kills),
        ("fit", Path(__file__), fits_killed, chosen.fits),
        ("saves", Path(__file__), saves_killed, chosen.saves),
    ):
        if not count:
            continue
        forks, started = Forks(program, backend), time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found[name] = {**how(forks, Path(folder), count, chosen.seed), **about}
            found[name]["seconds"] = round(time.monotonic() - started)
        forks.close()
    return found


def fits_killed(forks: Forks, root: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kill `fit` with `BackupAndRestore` in its second epoch, and resume it."""
    random, how = Random(seed), {"what": "fit", "pace": 0.005, "every": 5}
    expected = forks.start(root / "never.txt", place=root / "never", **how).result()
    found: dict[str, Any] = {"kills": 0, "same": 0, "failed": 0, "steps": []}
    for number in range(kills):
        process = forks.start(root / f"{number}.txt", place=root / f"{number}", **how)
        process.reach(f"batch {random.randint(15, 24)}")
        found["kills"] += process.kill(after=random.uniform(0, 0.005))
        again = forks.start(root / f"{number}-again.txt", place=root / f"{number}", **how)
        if again.wait():  # the backup is torn, and cannot be read
            found["failed"] += 1
            continue
        ended = again.result()
        found["same"] += ended == expected
        found["steps"].append(ended["step"])
    return {**found, "steps_expected": expected["step"]}


def saves_killed(forks: Forks, root: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kill `fit` while `ModelCheckpoint` saves after every batch, and load what it left."""
    random = Random(seed)
    found: dict[str, Any] = {"kills": 0, "unloadable": 0, "reasons": {}}
    while found["kills"] < kills:
        number = found["kills"]
        file, output = root / f"{number}.keras", root / f"{number}.txt"
        process = forks.start(output, what="saves", place=file)
        process.reach("batch 3")  # the first is not saved
        if not process.kill(after=random.uniform(0, 0.3)):
            continue
        found["kills"] += 1
        loaded = forks.start(root / "loads.txt", what="loads", place=file).result()
        found["unloadable"] += not loaded["loads"]
        if not loaded["loads"]:  # Keras says "File not found" of one that is there, but torn
            why = "torn" if file.exists() else "not there"
            found["reasons"][why] = found["reasons"].get(why, 0) + 1
    return found


def figures(results: dict[str, Any]) -> list[str]:
    """Return a table of the kills, and where they were."""
    lines = [
        "| backend | kills | in runs that ended bit-same | torn saves left | damaged checkpoints "
        "| `BackupAndRestore`: bit-same | `ModelCheckpoint`: cannot be loaded |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    facts: dict[str, Any] = {}
    for backend in (name for name in BACKENDS if name in results):
        found = results[backend]
        run, fit, saves = (found.get(name, {}) for name in ("treadle", "fit", "saves"))
        facts |= run or fit or saves
        lines.append(
            f"| {backend} | {run.get('kills', '–')} | {_of(run, 'same')} | "
            f"{run.get('in_saves', '–')} | {run.get('damaged', '–')} | {_of(fit, 'same')} | "
            f"{_of(saves, 'unloadable')} |"
        )
    told = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    cpu = facts["machine"]
    where = f"{cpu['cpu']}, {cpu['cores']} cores, {cpu['memory']}; {told}."
    return [*lines, "", where]


def of_directories(option: str, count: int, seed: int) -> dict[str, int]:
    """Run `scripts/fuzz-directories`, and return how many cases there were of each kind."""
    with tempfile.TemporaryDirectory() as folder:
        totals = Path(folder) / "totals.json"
        command = [sys.executable, "-m", "tests.directories", option, str(count), "--workers", "1"]
        subprocess.run([*command, "--seed", str(seed), "--totals", str(totals)], cwd=ROOT)
        return json.loads(totals.read_text())


def directories(results: dict[str, dict[str, int]]) -> list[str]:
    """Return a table of the directories that lost power or were damaged."""
    return [
        "| | seed | cases | equal results | one sentence | forged | failed |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(
            f"| {TRIALS[name]} | {found['seed']} | {found['cases']:,} | {found.get('equal', 0):,} "
            f"| {found.get('refused', 0):,} | {found.get('forged', 0):,} | {found['failed']:,} |"
            for name, found in results.items()
        ),
    ]


def _of(found: dict[str, Any], name: str) -> str:
    return f"{found[name]} of {found['kills']}" if found else "–"


# The program of a user of Keras, which forks as `tests/conformance/drill.py` does

BATCH, BATCHES, EPOCHS = 16, 13, 3


def model() -> Any:
    """The drill's model, in the form that `fit` can train."""
    import keras

    built = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(3),
        ]
    )
    schedule = keras.optimizers.schedules.CosineDecay(1e-2, 60)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    built.compile(keras.optimizers.Adam(schedule, use_ema=True), loss, metrics=["accuracy"])
    return built


def fit(directory: Path, pace: float, every: int) -> dict[str, Any]:
    """Train with `BackupAndRestore`, which saves at every so many batches; return the outcome."""
    import keras

    trained = _trained(keras.callbacks.BackupAndRestore(directory, save_freq=every), pace)
    digest = hashlib.sha256()
    for value in [*trained.get_weights(), *map(np.asarray, trained.optimizer.variables)]:
        digest.update(value.tobytes())
    return {"arrays": digest.hexdigest()[:16], "step": int(trained.optimizer.iterations)}


def saves(file: Path) -> dict[str, Any]:
    """Train with `ModelCheckpoint`, which saves after every batch."""
    import keras

    _trained(keras.callbacks.ModelCheckpoint(file, save_freq=1), 0.0)
    return {}


def loads(file: Path) -> dict[str, Any]:
    """Return whether a saved model can be loaded, and why not."""
    import keras

    try:
        keras.models.load_model(file)
    except Exception as error:  # what comes depends on where the file ends
        return {"loads": False, "why": f"{type(error).__name__}: {error}"[:200]}
    return {"loads": True}


def _trained(callback: Any, pace: float) -> Any:
    import keras

    class Tells(keras.callbacks.Callback):
        """Prints the number of each batch, and takes some time for it."""

        step = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.step += 1
            print(f"batch {self.step}", flush=True)
            time.sleep(pace)

    keras.utils.set_random_seed(3)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH * BATCHES, 8)).astype("float32")
    y = (x[:, 0] > 0).astype("int32") + (x[:, 1] > 0)
    trained = model()
    callbacks = [callback, Tells()]
    trained.fit(x, y, batch_size=BATCH, epochs=EPOCHS, callbacks=callbacks, verbose=0)
    return trained


def member() -> None:
    """Serve runs of `fit`, each in a fork of this process, until the input ends."""
    import keras

    if keras.config.backend() == "torch":
        sys.modules["torch"].set_num_threads(1)
    arguments = serve()
    if arguments is not None:  # this is a forked process
        does = {"fit": fit, "saves": saves, "loads": loads}[arguments.pop("what")]
        place = Path(arguments.pop("place"))
        print(json.dumps(does(place, **arguments)), flush=True)


if __name__ == "__main__":
    member()
