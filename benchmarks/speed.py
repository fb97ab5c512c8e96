"""How fast is Treadle, compared with every other way to run the same steps?

Every table of every backend is measured in a process of its own, since Keras fixes its backend when
it is imported. Within a process all contestants take turns. Results are kept in
benchmarks/results/speed.json, from which the tables of docs/benchmarks.md are written.
"""

import argparse
import gc
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from . import BACKENDS, chart, environment_of, keep, kept, page, parser_of
from .page import TABLES, WORKLOADS
from .timing import Neighbours, machine, take_turns

# What runs on TensorFlow alone.
ONE_BACKEND = ("precision", "streaming")
# A table takes a minute or two.
LONGEST = 1200


def main(arguments: list[str]) -> None:
    """Measure what was chosen, show it, and keep it if asked to."""
    parser = parser_of("speed", __doc__, page="benchmarks.md")
    parser.add_argument("--table", choices=TABLES, action="append", help="only this table")
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="only this workload")
    parser.add_argument("--only", metavar="TEXT", action="append", help="only names with TEXT")
    parser.add_argument("--rounds", type=int, help="turns of each contestant (7; --quick: 3)")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter turns")
    parser.add_argument("--keras", metavar="VERSION", help="measure `fit` of another Keras")
    parser.add_argument("--page", action="store_true", help="write the page from what was kept")
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    chosen.rounds = chosen.rounds or (3 if chosen.quick else 7)
    if chosen.child:
        chosen.file.write_text(json.dumps(measured(chosen)))
        return
    results = kept("speed")
    shown = results if chosen.write or chosen.page else {}
    failed: list[str] = []
    for key, where in () if chosen.page else _chosen_tables(chosen):
        try:
            result = _in_process(*where, chosen, arguments)
        except ChildFailed as error:
            failed.append(f"{key} failed\n{error}")
            print(failed[-1], flush=True)
            continue
        results[key] = shown[key] = result
        print("\n".join(page.section(key, result)), flush=True)
        if chosen.write:
            keep("speed", page.ordered(results))
    if chosen.write or chosen.page:
        page.write(results, _newest_keras())
        chart.write(results)
    print("\n".join(page.must_show(shown)))
    if failed:
        sys.exit("\n".join(failed))


class ChildFailed(Exception):
    """A process that measured a table broke off; holds the end of what it said."""


