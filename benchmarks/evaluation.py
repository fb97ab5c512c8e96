"""How fast are `loop.evaluate` and `loop.predict`?

Compared with Keras' `model.evaluate` and `model.predict`, and with loops by hand: a compiled
forward pass, a Python loop over the batches, and one fetch at the end. Each backend and network
has a process of its own, in which all contestants take turns. Compilation is not timed.

    scripts/bench evaluation --backend jax --workload mlp
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import in_process, parser_of

BACKENDS = ("tensorflow", "jax", "torch")
NETWORKS = {
    "mlp": "784-64-64-10, MNIST, loss and accuracy",
    "autoencoder": "784-128-16-128-784, MNIST, loss",
    "cnn": "the recipe `cifar10-cnn`, loss and accuracy",
    "lstm": "an LSTM of 64 units over the 28 rows of a digit, loss and accuracy",
}
WORKLOADS = tuple(NETWORKS)
CALLS = ("evaluate", "predict")
EXAMPLES, BATCH = 10_000, 100
FEWER = {"cnn": 2_000}  # a turn over all of them would take many seconds
TREADLE = "treadle"
RESULTS = Path(__file__).with_name("evaluation.json")
PAGE = Path(__file__).parent.parent / "docs" / "evaluation.md"
Times = dict[str, list[float]]


def main(arguments: list[str]) -> None:
    """Measure what was chosen, and print a table."""
    parser = parser_of("evaluation", __doc__)
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="only this network")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="only this backend")
    parser.add_argument("--call", choices=CALLS, action="append", help="only this call")
    parser.add_argument("--rounds", type=int, default=11, help="turns of each contestant (11)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help=f"write docs/{PAGE.name}")
    chosen = parser.parse_args(arguments)
    if chosen.child:
        found = {call: _measured(call, chosen.workload[-1], chosen.rounds) for call in chosen.call}
        print(json.dumps(found))
        return
    kept: dict[str, Times] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    calls = chosen.call or list(CALLS)
    print("\n".join(_head()))
    for backend in chosen.backend or BACKENDS:
        for workload in chosen.workload or WORKLOADS:
            options = ["--workload", workload, "--rounds", str(chosen.rounds)]
            options += [word for call in calls for word in ("--call", call)]
            for call, times in in_process("evaluation", backend, *options).items():
                kept[f"{call} {workload} {backend}"] = times
                print("\n".join(_rows(workload, backend, times, call)), flush=True)
    if chosen.write:
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
        PAGE.write_text(page(kept))


def page(kept: dict[str, Times]) -> str:
    """Return the page with a table for each call."""
    from .timing import machine

    about = machine()
    lines = [
        "# Evaluation and prediction",
        "",
        f"This page compares `loop.evaluate` and `loop.predict` over {EXAMPLES:,} examples in "
        f"arrays ({FEWER['cnn']:,} for the cnn),\nin batches of {BATCH}, with `model.evaluate` and "
        "`model.predict` of Keras, and with loops by hand: a compiled forward pass, a\nPython loop "
        "over the batches, and one fetch at the end. Compilation is not timed. All turns of a "
        "network follow each\nother in one process; the last column is the median ratio with "
        "quartiles. Above 1.00, Treadle is faster. Written by\n`scripts/bench evaluation --write`.",
        "",
        f"{about['cpu']}, {about['cores']} cores.",
        "",
        *(f"- {name}: {text}" for name, text in NETWORKS.items() if f" {name} " in str([*kept])),
    ]
    for call in CALLS:
        lines += ["", f"## `loop.{call}`", "", *_head()]
        for backend in BACKENDS:
            for workload in WORKLOADS:
                times = kept.get(f"{call} {workload} {backend}")
                lines += _rows(workload, backend, times, call) if times else []
    return "\n".join(lines) + "\n"


def _head() -> list[str]:
    return [
        "| network | backend | contestant | µs a batch | its time by Treadle's (quartiles) |",
        "| --- | --- | --- | --- | --- |",
    ]


def _rows(workload: str, backend: str, times: Times, call: str = "") -> list[str]:
    from .timing import Spread, ratio

    rows: list[str] = []
    for name, found in times.items():
        share = ratio(found, times[TREADLE])
        shown = f"treadle, `loop.{call}`" if call and name == TREADLE else name
        rows.append(
            f"| {workload} | {backend} | {shown} | {Spread.of(found).median:,.0f} "
            f"| {share.median:.2f} ({share.low:.2f} to {share.high:.2f}) |"
        )
    return rows


def _measured(call: str, workload: str, rounds: int) -> Times:
    """Return microseconds a batch by contestant, a value for each turn."""
    from .timing import take_turns

    found = take_turns(makers(call, job(workload)), rounds)
    failed = [f"{name}: {times.failed}" for name, times in found.items() if times.failed]
    if failed:
        sys.exit("\n".join(failed))
    results = {name: times.values for name, times in found.items()}
    for name, values in results.items():
        for key, value in values.items():
            expected = results[TREADLE].get(key, value)  # Keras names its metrics otherwise
            if abs(value - expected) > 1e-3 * abs(expected):
                sys.exit(f"{name} found a {key} of {value}, {TREADLE} one of {expected}")
    return {name: times.per_step for name, times in found.items()}


def job(workload: str, examples: int | None = None) -> Any:
    """Return a network with its data; it has the same initial weights each time it is made."""
    from dataclasses import replace

    from . import data
    from .single_steps import _autoencoder
    from .workloads import WORKLOADS as ALL
    from .workloads import Job, Workload

    examples = examples or FEWER.get(workload, EXAMPLES)
    if workload == "autoencoder":
        made = Workload(NETWORKS[workload], _autoencoder, data.digit_rows, {}, BATCH)
        rows = data.digit_rows(examples)[0]
        arrays = rows, rows
    else:
        name = {"mlp": "mlp-sgd", "cnn": "cifar10-cnn", "lstm": "lstm"}[workload]
        made = replace(ALL[name], batch_size=BATCH)
        arrays = made.arrays(examples)
    return Job(workload, made, examples // BATCH, arrays)


def makers(call: str, job: Any) -> dict[str, Callable[[], Any]]:
    """Return a function for each contestant that makes it."""
    import importlib
    from functools import partial

    import keras

    backend = keras.config.backend()
    module = importlib.import_module(f"benchmarks.contestants_{backend}")
    by_hand: dict[str, Any] = module.EVALUATING if call == "evaluate" else module.PREDICTING
    return {
        TREADLE: partial(_evaluate if call == "evaluate" else _predict, job),
        f"`model.{call}`": partial(_keras_evaluate if call == "evaluate" else _keras_predict, job),
        **{name: partial(make, job) for name, make in by_hand.items()},
    }


def _evaluate(job: Any) -> Any:
    import treadle

    from .contestants import Contestant

    source = treadle.data.from_arrays(*job.arrays, batch_size=job.batch_size, shuffle=False)
    loop = treadle.Loop(job.make(), console=False)
    return Contestant(lambda: loop.evaluate(source), job.steps)


def _predict(job: Any) -> Any:
    import treadle

    from .contestants import Contestant, checked

    source = treadle.data.from_arrays(job.arrays[0], batch_size=job.batch_size, shuffle=False)
    loop = treadle.Loop(job.make(), console=False)
    return Contestant(lambda: checked(loop.predict(source)), job.steps)


def _keras_evaluate(job: Any) -> Any:
    from .contestants import Contestant, compiled

    model = compiled(job)

    def run() -> dict[str, float]:
        return model.evaluate(*job.arrays, batch_size=job.batch_size, verbose=0, return_dict=True)

    return Contestant(run, job.steps)


def _keras_predict(job: Any) -> Any:
    from .contestants import Contestant, checked, compiled

    model = compiled(job)

    def run() -> dict[str, float]:
        return checked(model.predict(job.arrays[0], batch_size=job.batch_size, verbose=0))

    return Contestant(run, job.steps)
