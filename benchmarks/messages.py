"""What a step of several processes sends, and how far it scales, `scripts/bench messages`.

Counted: programs train in two and in three processes, each with the same number of rows. Messages
and bytes are those of process 0 in one step: calls of the sum on PyTorch, operations of the traced
graph on TensorFlow, and of the compiled program on JAX. The time of a step is that of one process
with its rows, on one core.

Calculated: `Network.seconds` gives the time of these messages, for Treadle and for
`DistributedDataParallel`, and `efficiency` what remains of the speed of one process.
"""

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import accelerator
from benchmarks.scale import CLASSES, LAYERS, ONE_THREAD, UNITS

BACKENDS = ("torch", "jax", "tensorflow")
SIZES = (2, 3)
STEPS, ROUNDS = 16, 5
FASTER = 100  # a device, than one core

# Rows of a process in a batch.
LAYERS_ALONE = f"{LAYERS} layers of {UNITS:,} units"
RESNET = "ResNet-18 of 16 to 128 channels"
ROWS = {
    LAYERS_ALONE: 64,
    RESNET: 8,
    "char-lm": 16,
    "mnist-gan": 64,
    "self-supervised": 64,
}

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # of DistributedDataParallel, in bytes
BACKWARD = 2 / 3  # the part of a step that is its backward pass: two products for one

