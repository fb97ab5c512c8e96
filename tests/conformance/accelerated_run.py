"""A run in a process of its own, for `test_accelerator.py`: bits, resume, device assert, memory.

    python accelerated_run.py DIRECTORY EPOCHS [stop|wrong|memory|nondeterministic]…

Prints a digest of all variables, or what the words behind EPOCHS ask for.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import treadle

WORDS = sys.argv[3:]
treadle.setup(seed=0, deterministic="nondeterministic" not in WORDS)

import keras  # noqa: E402
import numpy as np  # noqa: E402

WORD_COUNT, CLASSES, ROWS, BATCHES = 50, 5, 16, 12


def model() -> Any:
    """Return a model whose gradients are sums that a GPU adds in a varying order."""
    words = keras.Input((24,), dtype="int32")
    x = keras.layers.Embedding(WORD_COUNT, 16)(words)
    x = x + keras.layers.MultiHeadAttention(2, 8)(x, x)
    x = keras.layers.Conv1D(16, 3, padding="same", activation="relu")(x)
    x = keras.layers.Dropout(0.2)(keras.layers.GlobalAveragePooling1D()(x))
    return keras.Model(words, keras.layers.Dense(CLASSES)(x))


def bytes_in_use() -> int:
    """Return the bytes that the framework holds on the device."""
    backend = keras.config.backend()
    if backend == "torch":
        import torch

        return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    if backend == "jax":
        import jax

        return (jax.devices()[0].memory_stats() or {}).get("bytes_in_use", 0)
    import tensorflow as tf

    found = tf.config.list_logical_devices("GPU")
    return tf.config.experimental.get_memory_info("GPU:0")["current"] if found else 0


def main() -> None:
    directory, epochs = Path(sys.argv[1]), int(sys.argv[2])
    rng = np.random.default_rng(0)
    words = rng.integers(0, WORD_COUNT, (ROWS * BATCHES, 24)).astype("int32")
    labels = rng.integers(0, CLASSES, ROWS * BATCHES).astype("int32")
    if "wrong" in WORDS:
        words[8 * ROWS, 3] = WORD_COUNT + 7  # not in the first batch, which is checked
    data = treadle.data.from_arrays(words, labels, batch_size=ROWS, shuffle="wrong" not in WORDS)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    task = treadle.Supervised(model(), loss, keras.optimizers.Adam(0.01))
    used: list[int] = []
    hooks: list[Any] = [treadle.hooks.Checkpoint(every="3 steps")]
    if "stop" in WORDS:
        hooks.append(treadle.at("7 steps", lambda loop: sys.exit(0)))
    if "memory" in WORDS:
        hooks.append(treadle.every("1 epoch", lambda loop: used.append(bytes_in_use())))
    with treadle.Loop(task, directory, hooks, console=False) as loop:
        try:
            loop.fit(data, epochs=epochs)
        except Exception as error:
            print(json.dumps({"error": str(error), "notes": error.__notes__}))
            sys.exit(1)
        arrays = loop.state.arrays()
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(x).tobytes() for x in arrays.values()))
    print(json.dumps({"bits": digest.hexdigest(), "plan": loop.plan, "bytes": used}))


if __name__ == "__main__":
    main()
