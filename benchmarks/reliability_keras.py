"""What a user of Keras has today, under the same faults: `BackupAndRestore` and `ModelCheckpoint`.

A program that forks, as `tests/conformance/drill.py` is: see `forks` there.
"""

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

BATCH, BATCHES, EPOCHS = 16, 13, 3


def model() -> keras.Model:
    """The drill's model, in the form that `fit` can train."""
    built = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(3),
        ]
    )
    schedule = keras.optimizers.schedules.CosineDecay(1e-2, 60)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    built.compile(keras.optimizers.Adam(schedule, use_ema=True), loss, metrics=["accuracy"])
    return built


class Tells(keras.callbacks.Callback):
    """Prints the number of each batch, and takes some time for it."""

    def __init__(self, pace: float) -> None:
        super().__init__()
        self._pace, self._step = pace, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._step += 1
        print(f"batch {self._step}", flush=True)
        time.sleep(self._pace)


def fit(directory: Path, pace: float, every: int) -> dict[str, Any]:
    """Train with `BackupAndRestore`, which saves at every so many batches; tell the outcome."""
    trained = _trained(keras.callbacks.BackupAndRestore(directory, save_freq=every), pace)
    digest = hashlib.sha256()
    for value in [*trained.get_weights(), *map(np.asarray, trained.optimizer.variables)]:
        digest.update(value.tobytes())
    return {"arrays": digest.hexdigest()[:16], "step": int(trained.optimizer.iterations)}


def saves(file: Path) -> dict[str, Any]:
    """Train with `ModelCheckpoint`, which saves after every batch."""
    _trained(keras.callbacks.ModelCheckpoint(file, save_freq=1), 0.0)
    return {}


def loads(file: Path) -> dict[str, Any]:
    """Say whether a saved model can be loaded, and why not."""
    try:
        keras.models.load_model(file)
    except Exception as error:  # what comes depends on where the file ends
        return {"loads": False, "why": f"{type(error).__name__}: {error}"[:200]}
    return {"loads": True}


def _trained(callback: Any, pace: float) -> keras.Model:
    keras.utils.set_random_seed(3)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH * BATCHES, 8)).astype("float32")
    y = (x[:, 0] > 0).astype("int32") + (x[:, 1] > 0)
    trained = model()
    callbacks = [callback, Tells(pace)]
    trained.fit(x, y, batch_size=BATCH, epochs=EPOCHS, callbacks=callbacks, verbose=0)
    return trained


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "conformance"))
    from forks import serve

    if keras.config.backend() == "torch":
        sys.modules["torch"].set_num_threads(1)
    arguments = serve()
    if arguments is not None:  # this is a forked process
        does = {"fit": fit, "saves": saves, "loads": loads}[arguments.pop("what")]
        place = Path(arguments.pop("place"))
        print(json.dumps(does(place, **arguments)), flush=True)
