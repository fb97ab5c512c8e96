"""How fast is Treadle, beside every other way to run the same steps?

Each workload runs in a process of its own on each backend, since Keras fixes its backend when it
is imported. Within it all contestants take turns. The figures go to docs/benchmarks.md.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from .timing import Spread, Times, machine, ratio, take_turns

BACKENDS = ("tensorflow", "jax", "torch")
WORKLOADS = (
    *("mlp-sgd", "mlp-adam", "bn-dropout", "cifar10-cnn"),
    *("gan", "transformer", "lstm", "streaming"),
)
RESULTS = Path(__file__).with_name("results.json")


def main(arguments: list[str]) -> None:
    """Run what was chosen, each in a process of its own."""
    parser = argparse.ArgumentParser(prog="scripts/bench speed", description=__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="only this one")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="only this one")
    parser.add_argument("--only", metavar="TEXT", action="append", help="contestants with TEXT")
    parser.add_argument("--rounds", type=int, help="turns of each contestant (7; --quick: 3)")
    parser.add_argument("--quick", action="store_true", help="3 rounds, shorter turns")
    parser.add_argument("--write", action="store_true", help="keep the figures, write the page")
    parser.add_argument("--child", metavar="FILE", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    chosen.rounds = chosen.rounds or (3 if chosen.quick else 7)
    if chosen.child:
        found = measured(chosen)
        Path(chosen.child).write_text(json.dumps(found))
        return
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if os.getloadavg()[0] > 0.5:
        print(f"the machine is busy (load {os.getloadavg()[0]:.1f}): do not trust the figures")
    for workload in chosen.workload or WORKLOADS:
        for backend in chosen.backend or BACKENDS:
            result = in_process(workload, backend, arguments)
            kept[f"{workload} {backend}"] = result
            print("\n".join(table(result)), flush=True)
            if chosen.write:
                RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


def in_process(workload: str, backend: str, arguments: list[str]) -> dict[str, Any]:
    """Measure one workload on one backend."""
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        command = [sys.executable, "-m", "benchmarks", "speed", *arguments]
        # The last of an option counts for those that choose once; `measured` reads the last one.
        command += ["--workload", workload, "--backend", backend, "--child", str(result)]
        with log.open("w") as output:
            done = subprocess.run(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
            )
        if done.returncode:
            sys.exit(f"{workload} on {backend} failed\n{log.read_text()[-2000:]}")
        return json.loads(result.read_text())


def measured(chosen: argparse.Namespace) -> dict[str, Any]:
    """Let all contestants of a workload take turns in this process."""
    workload, backend = chosen.workload[-1], chosen.backend[-1]
    import keras

    from .workloads import job

    keras.utils.set_random_seed(0)  # imports TensorFlow, which is not to count for the first one
    module = importlib.import_module(f"benchmarks.contestants_{backend}")
    work = job(workload)
    makers = {
        name: partial(make, work)
        for name, make in module.SUPERVISED.items()
        if not chosen.only or name == "treadle" or any(text in name for text in chosen.only)
    }
    shortest = 0.1 if chosen.quick else 0.3
    times = take_turns(makers, chosen.rounds, shortest, print)
    return {
        "workload": workload,
        "backend": backend,
        "times": {name: asdict(time) for name, time in times.items()},
        "machine": machine(),
        "versions": {"keras": keras.__version__, **module.versions()},
    }


def table(result: dict[str, Any]) -> list[str]:
    """Return the rows of one workload on one backend: ratios first."""
    times = {name: Times(**value) for name, value in result["times"].items()}
    ours = times["treadle"].per_step
    rows = [
        f"## {result['workload']}, {result['backend']}",
        "",
        "| contestant | times Treadle's time | quartiles | µs per step | quartiles "
        "| first epoch, s | its loss |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    ordered = sorted(times.items(), key=lambda item: ratio(item[1].per_step, ours).median)
    for name, one in ordered:
        against, own = ratio(one.per_step, ours), Spread.of(one.per_step)
        rows.append(
            f"| {name} | {against.median:.2f} | {against.low:.2f} – {against.high:.2f} "
            f"| {own.median:,.0f} | {own.low:,.0f} – {own.high:,.0f} "
            f"| {one.first:.1f} | {one.values.get('loss', float('nan')):.4f} |"
        )
    return [*rows, ""]
