"""How much memory do training, evaluation and checkpoints take?

The peak memory (VmHWM) of a process that trains a network whose state (weights and the slots of
Adam) is 1 GB, for a few steps and in three variants: training alone, with an evaluation, and with
checkpoints. Compared with `fit` and with a loop by hand. Each contestant has a process of its own.

    scripts/bench memory --backend jax --variant train
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
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from . import BACKENDS, DOCS, environment_of, in_process, keep, kept, parser_of, write_section

VARIANTS = ("train", "evaluate", "checkpoint")
TREADLE, FIT, BY_HAND = "treadle", "`fit`", "loop by hand"
CONTESTANTS = (TREADLE, FIT, BY_HAND)
WIDTH, HIDDEN, INPUTS, BATCH, STEPS = 4096, 5, 64, 32, 4
Peaks = dict[str, dict[str, float]]
Parts = tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any], Callable[[Path], None]]
"""A step, an evaluation, and a save."""


def main(arguments: list[str]) -> None:
    """Measure what was chosen, and print a table."""
    parser = parser_of("memory", __doc__, page="memory.md")
    parser.add_argument("--variant", choices=VARIANTS, action="append", help="only this variant")
    parser.add_argument("--contestant", choices=CONTESTANTS, action="append", help="only this one")
    parser.add_argument("--width", type=int, default=WIDTH, help=f"of the layers ({WIDTH})")
    chosen = parser.parse_args(arguments)
    if chosen.child:
        _run(chosen.contestant[-1], chosen.variant[-1], chosen.width)
        return
    results: Peaks = kept("memory")
    print("\n".join(_head()))
    for backend in chosen.backend or BACKENDS:
        for variant in chosen.variant or VARIANTS:
            peaks = results.setdefault(f"{variant} {backend}", {})
            for name in chosen.contestant or CONTESTANTS:
                options = ["--variant", variant, "--contestant", name]
                options += ["--width", str(chosen.width)]
                peaks[name] = in_process("memory", backend, *options)
                print(f"{variant} {backend} {name}: {peaks[name]:.0f} MiB", flush=True)
    for key, peaks in results.items():
        print("\n".join(_rows(*key.split(), peaks)))
    if chosen.write:
        keep("memory", results)
        write_section(DOCS / "memory.md", "bench memory --write", page(results))


def page(results: Peaks) -> list[str]:
    """Return the table of `docs/memory.md`."""
    lines = _head()
    for key in (f"{variant} {backend}" for backend in BACKENDS for variant in VARIANTS):
        lines += _rows(*key.split(), results[key]) if key in results else []
    return lines


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
    print(memory_of_process("VmHWM"))


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
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    made.model.compile(optimizer=made.optimizer, loss=made.loss, metrics=[accuracy])
    callbacks = []
    if variant == "checkpoint":
        callbacks.append(keras.callbacks.ModelCheckpoint(directory / "model.keras"))
    for _ in range(3):
        made.model.fit(*_arrays(), batch_size=BATCH, epochs=1, verbose=0, callbacks=callbacks)
        if variant == "evaluate":
            made.model.evaluate(*_arrays(), batch_size=BATCH, verbose=0)


def _by_hand(variant: str, width: int, directory: Path) -> None:
    import keras

    by_hand = importlib.import_module(f"benchmarks.by_hand_{keras.config.backend()}")
    train, evaluate, save = by_hand.memory_parts(width)
    for _ in range(3):
        for x, y in batches():
            train(x, y)
        if variant == "evaluate":
            for x, y in batches():
                evaluate(x, y)
        if variant == "checkpoint":
            save(directory / "state")


def remat(arguments: list[str]) -> None:
    """What memory does gradient checkpointing save? Six blocks of `char-lm`, with and without it.

    Each row is a process of its own, whose allocator gives large blocks back at once. Linux only.
    """
    parser = parser_of("remat", remat.__doc__)
    parser.add_argument("--execution", choices=("auto", "eager"), help=argparse.SUPPRESS)
    parser.add_argument("--remat", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.child:
        print(json.dumps(_checkpointing(chosen.execution, chosen.remat)))
        return
    print("| backend | plan | checkpointing | peak of the first two steps, MiB | of later ones |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    for backend in chosen.backend or BACKENDS:
        for execution in ("auto", "eager") if backend == "torch" else ("auto",):
            for option in ((), ("--remat",)):
                first, later = in_process(
                    *("remat", backend, "--execution", execution, *option),
                    MALLOC_MMAP_THRESHOLD_="100000",
                    MALLOC_TRIM_THRESHOLD_="100000",
                )
                plan = "eager" if execution == "eager" else "compiled"
                row = f"| {backend} | {plan} | {'yes' if option else ''} | {first:,.0f} |"
                print(f"{row} {later:,.0f} |", flush=True)


def _checkpointing(execution: Any, remat: bool) -> tuple[float, float]:
    """Train a few steps; return the peak of the first ones and of later ones, in MiB."""
    import treadle
    from treadle.recipes.char_lm import CharacterModel

    task = CharacterModel(depth=6, batch_size=128, accumulation_steps=1, remat=remat)
    options = treadle.Options(execution=execution)
    with treadle.Loop(task, console=False, options=options) as loop:
        train = task.datasets().train
        loop.fit(train, steps=2)
        first = memory_of_process("VmHWM")
        reset_peak()
        loop.fit(train, steps=5)
        return first, memory_of_process("VmHWM")


def memory_of_process(name: str) -> float:
    """Return the MiB of this process that Linux calls so: `VmRSS`, or `VmHWM` at their peak."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def reset_peak() -> None:
    """Set the peak of this process to what it uses now."""
    Path("/proc/self/clear_refs").write_text("5")


