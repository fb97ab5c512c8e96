"""Two processes on this machine: Treadle and a loop written by hand, `scripts/bench processes`.

All train the same network on the same global batches, in many short turns, in the same two
processes. The processor time of both processes together is counted: they share the cores of one
machine, so the time on the clock says little.

By hand is a jitted step on arrays that are split among the processes (JAX); a network of `torch.nn`
in `DistributedDataParallel` (PyTorch), with its buckets, which are sent during the backward pass,
and with one message after it; and a `tf.function` that runs a Keras model under
`MultiWorkerMirroredStrategy` (TensorFlow). On PyTorch and TensorFlow batches are not divided
further, so that normalization and Dropout of the loops by hand are those of a process's rows.

What Treadle's processes exchange between windows costs as many exchanges as there were, times the
processor time of one. Waiting for the other process in them is no processor time, and is shown too.

The exit code is 1 if Treadle takes more than 1.1 times the processor time of a loop by hand, or if
exchanges cost more than 2 % of Treadle's.
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

WORKERS = 2
MOST_RATIO, MOST_SHARE = 1.1, 0.02
EXCHANGES = 500


def main(arguments: list[str]) -> None:
    """Start the processes, of which the first one prints a table."""
    parser = argparse.ArgumentParser(prog="scripts/bench processes", description=__doc__)
    parser.add_argument("--backend", choices=["jax", "torch", "tensorflow"], default="jax")
    parser.add_argument("--workload", default="mlp-adam")
    parser.add_argument("--steps", type=int, default=40, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=25)
    chosen = parser.parse_args(arguments)
    launch = [sys.executable, "-m", "treadle", "launch", "--workers", str(WORKERS), "--"]
    given = [chosen.backend, chosen.workload, str(chosen.steps), str(chosen.rounds)]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    sys.exit(subprocess.run([*launch, __file__, *given], env=environment).returncode)


class Exchanges:
    """What a process exchanges with the other one.

    Args:
        group: The processes, whose exchanges are counted from now on.

    Attributes:
        count: The number of exchanges.
        waited: The seconds on the clock that they took, together.
    """

    def __init__(self, group: Any) -> None:
        self.count, self.waited = 0, 0.0
        self._exchange = group.exchange
        vars(group)["exchange"] = self._counted

    def _counted(self, value: Any, at: str) -> list[Any]:
        started = time.perf_counter()
        try:
            return self._exchange(value, at)
        finally:
            self.count += 1
            self.waited += time.perf_counter() - started

    def together(self, value: float) -> float:
        """Return the sum of a value over the processes, by an exchange that does not count."""
        return sum(self._exchange(value, "a measurement"))

    def cost(self) -> float:
        """Return the processor time of one exchange after a window, in all processes together."""
        message = [time.monotonic(), 0.0123456789, 0.0123456789, None]
        before = time.process_time()
        for number in range(EXCHANGES):
            self._exchange(message, f"the window that ends at step {number}")
        return self.together(time.process_time() - before) / EXCHANGES


def member(backend: str, workload: str, steps: int, rounds: int) -> int:
    """Train in turns, in one of the processes, and return the exit code."""
    import treadle

    treadle.setup(seed=0, backend=backend)
    from benchmarks.contestants import TreadleLoop
    from benchmarks.workloads import job
    from treadle.core.processes import process_group

    work, group = job(workload, steps), process_group()
    exchanges = Exchanges(group)
    by_hand = {"jax": _jax, "torch": _torch, "tensorflow": _tensorflow}[backend](work, group)
    contestants = {"treadle": TreadleLoop(work, hooks=False), **by_hand}
    spent: dict[str, list[float]] = {name: [] for name in contestants}
    clock: dict[str, list[float]] = {name: [] for name in contestants}
    losses = dict[str, float]()  # all train alike
    costs, waits = list[float](), list[float]()
    for number in range(rounds + 1):  # the first one compiles
        for name in [*contestants] if number % 2 else [*contestants][::-1]:
            contestant = contestants[name]
            exchanges.count, exchanges.waited = 0, 0.0
            before = time.process_time()
            turn = contestant.round(2)
            seconds, losses[name] = turn.seconds, turn.values["loss"]
            count, waited = exchanges.count, exchanges.waited
            both = exchanges.together(time.process_time() - before)
            if number:
                spent[name].append(1e6 * both / (2 * steps))
                clock[name].append(1e6 * seconds / (2 * steps))
            if number and name == "treadle":
                costs.append(count * exchanges.cost() / both)
                waits.append(waited / seconds)
    cost = exchanges.cost()
    ratios = {
        name: [a / b for a, b in zip(spent["treadle"], spent[name], strict=True)]
        for name in by_hand
    }
    if group.rank == 0:
        print(f"{backend}, {workload}, {WORKERS} processes; median of {rounds} (extremes)")
        for name, values in spent.items():
            print(
                f"{name:>16}: {_shown(values, '.0f')} µs of a processor a step, "
                f"{_shown(clock[name], '.0f')} on the clock; loss {losses[name]:.3f}"
            )
            if name in ratios:
                print(f"{'':>16}  Treadle takes {_shown(ratios[name], '.2f')} of it")
        print(
            f"exchanges: {_shown([100 * x for x in costs], '.2f')} % of Treadle's processor time, "
            f"{1e6 * cost:.0f} µs each; waiting in them {100 * statistics.median(waits):.2f} % of "
            "its time on the clock"
        )
    slowest = max(statistics.median(found) for found in ratios.values())
    return int(slowest > MOST_RATIO or statistics.median(costs) > MOST_SHARE)


def _shown(values: list[float], form: str) -> str:
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:{form}} ({least:{form}} to {most:{form}})"


def _jax(work: Any, group: Any) -> dict[str, Any]:
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

    return {"by hand": Contestant(hand.epoch(run), work.steps)}


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


def _tensorflow(work: Any, group: Any) -> dict[str, Any]:
    """A compiled step under `MultiWorkerMirroredStrategy`, each process with its rows.

    The strategy uses the servers that Treadle has started, and has no others.
    """
    from unittest.mock import patch

    import tensorflow as tf
    from tensorflow.python.eager import context as contexts

    from benchmarks.contestants import Contestant
    from benchmarks.contestants_tensorflow import Hand

    context = contexts.context()
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(context._collective_ops_server_def.cluster),
        task_type="worker",
        task_id=group.rank,
        rpc_layer="grpc",
    )
    with patch.object(context, "enable_collective_ops"):
        strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)
    with strategy.scope():
        hand = Hand(work, strategy.num_replicas_in_sync)
    size = work.batch_size // group.size
    mine = slice(group.rank * size, (group.rank + 1) * size)
    arrays = [tf.constant(array) for array in work.arrays]

    @tf.function
    def step(rows: Any) -> None:
        strategy.run(hand.step, args=[tf.gather(array, rows) for array in arrays])

    def run() -> None:
        for rows in work.order():
            step(tf.constant(rows[mine]))

    return {"MWMS": Contestant(hand.epoch(run), work.steps)}


if __name__ == "__main__":
    code = member(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    sys.exit(code)
