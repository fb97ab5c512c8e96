"""How many runs survive a kill bit for bit, and how many with what a user of Keras has today?

Processes are killed (SIGKILL) at random instants and started again; in the end all arrays and all
that was logged must be the same as without a kill. Results are kept in benchmarks/reliability.json,
from which the figures in docs/reliability.md are written.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

from . import parser_of
from .page import BACKENDS
from .timing import machine

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests" / "conformance"
RESULTS = Path(__file__).with_name("reliability.json")
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
DIRECTORIES = "<!-- directories -->", "<!-- end of directories -->"
TRIALS = {"power_losses": "runs that lost power", "damages": "damaged run directories"}
PACKAGES = ("keras", "tensorflow", "jax", "torch", "numpy")

sys.path.insert(0, str(TESTS))

from forks import Forks, killed_at_random  # noqa: E402 - next to the tests, which use it too


def main(arguments: list[str]) -> None:
    """Kill what was chosen, show what became of it, and keep that if asked to."""
    parser = parser_of("reliability", __doc__)
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="only this backend")
    parser.add_argument("--kills", type=int, default=50, help="kills of runs on each backend (50)")
    parser.add_argument("--fits", type=int, default=10, help="kills of Keras' fit (10)")
    parser.add_argument("--saves", type=int, default=40, help="kills of ModelCheckpoint (40)")
    parser.add_argument(
        "--power-losses", type=int, default=0, help="instead, cut the power of runs"
    )
    parser.add_argument("--damages", type=int, default=0, help="instead, damage run directories")
    parser.add_argument("--seed", type=int, default=0, help="of the instants")
    parser.add_argument("--write", action="store_true", help="keep results and write the page")
    chosen = parser.parse_args(arguments)
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, option in (("power_losses", "--power-losses"), ("damages", "--cases")):
        if count := getattr(chosen, name):
            totals = of_directories(option, count, chosen.seed)
            print(TRIALS[name], totals, flush=True)
            if chosen.write:
                kept = json.loads(RESULTS.read_text())
                kept["directories"] = {**kept.get("directories", {}), name: totals}
                RESULTS.write_text(json.dumps(kept, indent=2))
                PAGE.write_text(with_directories(PAGE.read_text(), kept["directories"]))
    if chosen.power_losses or chosen.damages:
        return
    for backend in chosen.backend or BACKENDS:
        found = measured(backend, chosen)
        print(backend, json.dumps(found, indent=2), flush=True)
        kept[backend] = {**kept.get(backend, {}), **found}
        if chosen.write:
            order = [name for name in (*BACKENDS, "directories") if name in kept]
            RESULTS.write_text(json.dumps({name: kept[name] for name in order}, indent=2))
            PAGE.write_text(with_figures(PAGE.read_text(), kept))


def measured(backend: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Return what became of the kills on a backend: of as many of each kind as were asked for."""
    about = {"machine": machine(), "versions": {name: version(name) for name in PACKAGES}}
    found: dict[str, Any] = {}
    for name, program, how, count in (
        ("treadle", TESTS / "drill.py", killed_at_random, chosen.kills),
        ("fit", Path(__file__).with_name("reliability_keras.py"), fits_killed, chosen.fits),
        ("saves", Path(__file__).with_name("reliability_keras.py"), saves_killed, chosen.saves),
    ):
        if not count:
            continue
        forks, started = Forks(program, backend), time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found[name] = {**how(forks, Path(folder), count, chosen.seed), **about}
            found[name]["seconds"] = round(time.monotonic() - started)
        forks.close()
    return found


