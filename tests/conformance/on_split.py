"""Runs whose weights several processes hold together, saved and resumed on other meshes.

Each argument is a run: `DIRECTORY:MESH:STEPS`, where the mesh is `1` for one device, or as `1x4`.
Prints for each the losses and the CRC-32 of every variable at the end, as JSON. With a suffix as in
`2x2t`, the parts of a weight are on devices of both processes.

    treadle launch --workers 2 -- on_split.py runs/1:1x4:9 runs/1:4x1:18
"""

import json
import os
import signal
import sys
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import treadle

treadle.setup(seed=0)

import keras  # noqa: E402
import numpy as np  # noqa: E402
from keras import layers  # noqa: E402

from treadle.checkpoint import Checkpoints, parts  # noqa: E402
from treadle.core.folder import Folder  # noqa: E402
from treadle.core.processes import is_chief, process_group  # noqa: E402
from treadle.errors import TreadleWarning  # noqa: E402


def use(mesh: str) -> None:
    """Start from scratch on a mesh."""
    keras.backend.clear_session()
    if mesh == "1":
        treadle.setup(seed=0)
        return
    shape = tuple(map(int, mesh.removesuffix("t").split("x")))
    names = np.array(keras.distribution.list_devices())
    placed = names.reshape(shape[::-1]).T if mesh.endswith("t") else names.reshape(shape)
    layouts = keras.distribution.LayoutMap(
        keras.distribution.DeviceMesh(shape, ("batch", "model"), placed.ravel().tolist())
    )
    layouts[".*hidden.*kernel"] = (None, "model")
    layouts[".*hidden.*bias"] = ("model",)
    layouts[".*out.*kernel"] = ("model", None)
    parallel = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
    treadle.setup(seed=0, devices=parallel)


def task() -> Any:
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="relu", name="hidden"),
            layers.BatchNormalization(),
            layers.Dense(4, name="out"),
        ]
    )
    return treadle.Supervised(
        model,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        keras.optimizers.Adam(1e-2, global_clipnorm=1.0, use_ema=True),
    )


def run(directory: Path, mesh: str, steps: int, faults: Sequence[str]) -> dict[str, Any]:
    use(mesh)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(48, 6)).astype("float32"), rng.integers(0, 4, 48).astype("int32")
    hooks = [Killed(directory, faults)]
    with (
        warnings.catch_warnings(record=True, category=TreadleWarning) as caught,
        treadle.Loop(
            task(), directory, hooks=hooks, console=False, override=["steps", "backend"]
        ) as loop,
    ):
        warnings.simplefilter("always", TreadleWarning)
        loop.fit(treadle.data.from_arrays(x, y, batch_size=8), steps=steps)
        # All processes read, one variable after another.
        ends = {
            p: zlib.crc32(np.ascontiguousarray(x).tobytes()) for p, x in loop.state.arrays().items()
        }
        return {
            "losses": loop.history.steps("loss").tolist(),
            "ends": ends,
            "steps": Checkpoints(directory / "checkpoints").steps(),
            "warnings": [str(w.message) for w in caught],
        }


class Killed(treadle.hooks.Checkpoint):
    """Kills this process in a save from a step on, once, while other processes save too.

    Args:
        directory: The run directory.
        faults: The process, where in the save it is killed, and the step, as `1-parts@6`.
    """

    def __init__(self, directory: Path, faults: Sequence[str]) -> None:
        super().__init__("3 steps", keep_last=9)
        self._faults = [(fault, directory.with_suffix(f".{fault}")) for fault in faults]
        self._where = ""
        pieces, rename = parts.pieces, Folder.rename

        def halved(own: Any) -> Any:
            for piece in pieces(own):
                if self._where == "parts":
                    yield bytes(piece)[: len(piece) // 2]
                    os.kill(os.getpid(), signal.SIGKILL)
                yield piece

        def renamed(folder: Any, name: str, new: str) -> None:
            if self._where == "rename" and new.startswith("step-"):
                os.kill(os.getpid(), signal.SIGKILL)
            rename(folder, name, new)

        parts.pieces, Folder.rename = halved, renamed

    def save(self, loop: Any, wait: bool = False, begins: bool = False) -> bool:
        for fault, done in self._faults:
            who, _, step = fault.partition("@")
            rank, _, where = who.partition("-")
            mine = int(rank) == process_group().rank
            if mine and loop.progress.step >= int(step) and not done.exists():
                done.touch()
                self._where = where
                break
        return super().save(loop, wait or bool(self._faults), begins)


def note_start(directory: Path) -> None:
    """Note which checkpoints there are, before the run cleans its folder."""
    if is_chief():
        folder = directory / "checkpoints"
        read = Checkpoints(folder).latest()
        names = os.listdir(folder) if folder.exists() else []
        found = {
            "steps": Checkpoints(folder).steps(),
            "read": None if read is None else read.progress.step,
            "left": [name for name in names if name.startswith(".partial")],
        }
        with directory.with_suffix(".starts").open("a") as file:
            file.write(f"{json.dumps(found)}\n")


def main() -> None:
    found: dict[str, Any] = {}
    faults = [each for each in sys.argv[1:] if "@" in each]
    for each in sys.argv[1:]:
        if each in faults:
            continue
        directory, mesh, steps = each.rsplit(":", 2)
        if faults:
            note_start(Path(directory))
        found[each] = run(Path(directory), mesh, int(steps), faults)
    if is_chief():
        os.write(1, f"{json.dumps(found)}\n".encode())


main()