_TYPES = {"pred": 1, "s8": 1, "u8": 1, "f16": 2, "bf16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8}
_SENDS = re.compile(
    r"= (.+?) (?:all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)\("
)


@dataclass(frozen=True)
class Network:
    """A network between processes, each of which has a link of its own.

    Attributes:
        name: What tables call it.
        latency: The seconds that a message of no bytes takes.
        bandwidth: Bytes a second, in each direction.
    """

    name: str
    latency: float
    bandwidth: float

    def seconds(self, size: float, processes: int) -> float:
        """Return the time of a sum of so many bytes: recursive doubling, or halving and doubling.

        Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
        MPICH", 2005. Doubling exchanges all bytes log2(N) times; halving and doubling takes twice
        as many messages, with 2 (N - 1) / N times the bytes together.
        """
        steps = math.log2(processes)
        small = steps * (self.latency + size / self.bandwidth)
        rest = (processes - 1) / processes * size / self.bandwidth
        return min(small, 2 * (steps * self.latency + rest))


NETWORKS = (Network("10 Gb Ethernet", 50e-6, 1.25e9), Network("400 Gb InfiniBand", 5e-6, 50e9))


@dataclass(frozen=True)
class Counted:
    """What was counted of a program on one backend.

    Attributes:
        sizes: The bytes of each message in a step of two processes, and in one of three.
        seconds: The time of a step in one process, on one core.
        gradients: For each model that `DistributedDataParallel` would wrap, the bytes of the
            gradients, in the order of the weights.
        normalizations: How many layers compute moments of the batch.
    """

    sizes: tuple[Sequence[int], Sequence[int]]
    seconds: float
    gradients: Sequence[Sequence[int]]
    normalizations: int

    def growth(self) -> tuple[float, float]:
        """Return the bytes that all processes need, and those that each further one adds."""
        few, more = map(sum, self.sizes)
        return few - SIZES[0] * (more - few), more - few

    def exposed(self, network: Network, processes: int) -> float:
        """Return the seconds for which a step waits for its messages."""
        waits = 0.0
        for few, more in zip(*self.sizes, strict=True):
            waits += network.seconds(few + (processes - SIZES[0]) * (more - few), processes)
        return waits

    def exposed_of_ddp(self, network: Network, processes: int, faster: float = 1.0) -> float:
        """Return the seconds for which a step of DDP waits for its messages.

        It sends buckets during the backward pass of each model, and waits for the last one. Each
        `SyncBatchNorm` gathers moments and sums their gradients. Rows of all processes are gathered
        in one operation, and their gradients scattered in another: together half of two sums.
        """
        waits = 2 * self.normalizations * math.log2(processes) * network.latency
        if growing := self.growth()[1]:
            waits += network.seconds(growing * processes / 2, processes)
        hidden = BACKWARD * self.seconds / faster / len(self.gradients)
        for sizes in self.gradients:
            spent = [network.seconds(size, processes) for size in buckets(sizes)]
            waits += max(spent[-1], sum(spent) - hidden)
        return waits


def buckets(sizes: Sequence[int]) -> list[int]:
    """Return the bytes of the buckets of `DistributedDataParallel`, in the order of sending."""
    found, size = list[int](), 0
    for each in reversed(sizes):
        size += each
        if size >= (BUCKET if found else FIRST_BUCKET):
            found.append(size)
            size = 0
    return [*found, size] if size else found


def efficiency(seconds: float, exposed: float) -> float:
    """Return the speed of a process among others, as a share of that of one process alone."""
    return seconds / (seconds + exposed)


def main(arguments: list[str]) -> None:
    """Count in processes of their own, and print the tables."""
    parser = argparse.ArgumentParser(prog="scripts/bench messages", description=__doc__)
    parser.add_argument("--backend", choices=BACKENDS, action="append")
    chosen = parser.parse_args(arguments).backend or BACKENDS
    found = {backend: counted(backend) for backend in chosen}
    print(f"| program, rows of a process | {' | '.join(f'{b}: messages, bytes' for b in found)} |")
    print("| --- |" + " --- |" * len(found))
    for name, rows in ROWS.items():
        cells = [_sent(found[backend][name]) for backend in found]
        print(f"| {name}, {rows} | {' | '.join(cells)} |")
    for backend in [name for name in found if name != "jax"][:1]:  # XLA's messages vary with N
        for network in NETWORKS:
            print(f"\n{network.name}; {backend}: waiting with 8, 64, 1,024 processes\n")
            for line in table(found[backend], network):
                print(line)


def table(found: dict[str, Counted], network: Network) -> list[str]:
    """Return the lines of a table with what is calculated for a network."""
    sizes = (8, 64, 1024)
    lines = [
        "| program | a step alone | Treadle waits | DDP waits | efficiency, this core | "
        f"DDP | a device {FASTER} times as fast | DDP |",
        "| --- |" + " --- |" * 7,
    ]
    for name, one in found.items():
        waits = [one.exposed(network, n) for n in sizes]
        ddp = [one.exposed_of_ddp(network, n) for n in sizes]
        cells = [
            f"{1e3 * one.seconds:.1f} ms",
            *(_listed([1e3 * x for x in found], ".2g") + " ms" for found in (waits, ddp)),
        ]
        for faster in (1, FASTER):
            ddp = [one.exposed_of_ddp(network, n, faster) for n in sizes]
            for exposed in (waits, ddp):
                alone = one.seconds / faster
                cells.append(_listed([efficiency(alone, x) for x in exposed], ".2f"))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _listed(values: list[float], form: str) -> str:
    return ", ".join(f"{value:{form}}" for value in values)


def _sent(one: Counted) -> str:
    few, more = one.sizes
    if len(few) != len(more):  # XLA chooses others
        return f"{len(few)}, {sum(few):,} with two; {len(more)}, {sum(more):,} with three"
    size, growing = one.growth()
    return f"{len(few)}, {size:,}{f' + {growing:,} N' if growing else ''}"


def counted(backend: str) -> dict[str, Counted]:
    """Return what the programs send on a backend."""
    alone, few, more = (_run(backend, size) for size in (1, *SIZES))
    return {
        name: Counted(
            (few[name]["sizes"], more[name]["sizes"]),
            one["seconds"],
            one["gradients"],
            one["normalizations"],
        )
        for name, one in alone.items()
    }


def _run(backend: str, size: int) -> dict[str, dict[str, Any]]:
    launch = ["-m", "treadle", "launch", "--workers", str(size), "--"] if size > 1 else []
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": path}
    with TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        command = [sys.executable, *launch, __file__, backend, str(file)]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        return json.loads(file.read_text())


# What a process does


def member(backend: str, file: Path) -> None:
    """Train the programs; process 0 writes what it has counted."""
    import treadle

    treadle.setup(seed=0, backend=backend)
    import keras

    from treadle.core.processes import process_group

    group = process_group()
    distribution = keras.distribution.distribution()
    sent = {"torch": _of_torch, "jax": _of_jax, "tensorflow": _of_tensorflow}[backend]()
    found: dict[str, dict[str, Any]] = {}
    for name, rows in ROWS.items():
        keras.backend.clear_session()
        if distribution is not None:
            keras.distribution.set_distribution(distribution)
        treadle.setup(seed=0)
        task, train = _program(name, rows * group.size)
        spent = list[float]()
        sent.clear()
        # One program for a step, so that all that it sends is of one step.
        options = treadle.Options(window=1)
        with treadle.Loop(task, hooks=(), console=False, options=options) as loop:
            for _ in range(ROUNDS if group.size == 1 else 2):
                if backend == "torch":
                    sent.clear()  # what the last round has sent counts
                started = time.perf_counter()
                loop.fit(train, epochs=1)
                spent.append((time.perf_counter() - started) / STEPS)
        each = len(sent) // STEPS if backend == "torch" else len(sent)
        assert [*sent] == sent[:each] * (STEPS if backend == "torch" else 1)  # steps are equal
        found[name] = {
            "sizes": sent[:each],
            "seconds": statistics.median(spent[1:]),
            **_about(task),
        }
    if group.rank == 0:
        file.write_text(json.dumps(found))


def _program(name: str, examples: int) -> tuple[Any, Any]:
    """Return a task and its batches of an epoch."""
    import keras
    import numpy as np

    from treadle import Supervised, data, recipes
    from treadle.recipes import resolve

    if name in (LAYERS_ALONE, RESNET):
        if name == RESNET:
            model = accelerator.MODELS["resnet18"](accelerator.Size(0, 0, 16))
        else:
            hidden = [keras.layers.Dense(UNITS, "relu") for _ in range(LAYERS)]
            model = keras.Sequential([keras.Input((UNITS,)), *hidden, keras.layers.Dense(CLASSES)])
        loss = keras.losses.SparseCategoricalCrossentropy(True)
        rng = np.random.default_rng(0)
        x = rng.normal(size=(examples * STEPS, *model.input_shape[1:])).astype("float32")
        y = rng.integers(CLASSES, size=len(x)).astype("int32")
        task = Supervised(model, loss, keras.optimizers.SGD(0.01))
        return task, data.from_arrays(x, y, batch_size=examples)
    recipe = resolve(name)
    made = recipes.make(recipe, recipe.settings((f"batch_size={examples}",)))
    return made.task, data.limited(made.datasets().train, STEPS)


def _about(task: Any) -> dict[str, Any]:
    import keras

    models = [value for value in vars(task).values() if isinstance(value, keras.Model)]
    optimizers = [x for x in vars(task).values() if isinstance(x, keras.optimizers.Optimizer)]
    sizes = [[4 * math.prod(v.shape) for v in x.trainable_variables] for x in models]  # float32
    if len(optimizers) == 1:  # DDP wraps them together
        sizes = [[*chain(*sizes)]]
    kinds = [layer for model in models for layer in model._flatten_layers()]
    return {
        "gradients": sizes,
        "normalizations": sum(isinstance(x, keras.layers.BatchNormalization) for x in kinds),
    }


# How messages are counted: each returns a list with the bytes of each message


def _of_torch() -> list[int]:
    from treadle.distribute.torch.backend import TorchGroup

    sent, original = list[int](), TorchGroup.sum

    def counting(self: Any, x: Any) -> Any:
        sent.append(x.numel() * x.element_size())
        return original(self, x)

    TorchGroup.sum = counting  # type: ignore[method-assign]
    return sent


def _of_tensorflow() -> list[int]:
    """Of the last graph: the operations with a key of their own."""
    import numpy as np

    from treadle.distribute.tensorflow.backend import TensorFlowGroup

    sent, begin, original = list[int](), TensorFlowGroup.begin_step, TensorFlowGroup.sum

    def beginning(self: Any) -> None:
        sent.clear()
        begin(self)

    def counting(self: Any, x: Any) -> Any:
        sent.append(int(np.prod(x.shape)) * x.dtype.size)
        return original(self, x)

    TensorFlowGroup.begin_step = beginning  # type: ignore[method-assign]
    TensorFlowGroup.sum = counting  # type: ignore[method-assign]
    return sent


def _of_jax() -> list[int]:
    """Of the compiled program of a step."""
    import jax

    sent, original = list[int](), jax.stages.Lowered.compile

    def compiling(self: Any, *args: Any, **kwargs: Any) -> Any:
        program = original(self, *args, **kwargs)
        found = [_bytes_of(line) for line in (program.as_text() or "").splitlines()]
        sent[:] = [size for size in found if size]
        return program

    jax.stages.Lowered.compile = compiling  # type: ignore[method-assign]
    return sent


def _bytes_of(line: str) -> int:
    """Return the bytes that an operation of a compiled program sends; 0 if it sends none."""
    found = _SENDS.search(line)
    if not found:
        return 0
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", found[1])
    return sum(
        _TYPES[kind] * math.prod(int(n) for n in shape.split(",") if n) for kind, shape in arrays
    )


if __name__ == "__main__":
    member(sys.argv[1], Path(sys.argv[2]))
