"""How fast is training on a GPU, and how much of its memory does it take?

Treadle in windows, one step at a time, with deterministic algorithms, and on PyTorch compiled by
Inductor and in a CUDA graph; next to Keras' `fit` and loops written by hand. Each has a process of
its own. Results are kept in a file, and those that are in it are not measured again: if the time of
a call is over, the next call measures the rest. Remove the file to measure again.

    scripts/bench accelerator --write
    python -m benchmarks accelerator --backend jax --workload mlp --seconds 500

The second form runs in the environment of a machine that has the frameworks for its GPU already.
Without a GPU, `--small` shows that everything runs; its results have a file and a section of the
page of their own.
"""

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any

import numpy as np

from . import DOCS, environment_of, parser_of, write_section

WORKLOADS = {
    "mlp": "784-512-512-10, batch 128, float32",
    "resnet18": "ResNet-18 for 32 × 32 images, batch 256, bfloat16",
    "transformer": "width 512, 6 blocks, 256 tokens, batch 32, bfloat16",
}
TINY = {
    "mlp": "784-64-64-10, batch 32, float32",
    "resnet18": "the same layers with 4 to 32 channels, batch 4, bfloat16",
    "transformer": "width 32, 2 blocks, 16 tokens, batch 4, bfloat16",
}
COMMON = (
    "treadle, windows",
    "treadle, windows, deterministic",
    "treadle, each loss read",
    "fit",
)
OTHERS = {
    "jax": ("jitted step", "jitted step, each loss read", "raw lax.scan"),
    "torch": (
        *("treadle, inductor", "treadle, cuda-graph", "torch.nn", "torch.nn, each loss read"),
        "torch.nn, torch.compile",
    ),
    "tensorflow": (),
}
LONGEST = 240  # seconds for one contestant, most of which PyTorch's compiler takes
RESULTS = Path("build/accelerator.json")
RESULTS_SMALL = Path("build/accelerator-small.json")
PAGE = DOCS / "accelerators.md"

Epoch = Callable[[], float]
"""Trains for one epoch, and returns the loss of its last step."""

Results = dict[str, dict[str, Any]]
"""What was measured, by backend, workload and contestant, joined by `/`."""


def main(arguments: list[str]) -> None:
    """Measure what is missing, and print the tables."""
    parser = parser_of("accelerator", __doc__, 5, PAGE.name)
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="only this one")
    parser.add_argument("--contestant", action="append", help="only this one")
    parser.add_argument("--seconds", type=float, default=570, help="time of this call (570)")
    parser.add_argument(
        "--results",
        type=Path,
        help=f"file of the results ({RESULTS}, with --small {RESULTS_SMALL})",
    )
    parser.add_argument("--small", action="store_true", help="tiny networks, for a CPU")
    chosen = parser.parse_args(arguments)
    chosen.results = chosen.results or (RESULTS_SMALL if chosen.small else RESULTS)
    if chosen.child:
        found = measured(chosen.workload[0], chosen.contestant[0], chosen.rounds, chosen.small)
        print(json.dumps(found))
        return
    kept: Results = json.loads(chosen.results.read_text()) if chosen.results.exists() else {}
    ends = time.monotonic() + chosen.seconds
    for key in _keys(chosen):
        left = ends - time.monotonic()
        if key in kept or left <= 0:
            continue
        found = _in_process(key, chosen.rounds, chosen.small, min(left, LONGEST))
        if found is None:
            continue  # there was too little time for it
        kept[key] = found
        print(f"{key}: {found.get('failed') or _cells(found)}", flush=True)
        chosen.results.parent.mkdir(parents=True, exist_ok=True)
        chosen.results.write_text(json.dumps(kept, indent=1))
    print("\n".join(["", *tables(kept, chosen.small)]))
    missing = [key for key in _keys(chosen) if key not in kept]
    if missing:
        print(f"\nnot measured yet: {', '.join(missing)}\nrun the same command again")
    if chosen.write:
        command = f"bench accelerator{' --small' if chosen.small else ''} --write"
        write_section(PAGE, command, tables(kept, chosen.small))


def _keys(chosen: Any) -> list[str]:
    return [
        f"{backend}/{workload}/{name}"
        for backend in chosen.backend or OTHERS
        for workload in chosen.workload or WORKLOADS
        for name in (*COMMON, *OTHERS[backend])
        if not chosen.contestant or name in chosen.contestant
    ]


