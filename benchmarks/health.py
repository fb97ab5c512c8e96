"""What does the hook `GradientHealth` cost?

The same training with and without the hook, in turns in one process for each backend. Measured
steps are rare, so the turns are long: they begin after the first steps, of which many are measured.

    scripts/bench health --backend jax
"""

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from . import in_process, parser_of

BACKENDS = ("tensorflow", "jax", "torch")
NETWORK = "784-64-64-10, SGD, MNIST, batch 64"
STEPS = 2000  # of a turn; one in 1000 is measured


def main(arguments: list[str]) -> None:
    """Measure what was chosen, and print a table."""
    parser = parser_of("health", __doc__)
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="only this backend")
    parser.add_argument("--rounds", type=int, default=11, help="turns of each contestant (11)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.child:
        print(json.dumps(_measured(chosen.rounds)))
        return
    print(f"{NETWORK}\n\n| backend | µs a step | with GradientHealth (quartiles) |")
    print("| --- | --- | --- |")
    for backend in chosen.backend or BACKENDS:
        from .timing import Spread, ratio

        times = in_process("health", backend, "--rounds", str(chosen.rounds))
        share = ratio(times["with"], times["without"])
        print(
            f"| {backend} | {Spread.of(times['without']).median:,.0f} "
            f"| {share.median:.3f} ({share.low:.3f} to {share.high:.3f}) |",
            flush=True,
        )


def _measured(rounds: int) -> dict[str, list[float]]:
    """Return microseconds a step, a value for each turn."""
    from .timing import take_turns
    from .workloads import job

    made = job("mlp-sgd", STEPS)
    makers: dict[str, Callable[[], Any]] = {
        "without": partial(_contestant, made, measured=False),
        "with": partial(_contestant, made, measured=True),
    }
    return {name: times.per_step for name, times in take_turns(makers, rounds).items()}


def _contestant(job: Any, measured: bool) -> Any:
    import treadle

    from .contestants import Contestant

    hooks = [treadle.hooks.GradientHealth()] if measured else []
    train = treadle.data.from_arrays(*job.arrays, batch_size=job.batch_size)

    def epochs() -> Iterator[dict[str, float]]:
        with treadle.Loop(job.make(), console=False, hooks=hooks) as loop:
            for _ in loop.epochs():
                for logs in loop.steps(train, every=f"{job.steps} steps"):
                    yield dict(logs)

    turns = epochs()
    return Contestant(lambda: next(turns), job.steps)
