"""Run the main jobs on versions of Keras: scripts/range [--tests] [--backend NAME]… [VERSION…].

Prints a table: a row for each version, a column for each backend. All versions on all backends take
about 13 minutes of one processor; with `--tests`, each cell takes several minutes more.
"""

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks import write_section
from tests.xla import less_optimized

from . import versions
from .jobs import BACKENDS, INSTALLED, JOBS, ROOT, Cell, run
from .names import checked

PAGE = ROOT / "docs" / "start" / "installation.md"
TITLES = {"torch": "PyTorch", "jax": "JAX", "tensorflow": "TensorFlow"}
# Two processes on TensorFlow, which never frees what XLA compiled.
TESTS = "tests/conformance"
PARTS = {
    "torch": [[TESTS]],
    "jax": [[TESTS]],
    "tensorflow": [
        [TESTS, "--ignore-glob=*/conformance/test_[m-z]*.py"],
        [TESTS, "--ignore-glob=*/conformance/test_[a-l]*.py"],
    ],
}


def main(words: list[str] | None = None) -> int:
    """Run what the command line asks for, and return the exit code."""
    arguments = parsed(words)
    wanted = [x for x in arguments.versions if x != INSTALLED]
    found: dict[str, Path | Exception | None] = {**versions.unpacked(wanted)}
    found |= {INSTALLED: None} if INSTALLED in arguments.versions else {}
    if bad := [str(reason) for reason in found.values() if isinstance(reason, Exception)]:
        print("\n".join(bad), file=sys.stderr)
        return 2
    cells: dict[str, list[Cell]] = {}
    failed = False
    for name in arguments.versions:
        folder = found[name]
        assert not isinstance(folder, Exception)
        shown = versions.version_of(folder) if folder else importlib.metadata.version("keras")
        for backend in arguments.backends:
            cell = filled(Cell(folder, backend, Path()), shown, arguments.tests)
            cells.setdefault(shown, []).append(cell)
            failed |= bool(cell.failures) and (name != versions.NIGHTLY or arguments.strict)
    lines = table(cells, arguments.backends)
    print("\n".join(lines))
    if arguments.write:
        write_section(PAGE, "range --write", lines)
    return int(failed)


def parsed(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/range", description=__doc__)
    default = [*versions.STABLE, versions.NEWEST, versions.NIGHTLY]
    parser.add_argument(
        "versions",
        nargs="*",
        metavar="VERSION",
        help=f"a version of Keras as 3.12 or 3.12.4, {versions.NEWEST}, {versions.NIGHTLY}, or "
        f"{INSTALLED}; default: {' '.join(default)}",
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--jobs", action="store_true", help="only the main jobs (default)")
    kinds.add_argument("--tests", action="store_true", help=f"{TESTS} as well")
    parser.add_argument("--backend", action="append", dest="backends", choices=BACKENDS)
    parser.add_argument(
        "--strict", action="store_true", help="also a failure of the nightly build gives code 1"
    )
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    arguments = parser.parse_args(words)
    if arguments.write and (arguments.versions or arguments.backends):
        parser.error("--write needs all versions and backends: name none")
    arguments.versions = arguments.versions or default
    arguments.backends = arguments.backends or list(BACKENDS)
    return arguments


def filled(cell: Cell, shown: str, tests: bool) -> Cell:
    """Run the jobs of a cell, check the names, and run the tests if wanted; print what fails."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="treadle-range-") as folder:
        cell.folder = Path(folder)
        run(cell)
    if cell.keras and (faults := checked(cell.keras)[0]):
        cell.failures["names"] = "\n".join(faults)
    if tests:
        run_tests(cell)
    seconds = time.monotonic() - started
    print(f"Keras {shown} on {cell.backend}: {text(cell)} ({seconds:.0f} s)", flush=True)
    print("".join(f"-- {TESTS}: {line}\n" for line in cell.tests), end="", flush=True)
    for name, message in cell.failures.items():
        print(f"-- {name}: {message}\n", flush=True)
    return cell


def run_tests(cell: Cell) -> None:
    """Run the conformance tests, and keep the end of what they print if they fail."""
    for part in PARTS[cell.backend]:
        command = [sys.executable, "-m", "pytest", "-q", "-rfEs", "-p", "no:cacheprovider", *part]
        # As in scripts/test; and the user's own cache folder, not the one of the jobs.
        variables = {**cell.environment, **less_optimized()}
        variables |= {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", "")}
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
        lines = done.stdout.splitlines()
        cell.tests += lines[-1:]
        if done.returncode:
            bad = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
            ends = [cell.failures.get("tests", ""), *bad, *lines[-5:], done.stderr[-500:]]
            cell.failures["tests"] = "\n".join(filter(None, ends))


def text(cell: Cell) -> str:
    """Return what the table says of a cell."""
    if not cell.failures:
        return "works"
    if set(cell.failures) >= set(JOBS):
        return "fails"
    return f"fails: {', '.join(cell.failures)}"


def table(cells: dict[str, list[Cell]], backends: Iterable[str]) -> list[str]:
    """Return the lines of the table, and of what is switched off."""
    heads = [f"{TITLES[name]} {_installed(name)}" for name in backends]
    lines = [f"| Keras | {' | '.join(heads)} |", "| --- " * (len(heads) + 1) + "|"]
    for shown, row in cells.items():
        lines.append(f"| {shown} | {' | '.join(map(text, row))} |")
    off = list(_switched_off(cells))
    return [*lines, "", *off] if off else lines


def _switched_off(cells: dict[str, list[Cell]]) -> Iterator[str]:
    """Yield a line for each part that is switched off, with the versions and backends."""
    places: dict[str, list[str]] = {}
    for shown, row in cells.items():
        for cell in row:
            for note in cell.switched_off:
                places.setdefault(note, []).append(f"{shown} on {TITLES[cell.backend]}")
    for note, where in places.items():
        yield f"- {', '.join(where)}: {note}"


def _installed(backend: str) -> str:
    for name in (backend, f"{backend}-cpu"):
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
