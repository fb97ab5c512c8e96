"""Two processes on this machine: Treadle and a loop written by hand, `scripts/bench processes`.

All train the same network on the same global batches, in many short turns, in the same two
processes. The processor time of both processes together is counted: they share the cores of one
machine, so the time on the clock says little. The share of exchanges is the time in which process 0
waits for them.

By hand is a jitted step on arrays that are split among the processes (JAX), and a network of
`torch.nn` in `DistributedDataParallel` (PyTorch): with its buckets, which are sent during the
backward pass, and with one message after it. Batches are not divided further, so that normalization
and Dropout of the loops by hand are those of a process's rows.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORKERS, ROUNDS = 2, 25


def main(arguments: list[str]) -> None:
    """Start the processes, of which the first one prints a table."""
    parser = argparse.ArgumentParser(prog="scripts/bench processes", description=__doc__)
    parser.add_argument("--backend", choices=["jax", "torch"], default="jax")
    parser.add_argument("--workload", default="mlp-adam")
    parser.add_argument("--steps", type=int, default=40, help="steps in a round")
    chosen = parser.parse_args(arguments)
    launch = [sys.executable, "-m", "treadle", "launch", "--workers", str(WORKERS), "--"]
    given = [chosen.backend, chosen.workload, str(chosen.steps)]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    sys.exit(subprocess.run([*launch, __file__, *given], env=environment).returncode)


def member(backend: str, workload: str, steps: int) -> None:
    """Train in turns, in one of the processes."""
    import treadle

    treadle.setup(seed=0, backend=backend)
    from benchmarks.contestants import TreadleLoop
    from benchmarks.workloads import job
    from treadle.core.processes import process_group

    work, group = job(workload, steps), process_group()
    waiting = [0.0]
    exchange = group.exchange

    def timed(value: Any, at: str) -> list[Any]:
        started = time.perf_counter()
        try:
            return exchange(value, at)
        finally:
            waiting[0] += time.perf_counter() - started

    vars(group)["exchange"] = timed
    by_hand = {"by hand": _jax(work)} if backend == "jax" else _torch(work, group)
    contestants = {"treadle": TreadleLoop(work, hooks=False), **by_hand}
    found: dict[str, list[float]] = {name: [] for name in contestants}
    clock: dict[str, list[float]] = {name: [] for name in contestants}
    shares: list[float] = []
    for number in range(ROUNDS + 1):  # the first one compiles
        for name, contestant in contestants.items():
            before, waiting[0] = time.process_time(), 0.0
            seconds = contestant.round(2).seconds
            share = waiting[0] / seconds
            spent = sum(exchange(time.process_time() - before, "a round"))
            if number:
                found[name].append(1e6 * spent / (2 * steps))
                clock[name].append(1e6 * seconds / (2 * steps))
                if name == "treadle":
                    shares.append(share)
    if group.rank == 0:
        print(f"{backend}, {workload}, {WORKERS} processes; median of {ROUNDS} (extremes)")
        for name, values in found.items():
            ratios = [b / a for a, b in zip(found["treadle"], values, strict=True)]
            spent, wall = _shown(values, ".0f"), _shown(clock[name], ".0f")
            print(f"{name:>16}: {spent} µs of a processor a step, {wall} on the clock")
            print(f"{'':>16}  {_shown(ratios, '.2f')} of Treadle's")
        print(f"exchanges: {100 * statistics.median(shares):.2f} % of Treadle's time")
    exchange(None, "the end")


def _shown(values: list[float], form: str) -> str:
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:{form}} ({least:{form}} to {most:{form}})"


def _jax(work: Any) -> Any:
    """A jitted step whose batch is split among the devices of both processes."""
    from functools import partial

    import jax
    import keras
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from benchmarks.contestants import Contestant
    from benchmarks.contestants_jax import Hand

    mesh = keras.distribution.distribution().device_mesh.backend_mesh
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
    whole = NamedSharding(mesh, PartitionSpec())
    hand = Hand(work)
    put: Callable[[Any, Any], Any] = lambda x, layout: jax.make_array_from_callback(  # noqa: E731
        x.shape, layout, lambda index: x[index]
    )
    hand.state = jax.tree.map(lambda x: put(np.asarray(x), whole), hand.state)
    arrays = [put(array, whole) for array in work.arrays]

    @partial(jax.jit, donate_argnums=0, out_shardings=whole)
    def step(state: Any, rows: Any, arrays: Any) -> Any:
        return hand.step(state, *(array[rows] for array in arrays))

    def run(state: Any) -> Any:
        for rows in work.order():
            state = step(state, put(rows, split), arrays)
        return state

    return Contestant(hand.epoch(run), work.steps)


def _torch(work: Any, group: Any) -> dict[str, Any]:
    """`DistributedDataParallel` over a network of `torch.nn`, each process with its rows."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks.contestants import Contestant
    from benchmarks.contestants_torch import Counted, looped, supervised, tensors
    from benchmarks.torch_models import by_hand

    arrays, size = tensors(work), work.batch_size // group.size
    mine = slice(group.rank * size, (group.rank + 1) * size)

    def batches() -> Any:
        for rows in torch.from_numpy(work.order()):
            yield [array[rows[mine]] for array in arrays]

    def made(**buckets: Any) -> Contestant:
        (model,), optimizers = by_hand(work.name)
        counted = Counted()
        parallel = DistributedDataParallel(model, **buckets)
        step = supervised([parallel], optimizers, counted, torch.Tensor.backward)
        return looped(step, counted, batches, work.steps)

    return {"DDP": made(), "DDP, one bucket": made(bucket_cap_mb=10_000)}


if __name__ == "__main__":
    member(sys.argv[1], sys.argv[2], int(sys.argv[3]))
