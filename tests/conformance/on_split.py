"""Runs whose weights several processes hold together, saved and resumed on other meshes.

Each argument is a run: `DIRECTORY:MESH:STEPS`, where the mesh is `1` for one device, or as `1x4`.
Prints for each the losses and the CRC-32 of every variable at the end, as JSON. With a suffix as in
`2x2t`, the parts of a weight are on devices of both processes.

    treadle launch --workers 2 -- on_split.py runs/1:1x4:9 runs/1:4x1:18
"""

import json
import os
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import treadle

treadle.setup(seed=0)

import keras  # noqa: E402
import numpy as np  # noqa: E402
from keras import layers  # noqa: E402

from treadle.checkpoint import Checkpoints  # noqa: E402
from treadle.core.processes import is_chief  # noqa: E402
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


def run(directory: Path, mesh: str, steps: int) -> dict[str, Any]:
    use(mesh)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(48, 6)).astype("float32"), rng.integers(0, 4, 48).astype("int32")
    hooks = [treadle.hooks.Checkpoint("3 steps", keep_last=9)]
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


def main() -> None:
    found: dict[str, Any] = {}
    for each in sys.argv[1:]:
        directory, mesh, steps = each.rsplit(":", 2)
        found[each] = run(Path(directory), mesh, int(steps))
    if is_chief():
        os.write(1, f"{json.dumps(found)}\n".encode())


main()
