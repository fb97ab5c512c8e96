"""Kills `treadle.fit` at random times, and compares the resumed runs with uninterrupted ones.

    KERAS_BACKEND=jax python -m tests.conformance.keras_kills [--kills 20] [programs]

Compared are all weights and slots, bit for bit, the history, the numbers, texts and arrays of the
callbacks, and the file of `CSVLogger`. The exit status is 0 if all are equal.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

PROGRAMS = ("compiled", "own_steps", "callbacks", "several_inputs", "recurrent")
BEGUN = "training begins"
EPOCHS, PAUSE = 6, 0.1  # seconds after each epoch, so that kills are spread over the run


def train(name: str, folder: Path) -> None:
    """Train a program in a folder, and write down what it leaves behind."""
    import keras
    import numpy as np

    import treadle
    from tests.conformance.keras_comparison import programs

    warnings.simplefilter("ignore")
    keras.utils.set_random_seed(3)
    (folder / "files").mkdir(parents=True, exist_ok=True)
    case = programs()[name](folder / "files")
    kinds = keras.callbacks

    class Paced(kinds.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            print(BEGUN, flush=True)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            time.sleep(PAUSE)

    watched = [
        kinds.EarlyStopping("loss", patience=4, restore_best_weights=True),
        kinds.ReduceLROnPlateau("loss", patience=1, min_delta=0.05, cooldown=1),
        kinds.CSVLogger(str(folder / "files" / "table.csv")),
    ]
    given = [*watched, *case.arguments.pop("callbacks", ()), Paced()]
    arguments = {"batch_size": 8, "verbose": 0, **case.arguments, "epochs": EPOCHS}
    saving = treadle.hooks.Checkpoint(every="2 steps")
    history = treadle.fit(
        case.model, **arguments, callbacks=given, directory=folder / "run", hooks=[saving]
    )
    weights = [keras.ops.convert_to_numpy(v) for v in case.model.variables]
    kept = [{k: v for k, v in vars(c).items() if _is_compared(k, v)} for c in watched[:2]]
    best = watched[0].best_weights or []
    np.savez(folder / "end.npz", *weights, *best)
    found = [history.history, history.epoch, kept, (folder / "files" / "table.csv").read_text()]
    (folder / "end.json").write_text(json.dumps(found))


def _is_compared(name: str, value: Any) -> bool:
    """Return whether an attribute is state: not one that each start of training sets up again.

    A run that was killed after its end is not trained again, so nothing sets these up there.
    """
    from treadle.hooks.callback_model import SET_UP

    return name not in (*SET_UP, "filename") and isinstance(value, (bool, int, float, str))


def killed(name: str, folder: Path, wait: random.Random, length: float) -> tuple[bool, float]:
    """Train in a process that is killed after a random time below `length`; 0 lets it finish.

    Returns:
        Whether it was killed, and the seconds that it trained.
    """
    command = [sys.executable, "-m", "tests.conformance.keras_kills", "--child", str(folder), name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while (line := process.stdout.readline()) and line.strip() != BEGUN:
        pass
    began = time.monotonic()
    try:
        process.wait(wait.uniform(0, length) if length else None)
    except subprocess.TimeoutExpired:
        process.kill()
    process.stdout.close()
    code = process.wait()
    if code not in (0, -9):
        raise SystemExit(f"{name} failed in {folder}: its messages are above")
    return code != 0, time.monotonic() - began


def compare(name: str, kills: int, seed: int) -> tuple[int, set[str]]:
    """Kill runs so often, each until it has finished, and compare them with an uninterrupted one.

    Returns:
        The number of runs, and how they differ.
    """
    with tempfile.TemporaryDirectory() as place:
        whole, wait = Path(place) / "whole", random.Random(seed)
        _, length = killed(name, whole, wait, 0)
        done, runs, different = 0, 0, set[str]()
        while done < kills:
            runs, other = runs + 1, Path(place) / f"killed-{runs}"
            while not (other / "end.json").exists():
                was_killed, _ = killed(name, other, wait, length if done < kills else 0)
                done += was_killed
            different |= differences(whole, other)
        return runs, different


def differences(whole: Path, other: Path) -> set[str]:
    """Return in what the files that two runs left differ."""
    import numpy as np

    expected, found = (json.loads((x / "end.json").read_text()) for x in (whole, other))
    parts = ("history", "epochs", "callbacks", "table")
    different = {p for p, a, b in zip(parts, expected, found, strict=True) if a != b}
    with np.load(whole / "end.npz") as a, np.load(other / "end.npz") as b:
        if any(not np.array_equal(a[k], b[k], equal_nan=True) for k in a.files):
            different.add("weights")
    return different


def main() -> int:
    """Train all programs, and print how each differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=PROGRAMS)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--child")
    options = parser.parse_args()
    if options.child is not None:
        train(options.names[0], Path(options.child))
        return 0
    failed = 0
    for number, name in enumerate(options.names):
        share = options.kills // len(options.names)
        runs, different = compare(name, share, number)
        failed += bool(different)
        found = f"DIFFERENT: {', '.join(sorted(different))}" if different else "equal"
        print(
            f"{os.environ['KERAS_BACKEND']} {name}, {share} kills of {runs} runs: {found}",
            flush=True,
        )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