def _in_process(key: str, rounds: int, small: bool, seconds: float) -> dict[str, Any] | None:
    """Measure a contestant; None if it took as long as the call had left, and not its own limit."""
    backend, workload, name = key.split("/")
    environment = environment_of(backend) | {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    }
    command = [sys.executable, "-m", "benchmarks", "accelerator", "--child"]
    command += ["--workload", workload, "--contestant", name, "--rounds", str(rounds)]
    command += ["--small"] if small else []
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done in {LONGEST} s"} if seconds >= LONGEST else None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"failed": lines[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def measured(workload: str, name: str, rounds: int, small: bool) -> dict[str, Any]:
    """Return the times of a contestant on the active backend, and its peak of memory."""
    import treadle

    precision = "mixed_bfloat16" if workload in ("resnet18", "transformer") else "float32"
    treadle.setup(seed=0, precision=precision, deterministic=name.endswith("deterministic"))

    job = Job.of(workload, small)
    started = time.perf_counter()
    epoch = contestants()[name](job)
    epoch()
    first = time.perf_counter() - started
    epoch()
    times: list[float] = []
    for _ in range(rounds):
        started = time.perf_counter()
        loss = epoch()
        times.append((time.perf_counter() - started) / job.size.steps * 1e6)
    peak = peak_bytes()
    return {
        "per_step": sorted(times),
        "first": first,
        "peak": None if peak is None else peak / 2**20,
        "loss": float(loss),
        "device": device(),
    }


def tables(kept: Results, small: bool) -> list[str]:
    """Return a table for each backend and workload, with times relative to windows of Treadle."""
    lines: list[str] = []
    for backend in OTHERS:
        for workload, about in (TINY if small else WORKLOADS).items():
            prefix = f"{backend}/{workload}/"
            found = {key.removeprefix(prefix): x for key, x in kept.items() if prefix in key}
            if not found:
                continue
            devices = sorted({x["device"] for x in found.values() if "device" in x})
            lines += [f"**{backend}, {workload}** ({about}) on {', '.join(devices) or '?'}:", ""]
            lines += ["| | µs a step (quartiles) | times Treadle's windows | peak MiB | start, s |"]
            lines += ["| --- | --- | --- | --- | --- |"]
            base = found.get(COMMON[0], {}).get("per_step")
            for name in (*COMMON, *OTHERS[backend]):
                if name in found:
                    lines.append(f"| {name} | {_cells(found[name], base)} |")
            lines.append("")
    return lines


def _cells(found: dict[str, Any], base: list[float] | None = None) -> str:
    if "failed" in found:
        return f"failed: {found['failed']} | | |".replace("\n", " ")
    times = found["per_step"]
    low, median, high = quantiles(times, n=4) if len(times) > 1 else times * 3
    ratio = "" if base is None else f"{median / quantiles(base * 2, n=4)[1]:.2f}"
    peak = "" if found["peak"] is None else f"{found['peak']:,.0f}"
    return f"{median:,.0f} ({low:,.0f} to {high:,.0f}) | {ratio} | {peak} | {found['first']:.0f}"


# The workloads, with Keras' layers, and who runs them on every backend


@dataclass(frozen=True)
class Size:
    """The size of a workload.

    Attributes:
        batch: Examples in a batch.
        steps: Steps in an epoch.
        width: Units of a hidden layer, or channels of the first one.
        depth: Blocks of a transformer.
        tokens: The length of a sequence.
        words: The number of different tokens.
    """

    batch: int
    steps: int
    width: int
    depth: int = 0
    tokens: int = 0
    words: int = 0


SIZES = {
    "mlp": Size(128, 400, 512),
    "resnet18": Size(256, 60, 64),
    "transformer": Size(32, 30, 512, 6, 256, 8192),
}
SMALL = {
    "mlp": Size(32, 100, 64),
    # Not narrower: on CPUs, oneDNN 3.12 writes past the end of its memory in the gradient of a 1x1
    # convolution of stride 2 with fewer than 8 channels, "channels last".
    "resnet18": Size(4, 20, 8),
    "transformer": Size(4, 40, 32, 2, 16, 100),
}
HALF = ("resnet18", "transformer")  # these compute in bfloat16
CLASSES = 10


@dataclass(frozen=True)
class Job:
    """A workload of one size, with its data."""

    name: str
    size: Size
    arrays: tuple[Any, Any]

    @classmethod
    def of(cls, name: str, small: bool) -> "Job":
        """Return a workload with random data."""
        size, rng = (SMALL if small else SIZES)[name], np.random.default_rng(0)
        rows = size.batch * size.steps
        if name == "transformer":
            tokens = rng.integers(0, size.words, (rows, size.tokens)).astype("int32")
            return cls(name, size, (tokens, np.roll(tokens, -1, axis=1)))
        shape = (784,) if name == "mlp" else (32, 32, 3)
        inputs = rng.random((rows, *shape), dtype="float32")
        return cls(name, size, (inputs, rng.integers(0, CLASSES, rows).astype("int32")))

    def order(self) -> Any:
        """Return the shuffled rows of each batch of an epoch."""
        rows = np.random.default_rng(0).permutation(len(self.arrays[0]))
        return rows.reshape(self.size.steps, self.size.batch)


