"""Is `treadle.fit` as fast as `fit`, and does it need as much memory?

The same compiled Keras model is trained by `model.fit` and by `treadle.fit`, and the same network
as a task by a loop. They take turns, and ratios are those of each round. The GAN has a `train_step`
of its own. The peak memory (VmHWM) is that of processes which train a transformer for 20 steps.

    scripts/bench fitting --write
    scripts/bench fitting --backend jax --workload mlp-adam
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

from . import BACKENDS, DOCS, in_process, keep, kept, parser_of, write_section

WORKLOADS = {
    "mlp-adam": "MLP",
    "cifar10-cnn": "CNN",
    "lstm": "LSTM",
    "gan": "GAN with its own `train_step`",
}
FIT, OURS, TASK = "fit", "treadle.fit", "task"
MEMORY = "memory"
NETWORK = {"width": 768, "heads": 12, "depth": 14}  # 100 million weights
STEPS, BATCH = 20, 2
SLOWEST, LARGEST, MOST = 0.97, 1.1, 1.1  # of the speed of `fit`, time of a task, memory of `fit`


def main(arguments: list[str]) -> None:
    """Measure what was chosen, and print the tables."""
    parser = parser_of("fitting", __doc__, 7, page="coming-from-keras.md")
    choices = [*WORKLOADS, MEMORY]
    parser.add_argument("--workload", choices=choices, action="append", help="only this one")
    parser.add_argument("--which", choices=(FIT, OURS), help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.child:
        which = chosen.workload[-1]
        found = peak(chosen.which) if which == MEMORY else turns(which, chosen.rounds)
        print(json.dumps(found))
        return
    results = kept("fitting")
    for backend in chosen.backend or BACKENDS:
        for which in chosen.workload or choices:
            options = ["--workload", which, "--rounds", str(chosen.rounds)]
            if which == MEMORY:
                both = {
                    one: in_process("fitting", backend, *options, "--which", one)
                    for one in (FIT, OURS)
                }
                results[f"{which} {backend}"] = both
            else:
                results[f"{which} {backend}"] = in_process("fitting", backend, *options)
            print(_row(which, backend, results[f"{which} {backend}"]), flush=True)
            if chosen.write:
                keep("fitting", results)
    if chosen.write:
        write_section(DOCS / "coming-from-keras.md", "bench fitting --write", page(results))


def page(results: dict[str, Any]) -> list[str]:
    """Return the tables of `docs/coming-from-keras.md`."""
    from .timing import processor

    speed = [(w, b) for b in BACKENDS for w in WORKLOADS if f"{w} {b}" in results]
    memory = [b for b in BACKENDS if f"{MEMORY} {b}" in results]
    return [
        f"{processor()}.",
        "",
        "| program | backend | `fit`, µs a step | `treadle.fit` | task | speed, `fit` = 1 "
        "| time, task = 1 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(_row(w, b, results[f"{w} {b}"]) for w, b in speed),
        "",
        "| backend | peak of `fit`, MiB | of `treadle.fit` | `fit` = 1 |",
        "| --- | --- | --- | --- |",
        *(_row(MEMORY, b, results[f"{MEMORY} {b}"]) for b in memory),
    ]


def _row(which: str, backend: str, found: dict[str, Any]) -> str:
    from .timing import Spread, ratio

    if which == MEMORY:
        times = found[OURS] / found[FIT]
        missed = f" (target: {MOST})" if round(times, 2) > MOST else ""
        return f"| {backend} | {found[FIT]:,.0f} | {found[OURS]:,.0f} | {times:.2f}{missed} |"
    speed, time = ratio(found[FIT], found[OURS]), ratio(found[OURS], found[TASK])
    slow = f" (target: {SLOWEST})" if round(speed.median, 2) < SLOWEST else ""
    long = f" (target: {LARGEST})" if round(time.median, 2) > LARGEST else ""
    medians = " | ".join(f"{Spread.of(found[name]).median:,.0f}" for name in (FIT, OURS, TASK))
    return (
        f"| {WORKLOADS[which]} | {backend} | {medians} | {speed.median:.2f}{slow} "
        f"| {time.median:.2f}{long} |"
    )


def turns(which: str, rounds: int) -> dict[str, list[float]]:
    """Return the microseconds of a step in each turn, by contestant."""
    import keras

    import treadle

    from .contestants import Contestant, Fit, TreadleLoop, compiled
    from .fitting_models import AdversariesTask, adversaries
    from .timing import per_step
    from .workloads import job

    made, own = job(which), which == "gan"
    data = made.arrays[:1] if own else made.arrays

    def fitted(train: Callable[..., Any]) -> Contestant:
        model = adversaries() if own else compiled(made)
        return Fit(model, data, made.steps, train, batch_size=made.batch_size)

    makers: dict[str, Callable[[], Any]] = {
        FIT: lambda: fitted(keras.Model.fit),
        OURS: lambda: fitted(treadle.fit),
        TASK: lambda: TreadleLoop(made, hooks=False, make=AdversariesTask if own else None),
    }
    return per_step(makers, rounds)


def peak(which: str) -> float:
    """Train a transformer of 100 million weights; return the peak of this process in MiB."""
    import keras
    import numpy as np

    import treadle

    from .memory import memory_of_process
    from .workloads import LENGTH, VOCABULARY, transformer

    task: Any = transformer(**NETWORK)
    task.model.compile(task.optimizer, task.loss)
    texts = np.random.default_rng(0).integers(VOCABULARY, size=(STEPS * BATCH, LENGTH + 1))
    x, y = (part.astype("int32") for part in (texts[:, :-1], texts[:, 1:]))
    train: Any = {FIT: keras.Model.fit, OURS: treadle.fit}[which]
    train(task.model, x, y, batch_size=BATCH, verbose=0)
    return memory_of_process("VmHWM")
