"""What memory does gradient checkpointing save? Six blocks of `char-lm`, with and without it.

Each row is a process of its own, whose allocator gives large blocks back at once. Linux only.
"""

import os
import subprocess
import sys
from pathlib import Path

from . import parser_of

BACKENDS = ("tensorflow", "jax", "torch")
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def main(arguments: list[str]) -> None:
    """Print the table."""
    parser = parser_of("remat", __doc__)
    parser.add_argument("--backend", choices=BACKENDS, action="append")
    chosen = parser.parse_args(arguments)
    print("| backend | plan | checkpointing | peak of the first two steps, MiB | of later ones |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    for backend in chosen.backend or BACKENDS:
        for execution in ("auto", "eager") if backend == "torch" else ("auto",):
            for remat in ("", "yes"):
                subprocess.run(
                    [sys.executable, "-m", __name__, execution, remat],
                    env={
                        **os.environ,
                        "KERAS_BACKEND": backend,
                        "TF_CPP_MIN_LOG_LEVEL": "3",
                        "MALLOC_MMAP_THRESHOLD_": "100000",
                        "MALLOC_TRIM_THRESHOLD_": "100000",
                    },
                    check=True,
                )


def measured(execution: str, remat: str) -> None:
    """Train a few steps, and print a row."""
    import keras

    import treadle
    from treadle.recipes.char_lm import CharacterModel

    task = CharacterModel(depth=6, batch_size=128, accumulation_steps=1, remat=bool(remat))
    options = treadle.Options(execution="eager" if execution == "eager" else "auto")
    with treadle.Loop(task, console=False, options=options) as loop:
        train = task.datasets().train
        loop.fit(train, steps=2)
        first = _peak()
        RESET.write_text("5")  # the highest mark is set to what is used now
        loop.fit(train, steps=5)
        plan = "eager" if execution == "eager" else "compiled"
        print(
            f"| {keras.config.backend()} | {plan} | {remat} | {first:,} | {_peak():,} |", flush=True
        )


def _peak() -> int:
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024


if __name__ == "__main__":
    measured(*sys.argv[1:])
