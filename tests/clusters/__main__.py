"""Run the examples of clusters on this machine, with killed processes: scripts/clusters [NAME…].

Each example trains with two processes on each backend: once uninterrupted, and once with a process
that is killed at a step. The log and the weights of both are compared bit for bit, and the weights
with those of one process. `--kills` kills a process under Ray Train at random times; `--tune`
compares trials of Ray Tune, of which one is killed, with the same trials in one process.
"""

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from benchmarks import write_section
from tests.same_bits import differences

from .launchers import LAUNCHERS, Failed, Launcher, OneProcess
from .tuning import compared_trials

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "clusters.md"
TITLES = {"torch": "PyTorch", "tensorflow": "TensorFlow", "jax": "JAX"}
STEP = 13
MOST_KILLS = 10  # of one run: as many failures as ray_train.py allows


def main() -> int:
    """Run what the command line asks for; return 1 if a run failed or differs."""
    parser = argparse.ArgumentParser(prog="scripts/clusters", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(LAUNCHERS)}")
    parser.add_argument("--backend", action="append", dest="backends", choices=TITLES)
    parser.add_argument("--kills", type=int, default=0, help="how many kills at random times")
    parser.add_argument("--seed", type=int, default=0, help="of the times of the kills")
    parser.add_argument("--tune", action="store_true", help="compare trials of Ray Tune")
    parser.add_argument("--folder", type=Path, help="where the runs are kept; default: nowhere")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    given = parser.parse_args()
    backends = given.backends or list(TITLES)
    with contextlib.ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = folder.resolve()
        copy_examples(folder)
        os.environ["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
        if given.tune:
            return compared_trials(stack, folder, backends[0])
        if given.kills:
            return killed_at_random(stack, folder, backends, given.kills, given.seed)
        lines = ["| started by | " + " | ".join(TITLES[b] for b in backends) + " |"]
        lines.append("| --- |" + " --- |" * len(backends))
        print("\n".join(lines), flush=True)
        for name in given.names or LAUNCHERS:
            lines.append(row(LAUNCHERS[name](folder), backends))
            print(lines[-1], flush=True)
    if not given.names:
        lines += ["", schema()]
        print(lines[-1])
    if given.write:
        write_section(PAGE, "clusters --write", [*lines, "", software()])
    return int(any("failed" in line or "differs" in line for line in lines))


def schema() -> str:
    """Check the file for Kubernetes against the schema, and return a sentence."""
    file = ROOT / "examples" / "clusters" / "kubernetes.yaml"
    command = [Path(sys.executable).with_name("kubernetes-validate"), "--strict", file]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return f"`kubernetes.yaml` failed: {done.stdout}{done.stderr}"
    return f"`kubernetes.yaml` follows the schema of Kubernetes {done.stdout.split()[-1]}; not run."


def software() -> str:
    """Return the versions of what ran, as a sentence."""
    from importlib.metadata import version

    names = {"torch": "PyTorch", "tensorflow": "TensorFlow", "jax": "JAX", "keras": "Keras"}
    shown = ", ".join(f"{title} {version(name)}" for name, title in names.items())
    return f"Versions: {shown}, Python {platform.python_version()}, on {os.cpu_count()} cores."


def copy_examples(folder: Path) -> None:
    """Copy the examples, with a task that can be killed in the place of their own."""
    (folder / "runs").mkdir(parents=True, exist_ok=True)  # which Ray does not copy
    shutil.copytree(ROOT / "examples" / "clusters", folder, dirs_exist_ok=True)
    (folder / "task.py").rename(folder / "original.py")
    shutil.copy(Path(__file__).with_name("faulty_task.py"), folder / "task.py")


def row(launcher: Launcher, backends: list[str]) -> str:
    """Run an example on each backend, and return its row of the table."""
    if missing := launcher.missing():
        return f"| {launcher.name} | skipped: {', '.join(missing)} not installed |"
    cells: list[str] = []
    with launcher.running():
        for backend in backends:
            if backend not in launcher.backends:
                cells.append("not run")
                continue
            began = time.monotonic()
            try:
                cells.append(cell(launcher, backend))
            except Failed as error:
                cells.append("failed")
                print(error, file=sys.stderr, flush=True)
            print(
                f"{launcher.name} on {backend}: {time.monotonic() - began:.0f} s", file=sys.stderr
            )
    return f"| {launcher.name} {launcher.version()}, `{launcher.example}` | {' | '.join(cells)} |"


def cell(launcher: Launcher, backend: str) -> str:
    """Return how an uninterrupted and a killed run compare, for the table.

    Raises:
        Failed: A run does not end.
    """
    one = alone(launcher.folder, backend)
    whole = directory_of(launcher, backend, "whole")
    said = launcher.train(whole, backend)
    if f"2 processes, by {launcher.name}" not in said:
        raise Failed(f"no line names {launcher.name}: {said[-2000:]}")
    killed = directory_of(launcher, backend, "killed")
    fault = Path(f"{launcher.run_directory(killed)}.fault-00")
    fault.parent.mkdir(exist_ok=True)
    fault.write_text(f"step {STEP} 1")
    launcher.train(killed, backend)
    if fault.exists():
        raise Failed("no process was killed")
    found = [launcher.run_directory(path) for path in (whole, killed)]
    far = compared(one, found[0])
    return f"{far}; killed at step {STEP}: {same(*found)}"


def directory_of(launcher: Launcher, backend: str, kind: str) -> Path:
    """Return a directory for a run of a launcher."""
    return launcher.folder / "runs" / f"{type(launcher).__name__}-{backend}-{kind}"


def alone(folder: Path, backend: str) -> Path:
    """Return the run in one process, which is trained once."""
    directory = folder / "runs" / f"alone-{backend}"
    if not directory.exists():
        OneProcess(folder).train(directory, backend)
    return directory


def same(one: Path, other: Path) -> str:
    """Return whether two runs have the same log and weights, in words."""
    found = list(differences(one, other))
    for line in found[:5]:
        print(f"{other}: {line}", file=sys.stderr)
    return "differs" if found else "same bits"


def compared(one: Path, other: Path) -> str:
    """Return how far the variables of two runs are from each other, in words."""
    a, b = (load_file(path / "state.safetensors") for path in (one, other))
    numbers = [name for name in a if a[name].dtype.kind == "f"]
    far = [
        float(np.max(np.abs(a[name] - b[name]) / max(1.0, float(np.max(np.abs(a[name]))))))
        for name in numbers
        if a[name].size
    ]
    if max(far) == 0:
        return "same bits as one process"
    return f"within {max(far):.1e} of one process"


def killed_at_random(
    stack: contextlib.ExitStack, folder: Path, backends: list[str], count: int, seed: int
) -> int:
    """Kill processes under Ray Train at random times; return 1 if a run differs."""
    launcher, draws = LAUNCHERS["ray"](folder), random.Random(seed)
    stack.enter_context(launcher.running())
    good = runs = kills = 0
    for backend in backends:
        whole, wanted = directory_of(launcher, backend, "whole"), kills + count
        launcher.train(whole, backend)
        while kills < wanted:
            runs += 1
            times = [draws.uniform(0, 9) for _ in range(min(MOST_KILLS, wanted - kills))]
            happened, verdict = often_killed(launcher, backend, f"kills-{runs}", times)
            kills, good = kills + happened, good + (verdict == "same bits")
    print(f"{kills} kills in {runs} runs, of which {good} ended with the same bits")
    return int(good < runs)


def often_killed(
    launcher: Launcher, backend: str, name: str, times: list[float]
) -> tuple[int, str]:
    """Kill a process after each of some seconds; return how often, and how the run compares."""
    directory, began = directory_of(launcher, backend, name), time.monotonic()
    for number, seconds in enumerate(times):
        Path(f"{directory}.fault-{number:02}").write_text(f"seconds {seconds:.2f}")
    try:
        launcher.train(directory, backend)
        verdict = same(directory_of(launcher, backend, "whole"), directory)
    except Failed as error:
        verdict = f"failed: {error}"
    happened = len(list(directory.parent.glob(f"{directory.name}.fault-*-done")))
    resumed = json.loads((directory / "run.json").read_text()).get("resumed", [])
    print(
        f"{name} on {backend}: killed {happened} times, after "
        f"{', '.join(f'{seconds:.1f}' for seconds in times[:happened])} s; resumed at the steps "
        f"{', '.join(str(one['step']) for one in resumed)}; {verdict}, "
        f"{time.monotonic() - began:.0f} s",
        flush=True,
    )
    return happened, verdict


if __name__ == "__main__":
    sys.exit(main())
