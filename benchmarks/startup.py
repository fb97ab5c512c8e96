"""Time from a command to its first step: imports, and the starts of three recipes.

`--recipes` compares the first and the second start of `treadle run` with the same program written
by hand and with `fit`; `--write` adds the rounds to those measured before, and writes the page.
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import parser_of
from .first_step import FIRST, TASKS, starts

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


RESULTS = Path(__file__).parent / "startup.json"
PAGE = Path(__file__).parent.parent / "docs" / "first-step.md"
BACKENDS = ("tensorflow", "jax", "torch")


def main(arguments: list[str]) -> None:
    """Time imports, or with `--recipes` the first steps of recipes."""
    parser = parser_of("startup", __doc__)
    parser.add_argument("--recipes", action="store_true", help="time first steps, not imports")
    parser.add_argument("--recipe", choices=TASKS, action="append", help="only this one")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="only this one")
    parser.add_argument("--rounds", type=int, default=5, help="starts of each contestant (5)")
    parser.add_argument("--afresh", action="store_true", help="discard what was measured before")
    parser.add_argument("--write", action="store_true", help=f"write docs/{PAGE.name}")
    chosen = parser.parse_args(arguments)
    if not chosen.recipes:
        _imports()
        return
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for backend in chosen.backend or BACKENDS:
        for recipe in chosen.recipe or TASKS:
            key = f"{recipe} {backend}"
            found = {} if chosen.afresh else kept.get(key, {})
            for _ in range(chosen.rounds):
                for name, seconds in starts(recipe, backend).items():
                    found.setdefault(name, []).append(round(seconds, 3))
            kept[key] = found
            print("\n".join(_rows(recipe, backend, found)), flush=True)
    if chosen.write:
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
        write_page(kept)


def write_page(kept: dict[str, Any]) -> None:
    """Write the page from all results that were kept."""
    from .timing import machine

    about = machine()
    lines = [
        "# Time to the first step",
        "",
        "This page shows how long it takes from a command to the end of its first training step: "
        "imports, making the network,\nloading the data, building, tracing and compiling. "
        "`treadle run` is compared with a script that trains the same network\nwith a "
        "hand-written compiled step, and with `fit`. Written by `scripts/bench startup --recipes "
        "--write`.",
        "",
        f"{about['cpu']}, {about['cores']} cores. Each start is a new process. Contestants take "
        "turns; ratios are\nmedians of the ratios within a round, with quartiles.",
        "",
        "- The second start uses the [compiled programs](speed.md#the-second-start-is-faster) "
        "that the first one has kept. Only JAX\n  does that. The second start still imports "
        "Keras and JAX, and traces the step.",
        "- `import keras` also imports Matplotlib, and on TensorFlow and PyTorch JAX. `treadle "
        "run` omits both, which saves about a\n  second.",
        "- The scripts use Keras' own gradient accumulation and clipping for `char-lm`.",
        "- On PyTorch, the step by hand runs Keras' layers as Python, and compiles nothing.",
        "",
        "| recipe | backend | contestant | starts | seconds (quartiles) | by the first start "
        "| by the program by hand |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for backend in BACKENDS:
        for recipe in TASKS:
            if f"{recipe} {backend}" in kept:
                lines += _rows(recipe, backend, kept[f"{recipe} {backend}"])
    PAGE.write_text("\n".join(lines) + "\n")


def _rows(recipe: str, backend: str, found: dict[str, list[float]]) -> list[str]:
    from .timing import Spread, ratio

    rows: list[str] = []
    for name, seconds in found.items():
        own = Spread.of(seconds)
        shares = [ratio(seconds, found[other]) for other in (FIRST, "by hand")]
        shown = [f"{x.median:.2f} ({x.low:.2f} to {x.high:.2f})" for x in shares]
        rows.append(
            f"| {recipe} | {backend} | {name} | {len(seconds)} "
            f"| {own.median:.2f} ({own.low:.2f} to {own.high:.2f}) | {' | '.join(shown)} |"
        )
    return rows


def _imports() -> None:
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
