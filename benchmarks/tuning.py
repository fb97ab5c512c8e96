"""Does a search beat the defaults? On the recipe `digits`, killed once, and judged by other seeds.

Two searches: one judges its trials by the recipe's own 360 held-out rows; the other never sees
them, and judges by a quarter of the training rows. The best settings of each then train from seeds
that no trial had, on all training rows, compared with the defaults.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import treadle
from treadle import data
from treadle.recipes.digits import Digits

from . import parser_of

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


def main(arguments: list[str]) -> None:
    """Search, train from other seeds, and print the table."""
    parser = parser_of("tuning", __doc__)
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
    import keras

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
