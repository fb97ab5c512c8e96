"""The workloads of `scripts/bench accelerator`, with Keras' layers, and who runs them anywhere."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import treadle

Epoch = Callable[[], float]
"""Trains for one epoch, and returns the loss of its last step."""


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
    "resnet18": Size(4, 20, 4),
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


class Places(layers.Layer):
    """Adds a learned vector to each place of a sequence."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=shape[1:], initializer="uniform")

    def call(self, x: Any) -> Any:
        return x + ops.cast(self.table, x.dtype)


def _mlp(size: Size) -> Any:
    hidden = [layers.Dense(size.width, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((784,)), *hidden, layers.Dense(CLASSES)])


def _resnet18(size: Size) -> Any:
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
    inputs = keras.Input((size.tokens,), dtype="int32")
    x = Places()(layers.Embedding(size.words, size.width)(inputs))
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
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return MODELS[job.name](job.size), loss, keras.optimizers.Adam(1e-3)


def treadle_loop(job: Job, every: str = "auto", compiler: Any = "auto") -> Epoch:
    """Return an epoch of a loop without a run directory."""
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
    found: dict[str, Callable[[Job], Epoch]] = {
        "treadle, windows": treadle_loop,
        "treadle, windows, deterministic": treadle_loop,
        "treadle, each loss read": lambda job: treadle_loop(job, "1 step"),
        "fit": fit,
    }
    if keras.config.backend() == "jax":
        from .accelerated_jax import JAX

        found |= JAX
    if keras.config.backend() == "torch":
        from .accelerated_torch import TORCH

        for compiler in ("inductor", "cuda-graph"):
            found[f"treadle, {compiler}"] = lambda job, which=compiler: treadle_loop(
                job, compiler=which
            )
        found |= TORCH
    return found


def peak_bytes() -> int | None:
    """Return the most bytes that were in use on the device; None on a CPU."""
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
