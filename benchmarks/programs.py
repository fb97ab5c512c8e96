"""Do recipes show on the real data what they must? Runs them as a user does, with `treadle run`.

Results are kept in benchmarks/results/programs.json, from which docs/programs.md is written: so
recipes can be run one after another, and one alone again.
"""

import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from treadle.core.directory import LOG, read_run
from treadle.errors import DirectoryError
from treadle.hooks.log_file import read_log
from treadle.recipes import find

from . import BACKENDS, DOCS, environment_of, keep, kept, parser_of
from .programs_musts import PLAIN, PROGRAMS, Program, Run, Settings, unknown

CUT_OFF = "not done after"
Results = dict[str, dict[str, Any]]


def main(arguments: list[str]) -> None:
    """Run recipes, keep what they showed, and write the page."""
    parser = parser_of("programs", __doc__)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="all, if none is named")
    parser.add_argument("--all-backends", action="store_true")
    parser.add_argument("--minutes", type=float, default=15, help="a run may take so long")
    parser.add_argument("--only-page", action="store_true", help="write the page from what is kept")
    chosen = parser.parse_args(arguments)
    strange = set(chosen.recipes) - set(find())
    if strange:
        parser.error(f"there is no recipe {', '.join(sorted(strange))}")
    results: Results = kept("programs")
    for name in [] if chosen.only_page else chosen.recipes or find():
        backends = BACKENDS if chosen.all_backends else chosen.backend
        for backend in _backends(name, backends):
            found = results[f"{name} {backend}"] = measured(name, backend, chosen.minutes)
            print(_row(name, backend, found), flush=True)
            keep("programs", dict(sorted(results.items())))
    (DOCS / "programs.md").write_text(page(results))


