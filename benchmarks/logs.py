"""What does the log of a long run cost when its directory is opened?

A run is trained for many steps and killed, and opened in fresh processes as commands do it. What
opening the directory of a run of 1,000 steps takes is subtracted: what is left is due to the log.

    scripts/bench logs [--steps 1000000] [--rounds 5] [--backend torch]
"""

import argparse
import importlib
import json
import os
import re
import shutil
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

Opener = Callable[[Path, int, Callable[[], None]], None]
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
                    _opened(how, place, steps, chosen.backend) for steps, place in places.items()
                )
                seconds.append(long[0] - short[0])
                memory.append(long[1] - short[1])
            print(f"| {how} | {_spread(seconds, 2)} | {_spread(memory, 0)} |", flush=True)


def _opened(how: str, place: Path, steps: int, backend: str) -> list[float]:
    """Open a copy of a directory in a process; return its processor seconds and MiB."""
    copy = shutil.copytree(place, place.with_name("copy"))
    options = ["--how", how, "--directory", str(copy), "--steps", str(steps)]
    found = in_process("logs", backend, *options)
    shutil.rmtree(copy)
    return found


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


def _measured(opener: Opener, place: Path, steps: int) -> list[float]:
    """Return the processor seconds and the MiB by which the memory grew at its peak."""
    for module in ("keras", "treadle.cli", "treadle.doctor", "treadle.loop"):
        importlib.import_module(module)
    found: list[float] = []
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before, started = _memory("VmRSS"), time.process_time()

    def opened() -> None:
        found.extend((time.process_time() - started, _memory("VmHWM") - before))

    opener(place, steps, opened)
    return found


def _memory(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def train(
    place: Path, steps: int, dies: bool = False, begun: Callable[[], None] = lambda: None
) -> None:
    """Train a line for a few steps more than `steps`, or die there.

    Args:
        place: The run directory.
        steps: How many steps, up to the checkpoint.
        dies: End the process in the next step.
        begun: Called in the next step.
    """
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
    hooks += [treadle.at(f"{steps + 1} steps", die if dies else lambda loop: begun())]
    with treadle.Loop(task, place, hooks=hooks, console=False) as loop:
        loop.fit(train, steps=steps + MORE)


def _resume(place: Path, steps: int, opened: Callable[[], None]) -> None:
    train(place, steps, begun=opened)


def _replay(place: Path, steps: int, opened: Callable[[], None]) -> None:
    from treadle.doctor.recorded import Recorded

    assert Recorded(place).log.last_step >= steps
    opened()


def _runs(place: Path, steps: int, opened: Callable[[], None]) -> None:
    from treadle.hooks.log_tail import records

    records(place / "log.jsonl")
    opened()


OPENERS: dict[str, Opener] = {"resume": _resume, "replay": _replay, "runs": _runs}
