"""Is one step source the same program on every backend?

Each backend trains in a process of its own, from the same initial weights (drawn with NumPy) and
in the same order of the data: the first 50 losses, and the validation accuracy after one epoch of
MNIST. The figures go to docs/backends.md.
"""

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

from . import in_process, parser_of

BACKENDS = ("tensorflow", "jax", "torch")
STEPS = 50
PAGE = Path(__file__).parent.parent / "docs" / "backends.md"


def main(arguments: list[str]) -> None:
    """Run every backend and compare, or (with --child) one of them."""
    parser = parser_of("backends", __doc__)
    parser.add_argument("--child", metavar="RECIPE", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="write docs/backends.md")
    chosen = parser.parse_args(arguments)
    if chosen.child:
        print(json.dumps(_train(chosen.child)))
        return
    rows: list[str] = []
    for recipe in ("mnist-mlp", "activity-regularization"):
        results = {backend: in_process("backends", backend, recipe) for backend in BACKENDS}
        first = results[BACKENDS[0]]["losses"]
        for backend, result in results.items():
            apart = max(abs(a - b) / abs(a) for a, b in zip(first, result["losses"], strict=True))
            rows.append(
                f"| {recipe} | {backend} | {result['losses'][0]:.6f} | {result['losses'][-1]:.6f} "
                f"| {apart:.1e} | {result['val_accuracy']:.2%} |"
            )
            print(rows[-1], flush=True)
    text = "\n".join([*_head(results), *rows]) + "\n"
    if chosen.write:
        PAGE.write_text(text)


def _head(results: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{b} {results[b]['version']}" for b in BACKENDS)
    return [
        "# One step source, three backends",
        "",
        "This page compares the backends: the same recipe is trained from the same weights, drawn "
        "with NumPy, with the\nsame order of the data, in one process for each backend. Written by "
        "`scripts/bench backends --write`.",
        "",
        f"{versions}; Python {platform.python_version()}, {os.cpu_count()} CPU cores.",
        "",
        f"| recipe | backend | loss of step 1 | loss of step {STEPS} | largest relative difference "
        f"from {BACKENDS[0]} in {STEPS} steps | validation accuracy after one epoch |",
        "| --- | --- | --- | --- | --- | --- |",
    ]


def _train(recipe: str) -> dict[str, Any]:
    import keras

    import treadle
    from treadle.recipes.activity_regularization import Regularized
    from treadle.recipes.mnist_mlp import MnistMLP
    from treadle.testing import same_start

    treadle.setup(seed=0)
    task: Any = MnistMLP() if recipe == "mnist-mlp" else Regularized()
    sources = task.datasets()
    with treadle.Loop(task, console=False) as loop:
        loop.prepare(sources.train)
        same_start(task)
        history = loop.fit(sources.train, validation=sources.validation, epochs=1)
    version = __import__(keras.config.backend()).__version__
    return {
        "losses": history.steps("loss")[:STEPS].tolist(),
        "val_accuracy": history["val_accuracy"][-1],
        "version": version,
    }
