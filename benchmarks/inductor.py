"""How fast is a captured PyTorch step that Inductor compiles?

`Options(compiler="inductor")` against `Options(compiler="captured")`, on a CPU. Each network has
two processes: one with an empty cache of compiled programs, for the first start, and one that finds
them there, in which both take turns.

    scripts/bench inductor --workload mlp-adam
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from . import parser_of

NETWORKS = {"mlp-adam": 100, "bn-dropout": 60, "transformer": 12}  # steps of an epoch
COMPILERS = ("captured", "inductor")
PAGE = Path(__file__).parent.parent / "docs" / "speed.md"
BEGIN, END = "<!-- scripts/bench inductor --write -->\n", "<!-- end -->\n"


def main(arguments: list[str]) -> None:
    """Measure what was chosen, and print a table."""
    parser = parser_of("inductor", __doc__)
    parser.add_argument("--workload", choices=NETWORKS, action="append", help="only this network")
    parser.add_argument("--rounds", type=int, default=11, help="turns of each compiler (11)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads (all cores)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help=f"write the table in docs/{PAGE.name}")
    chosen = parser.parse_args(arguments)
    if chosen.child:
        print(json.dumps(_measured(chosen.workload[-1], chosen.rounds)))
        return
    lines = [
        "| network | captured, µs a step | inductor, µs a step | times as fast (quartiles) "
        "| first start, s | later starts, s | captured start, s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    print("\n".join(lines))
    for workload in chosen.workload or NETWORKS:
        with TemporaryDirectory() as cache:
            environment = {"TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": str(chosen.threads)}
            first = _in_process(workload, 1, environment)
            again = _in_process(workload, chosen.rounds, environment)
        lines.append(_row(workload, first, again))
        print(lines[-1], flush=True)
    if chosen.write:
        from .timing import machine

        about = machine()
        threads = f"{chosen.threads} thread{'s' if chosen.threads > 1 else ''}"
        lines = [f"{about['cpu']}, {about['cores']} cores, {threads}:", "", *lines]
        before, _, rest = PAGE.read_text().partition(BEGIN)
        table = "\n".join(lines)
        PAGE.write_text(f"{before}{BEGIN}\n{table}\n\n{END}{rest.partition(END)[2]}")


def _row(workload: str, first: dict[str, Any], again: dict[str, Any]) -> str:
    from .timing import Spread, ratio

    captured, compiled = (again[name]["per_step"] for name in COMPILERS)
    gain = ratio(captured, compiled)
    return (
        f"| {workload} | {Spread.of(captured).median:,.0f} | {Spread.of(compiled).median:,.0f} "
        f"| {gain.median:.2f} ({gain.low:.2f} to {gain.high:.2f}) "
        f"| {first['inductor']['first']:.0f} | {again['inductor']['first']:.1f} "
        f"| {again['captured']['first']:.1f} |"
    )


def _in_process(workload: str, rounds: int, environment: dict[str, str]) -> dict[str, Any]:
    environment = {**os.environ, "KERAS_BACKEND": "torch", **environment}
    command = [sys.executable, "-m", "benchmarks", "inductor", "--child"]
    command += ["--workload", workload, "--rounds", str(rounds)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{workload} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _measured(workload: str, rounds: int) -> dict[str, Any]:
    """Return seconds to the end of the first epoch, and microseconds a step for each turn."""
    from .timing import take_turns
    from .workloads import job

    made = job(workload, NETWORKS[workload])
    found = take_turns({name: partial(_treadle, made, name) for name in COMPILERS}, rounds)
    failed = [f"{name}: {times.failed}" for name, times in found.items() if times.failed]
    if failed:
        sys.exit("\n".join(failed))
    return {
        name: {"first": times.first, "per_step": times.per_step} for name, times in found.items()
    }


def _treadle(job: Any, compiler: Any) -> Any:
    """Return a loop in windows, without a run directory.

    Raises:
        RuntimeError: The step runs otherwise.
    """
    import treadle

    from .contestants import Contestant

    train = treadle.data.from_arrays(*job.arrays, batch_size=job.batch_size)
    options = treadle.Options(compiler=compiler)

    def epochs() -> Iterator[dict[str, float]]:
        with treadle.Loop(job.make(), options=options, console=False) as loop:
            for _ in loop.epochs():
                total = 0.0
                for logs in loop.steps(train, every="auto"):
                    total += logs["loss"]
                if f", {compiler}" not in loop.plan:
                    raise RuntimeError(f"the plan is {loop.plan}")
                yield {"loss": total}

    rounds = epochs()
    return Contestant(lambda: next(rounds), job.steps)