def measured(name: str, backend: str, minutes: float, docs: Path = DOCS) -> dict[str, Any]:
    """Run a recipe with all its settings, and return what the page says of it."""
    program = PROGRAMS.get(name) or unknown()
    with TemporaryDirectory() as folder:
        runs: dict[str, Run] = {}
        for number, (label, settings) in enumerate(program.runs.items()):
            directory = Path(folder) / str(number)
            fault, seconds = _run(name, backend, settings, directory, minutes)
            if fault:
                about = f" ({label})" if label else ""
                shown = None if fault.startswith(CUT_OFF) else False
                return _facts(backend, shown, f"{fault}{about}", seconds)
            runs[label] = Run(directory, seconds)
        shown, text = program.judge(runs)
        found = _facts(backend, shown, text, runs[PLAIN].seconds)
        if backend == _backends(name, None)[0]:
            found["pictures"] = _pictures(name, program, runs[PLAIN], docs)
        return found


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page of all that is kept of recipes that there still are."""
    present = {
        (name, backend): results[f"{name} {backend}"]
        for name in find()
        for backend in BACKENDS
        if f"{name} {backend}" in results
    }
    versions = {k: v for found in present.values() for k, v in found["versions"].items()}
    lines = [
        "# What the recipes show",
        "",
        "Results of each recipe on the real data, from `treadle run NAME --seed 0`, compared with "
        "the required result. Written\nby `scripts/bench programs`; `--all-backends` runs each on "
        "every backend, `--minutes` limits the duration of a run.",
        "",
        f"{', '.join(f'{name} {v}' for name, v in sorted(versions.items()))}; Python "
        f"{platform.python_version()}, {os.cpu_count()} CPU cores. Seconds are those of\nthe whole "
        "command, on a machine that was also busy with other work: this page is about results, not "
        "speed. The data are\nJPEG copies of MNIST and CIFAR-10.",
        "",
        "| recipe | backend | must show | measured | shown | seconds |",
        "| --- | --- | --- | --- | --- | --- |",
        *(_row(name, backend, found) for (name, backend), found in present.items()),
        "",
        "A dash means that no figure is required, or that the run was cut off. If it completed an "
        "epoch, the estimated total duration is given.",
    ]
    missing = set(find()) - {name for name, _ in present}
    if missing:
        lines += ["", f"Not measured yet: {', '.join(f'`{name}`' for name in sorted(missing))}."]
    for backend in BACKENDS if len({backend for _, backend in present}) > 1 else ():
        left = [
            f"`{name}`"
            for name in find()
            if backend in _backends(name, BACKENDS)
            and name not in missing
            and (name, backend) not in present
        ]
        if left:
            lines += ["", f"Not measured yet on {backend}: {', '.join(left)}."]
    for (name, _), found in present.items():
        for picture in found.get("pictures", ()):
            lines += ["", f"## {name}", "", f"![{name}: {picture['name']}]({picture['file']})"]
    return "\n".join(lines) + "\n"


def _row(name: str, backend: str, found: Mapping[str, Any]) -> str:
    shown = {True: "yes", False: "**no**", None: "–"}[found["shown"]]
    must = PROGRAMS[name].must if name in PROGRAMS else ""
    cells = (f"`{name}`", backend, must, found["measured"], shown, f"{found['seconds']:.0f}")
    return f"| {' | '.join(cells)} |"


def _backends(name: str, asked: Any) -> tuple[str, ...]:
    """Return where a recipe is to run: its own backend if it has one, else what was asked for."""
    own = find()[name].backend
    if own is not None:
        return (own,)
    return tuple(asked or [(PROGRAMS.get(name) or unknown()).backend])


def _run(
    name: str, backend: str, settings: Settings, directory: Path, minutes: float
) -> tuple[str, float]:
    """Run a recipe by the command line; returns what went wrong, if anything, and the seconds."""
    command = [sys.executable, "-c", "import treadle.cli; treadle.cli.main()", "run", name]
    command += ["--backend", backend, "--seed", "0", "--directory", str(directory), "--quiet"]
    command += [part for setting in settings for part in ("--set", setting)]
    environment = environment_of(backend)
    environment.pop("KERAS_BACKEND", None)  # the option says it
    started = time.monotonic()
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60 * minutes
        )
    except subprocess.TimeoutExpired:
        return f"{CUT_OFF} {minutes:g} minutes{_progress(directory)}", 60 * minutes
    seconds = time.monotonic() - started
    if done.returncode == 0:
        return "", seconds
    if done.returncode < 0:
        return f"killed by {signal.Signals(-done.returncode).name}", seconds
    print(done.stderr, file=sys.stderr)
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return f"failed: {lines[-1]}".replace("|", "/"), seconds


def _progress(directory: Path) -> str:
    """Say how far a run came that was cut off; nothing where no epoch was done."""
    try:
        configuration = read_run(directory)["configuration"]
        _, records = read_log(directory / LOG)
    except (DirectoryError, OSError):  # it came to nothing yet
        return ""
    of = "epoch" if "epochs" in configuration else "step"
    planned = configuration.get(f"{of}s")
    last = next((record for record in reversed(records) if record["kind"] == "epoch"), None)
    if last is None or planned is None:
        return ""
    minutes = last["seconds"] / last[of] * planned / 60  # all seconds so far
    return f", after {of} {last[of]:,} of {planned:,}: about {minutes:.1f} minutes in all"


def _facts(backend: str, shown: bool | None, text: str, seconds: float) -> dict[str, Any]:
    packages = ("keras", backend)
    return {
        "shown": shown,
        "measured": text,
        "seconds": round(seconds, 1),
        "versions": {package: version(package) for package in packages},
    }


def _pictures(name: str, program: Program, run: Run, docs: Path) -> list[dict[str, str]]:
    """Copy a run's newest pictures into the documentation."""
    found: list[dict[str, str]] = []
    for picture in program.pictures:
        file = f"images/{name}-{picture}.png"
        (docs / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(run.picture(picture), docs / file)
        found.append({"name": picture, "file": file})
    return found
