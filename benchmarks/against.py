"""Is this checkout as fast as another one, such as an earlier commit?

For each workload and backend, two processes train it: one with Treadle from this checkout, one with
that of the other checkout. They take turns, so that both meet the same noise, and only one trains
at a time. The ratio is the other's time by this one's, turn by turn: above 1, this one is faster.

    git worktree add /tmp/before HEAD~1
    scripts/bench against /tmp/before --workload mlp-sgd
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, cast

from . import parser_of
from .page import BACKENDS, WORKLOADS
from .timing import Spread, ratio

ROOT = Path(__file__).parents[1]
WARM_UP = 2  # turns that are not counted


def main(arguments: list[str]) -> None:
    """Compare what was chosen, and print a table."""
    parser = parser_of("against", __doc__)
    parser.add_argument("other", type=Path, help="the folder of the other checkout")
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="only this workload")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="only this backend")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each checkout (15)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.child:
        _take_turns(chosen.workload[-1])
        return
    print("workload      backend     µs a step: other  this   other/this (quartiles)")
    for workload in chosen.workload or WORKLOADS:
        for backend in chosen.backend or BACKENDS:
            other, this = _compared(workload, backend, chosen.other.resolve(), chosen.rounds)
            found, before, now = ratio(other, this), Spread.of(other), Spread.of(this)
            print(
                f"{workload:13} {backend:11} {1e6 * before.median:16.0f} {1e6 * now.median:6.0f}   "
                f"{found.median:.3f} ({found.low:.3f} to {found.high:.3f})",
                flush=True,
            )


def _compared(
    workload: str, backend: str, other: Path, rounds: int
) -> tuple[list[float], list[float]]:
    """Return the seconds per step of each turn: of the other checkout, and of this one."""
    found: tuple[list[float], list[float]] = ([], [])
    children = [_child(root, workload, backend) for root in (other, ROOT)]
    try:
        for turn in range(WARM_UP + rounds):
            for i in (0, 1) if turn % 2 else (1, 0):
                seconds = _turn(children[i])
                if turn >= WARM_UP:
                    found[i].append(seconds)
    finally:
        for child in children:
            child.kill()
            child.wait()
    return found


def _child(root: Path, workload: str, backend: str) -> subprocess.Popen[str]:
    """Start a process that trains with a checkout's Treadle, one turn for each line it gets."""
    environment = {**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": str(root / "src")}
    command = [sys.executable, "-m", "benchmarks", "against", str(root), "--child"]
    return subprocess.Popen(
        [*command, "--workload", workload],
        cwd=ROOT,  # the same benchmark for both
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _turn(child: subprocess.Popen[str]) -> float:
    """Let a process train for one turn, and return its seconds per step."""
    asks, answers = cast("IO[str]", child.stdin), cast("IO[str]", child.stdout)
    asks.write("turn\n")
    asks.flush()
    for line in answers:  # Keras may print lines of its own
        if line.startswith("turn "):
            return float(line.split()[1])
    sys.exit(f"the process {child.args} broke off")


def _take_turns(workload: str) -> None:
    """Train for at least 0.3 s for each line of standard input; print the seconds per step."""
    import treadle

    from .contestants import TreadleLoop
    from .workloads import job

    contestant, epochs = TreadleLoop(job(workload)), 1
    print(treadle.__file__)
    for _ in sys.stdin:
        turn = contestant.round(epochs)
        print("turn", turn.seconds / turn.steps, flush=True)
        if turn.seconds < 0.3:
            epochs *= 2
