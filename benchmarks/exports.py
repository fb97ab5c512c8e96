"""Which formats does each backend export, and how close are the files to `predict`?

Each program trains a few steps, and its `predict_step` is exported in each format. A file is loaded
in its own runtime and compared with `predict`, on two batch sizes. Nothing here measures time.

    scripts/bench exports --write
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import BACKENDS, DOCS, in_process, keep, kept, parser_of, write_section

STEPS = 20


def main(arguments: list[str]) -> None:
    """Export what was chosen, and print a table."""
    parser = parser_of("exports", __doc__, page="exports.md")
    chosen = parser.parse_args(arguments)
    if chosen.child:
        print(json.dumps(_exported()))
        return
    results = kept("exports")
    for backend in chosen.backend or BACKENDS:
        results[backend] = in_process("exports", backend)
    print("\n".join(_table(results)))
    if chosen.write:
        keep("exports", results)
        write_section(DOCS / "exports.md", "bench exports --write", page(results))


def page(results: dict[str, Any]) -> list[str]:
    """Return the lines of the section of `docs/exports.md`: versions, table and messages."""
    runtimes = {name: v for found in results.values() for name, v in found["runtimes"].items()}
    named = sorted({runtime for runtime in runtimes.values() if not runtime.startswith("Keras")})
    keras = next(iter(results.values()))["keras"]
    head = f"Keras {keras}, {', '.join(named)}."
    return [head, "", *_table(results), "", *_failures(results)]


def _programs() -> dict[str, Callable[[], Any]]:
    from treadle.recipes.cifar10_cnn import Cifar10CNN
    from treadle.recipes.digits import Digits
    from treadle.recipes.mnist_gan import MnistGAN

    return {
        "`digits`": Digits,
        "`cifar10-cnn`": Cifar10CNN,
        "`mnist-gan`, generator": MnistGAN,
        "two inputs, softmax": _two_inputs(),
    }


def _two_inputs() -> Callable[[], Any]:
    """Return a class of tasks with two inputs by name, scaled pixels, and probabilities."""
    import keras
    import numpy as np
    from keras import layers, ops

    import treadle

    class TwoInputs(treadle.Task):
        def __init__(self) -> None:
            pixels, ages = keras.Input((28, 28, 1)), keras.Input((2,))
            x = layers.Conv2D(8, 3, strides=2)(pixels)
            x = layers.Flatten()(layers.ReLU()(layers.BatchNormalization()(x)))
            both = layers.Concatenate()([x, layers.Dense(8, activation="relu")(ages)])
            self.model = keras.Model([pixels, ages], layers.Dense(3)(layers.Dropout(0.2)(both)))
            self.optimizer = keras.optimizers.Adam()
            self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def train_step(self, batch: Any) -> dict[str, Any]:
            x, y = batch

            def objective() -> Any:
                return self.loss(y, self.model([x["image"] / 255, x["age"]], training=True))

            return {"loss": treadle.minimize(objective, self.model, self.optimizer)}

        def predict_step(self, batch: Any) -> dict[str, Any]:
            x, _ = batch
            logits = self.model([x["image"] / 255, x["age"]], training=False)
            return {"probabilities": ops.softmax(logits), "logits": logits}

        def datasets(self) -> Any:
            rng = np.random.default_rng(0)
            images = rng.integers(0, 255, (320, 28, 28, 1)).astype("float32")
            x = {"image": images, "age": rng.normal(size=(320, 2)).astype("float32")}
            return treadle.Datasets(
                treadle.data.from_arrays(x, rng.integers(0, 3, 320), batch_size=16)
            )

    return TwoInputs


def _exported() -> dict[str, Any]:
    """Train and export all programs on this backend; return the differences and the errors."""
    import itertools

    import keras

    import treadle
    from treadle.exporting.formats import FORMATS

    treadle.setup(seed=0)
    found: dict[str, Any] = {}
    runtimes: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for program, make in _programs().items():
            task = make()
            train = task.datasets().train
            with treadle.Loop(task, console=False) as loop:
                for _ in itertools.islice(loop.steps(train), STEPS):
                    pass
                for name, form in FORMATS.items():
                    path = Path(folder) / f"{len(found)}-{name}{form.suffix}"
                    try:
                        done = treadle.export(loop, path, name)
                    except treadle.errors.TreadleError as error:
                        refused = isinstance(error, treadle.errors.ConfigurationError)
                        kind = "refused" if refused else "failed"
                        found[f"{program} {name}"] = {kind: str(error)}
                    else:
                        runtimes[name] = done.runtime
                        found[f"{program} {name}"] = {"difference": done.difference}
    return {"keras": keras.__version__, "runtimes": runtimes, "exports": found}


def _table(results: dict[str, Any]) -> list[str]:
    from treadle.exporting.formats import FORMATS

    programs = list(
        dict.fromkeys(
            key.rpartition(" ")[0] for found in results.values() for key in found["exports"]
        )
    )
    lines = [
        f"| format | backend | {' | '.join(programs)} |",
        f"| --- | --- |{' --- |' * len(programs)}",
    ]
    for name in FORMATS:
        for backend in (backend for backend in BACKENDS if backend in results):
            cells = [_cell(results[backend]["exports"][f"{p} {name}"]) for p in programs]
            lines.append(f"| {name} | {backend} | {' | '.join(cells)} |")
    return lines


def _cell(result: dict[str, Any]) -> str:
    if "difference" in result:
        return "0" if result["difference"] == 0 else f"{result['difference']:.0e}"
    return next(iter(result))


def _failures(results: dict[str, Any]) -> list[str]:
    """List the messages, each once."""
    messages: dict[str, None] = {}
    for backend, found in results.items():
        for key, result in found["exports"].items():
            program, _, name = key.rpartition(" ")
            if "refused" in result:
                messages[f"- {name} on {backend}: {result['refused']}."] = None
            elif "failed" in result:
                messages[f"- {name} on {backend}, {program}: {result['failed']}."] = None
    return ["## Messages", "", *messages]
