"""What does the log of a long run cost when its directory is opened?

A run is trained for many steps and killed, and opened in fresh processes as commands do it. What
opening the directory of a run of 1,000 steps takes is subtracted: what is left is due to the log.

    scripts/bench logs [--steps 1000000] [--rounds 5] [--backend torch]
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from . import in_process, parser_of
from .page import BACKENDS

FEW, MORE = 1000, 10  # the steps of the short run, and those that a resumed run still trains


def main(arguments: list[str]) -> None:
    """Train both runs, open each several times, and print a table."""
    parser = parser_of("logs", __doc__)
    parser.add_argument("--steps", type=int, default=1_000_000, help="of the long run (1,000,000)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is opened (5)")
    parser.add_argument("--backend", choices=BACKENDS, default="torch")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--how", choices=("train", *OPENERS), help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.child:
        print(json.dumps(_measured(OPENERS[chosen.how], chosen.directory, chosen.steps)))
        return
    with TemporaryDirectory() as folder:
        places = {steps: Path(folder) / str(steps) for steps in (FEW, chosen.steps)}
        for steps, place in places.items():
            _trained_and_killed(place, steps, chosen.backend)
        size = (places[chosen.steps] / "log.jsonl").stat().st_size
        print(f"{chosen.steps:,} steps, {size / 1e6:.0f} MB; median of {chosen.rounds} (extremes)")
        print("| opened by | processor seconds | MiB |\n| --- | --- | --- |")
        for how in OPENERS:
            seconds: list[float] = []
            memory: list[float] = []
            for _ in range(chosen.rounds):
                short, long = (
                    in_process("logs", chosen.backend, *_options(how, place, steps))
                    for steps, place in places.items()
                )
                seconds.append(long[0] - short[0])
                memory.append(long[1] - short[1])
            print(f"| {how} | {_spread(seconds, 2)} | {_spread(memory, 0)} |", flush=True)


def _options(how: str, place: Path, steps: int) -> list[str]:
    return ["--how", how, "--directory", str(place), "--steps", str(steps)]


def _spread(found: list[float], digits: int) -> str:
    middle, low, high = (
        f"{x:.{digits}f}" for x in (statistics.median(found), min(found), max(found))
    )
    return f"{middle} ({low} to {high})"


def _trained_and_killed(place: Path, steps: int, backend: str) -> None:
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    code = (
        "from pathlib import Path; from benchmarks.logs import train; "
        f"train(Path({str(place)!r}), {steps}, dies=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment)
    if done.returncode != 9:
        sys.exit(f"the run was to be killed after step {steps}, and ended with {done.returncode}")


def _measured(opener: Callable[[Path, int], Any], place: Path, steps: int) -> tuple[float, float]:
    """Return the processor seconds and the MiB by which the memory grew at its peak."""
    import keras

    del keras
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, started = _memory("VmRSS"), time.process_time()
    opener(place, steps)
    return time.process_time() - started, _memory("VmHWM") - before


def _memory(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def train(place: Path, steps: int, dies: bool = False) -> None:
    """Train a line for a few steps more than `steps`, or die there."""
    import keras
    import numpy as np

    import treadle

    def die(loop: Any) -> None:
        while not list((place / "checkpoints").glob(f"step-*{steps}")):
            time.sleep(0.01)  # another thread writes it
        os._exit(9)

    treadle.setup(seed=0)
    x = np.random.default_rng(0).normal(size=(8000, 1)).astype("float32")
    train = treadle.data.from_arrays(x, 2 * x, batch_size=8)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    task = treadle.Supervised(model, "mse", keras.optimizers.SGD(1e-6))
    hooks: list[Any] = [treadle.hooks.Checkpoint(every=f"{steps} steps")]
    hooks += [treadle.at(f"{steps + 1} steps", die)] if dies else []
    with treadle.Loop(task, place, hooks=hooks, console=False) as loop:
        loop.fit(train, steps=steps + MORE)


def _resume(place: Path, steps: int) -> None:
    """Resume a copy without links, so that each round finds the same files."""
    import shutil

    with TemporaryDirectory(dir=place.parent) as folder:
        train(Path(shutil.copytree(place, Path(folder) / "run")), steps)


def _replay(place: Path, steps: int) -> None:
    from treadle.doctor.recorded import Recorded

    assert Recorded(place).log.last_step >= steps


def _runs(place: Path, steps: int) -> None:
    from treadle.hooks.log_tail import records

    records(place / "log.jsonl")


OPENERS: dict[str, Callable[[Path, int], Any]] = {
    "resume": _resume,
    "replay": _replay,
    "runs": _runs,
}