Opener = Callable[[Path, int, Callable[[], None]], None]
FEW, MORE = 1000, 10  # the steps of the short run, and those that a resumed run still trains


def logs(arguments: list[str]) -> None:
    """What does the log of a long run cost when its directory is opened?

    A run is trained for many steps and killed, and opened in fresh processes as commands do it.
    What opening the directory of a run of 1,000 steps takes is subtracted: what is left is due to
    the log.

        scripts/bench logs [--steps 1000000] [--rounds 5] [--backend torch]
    """
    parser = parser_of("logs", logs.__doc__, 5)
    parser.add_argument("--steps", type=int, default=1_000_000, help="of the long run (1,000,000)")
    parser.add_argument("--how", choices=("train", *OPENERS), help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.child:
        print(json.dumps(_opening(OPENERS[chosen.how], chosen.directory, chosen.steps)))
        return
    backend = (chosen.backend or ["torch"])[-1]
    with TemporaryDirectory() as folder:
        places = {steps: Path(folder) / str(steps) for steps in (FEW, chosen.steps)}
        for steps, place in places.items():
            _trained_and_killed(place, steps, backend)
        size = (places[chosen.steps] / "log.jsonl").stat().st_size
        print(f"{chosen.steps:,} steps, {size / 1e6:.0f} MB; median of {chosen.rounds} (extremes)")
        print("| opened by | processor seconds | MiB |\n| --- | --- | --- |")
        for how in OPENERS:
            seconds: list[float] = []
            memory: list[float] = []
            for _ in range(chosen.rounds):
                short, long = (_opened(how, place, n, backend) for n, place in places.items())
                seconds.append(long[0] - short[0])
                memory.append(long[1] - short[1])
            print(f"| {how} | {_spread(seconds, 2)} | {_spread(memory, 0)} |", flush=True)


def opening(arguments: list[str]) -> None:
    """What does it cost to read and verify a checkpoint of 1 GB when a run is opened?

    scripts/bench opening [--rounds 3]
    """
    import hashlib

    import numpy as np

    from treadle.checkpoint import Checkpoints, SavedState
    from treadle.core.progress import Progress

    parser = parser_of("opening", opening.__doc__, 3)
    rounds = parser.parse_args(arguments).rounds
    rng = np.random.default_rng(0)
    arrays = {f"w{i}": rng.standard_normal((1024, 1024, 8), "float32") for i in range(32)}

    def processor(call: Callable[[], object]) -> list[float]:
        found: list[float] = []
        for _ in range(rounds):
            start = time.process_time()
            call()
            found.append(time.process_time() - start)
        return found

    with TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder))
        checkpoints.save(SavedState(Progress(1), arrays))
        checkpoints.wait()
        (file,) = Path(folder).glob("*/*.safetensors")
        print("| checkpoint of 1.07 GB | processor seconds |\n| --- | --- |")
        print(f"| read and verified | {_spread(processor(Checkpoints(Path(folder)).latest), 2)} |")

        def digest() -> None:
            with file.open("rb") as opened:
                hashlib.file_digest(opened, "sha256")

        print(f"| its SHA-256 alone | {_spread(processor(digest), 2)} |")


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
    code = (
        "from pathlib import Path; from benchmarks.memory import train; "
        f"train(Path({str(place)!r}), {steps}, dies=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment_of(backend))
    if done.returncode != 9:
        sys.exit(f"the run was to be killed after step {steps}, and ended with {done.returncode}")


def _opening(opener: Opener, place: Path, steps: int) -> list[float]:
    """Return the processor seconds and the MiB by which the memory grew at its peak."""
    for module in ("keras", "treadle.cli", "treadle.doctor", "treadle.loop"):
        importlib.import_module(module)
    found: list[float] = []
    reset_peak()
    before, started = memory_of_process("VmRSS"), time.process_time()

    def opened() -> None:
        found.extend((time.process_time() - started, memory_of_process("VmHWM") - before))

    opener(place, steps, opened)
    return found


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
    from treadle.hooks.log_tail import read_records

    read_records(place / "log.jsonl")
    opened()


OPENERS: dict[str, Opener] = {"resume": _resume, "replay": _replay, "runs": _runs}
