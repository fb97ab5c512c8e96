"""How fast is Treadle, compared with every other way to run the same steps?

Every table of every backend is measured in a process of its own, since Keras fixes its backend when
it is imported. Within a process all contestants take turns. Results are kept in
benchmarks/results.json, from which docs/benchmarks.md is written.
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from . import page, parser_of
from .page import BACKENDS, TABLES, WORKLOADS
from .timing import Neighbours, machine, take_turns

# What runs on TensorFlow alone.
ONE_BACKEND = ("precision", "streaming")
RESULTS = Path(__file__).with_name("results.json")
# A table takes a minute or two.
LONGEST = 1200


def main(arguments: list[str]) -> None:
    """Measure what was chosen, show it, and keep it if asked to."""
    parser = parser_of("speed", __doc__)
    parser.add_argument("--table", choices=TABLES, action="append", help="only this table")
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="only this workload")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="only this backend")
    parser.add_argument("--only", metavar="TEXT", action="append", help="only names with TEXT")
    parser.add_argument("--rounds", type=int, help="turns of each contestant (7; --quick: 3)")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter turns")
    parser.add_argument("--keras", metavar="VERSION", help="measure `fit` of another Keras")
    parser.add_argument("--write", action="store_true", help="keep results and write the page")
    parser.add_argument("--page", action="store_true", help="write the page from what was kept")
    parser.add_argument("--child", metavar="FILE", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    chosen.rounds = chosen.rounds or (3 if chosen.quick else 7)
    if chosen.child:
        Path(chosen.child).write_text(json.dumps(measured(chosen)))
        return
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    shown = kept if chosen.write or chosen.page else {}
    failed: list[str] = []
    for key, where in () if chosen.page else _chosen_tables(chosen):
        try:
            result = _in_process(*where, chosen, arguments)
        except ChildFailed as error:
            failed.append(f"{key} failed\n{error}")
            print(failed[-1], flush=True)
            continue
        kept[key] = shown[key] = result
        print("\n".join(page.section(key, result)), flush=True)
        if chosen.write:
            RESULTS.write_text(json.dumps(page.ordered(kept), indent=1) + "\n")
    if chosen.write or chosen.page:
        page.write(kept, _newest_keras())
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
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        command = [sys.executable, "-m", "benchmarks", "speed", *arguments]
        # `measured` reads the last of each.
        command += ["--table", table, "--workload", workload or WORKLOADS[0]]
        command += ["--backend", backend, "--child", str(result)]
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
        from .first_step import seconds_to_first_step

        found: dict[str, Any] = {"seconds": seconds_to_first_step(backend, max(3, chosen.rounds))}
    elif table == "speed":
        found = _turns(chosen, module)
    else:
        growth = importlib.import_module("benchmarks.growth")
        measure = getattr(growth, table)
        found = measure(module.ENTRIES["supervised"], chosen.rounds, chosen.quick)
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
