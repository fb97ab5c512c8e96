"""How much memory do training, evaluation and checkpoints take?

The peak memory (VmHWM) of a process that trains a network whose state (weights and the slots of
Adam) is 1 GB, for a few steps and in three variants: training alone, with an evaluation, and with
checkpoints. Compared with `fit` and with a loop by hand. Each contestant has a process of its own.

    scripts/bench memory --backend jax --variant train
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from . import in_process, parser_of

BACKENDS = ("tensorflow", "jax", "torch")
VARIANTS = ("train", "evaluate", "checkpoint")
TREADLE, FIT, BY_HAND = "treadle", "`fit`", "loop by hand"
CONTESTANTS = (TREADLE, FIT, BY_HAND)
WIDTH, HIDDEN, INPUTS, BATCH, STEPS = 4096, 5, 64, 32, 4
RESULTS = Path(__file__).with_name("memory.json")
PAGE = Path(__file__).parent.parent / "docs" / "memory.md"
Peaks = dict[str, dict[str, float]]


def main(arguments: list[str]) -> None:
    """Measure what was chosen, and print a table."""
    parser = parser_of("memory", __doc__)
    parser.add_argument("--variant", choices=VARIANTS, action="append", help="only this variant")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="only this backend")
    parser.add_argument("--contestant", choices=CONTESTANTS, action="append", help="only this one")
    parser.add_argument("--width", type=int, default=WIDTH, help=f"of the layers ({WIDTH})")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help=f"write docs/{PAGE.name}")
    chosen = parser.parse_args(arguments)
    if chosen.child:
        _run(chosen.contestant[-1], chosen.variant[-1], chosen.width)
        return
    kept: Peaks = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    print("\n".join(_head()))
    for backend in chosen.backend or BACKENDS:
        for variant in chosen.variant or VARIANTS:
            peaks = kept.setdefault(f"{variant} {backend}", {})
            for name in chosen.contestant or CONTESTANTS:
                options = ["--variant", variant, "--contestant", name]
                options += ["--width", str(chosen.width)]
                peaks[name] = in_process("memory", backend, *options)
                print(f"{variant} {backend} {name}: {peaks[name]:.0f} MiB", flush=True)
    for key, peaks in kept.items():
        print("\n".join(_rows(*key.split(), peaks)))
    if chosen.write:
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
        PAGE.write_text(page(kept))


def page(kept: Peaks) -> str:
    """Return the page with the table."""
    return "\n".join(
        [
            "# Memory",
            "",
            "This page compares the peak memory of processes that train a network whose state is "
            "1 GB: 84 million weights and the two\nslots of Adam for each. `train`: a few steps. "
            "`evaluate`: also an evaluation, with loss and metrics. `checkpoint`: also\nthree "
            "checkpoints of the complete state. The loop by hand is a jitted step that donates its "
            "state (JAX), a `@tf.function`\n(TensorFlow), or `torch.nn` (PyTorch); it writes its "
            "checkpoints with `np.savez` or `torch.save` while nothing else\nruns. `fit` uses "
            "`ModelCheckpoint`. Each contestant has a process of its own, and the peak is `VmHWM` "
            "of Linux, with all\nlibraries. Written by `scripts/bench memory --write`.",
            "",
            "Treadle writes checkpoints while the next steps run, so it needs a copy of the state "
            "(on JAX, the old state itself). On\nPyTorch, steps with such large variables run as "
            "Python on a CPU, and an evaluation that runs as Python may change any\nvariable: all "
            "are copied, and restored afterwards.",
            "",
            *_head(),
            *(
                row
                for backend in BACKENDS
                for variant in VARIANTS
                if (peaks := kept.get(f"{variant} {backend}"))
                for row in _rows(variant, backend, peaks)
            ),
            "",
        ]
    )


def _head() -> list[str]:
    return [
        "| variant | backend | contestant | peak, MiB | by the leaner peer's |",
        "| --- | --- | --- | --- | --- |",
    ]


def _rows(variant: str, backend: str, peaks: dict[str, float]) -> list[str]:
    least = min((peak for name, peak in peaks.items() if name != TREADLE), default=float("nan"))
    return [
        f"| {variant} | {backend} | {name} | {peak:,.0f} | {peak / least:.2f} |"
        for name, peak in peaks.items()
    ]


def _run(name: str, variant: str, width: int) -> None:
    """Run a contestant, and print the peak of this process in MiB."""
    with TemporaryDirectory() as directory:
        {TREADLE: _treadle, FIT: _fit, BY_HAND: _by_hand}[name](variant, width, Path(directory))
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    print(int(peak.group(1)) / 1024)


def task(width: int) -> Any:
    """Return the network with its loss and optimizer."""
    import keras
    from keras import layers

    import treadle

    model = keras.Sequential(
        [
            keras.Input((INPUTS,)),
            *(layers.Dense(width, activation="relu") for _ in range(HIDDEN + 1)),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    accuracy = keras.metrics.SparseCategoricalAccuracy("accuracy")
    return treadle.Supervised(model, loss, keras.optimizers.Adam(1e-5), {"accuracy": accuracy})


def _arrays() -> tuple[Any, Any]:
    import numpy as np

    random = np.random.default_rng(0)
    x = random.normal(size=(STEPS * BATCH, INPUTS)).astype("float32")
    return x, random.integers(10, size=len(x)).astype("int32")


def batches() -> Iterator[tuple[Any, Any]]:
    """Yield the batches of an epoch."""
    x, y = _arrays()
    for start in range(0, len(x), BATCH):
        yield x[start : start + BATCH], y[start : start + BATCH]


def _treadle(variant: str, width: int, directory: Path) -> None:
    import treadle

    train = treadle.data.from_arrays(*_arrays(), batch_size=BATCH)
    # The directory would hold a checkpoint at the end.
    place = directory if variant == "checkpoint" else None
    with treadle.Loop(task(width), place, console=False) as loop:
        for _ in range(3):
            loop.fit(train, epochs=1)
            if variant == "evaluate":
                loop.evaluate(train)


def _fit(variant: str, width: int, directory: Path) -> None:
    import keras

    made = task(width)
    made.model.compile(
        optimizer=made.optimizer, loss=made.loss, metrics=list(made.metrics.values())
    )
    callbacks = []
    if variant == "checkpoint":
        callbacks.append(keras.callbacks.ModelCheckpoint(directory / "model.keras"))
    for _ in range(3):
        made.model.fit(*_arrays(), batch_size=BATCH, epochs=1, verbose=0, callbacks=callbacks)
        if variant == "evaluate":
            made.model.evaluate(*_arrays(), batch_size=BATCH, verbose=0)


def _by_hand(variant: str, width: int, directory: Path) -> None:
    import keras

    from . import memory_by_hand

    make: Callable[..., Any] = getattr(memory_by_hand, keras.config.backend())
    train, evaluate, save = make(width)
    for _ in range(3):
        for x, y in batches():
            train(x, y)
        if variant == "evaluate":
            for x, y in batches():
                evaluate(x, y)
        if variant == "checkpoint":
            save(directory / "state")