def _mlp(size: Size) -> Any:
    import keras
    from keras import layers

    hidden = [layers.Dense(size.width, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((784,)), *hidden, layers.Dense(CLASSES)])


def _resnet18(size: Size) -> Any:
    import keras
    from keras import layers

    def convolution(x: Any, width: int, stride: int, kernel: int = 3) -> Any:
        return layers.Conv2D(width, kernel, stride, padding="same", use_bias=False)(x)

    def activated(x: Any) -> Any:
        return layers.ReLU()(layers.BatchNormalization()(x))

    inputs = keras.Input((32, 32, 3))
    x = convolution(inputs, size.width, 1)
    for stage in range(4):
        width = size.width * 2**stage
        for stride in (2 if stage else 1, 1):
            y = activated(x)
            skipped = convolution(y, width, stride, 1) if x.shape[-1] != width else x
            y = convolution(activated(convolution(y, width, stride)), width, 1)
            x = layers.Add()([y, skipped])
    x = layers.GlobalAveragePooling2D()(activated(x))
    return keras.Model(inputs, layers.Dense(CLASSES, dtype="float32")(x))


def _transformer(size: Size) -> Any:
    import keras
    from keras import layers

    from .workloads import Positions

    inputs = keras.Input((size.tokens,), dtype="int32")
    x = Positions()(layers.Embedding(size.words, size.width)(inputs))
    heads = max(1, size.width // 64)
    for _ in range(size.depth):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(heads, size.width // heads)(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        x = x + layers.Dense(size.width)(layers.Dense(4 * size.width, activation="gelu")(y))
    head = layers.Dense(size.words, dtype="float32")
    return keras.Model(inputs, head(layers.LayerNormalization()(x)))


MODELS = {"mlp": _mlp, "resnet18": _resnet18, "transformer": _transformer}


def made(job: Job) -> tuple[Any, Any, Any]:
    """Return a new model, its loss and its optimizer."""
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return MODELS[job.name](job.size), loss, keras.optimizers.Adam(1e-3)


def treadle_loop(job: Job, every: str = "auto", compiler: Any = "auto") -> Epoch:
    """Return an epoch of a loop without a run directory."""
    import treadle

    loop = treadle.Loop(
        treadle.Supervised(*made(job)), options=treadle.Options(compiler=compiler), console=False
    )
    train = treadle.data.from_arrays(*job.arrays, batch_size=job.size.batch)
    loop.__enter__()  # one run, whose epochs are the rounds

    def epoch() -> float:
        loss = 0.0
        for logs in loop.steps(train, every=every):
            loss = logs["loss"]
        if compiler != "auto" and f", {compiler}" not in loop.plan:
            raise RuntimeError(f"the plan is {loop.plan}")
        return loss

    return epoch


def fit(job: Job) -> Epoch:
    """Return an epoch of Keras' `fit`."""
    model, loss, optimizer = made(job)
    model.compile(optimizer, loss)

    def epoch() -> float:
        history = model.fit(*job.arrays, batch_size=job.size.batch, verbose=0)
        return history.history["loss"][-1]

    return epoch


def contestants() -> dict[str, Callable[[Job], Epoch]]:
    """Return who takes part on the active backend, by name."""
    import keras

    backend = keras.config.backend()
    found: dict[str, Callable[[Job], Epoch]] = {
        "treadle, windows": treadle_loop,
        "treadle, windows, deterministic": treadle_loop,
        "treadle, each loss read": lambda job: treadle_loop(job, "1 step"),
        "fit": fit,
    }
    for compiler in ("inductor", "cuda-graph") if backend == "torch" else ():
        found[f"treadle, {compiler}"] = partial(treadle_loop, compiler=compiler)
    return found | importlib.import_module(f"benchmarks.by_hand_{backend}").ACCELERATED


def peak_bytes() -> int | None:
    """Return the most bytes that were in use on the device; None on a CPU."""
    import keras

    backend = keras.config.backend()
    if backend == "torch":
        import torch

        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    if backend == "jax":
        import jax

        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    import tensorflow as tf

    found = tf.config.list_logical_devices("GPU")
    return tf.config.experimental.get_memory_info("GPU:0")["peak"] if found else None


def device() -> str:
    """Return the name of the device, or that of the CPU."""
    import keras

    backend = keras.config.backend()
    if backend == "torch":
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    if backend == "jax":
        import jax

        return jax.devices()[0].device_kind
    import tensorflow as tf

    found = tf.config.list_physical_devices("GPU")
    return tf.config.experimental.get_device_details(found[0])["device_name"] if found else "cpu"