def _chosen_tables(chosen: argparse.Namespace) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Yield what to measure: a name, and table, workload and backend."""
    for table in chosen.table or (("speed",) if chosen.workload or chosen.keras else TABLES):
        for workload in (chosen.workload or WORKLOADS) if table == "speed" else ("",):
            for backend in chosen.backend or BACKENDS:
                if {table, workload} & set(ONE_BACKEND) and backend != "tensorflow":
                    continue
                key = " ".join(part for part in (table, workload, backend) if part)
                other = f" keras {chosen.keras}" if chosen.keras else ""
                yield key + other, (table, workload, backend)


def _in_process(
    table: str, workload: str, backend: str, chosen: argparse.Namespace, arguments: list[str]
) -> dict[str, Any]:
    """Measure one table on one backend, in a process of its own."""
    environment = environment_of(backend)
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        command = [sys.executable, "-m", "benchmarks", "speed", *arguments]
        # `measured` reads the last of each.
        command += ["--table", table, "--workload", workload or WORKLOADS[0]]
        command += ["--backend", backend, "--child", "--file", str(result)]
        if chosen.keras:
            command += ["--only", "fit"]
            other = _other_keras(chosen.keras, folder)
            environment["PYTHONPATH"] = os.pathsep.join([other, os.environ.get("PYTHONPATH", "")])
        with log.open("w") as output:
            try:
                subprocess.run(
                    command,
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    check=True,
                    timeout=LONGEST,
                )
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                raise ChildFailed(f"{log.read_text()[-3000:]}\n{error}") from error
        return json.loads(result.read_text())


def _other_keras(version: str, folder: str) -> str:
    """Install another Keras where nothing else sees it; returns where."""
    target = str(Path(folder, "keras"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target]
    subprocess.run([*pip, f"keras=={version}"], check=True)
    return target


def _newest_keras() -> str:
    """Return the newest Keras that pip would install, or "" where it cannot tell."""
    pip = [sys.executable, "-m", "pip", "index", "versions", "keras"]
    told = subprocess.run(pip, capture_output=True, text=True, check=False).stdout
    found = re.match(r"keras \((.+)\)", told)
    return found[1] if found else ""


def measured(chosen: argparse.Namespace) -> dict[str, Any]:
    """Measure one table in this process."""
    table, backend = chosen.table[-1], chosen.backend[-1]
    neighbours = Neighbours()
    import keras

    keras.utils.set_random_seed(0)  # imports TensorFlow, which is not to count for the first one
    module = importlib.import_module(f"benchmarks.contestants_{backend}")
    if table == "startup":
        from .startup import seconds_to_first_step

        found: dict[str, Any] = {"seconds": seconds_to_first_step(backend, max(3, chosen.rounds))}
    elif table == "speed":
        found = _turns(chosen, module)
    else:
        measure = {"hooks": hooks, "precision": precision, "growth": growth, "memory": memory}
        found = measure[table](module.ENTRIES["supervised"], chosen.rounds, chosen.quick)
    versions = {"keras": keras.__version__, **module.versions()}
    return {
        **found,
        "neighbours": neighbours.share(),
        "machine": machine(),
        "versions": versions,
    }


def _turns(chosen: argparse.Namespace, module: Any) -> dict[str, Any]:
    """Let all contestants of a workload take turns."""
    from .workloads import job

    work = job(chosen.workload[-1])
    entries = [
        entry
        for entry in module.ENTRIES[work.workload.kind]
        if not chosen.only
        or entry.kind == "treadle"
        or any(text in entry.name for text in chosen.only)
    ]
    makers = {entry.name: partial(entry.make, work) for entry in entries}
    times = take_turns(makers, chosen.rounds, 0.1 if chosen.quick else 0.3, print)
    return {
        "what": work.workload.what,
        "steps": work.steps,
        "batch_size": work.batch_size,
        "kinds": {entry.name: entry.kind for entry in entries},
        "times": {name: asdict(one) for name, one in times.items()},
    }


# The other tables: hooks, precision, growth of data, parameters and steps, memory

# 784-444-444-10 has ten times the parameters of 784-64-64-10.
WIDE = 444
HOOK_STEPS = 10_000


def hooks(entries: list[Any], rounds: int, quick: bool) -> dict[str, Any]:
    """Time all default hooks against none, and each hook by a clock around its calls."""
    from .contestants import TreadleLoop
    from .workloads import job

    work = job("mlp-sgd")
    makers: dict[str, Callable[[], Any]] = {
        "treadle": lambda: TreadleLoop(work),
        "treadle, no hooks": lambda: TreadleLoop(work, hooks=False),
    }
    # What is looked for is small, so there are more rounds.
    times = take_turns(makers, rounds if quick else 3 * rounds, 0.1 if quick else 0.5)
    each = each_hook(work, HOOK_STEPS // (10 if quick else 1))
    return {"times": {name: asdict(one) for name, one in times.items()}, "each": each}


def each_hook(work: Any, steps: int) -> dict[str, float]:
    """Return the microseconds per step that each default hook takes."""
    from .contestants import TreadleLoop

    contestant = TreadleLoop(work)
    contestant.round()
    spent: dict[str, float] = {}

    def clocked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                spent[name] += time.perf_counter() - started

        return call

    for hook in contestant.loop._run.services.hooks._hooks:
        name = type(hook).__name__
        spent[name] = 0.0
        for method in ("steps", "record"):
            setattr(hook, method, clocked(name, getattr(hook, method)))
    epochs = -(-steps // work.steps)
    contestant.round(epochs)
    contestant.close()
    return {name: seconds / (epochs * work.steps) * 1e6 for name, seconds in spent.items()}


def precision(entries: list[Any], rounds: int, quick: bool) -> dict[str, Any]:
    """Time the convolutional network in float32 and in mixed_bfloat16, by hand and by Treadle."""
    from .workloads import job

    work = job("cifar10-cnn")
    makers: dict[str, Callable[[], Any]] = {}
    for entry in entries:
        if entry.name not in ("treadle", "raw in-graph loop", "@tf.function step over tf.data"):
            continue
        for policy in ("float32", "mixed_bfloat16"):
            make = partial(_made_in, policy, work.workload.make)
            typed = replace(work, workload=replace(work.workload, make=make))
            makers[f"{entry.name}, {policy}"] = partial(entry.make, typed)
    times = take_turns(makers, rounds, 0.1 if quick else 0.3)
    return {"times": {name: asdict(one) for name, one in times.items()}}


def _made_in(policy: str, make: Callable[[], Any]) -> Any:
    with dtype_policy(policy):
        return make()


@contextmanager
def dtype_policy(name: str) -> Any:
    """Let layers that are made inside compute in another type."""
    import keras

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def growth(entries: list[Any], rounds: int, quick: bool) -> dict[str, Any]:
    """Time ten times the data and ten times the parameters, next to the plain loop."""
    import keras

    from .contestants import TreadleLoop
    from .workloads import job, mlp

    small = job("mlp-sgd", 187)
    wide_task = replace(small.workload, make=lambda: mlp(keras.optimizers.SGD(1e-2), width=WIDE))
    wide = replace(small, workload=wide_task)
    plain = next(e for e in entries if e.name in PLAIN)
    makers: dict[str, Callable[[], Any]] = {
        "treadle": lambda: TreadleLoop(small),
        "treadle, data × 10": lambda: TreadleLoop(job("mlp-sgd", 1870)),
        "treadle, parameters × 10": lambda: TreadleLoop(wide),
        plain.name: lambda: plain.make(small),
        f"{plain.name}, parameters × 10": lambda: plain.make(wide),
    }
    times = take_turns(makers, rounds, 0.1 if quick else 0.3)
    return {"plain": plain.name, "times": {name: asdict(one) for name, one in times.items()}}


# The loop of the same Keras model with nothing around it, on each backend.
PLAIN = ("raw in-graph loop", "raw lax.scan", "Keras layers, tensor slices")


def memory(entries: list[Any], rounds: int, quick: bool) -> dict[str, Any]:
    """Train 100,000 steps; note memory, time per step and compiled programs on the way."""
    from .contestants import TreadleLoop
    from .workloads import job

    steps, looks = (5_000, 20) if quick else (100_000, 50)
    work = job("mlp-sgd", 100)
    contestant = TreadleLoop(work)
    process = psutil.Process()
    rows: list[dict[str, float]] = []
    done = 0
    while done < steps:
        part = contestant.round(max(1, steps // looks // work.steps))
        done += part.steps
        gc.collect()
        rows.append(
            {
                "step": done,
                "mebibytes": process.memory_info().rss / 2**20,
                "microseconds": part.seconds / part.steps * 1e6,
                "programs": contestant.loop.costs.programs,
            }
        )
    contestant.close()
    return {"rows": rows}
