"""Runs of which each process reads its own share of a stream: resumed, moved, and refused.

Each argument is a run `DIRECTORY:STEPS`, or the name of one of `FAILURES`. Prints, as JSON, what
happened in process 0, and what each process has read.

    treadle launch --workers 2 -- on_shards.py runs/1:9 runs/1:15 other-forms
"""

import json
import os
import sys
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import treadle

treadle.setup(seed=0)

import keras  # noqa: E402
import numpy as np  # noqa: E402
from keras import layers  # noqa: E402

from treadle.core.processes import process_group  # noqa: E402
from treadle.core.randomness import seed_everything  # noqa: E402
from treadle.errors import TreadleError, TreadleWarning  # noqa: E402

SHARES = [4, 4, 4, 4, 4, 2], [4, 4, 4, 1], [2, 2], [3, 1]
"""The rows of the batches in the share of each process."""
read: list[int] = []
"""The first number of each batch that this process has read."""


class Pair(NamedTuple):
    x: Any
    y: Any


class Share:
    """Makes the batches of a share, which depend on a state that goes on from epoch to epoch."""

    def __init__(self, shard: int) -> None:
        self.rng, self.sizes = np.random.default_rng(shard), SHARES[shard]
        self.made = np.zeros(1, "int64")

    def __call__(self, generator: np.random.Generator) -> Any:
        rows = self.sizes[int(self.made[0]) % len(self.sizes)]
        self.made = self.made + 1
        x = (self.rng.normal(size=(rows, 6)) + generator.normal()).astype("float32")
        read.append(round(float(x[0, 0]) * 1e6))
        return Pair(x, (x[:, 0] > 0).astype("int32"))

    def state(self) -> Any:
        return {"rng": self.rng.bit_generator.state, "made": self.made}

    def restore(self, state: Any) -> None:
        self.rng.bit_generator.state, self.made = state["rng"], state["made"]


def sharded(shard_index: int, shard_count: int) -> Any:
    return treadle.data.from_function(Share(shard_index), len(SHARES[shard_index]))


def source(directory: str) -> Any:
    """Epochs of shares, or of four batches of an endless stream."""
    found = treadle.data.sharded(sharded)
    return treadle.data.limited(found, 4) if "limited" in directory else found


def task() -> Any:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.Dropout(0.2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return treadle.Supervised(model, loss, keras.optimizers.Adam(1e-2))


def run(directory: str, steps: int) -> dict[str, Any]:
    seed_everything(0)
    read.clear()
    hooks = [treadle.hooks.Checkpoint("2 steps", keep_last=99)]
    with (
        warnings.catch_warnings(record=True, category=TreadleWarning) as caught,
        treadle.Loop(
            task(),
            directory,
            hooks=hooks,
            console=False,
            override=["steps"],
            options=treadle.Options(window=3),
        ) as loop,
    ):
        warnings.simplefilter("always", TreadleWarning)
        loop.fit(source(directory), steps=steps)
        ends = {p: zlib.crc32(np.ascontiguousarray(x)) for p, x in loop.state.arrays().items()}
    return {
        "losses": loop.history.steps("loss").tolist(),
        "ends": ends,
        "warnings": [str(w.message) for w in caught],
        "read": process_group().exchange(list(read), "what was read"),
        "examples": loop.progress.examples,
        "plan": loop.plan,
    }


def of_other_forms(shard_index: int, shard_count: int) -> Any:
    return [np.zeros((2, 3 + shard_index), "float32")]


def without_axis(shard_index: int, shard_count: int) -> Any:
    return [(np.zeros((2, 3), "float32"), np.float32(1))] if shard_index else of_other_forms(0, 2)


def empty(shard_index: int, shard_count: int) -> Any:
    return [] if shard_index else of_other_forms(0, 2)


def failing(shard_index: int, shard_count: int) -> Any:
    def batches() -> Iterator[Any]:
        yield np.zeros((2, 3), "float32")
        if shard_index:
            raise OSError("the disk is gone")
        yield np.zeros((2, 3), "float32")

    return batches


def of_other_keys(shard_index: int, shard_count: int) -> Any:
    return [{0.5: np.zeros((2, 3))}, {0.5: np.zeros((2, 3))}]


def without_rows(shard_index: int, shard_count: int) -> Any:
    return [np.zeros((0, 3))]


FAILURES = {
    "of-other-keys": of_other_keys,
    "without-rows": without_rows,
    "other-forms": of_other_forms,
    "without-axis": without_axis,
    "empty": empty,
    "failing": failing,
}


def messages(name: str) -> list[str]:
    """What each process raises while it reads."""
    reader = treadle.data.sharded(FAILURES[name]).read(0)
    error = ""
    try:
        while reader.take(1) is not None:
            pass
    except (TreadleError, OSError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    return process_group().exchange(error, "an error")


def main() -> None:
    found: dict[str, Any] = {}
    for each in sys.argv[1:]:
        if each in FAILURES:
            found[each] = messages(each)
        else:
            directory, steps = each.rsplit(":", 1)
            found[f"{Path(directory).name}:{steps}"] = run(directory, int(steps))
    if process_group().rank == 0:
        os.write(1, f"{json.dumps(found)}\n".encode())


main()
