"""How fast is a loop that reads its loss after every step?

`for logs in loop.steps(train)` against what people write instead, all of which read the loss of
each step: a compiled step with a Python loop around it, and `fit` with a callback for each batch.
Windows (`every="auto"`) and `every="10 steps"` show what reading seldom saves. Each backend and
network has a process of its own, in which all contestants take turns.

    scripts/bench single_steps --backend jax --workload mlp
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import in_process, parser_of

BACKENDS = ("tensorflow", "jax", "torch")
NETWORKS = {
    "mlp": "784-64-64-10, SGD, MNIST, batch 64",
    "autoencoder": "784-128-16-128-784, Adam, MNIST, batch 100",
    "cnn": "the recipe `cifar10-cnn`, batch 64",
}
WORKLOADS = tuple(NETWORKS)
TREADLE = "treadle, every step"
RESULTS = Path(__file__).with_name("single_steps.json")
PAGE = Path(__file__).parent.parent / "docs" / "single-steps.md"


def main(arguments: list[str]) -> None:
    """Measure what was chosen, and print a table."""
    parser = parser_of("single_steps", __doc__)
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="only this network")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="only this backend")
    parser.add_argument("--rounds", type=int, default=11, help="turns of each contestant (11)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help=f"write docs/{PAGE.name}")
    chosen = parser.parse_args(arguments)
    if chosen.child:
        print(json.dumps(_measured(chosen.workload[-1], chosen.rounds)))
        return
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    print("\n".join(_head()))
    for backend in chosen.backend or BACKENDS:
        for workload in chosen.workload or WORKLOADS:
            options = ("--workload", workload, "--rounds", str(chosen.rounds))
            times = in_process("single_steps", backend, *options)
            kept[f"{workload} {backend}"] = times
            print("\n".join(_rows(workload, backend, times)), flush=True)
    if chosen.write:
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
        _write_page(kept)


def _head() -> list[str]:
    return [
        "| network | backend | contestant | µs a step | its time by Treadle's (quartiles) |",
        "| --- | --- | --- | --- | --- |",
    ]


def _rows(workload: str, backend: str, times: dict[str, list[float]]) -> list[str]:
    from .timing import Spread, ratio

    rows: list[str] = []
    for name, found in times.items():
        share = ratio(found, times[TREADLE])
        rows.append(
            f"| {workload} | {backend} | {name} | {Spread.of(found).median:,.0f} "
            f"| {share.median:.2f} ({share.low:.2f} to {share.high:.2f}) |"
        )
    return rows


def _write_page(kept: dict[str, Any]) -> None:
    from .timing import machine

    about = machine()
    lines = [
        "# Single steps",
        "",
        "This page compares loops that read the loss after every step: `for logs in "
        "loop.steps(train)` with a compiled step\nin a Python loop, and with `fit` and a callback "
        "for each batch. Two rows show what reading less often saves. All turns of a\nnetwork "
        "follow each other in one process; the last column is the median ratio with quartiles. "
        "Above 1.00, `loop.steps`\nis faster. Written by `scripts/bench single_steps --write`.",
        "",
        f"{about['cpu']}, {about['cores']} cores. On PyTorch, the loop by hand runs the same Keras "
        "layers and optimizer as Python.",
        "",
        *(f"- {name}: {text}" for name, text in NETWORKS.items() if any(name in k for k in kept)),
        "",
        *_head(),
    ]
    for key in (f"{w} {b}" for b in BACKENDS for w in WORKLOADS):
        if key in kept:
            lines += _rows(*key.split(), kept[key])
    PAGE.write_text("\n".join(lines) + "\n")


def _measured(workload: str, rounds: int) -> dict[str, list[float]]:
    """Return microseconds a step by contestant, a value for each turn."""
    from functools import partial

    from .timing import take_turns

    job = _job(workload)
    makers: dict[str, Callable[[], Any]] = {
        TREADLE: partial(_treadle, job, "1 step"),
        "compiled step by hand": partial(_by_hand, job),
        "fit with a callback for each batch": partial(_fit, job),
        "treadle, every 10 steps": partial(_treadle, job, "10 steps"),
        "treadle, windows": partial(_treadle, job, "auto"),
    }
    found = take_turns(makers, rounds)
    failed = [f"{name}: {times.failed}" for name, times in found.items() if times.failed]
    if failed:
        sys.exit("\n".join(failed))
    return {name: times.per_step for name, times in found.items()}


def _job(workload: str) -> Any:
    import keras

    from . import data
    from .workloads import WORKLOADS as ALL
    from .workloads import Job, Workload
    from .workloads import job as job_of

    if workload == "cnn":
        return job_of("cifar10-cnn")
    steps = {"tensorflow": 400, "jax": 600, "torch": 300}
    if workload == "mlp":
        return job_of("mlp-sgd", steps[keras.config.backend()])
    made = Workload("784-128-16-128-784, Adam", _autoencoder, data.digit_rows, steps, 100)
    count = steps[keras.config.backend()]
    rows = ALL["mlp-sgd"].arrays(count * 100)[0]
    return Job("autoencoder", made, count, (rows, rows))


def _autoencoder() -> Any:
    import keras
    from keras import layers

    import treadle

    model = keras.Sequential(
        [
            keras.Input((784,)),
            layers.Dense(128, activation="relu"),
            layers.Dense(16, activation="relu"),
            layers.Dense(128, activation="relu"),
            layers.Dense(784, activation="sigmoid"),
        ]
    )
    return treadle.Supervised(model, keras.losses.BinaryCrossentropy(), keras.optimizers.Adam(1e-3))


def _treadle(job: Any, every: str) -> Any:
    """Return the loop that a user of Treadle writes, without a run directory."""
    import treadle

    from .contestants import Contestant

    train = treadle.data.from_arrays(*job.arrays, batch_size=job.batch_size)

    def epochs() -> Iterator[dict[str, float]]:
        with treadle.Loop(job.make(), console=False) as loop:
            for _ in loop.epochs():
                total = 0.0
                for logs in loop.steps(train, every=every):
                    total += logs["loss"]
                yield {"loss": total / job.steps}

    rounds = epochs()
    return Contestant(lambda: next(rounds), job.steps)


def _by_hand(job: Any) -> Any:
    """Return a Python loop around a compiled step; NumPy batches, the loss read each time."""
    import importlib

    import keras

    from .contestants import Contestant

    module = importlib.import_module(f"benchmarks.contestants_{keras.config.backend()}")
    step = module.reading_loss(job)

    def epoch() -> dict[str, float]:
        total = 0.0
        for rows in job.order():
            total += step(*(array[rows] for array in job.arrays))
        return {"loss": total / job.steps}

    return Contestant(epoch, job.steps)


def _fit(job: Any) -> Any:
    """Return `fit` with a callback that reads the loss of each batch."""
    import keras

    from .contestants import Contestant, Fit

    class Reading(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.total = 0.0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.total += logs["loss"]

    task = job.make()
    task.model.compile(
        optimizer=task.optimizer, loss=task.loss, metrics=list(task.metrics.values())
    )
    reading = Reading()
    made: Contestant = Fit(
        task.model, job.arrays, job.steps, batch_size=job.batch_size, callbacks=[reading]
    )
    return made
