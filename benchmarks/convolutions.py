"""Convolutions on a CPU by XLA and by TensorFlow's graphs: `scripts/bench convolutions`.

Each row trains a network on random images with `Options(jit=True, fused=True)` and with
`Options(jit=False)`, in turns. The last columns are the median ratio of the times of a round, and
what the plan chooses without options: see `treadle.steps.planning.choose`.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from . import DOCS, parser_of, write_section
from .timing import ratio

BATCH, STEPS = 64, 20


def main(arguments: list[str]) -> None:
    """Print a row for each network."""
    parser = parser_of("convolutions", __doc__, rounds=5, backends=False)
    parser.add_argument("--write", action="store_true", help="write docs/speed.md")
    chosen = parser.parse_args(arguments)
    os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    lines = [
        "| network | graph, ms a step | XLA, ms a step | XLA by graph (quartiles) | chosen |",
        "| --- | --- | --- | --- | --- |",
    ]
    print("\n".join(lines))
    for name, make in _networks().items():
        lines.append(_row(name, make, chosen.rounds))
        print(lines[-1], flush=True)
    if chosen.write:
        write_section(DOCS / "speed.md", "bench convolutions --write", lines)


def _row(name: str, make: Callable[[], Any], rounds: int) -> str:
    import treadle

    options = {"graph": {"jit": False}, "XLA": {"jit": True, "fused": True}, "": {}}
    loops = {how: _loop(make, treadle.Options(**given)) for how, given in options.items()}
    times: dict[str, list[float]] = {how: [_seconds(loop)] for how, loop in loops.items()}
    plan = loops.pop("").plan
    for _ in range(rounds):
        for how, loop in loops.items():
            times[how].append(_seconds(loop))
    graph, xla = (times[how][1:] for how in loops)  # without compiling
    median = [1e3 * sorted(x)[len(x) // 2] / STEPS for x in (graph, xla)]
    shown = f"{median[0]:.3g} | {median[1]:.3g} | {ratio(xla, graph):.2f}"
    return f"| {name} | {shown} | {'XLA' if ', XLA' in plan else 'graph'} |"


def _loop(make: Callable[[], Any], options: Any) -> Any:
    import keras

    import treadle

    keras.utils.set_random_seed(0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    task = treadle.Supervised(make(), loss=loss, optimizer=keras.optimizers.Adam())
    return treadle.Loop(task, options=options, console=False)


def _seconds(loop: Any) -> float:
    import numpy as np

    import treadle

    rng = np.random.default_rng(0)
    images = rng.normal(size=(BATCH * STEPS, 32, 32, 3)).astype("float32")
    labels = rng.integers(0, 10, BATCH * STEPS)
    data = treadle.data.from_arrays(images, labels, batch_size=BATCH)
    started = time.perf_counter()
    loop.fit(data, epochs=1)
    return time.perf_counter() - started


def _networks() -> dict[str, Callable[[], Any]]:
    """Return functions that build the networks, by name."""
    import keras
    from keras import layers

    def network(*parts: Any) -> Any:
        head = [layers.Flatten(), layers.Dense(10)]
        return keras.Sequential([keras.Input((32, 32, 3)), *parts, *head])

    def normalized(width: int, stride: int = 2, norm: Any = layers.BatchNormalization) -> list[Any]:
        convolution = layers.Conv2D(width, 3, stride, padding="same", use_bias=False)
        return [convolution, norm(), layers.ReLU()]

    def depthwise(width: int) -> list[Any]:
        first = [layers.DepthwiseConv2D(3, 2, padding="same"), layers.BatchNormalization()]
        return [*first, layers.Conv2D(width, 1), layers.BatchNormalization(), layers.ReLU()]

    def plain(*between: Any) -> list[Any]:
        convolutions = [layers.Conv2D(width, 3, activation="relu") for width in (32, 64)]
        return [convolutions[0], *between, convolutions[1], *between]

    def strides() -> list[Any]:
        return [layers.Conv2D(width, 3, 2, activation="relu") for width in (32, 64)]

    def residual() -> Any:
        x = inputs = keras.Input((32, 32, 3))
        for width in (16, 32, 64):
            y = keras.Sequential([*normalized(width), *normalized(width, 1)[:2]])(x)
            x = layers.ReLU()(y + layers.Conv2D(width, 1, 2)(x))
        return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))

    def u_net() -> Any:
        x = inputs = keras.Input((32, 32, 3))
        seen = [x := keras.Sequential(normalized(width))(x) for width in (16, 32, 64)]
        for width, skip in ((32, seen[1]), (16, seen[0])):
            up = layers.Conv2DTranspose(width, 3, 2, padding="same", use_bias=False)
            x = keras.Sequential([up, layers.BatchNormalization(), layers.ReLU()])(x)
            x = layers.Concatenate()([x, skip])
        return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))

    def transformer() -> Any:
        inputs = keras.Input((32, 32, 3))
        x = layers.Reshape((64, 64))(layers.Conv2D(64, 4, 4)(inputs))
        for _ in range(2):
            normal = layers.LayerNormalization()(x)
            x = x + layers.MultiHeadAttention(4, 16)(normal, normal)
            normal = layers.LayerNormalization()(x)
            x = x + layers.Dense(64)(layers.Dense(128, activation="gelu")(normal))
        return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))

    pool, average, group = layers.MaxPooling2D, layers.AveragePooling2D, layers.GroupNormalization
    return {
        "strides": lambda: network(*strides()),
        "average pooling": lambda: network(*plain(average(2))),
        "maximum pooling": lambda: network(*plain(pool(2))),
        "batch normalization": lambda: network(*normalized(32), *normalized(64)),
        "batch normalization, maximum pooling": lambda: network(*normalized(32, 1), pool(2)),
        "batch normalization, average pooling": lambda: network(*normalized(32, 1), average(2)),
        "group normalization": lambda: network(*normalized(32, 2, lambda: group(8))),
        "depthwise, batch normalization": lambda: network(*normalized(16), *depthwise(32)),
        "residual, batch normalization": residual,
        "U-Net, batch normalization": u_net,
        "transformer of patches": transformer,
    }
