"""What one of several processes spends on its rows, `scripts/bench scale --backend NAME`.

Each process has 64 rows of every batch, so with N processes a batch has 64 N. Shown for one process
are the processor time of a step, that of sending a message of the size of all gradients, and by how
much its memory grew at most. Each computes with one thread; where there are more processes than
cores they wait for one another, which is no processor time.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROWS, UNITS, LAYERS, CLASSES = 64, 1024, 3, 10
SIZES, STEPS, ROUNDS = (1, 2, 4, 8), 20, 7
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
}


def main(arguments: list[str]) -> None:
    """Start so many processes, of which the first one prints a row of the table."""
    parser = argparse.ArgumentParser(prog="scripts/bench scale", description=__doc__)
    parser.add_argument("--backend", choices=["jax", "torch", "tensorflow"], default="torch")
    parser.add_argument("--processes", type=int, nargs="+", default=SIZES)
    chosen = parser.parse_args(arguments)
    print("| processes | Dropout | a step | its messages alone | memory |")
    print("| --- | --- | --- | --- | --- |")
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    for rate in ("0", "0.5"):
        for size in chosen.processes:
            launch = ["-m", "treadle", "launch", "--workers", str(size), "--"] if size > 1 else []
            command = [sys.executable, *launch, __file__, chosen.backend, rate]
            environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": path}
            subprocess.run(command, env=environment, check=True)


def member(backend: str, rate: float) -> None:
    """Train in one of the processes; the first one prints its processor time and memory."""
    import treadle

    treadle.setup(seed=0, backend=backend)
    import keras
    import numpy as np

    from treadle.core.processes import process_group

    layers = keras.layers
    size = process_group().size
    model = keras.Sequential([keras.Input((UNITS,))])
    for _ in range(LAYERS):
        model.add(layers.Dense(UNITS, "relu"))
        if rate:
            model.add(layers.Dropout(rate))
    model.add(layers.Dense(CLASSES))
    task = treadle.Supervised(
        model, keras.losses.SparseCategoricalCrossentropy(True), keras.optimizers.SGD(0.01)
    )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS * size * STEPS, UNITS)).astype("float32")
    data = treadle.data.from_arrays(
        x, rng.integers(CLASSES, size=len(x)).astype("int32"), batch_size=ROWS * size
    )
    before, spent = peak(), list[float]()
    with treadle.Loop(task, hooks=(), console=False) as loop:
        for number in range(ROUNDS + 1):  # the first one compiles
            started = time.process_time()
            loop.fit(data, epochs=1)
            if number:
                spent.append((time.process_time() - started) / STEPS)
        grown = peak() - before
    weights = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    sent = messages(weights) if size > 1 else 0.0
    if process_group().rank == 0:
        step = 1e3 * statistics.median(spent)
        print(f"| {size} | {rate:g} | {step:.1f} ms | {1e3 * sent:.1f} ms | {grown:.0f} MB |")
        sys.stdout.flush()


def messages(numbers: int) -> float:
    """Return the processor time of summing so many numbers over the processes; 0 on JAX."""
    import numpy as np

    from treadle.distribute.dividing.collectives import Collectives, group_backend

    backend: Any = group_backend()
    if not isinstance(backend, Collectives):
        return 0.0
    array, spent = np.zeros(numbers, "float32"), list[float]()
    for number in range(STEPS + 1):
        started = time.process_time()
        backend.begin_step()
        backend.own.to_numpy(backend.sum(backend.own.to_device(array)))
        if number:
            spent.append(time.process_time() - started)
    return statistics.median(spent)


def peak() -> float:
    """Return the most memory that this process has had so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    member(sys.argv[1], float(sys.argv[2]))
