"""Compare the runs of two checkouts bit by bit: scripts/same-bits OTHER [--backend NAME]….

Trains five recipes for 60 steps on each backend with the Treadle of both checkouts. Each run is
killed after step 40, and resumed. Compared are the lines of `log.jsonl` without times, and the
arrays of the state at the end.

    git worktree add /tmp/before HEAD~1
    scripts/same-bits /tmp/before
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from tests.range.jobs import BACKENDS, SMALL_TEXTS, Cell, Failed, comparable, write_mnist

STEPS = 60
RECIPES: dict[str, Mapping[str, Any]] = {
    "digits": {},
    "custom-optimizer": {},
    "cyclic-lr": {},
    "char-lm": SMALL_TEXTS,
    "mnist-gan": {},
}
MOST = 5  # differences of a recipe that are shown
# The loop gets two more hooks, which change no result.
KILLED = """
import inspect, os, signal, treadle
from treadle.cli import main

def save(loop):
    loop.save()

def kill(loop):
    os.kill(os.getpid(), signal.SIGKILL)

original = treadle.Loop.__init__

def init(*args, **options):
    bound = inspect.signature(original).bind(*args, **options)
    given = bound.arguments.get("hooks") or ()
    bound.arguments["hooks"] = [*given, treadle.at("20 steps", save), treadle.at("40 steps", kill)]
    original(*bound.args, **bound.kwargs)

treadle.Loop.__init__ = init
main()
"""


def main() -> int:
    """Print what differs; return 1 if anything does."""
    parser = argparse.ArgumentParser(prog="scripts/same-bits", description=__doc__)
    parser.add_argument("other", type=Path, help="the folder of the other checkout")
    parser.add_argument("--backend", action="append", dest="backends", choices=BACKENDS)
    parser.add_argument("--recipe", action="append", dest="recipes", choices=RECIPES)
    arguments = parser.parse_args()
    found = 0
    for backend in arguments.backends or BACKENDS:
        for recipe in arguments.recipes or RECIPES:
            lines = list(compared(recipe, backend, arguments.other.resolve()))
            found += len(lines)
            shown = [*lines[:MOST], *([f"… {len(lines) - MOST} more"] if lines[MOST:] else [])]
            print(f"{recipe} on {backend}: {'; '.join(shown) or 'same bits'}", flush=True)
    return int(found > 0)


def compared(recipe: str, backend: str, other: Path) -> list[str]:
    """Run a recipe in both checkouts, side by side; return what differs."""
    with tempfile.TemporaryDirectory(prefix="treadle-bits-") as folder, ThreadPoolExecutor() as run:
        cells = [Cell(None, backend, Path(folder, name)) for name in ("other", "this")]
        cells[0].root = other
        try:
            directories = list(run.map(trained, [recipe] * 2, cells))
        except Failed as error:
            return [str(error)]
        return list(differences(*directories))


def trained(recipe: str, cell: Cell) -> Path:
    """Run a recipe that is killed, and resume it; return its directory.

    Raises:
        Failed: A command ends with another code than expected.
    """
    cell.folder.mkdir()
    words = [f"--set={name}={value}" for name, value in RECIPES[recipe].items()]
    if recipe == "mnist-gan":
        words += ["--data-dir", str(write_mnist(cell))]
    command = ("run", recipe, "--steps", STEPS, *words, "--directory", "run", "--quiet")
    cell.python("-c", KILLED, *command, code=-signal.SIGKILL)
    cell.treadle("resume", "run")
    return cell.folder / "run"


def differences(other: Path, this: Path) -> Iterator[str]:
    """Yield what differs between two run directories."""
    logs = [comparable(path / "log.jsonl") for path in (other, this)]
    for number, (a, b) in enumerate(zip(*logs, strict=False), 1):
        for name in sorted({*a, *b}):
            if str(a.get(name)) != str(b.get(name)):  # NaN is not equal to itself
                yield f"line {number} of the log: {name} was {a.get(name)}, now {b.get(name)}"
    if len(logs[0]) != len(logs[1]):
        yield f"the log had {len(logs[0])} lines, now {len(logs[1])}"
    states = [_arrays(path / "state.safetensors") for path in (other, this)]
    for name in sorted({*states[0], *states[1]}):
        a, b = (state.get(name) for state in states)
        if a is None or b is None:
            yield f"{name} is only in the {'present' if a is None else 'earlier'} state"
        elif (a.dtype, a.shape, a.tobytes()) != (b.dtype, b.shape, b.tobytes()):
            yield f"{name} differs"


def _arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    with safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


if __name__ == "__main__":
    sys.exit(main())