def fits_killed(forks: Forks, root: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kill `fit` with `BackupAndRestore` in its second epoch, and resume it."""
    random, how = Random(seed), {"what": "fit", "pace": 0.005, "every": 5}
    expected = forks.start(root / "never.txt", place=root / "never", **how).result()
    found: dict[str, Any] = {"kills": 0, "same": 0, "failed": 0, "steps": []}
    for number in range(kills):
        process = forks.start(root / f"{number}.txt", place=root / f"{number}", **how)
        process.reach(f"batch {random.randint(15, 24)}")
        found["kills"] += process.kill(after=random.uniform(0, 0.005))
        again = forks.start(root / f"{number}-again.txt", place=root / f"{number}", **how)
        if again.wait():  # the backup is torn, and cannot be read
            found["failed"] += 1
            continue
        ended = again.result()
        found["same"] += ended == expected
        found["steps"].append(ended["step"])
    return {**found, "steps_expected": expected["step"]}


def saves_killed(forks: Forks, root: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kill `fit` while `ModelCheckpoint` saves after every batch, and load what it left."""
    random = Random(seed)
    found: dict[str, Any] = {"kills": 0, "unloadable": 0, "reasons": {}}
    while found["kills"] < kills:
        number = found["kills"]
        file, output = root / f"{number}.keras", root / f"{number}.txt"
        process = forks.start(output, what="saves", place=file)
        process.reach("batch 3")  # the first is not saved
        if not process.kill(after=random.uniform(0, 0.3)):
            continue
        found["kills"] += 1
        loaded = forks.start(root / "loads.txt", what="loads", place=file).result()
        found["unloadable"] += not loaded["loads"]
        if not loaded["loads"]:  # Keras says "File not found" of one that is there, but torn
            why = "torn" if file.exists() else "not there"
            found["reasons"][why] = found["reasons"].get(why, 0) + 1
    return found


def with_figures(page: str, kept: dict[str, Any]) -> str:
    """Return the page with the figures of these results in place of those that it holds."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{figures(kept)}\n{END}{rest.partition(END)[2]}"


def figures(kept: dict[str, Any]) -> str:
    """Return the results as a table."""
    lines = [
        "| backend | kills | in runs that ended bit-same | torn saves left | damaged checkpoints "
        "| `BackupAndRestore`: bit-same | `ModelCheckpoint`: cannot be loaded |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    facts: dict[str, Any] = {}
    for backend in (name for name in BACKENDS if name in kept):
        found = kept[backend]
        run, fit, saves = (found.get(name, {}) for name in ("treadle", "fit", "saves"))
        facts |= run or fit or saves
        lines.append(
            f"| {backend} | {run.get('kills', '–')} | {_of(run, 'same')} | "
            f"{run.get('in_saves', '–')} | {run.get('damaged', '–')} | {_of(fit, 'same')} | "
            f"{_of(saves, 'unloadable')} |"
        )
    told = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    cpu = facts["machine"]
    where = f"{cpu['cpu']}, {cpu['cores']} cores, {cpu['memory']}; {told}."
    return "\n".join([*lines, "", where, ""])


def of_directories(option: str, count: int, seed: int) -> dict[str, int]:
    """Run `scripts/fuzz-directories`, and return how many cases there were of each kind."""
    with tempfile.TemporaryDirectory() as folder:
        totals = Path(folder) / "totals.json"
        command = [sys.executable, "-m", "tests.directories", option, str(count), "--workers", "1"]
        subprocess.run([*command, "--seed", str(seed), "--totals", str(totals)], cwd=ROOT)
        return json.loads(totals.read_text())


def with_directories(page: str, kept: dict[str, dict[str, int]]) -> str:
    """Return the page with the table of these results in place of the one that it holds."""
    begin, end = DIRECTORIES
    head, _, rest = page.partition(begin)
    lines = [
        "| | seed | cases | equal results | one sentence | failed |",
        "| --- | --- | --- | --- | --- | --- |",
        *(
            f"| {TRIALS[name]} | {found['seed']} | {found['cases']:,} | {found.get('equal', 0):,} "
            f"| {found.get('refused', 0):,} | {found['failed']:,} |"
            for name, found in kept.items()
        ),
    ]
    return "\n".join([f"{head}{begin}\n", *lines, "", f"{end}{rest.partition(end)[2]}"])


def _of(found: dict[str, Any], name: str) -> str:
    return f"{found[name]} of {found['kills']}" if found else "–"
