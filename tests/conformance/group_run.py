"""A small run, as one of several processes; `FAULT=kind@rank@step` makes one of them fail.

    treadle launch --workers 2 -- group_run.py DIRECTORY

Prints the step and a hash of all variables at the end, in each process.
"""

import hashlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import treadle
from treadle.distribute import channel

channel.GRACE_SECONDS = float(os.environ.get("GRACE", channel.GRACE_SECONDS))  # type: ignore[misc]
treadle.setup(seed=0)

import keras  # noqa: E402
import numpy as np  # noqa: E402
from keras import layers  # noqa: E402

from treadle.core.processes import process_group  # noqa: E402

RANK = process_group().rank
DIRECTORY = Path(sys.argv[1])
KIND, WHO, AT = (*os.environ.get("FAULT", "none@0@0").split("@"),)
IS_IT = int(WHO) == RANK
EVERY = os.environ.get("EVERY", "7 steps")
ACTION: Any = "rollback" if KIND == "nan" else "stop"


def once() -> bool:
    """Whether the fault has not happened yet; a process that is started again has none."""
    try:
        (DIRECTORY.parent / f"{DIRECTORY.name}.{AT}.fault").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Fault(treadle.Hook):
    def steps(self, loop: Any, logs: Any) -> None:
        if not IS_IT:
            return
        if KIND.startswith("slow"):
            time.sleep(0.05 * logs.steps)
        ends = ("kill", "term", "slow-term", "raise")
        if loop.progress.step < int(AT) or KIND not in ends or not once():
            return
        if KIND == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if KIND in ("term", "slow-term"):
            os.kill(os.getpid(), signal.SIGTERM)
        if KIND == "raise":
            raise ValueError("planted")

    def end(self, loop: Any, error: BaseException | None) -> None:
        if IS_IT and KIND == "end":
            raise ValueError("planted")


class Saving(treadle.hooks.Checkpoint):
    def save(self, loop: Any, wait: bool = False, begins: bool = False) -> bool:
        if KIND == "save" and IS_IT and loop.progress.step >= int(AT) and once():
            super().save(loop)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().save(loop, wait, begins)


class Slow(list[Any]):
    """Batches, of which the second one takes longer than a window waits for it."""

    def __iter__(self) -> Any:
        for i in range(len(self)):
            if IS_IT and i == 1:
                time.sleep(0.4)
            yield self[i]


def source(count: int, batch_size: int, **how: Any) -> Any:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 8)).astype("float32")
    y = 2 * x[:, :1]
    if KIND == "nan" and count == 97:
        y[3] = np.nan
    if KIND == "reads":
        starts = range(0, count - 1, batch_size)
        return Slow([(x[i : i + batch_size], y[i : i + batch_size]) for i in starts])
    return treadle.data.from_arrays(x, y, batch_size=batch_size, **how)


def looked(loop: Any) -> Any:
    return {"looked": loop.progress.step}


def main() -> None:
    hidden = layers.Dense(8, activation="relu")
    model = keras.Sequential([keras.Input((8,)), hidden, layers.Dropout(0.2), layers.Dense(1)])
    count = 96 if KIND == "data" and IS_IT else 97
    loop = treadle.Loop(
        treadle.Supervised(model, "mse", keras.optimizers.Adam(1e-2)),
        DIRECTORY,
        hooks=[
            Fault(),
            Saving(every=EVERY),
            *([treadle.every(EVERY, looked)] if "EVERY" in os.environ else []),
            treadle.hooks.NonFinite(ACTION),
        ],
        options=treadle.Options(window=4),
        console=False,
    )
    if KIND == "body":
        with loop:
            for logs in loop.steps(source(97, 16)):
                if IS_IT and logs.step == 3:
                    raise ValueError("planted")
    until = os.environ.get("UNTIL")
    lasts: dict[str, Any] = {"epochs": 5} if until is None else {"until": until}
    loop.fit(source(count, 16, shuffle=True), source(33, 8), **lasts)
    found = hashlib.sha256()
    for path, value in sorted(loop.state.arrays().items()):
        found.update(path.encode() + value.tobytes())
    # In one write, since processes may share the standard output.
    os.write(1, f"{RANK} {loop.progress.step} {found.hexdigest()[:16]}\n".encode())


main()
