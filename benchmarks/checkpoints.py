"""What checkpoints cost: how long training waits for one, and how much slower it runs with them.

`scripts/bench checkpoints [--backend B] [--workload W] [--seconds S] [--rounds N]`
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import Any

from . import parser_of

BACKENDS = ("tensorflow", "jax", "torch")
WORKLOADS = ("mlp-sgd", "cifar10-cnn")
# Five times as often as the 10 seconds in question, so that the cost stands out from the noise.
EVERY = 2.0


def main(arguments: list[str]) -> None:
    """Measure each backend in a process of its own."""
    parser = parser_of("checkpoints", __doc__)
    parser.add_argument("--backend", choices=BACKENDS, action="append")
    parser.add_argument("--workload", choices=WORKLOADS, action="append")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if not chosen.child:
        for backend in chosen.backend or BACKENDS:
            environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
            command = [sys.executable, "-m", "benchmarks", "checkpoints", *arguments, "--child"]
            subprocess.run(command, env=environment, check=True)
        return
    import keras

    print(f"{keras.config.backend()}:", stalls())
    for workload in chosen.workload or WORKLOADS:
        print(f"{keras.config.backend()}, {workload}:", slower(workload, chosen), flush=True)


def stalls(megabytes: int = 100) -> str:
    """Return for how long training waits for a save of a state of this size."""
    import keras
    import numpy as np

    import treadle

    class Timed(treadle.hooks.Checkpoint):
        def save(self, loop: Any, wait: bool = False) -> bool:
            started = time.perf_counter()
            saved = super().save(loop, wait)
            if saved and not wait:
                waited.append((time.perf_counter() - started) * 1e3)
            return saved

    waited: list[float] = []
    units = int((megabytes * 1e6 / 4 / 3 / 2) ** 0.5)  # two layers, each with two slots of Adam
    layers = [keras.layers.Dense(units), keras.layers.Dense(units)]
    model = keras.Sequential([keras.Input((units,)), *layers])
    x = np.random.default_rng(0).normal(size=(64, units)).astype("float32")
    task = treadle.Supervised(model, "mse", keras.optimizers.Adam())
    train = treadle.data.from_arrays(x, x, batch_size=8)
    with (
        TemporaryDirectory() as folder,
        treadle.Loop(task, folder, hooks=[Timed(every="16 steps")], console=False) as loop,
    ):
        loop.fit(train, steps=640)
        size = sum(array.nbytes for array in loop.state.arrays().values()) / 1e6
    first, *rest = waited  # the first makes the memory that values are copied into
    return (
        f"a save of {size:.0f} MB makes training wait {statistics.median(rest):.1f} ms "
        f"({min(rest):.1f} to {max(rest):.1f}; the first {first:.1f}), of {len(waited)} saves"
    )


def slower(workload: str, chosen: argparse.Namespace) -> str:
    """Return how much longer a step takes with a checkpoint every 2 seconds."""
    from .workloads import job

    work = job(workload)
    with_them, without = (turns(work, every, chosen.seconds) for every in (f"{EVERY} s", "100 h"))
    next(with_them), next(without)  # compiles
    found: list[float] = []
    for number in range(chosen.rounds):
        both = [(0, with_them), (1, without)]
        times = {which: next(turn) for which, turn in (both if number % 2 else both[::-1])}
        found.append(times[0] / times[1] - 1)
    middle = statistics.median(found)
    return (
        f"{middle:+.1%} time per step with a checkpoint every {EVERY:g} s, so {middle / 5:+.1%} "
        f"with one every 10 s ({min(found):+.1%} to {max(found):+.1%})"
    )


def turns(work: Any, every: str, seconds: float) -> Iterator[float]:
    """Yield the seconds per step of one turn after another."""
    import treadle

    train = treadle.data.from_arrays(*work.arrays, batch_size=work.batch_size)
    with (
        TemporaryDirectory() as folder,
        treadle.Loop(
            work.make(), folder, hooks=[treadle.hooks.Checkpoint(every=every)], console=False
        ) as loop,
    ):
        for _ in itertools.count():
            started, step = time.perf_counter(), loop.progress.step
            for _ in loop.epochs():
                for _ in loop.steps(train, every="auto"):
                    if time.perf_counter() - started > seconds:
                        break
                if time.perf_counter() - started > seconds:
                    break
            yield (time.perf_counter() - started) / (loop.progress.step - step)
