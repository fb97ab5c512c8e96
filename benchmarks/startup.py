"""What does `import treadle` cost, compared with `import keras`, and what does it import?"""

import statistics
import subprocess
import sys
import time

CODE = {
    "python alone": "pass",
    "import treadle": "import treadle",
    "treadle --help": (
        "import treadle.cli, sys; sys.argv = ['treadle', '--help']; treadle.cli.main()"
    ),
    "import keras": "import keras",
    "import keras, treadle": "import keras, treadle",
    "import keras, all of treadle": (
        "import keras, treadle; from treadle import Loop, Task, data, gradients, phase, setup"
    ),
}
ROUNDS = 7


def main(arguments: list[str]) -> None:
    """Time each in a process of its own, interleaved; print medians in seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in CODE}
    for _ in range(ROUNDS):
        for name, code in CODE.items():
            started = time.monotonic()
            subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
            seconds[name].append(time.monotonic() - started)
    for name, measured in seconds.items():
        print(
            f"{name:30s} {statistics.median(measured):6.2f} s  (of {ROUNDS}: {min(measured):.2f}"
            f" to {max(measured):.2f})"
        )
    probe = (
        "import sys, treadle; print([m for m in ('keras', 'tensorflow', 'jax', 'torch', 'numpy') "
        "if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    print(f"imported by `import treadle` alone: {found.stdout.strip()}")
