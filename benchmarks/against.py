"""Treadle compared with itself: other checkouts, other compilers, and what some features cost."""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, cast

from . import BACKENDS, DOCS, ROOT, environment_of, in_process, parser_of, write_section
from .page import WORKLOADS
from .timing import Spread, ratio

# Batches of an epoch of a small network.
CALLS = {"steps": 300, "step": 300, "evaluate": 100, "stream": 300}
WARM_UP = 2  # turns that are not counted


def main(arguments: list[str]) -> None:
    """Is this checkout as fast as another one, such as an earlier commit?

    For each workload and backend, two processes train it: one with Treadle from this checkout, one
    with that of the other checkout. They take turns, so that both meet the same noise, and only one
    trains at a time. The ratio is the other's time by this one's, turn by turn: above 1, this one
    is faster. Four workloads are no `fit` of a small network in arrays: `steps` reads the loss of
    each step, `step` calls `loop.step` with each batch, `evaluate` calls `loop.evaluate`, and
    `stream` trains on a generator.

        git worktree add /tmp/before HEAD~1
        scripts/bench against /tmp/before --workload mlp-sgd
    """
    parser = parser_of("against", main.__doc__, 15)
    parser.add_argument("other", type=Path, help="the folder of the other checkout")
    workloads = (*WORKLOADS, *CALLS)
    parser.add_argument("--workload", choices=workloads, action="append", help="only this workload")
    chosen = parser.parse_args(arguments)
    if chosen.child:
        _take_turns(chosen.workload[-1])
        return
    print("workload      backend     µs a step: other  this   other/this (quartiles)")
    for workload in chosen.workload or workloads:
        for backend in chosen.backend or BACKENDS:
            other, this = _both(workload, backend, chosen.other.resolve(), chosen.rounds)
            before, now = 1e6 * Spread.of(other).median, 1e6 * Spread.of(this).median
            print(
                f"{workload:13} {backend:11} {before:16.0f} {now:6.0f}   {ratio(other, this):.3f}",
                flush=True,
            )


def _both(workload: str, backend: str, other: Path, rounds: int) -> tuple[list[float], list[float]]:
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
    command = [sys.executable, "-m", "benchmarks", "against", str(root), "--child"]
    return subprocess.Popen(
        [*command, "--workload", workload],
        cwd=ROOT,  # the same benchmark for both
        env=environment_of(backend) | {"PYTHONPATH": str(root / "src")},
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

    runner: Any = calling(workload) if workload in CALLS else TreadleLoop(job(workload))
    epochs = 1
    print(treadle.__file__)
    for _ in sys.stdin:
        turn = runner.round(epochs)
        print("turn", turn.seconds / turn.steps, flush=True)
        if turn.seconds < 0.3:
            epochs *= 2


def calling(name: str) -> Any:
    """Return a contestant that makes one of the calls in `CALLS`."""
    from .calls import evaluate, stepping
    from .contestants import Contestant, TreadleLoop
    from .workloads import job

    made = job("mlp-sgd", CALLS[name])
    if name == "evaluate":
        return evaluate(made)
    if name == "steps":
        return stepping(made, "1 step")

    def batches() -> Iterator[Any]:
        for rows in made.order():
            yield tuple(array[rows] for array in made.arrays)

    if name == "stream":
        return TreadleLoop(made, batches)

    import treadle

    def epochs() -> Iterator[dict[str, float]]:
        with treadle.Loop(made.make(), console=False) as loop:
            while True:
                total = 0.0
                for batch in batches():
                    total += loop.step(batch)["loss"]
                yield {"loss": total / made.steps}

    rounds = epochs()
    return Contestant(lambda: next(rounds), made.steps)


COMPILED = {"mlp-adam": 100, "bn-dropout": 60, "transformer": 12}  # steps of an epoch
COMPILERS = ("captured", "inductor")


def inductor(arguments: list[str]) -> None:
    """How fast is a captured PyTorch step that Inductor compiles?

    `Options(compiler="inductor")` against `Options(compiler="captured")`, on a CPU. Each network
    has two processes: one with an empty cache of compiled programs, for the first start, and one
    that finds them there, in which both take turns.

        scripts/bench inductor --workload mlp-adam
    """
    parser = parser_of("inductor", inductor.__doc__, 11, "speed.md")
    parser.add_argument("--workload", choices=COMPILED, action="append", help="only this network")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads (all cores)")
    chosen = parser.parse_args(arguments)
    if chosen.child:
        print(json.dumps(_with_compilers(chosen.workload[-1], chosen.rounds)))
        return
    lines = [
        "| network | captured, µs a step | inductor, µs a step | times as fast (quartiles) "
        "| first start, s | later starts, s | captured start, s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    print("\n".join(lines))
    for workload in chosen.workload or COMPILED:
        with TemporaryDirectory() as cache:
            first, again = (
                in_process(
                    *("inductor", "torch", "--workload", workload, "--rounds", str(rounds)),
                    TORCHINDUCTOR_CACHE_DIR=cache,
                    OMP_NUM_THREADS=str(chosen.threads),
                )
                for rounds in (1, chosen.rounds)
            )
        captured, compiled = (again[name]["per_step"] for name in COMPILERS)
        lines.append(
            f"| {workload} | {Spread.of(captured).median:,.0f} | {Spread.of(compiled).median:,.0f} "
            f"| {ratio(captured, compiled):.2f} | {first['inductor']['first']:.0f} "
            f"| {again['inductor']['first']:.1f} | {again['captured']['first']:.1f} |"
        )
        print(lines[-1], flush=True)
    if chosen.write:
        from .timing import processor

        threads = f"{chosen.threads} thread{'s' if chosen.threads > 1 else ''}"
        lines = [f"{processor()}, {threads}:", "", *lines]
        write_section(DOCS / "speed.md", "bench inductor --write", lines)


def _with_compilers(workload: str, rounds: int) -> dict[str, Any]:
    """Return seconds to the end of the first epoch, and microseconds a step for each turn."""
    from .timing import compared
    from .workloads import job

    made = job(workload, COMPILED[workload])
    found = compared({name: partial(_compiled_by, made, name) for name in COMPILERS}, rounds)
    return {
        name: {"first": times.first, "per_step": times.per_step} for name, times in found.items()
    }


def _compiled_by(job: Any, compiler: Any) -> Any:
    """Return a loop in windows, without a run directory.

    Raises:
        RuntimeError: The step runs otherwise.
    """
    import treadle

    from .calls import stepping

    def check(loop: Any) -> None:
        if f", {compiler}" not in loop.plan:
            raise RuntimeError(f"the plan is {loop.plan}")

    return stepping(job, "auto", check, options=treadle.Options(compiler=compiler))


HEALTH_STEPS = 2000  # of a turn; one in 1000 is measured


def health(arguments: list[str]) -> None:
    """What does the hook `GradientHealth` cost?

    The same training with and without the hook, in turns in one process for each backend. Measured
    steps are rare, so the turns are long: they begin after the first steps, of which many are
    measured.

        scripts/bench health --backend jax
    """
    parser = parser_of("health", health.__doc__, 11)
    chosen = parser.parse_args(arguments)
    if chosen.child:
        print(json.dumps(_with_health(chosen.rounds)))
        return
    print("784-64-64-10, SGD, MNIST, batch 64\n")
    print("| backend | µs a step | with GradientHealth (quartiles) |\n| --- | --- | --- |")
    for backend in chosen.backend or BACKENDS:
        times = in_process("health", backend, "--rounds", str(chosen.rounds))
        median, share = Spread.of(times["without"]).median, ratio(times["with"], times["without"])
        print(f"| {backend} | {median:,.0f} | {share:.3f} |", flush=True)


def _with_health(rounds: int) -> dict[str, list[float]]:
    """Return microseconds a step, a value for each turn."""
    import treadle

    from .calls import stepping
    from .timing import per_step
    from .workloads import job

    made = job("mlp-sgd", HEALTH_STEPS)
    every = f"{HEALTH_STEPS} steps"
    makers: dict[str, Callable[[], Any]] = {
        "without": lambda: stepping(made, every),
        "with": lambda: stepping(made, every, hooks=[treadle.hooks.GradientHealth()]),
    }
    return per_step(makers, rounds)


SAVED = ("mlp-sgd", "cifar10-cnn")
# Five times as often as the 10 seconds in question, so that the cost stands out from the noise.
EVERY = 2.0


def checkpoints(arguments: list[str]) -> None:
    """What checkpoints cost: how long training waits for one, and how much slower it runs.

    scripts/bench checkpoints [--backend B] [--workload W] [--seconds S] [--rounds N]
    """
    parser = parser_of("checkpoints", checkpoints.__doc__, 3)
    parser.add_argument("--workload", choices=SAVED, action="append", help="only this workload")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each turn")
    chosen = parser.parse_args(arguments)
    if not chosen.child:
        for backend in chosen.backend or BACKENDS:
            command = [sys.executable, "-m", "benchmarks", "checkpoints", *arguments, "--child"]
            subprocess.run(command, env=environment_of(backend), check=True)
        return
    import keras

    print(f"{keras.config.backend()}:", stalls())
    for workload in chosen.workload or SAVED:
        print(f"{keras.config.backend()}, {workload}:", slower(workload, chosen), flush=True)


def stalls(megabytes: int = 100) -> str:
    """Return for how long training waits for a save of a state of this size."""
    import keras
    import numpy as np

    import treadle

    class Timed(treadle.hooks.Checkpoint):
        def save(self, loop: Any, wait: bool = False) -> bool:
            started = time.perf_counter()
            saved = super().save(loop, wait)
            if saved and not wait:
                waited.append((time.perf_counter() - started) * 1e3)
            return saved

    waited: list[float] = []
    units = int((megabytes * 1e6 / 4 / 3 / 2) ** 0.5)  # two layers, each with two slots of Adam
    layers = [keras.layers.Dense(units), keras.layers.Dense(units)]
    model = keras.Sequential([keras.Input((units,)), *layers])
    x = np.random.default_rng(0).normal(size=(64, units)).astype("float32")
    task = treadle.Supervised(model, "mse", keras.optimizers.Adam())
    train = treadle.data.from_arrays(x, x, batch_size=8)
    with (
        TemporaryDirectory() as folder,
        treadle.Loop(task, folder, hooks=[Timed(every="16 steps")], console=False) as loop,
    ):
        loop.fit(train, steps=640)
        size = sum(array.nbytes for array in loop.state.arrays().values()) / 1e6
    first, *rest = waited  # the first makes the memory that values are copied into
    return (
        f"a save of {size:.0f} MB makes training wait {statistics.median(rest):.1f} ms "
        f"({min(rest):.1f} to {max(rest):.1f}; the first {first:.1f}), of {len(waited)} saves"
    )


def slower(workload: str, chosen: argparse.Namespace) -> str:
    """Return how much longer a step takes with a checkpoint every 2 seconds."""
    from .workloads import job

    work = job(workload)
    with_them, without = (_turns(work, every, chosen.seconds) for every in (f"{EVERY} s", "100 h"))
    next(with_them), next(without)  # compiles
    found: list[float] = []
    for number in range(chosen.rounds):
        both = [(0, with_them), (1, without)]
        times = {which: next(turn) for which, turn in (both if number % 2 else both[::-1])}
        found.append(times[0] / times[1] - 1)
    middle = statistics.median(found)
    return (
        f"{middle:+.1%} time per step with a checkpoint every {EVERY:g} s, so {middle / 5:+.1%} "
        f"with one every 10 s ({min(found):+.1%} to {max(found):+.1%})"
    )


def _turns(work: Any, every: str, seconds: float) -> Iterator[float]:
    """Yield the seconds per step of one turn after another."""
    import treadle

    train = treadle.data.from_arrays(*work.arrays, batch_size=work.batch_size)
    hook = treadle.hooks.Checkpoint(every=every)
    with (
        TemporaryDirectory() as folder,
        treadle.Loop(work.make(), folder, hooks=[hook], console=False) as loop,
    ):
        for _ in itertools.count():
            started, step = time.perf_counter(), loop.progress.step
            for _ in loop.epochs():
                for _ in loop.steps(train, every="auto"):
                    if time.perf_counter() - started > seconds:
                        break
                if time.perf_counter() - started > seconds:
                    break
            yield (time.perf_counter() - started) / (loop.progress.step - step)
