"""Several devices and processes, compared with one: the commands of `scripts/devices`."""

import argparse
import importlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from . import ROOT

BACKENDS = ("torch", "jax", "tensorflow")
BENCHMARKS = ("processes", "against")
START = "import sys; from benchmarks.devices import main; main(sys.argv[1:])"

# The recipe, and settings that make it small.
SMALL = {
    "digits": (),
    "custom-gradients": (),
    "custom-optimizer": (),
    "vae": ("units=16", "batch_size=48"),
    "mnist-gan": (),
    "wgan-gp": ("batch_size=20", "critic_steps=2"),
    "maml": ("tasks=4",),
    "self-supervised": ("features=16", "projection_size=8", "batch_size=20"),
    "distillation": ("teacher_steps=2", "units=8", "batch_size=48"),
    "char-lm": ("width=16", "depth=1", "heads=2", "context_length=16", "batch_size=4"),
    "tabular": ("units=8",),
}


def trained(
    name: str, devices: int, steps: int, change: float = 0.0
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of every step, and every variable at the end; weights may start changed."""
    import keras

    import treadle
    from treadle import recipes

    keras.backend.clear_session()
    treadle.setup(seed=0, devices=devices)
    recipe = recipes.resolve(name)
    made = recipes.make(recipe, recipe.settings(SMALL.get(name, ())))
    with treadle.Loop(made.task, console=False) as loop:
        train = made.datasets().train
        loop.prepare(train)
        for variable in loop.state.variables.values():
            if variable.trainable:
                variable.assign(variable.value * (1 + change))
        history = loop.fit(train, steps=steps)
        values = {key: history.steps(key) for key in history.step_names}
        return values, loop.state.arrays()


def difference(found: dict[str, Any], expected: dict[str, Any]) -> tuple[float, str]:
    """The largest difference of floats, and its name; infinite if whole numbers differ.

    That of an array with entries above 1 is relative to its largest one.
    """
    worst, where = 0.0, ""
    for name, value in expected.items():
        a, b = np.asarray(found[name]), np.asarray(value)
        if b.dtype.kind == "f":
            size = max(1.0, float(np.max(np.abs(b), initial=0)))
            apart = float(np.max(np.abs(a - b), initial=0)) / size
        else:
            apart = 0.0 if (a == b).all() else float("inf")
        if not apart <= worst:
            worst, where = apart, name
    return worst, where


def virtual(arguments: list[str]) -> None:
    """Compare recipes on 2 and 4 virtual devices with one: `scripts/devices`.

    Prints a table of the largest differences over all steps' values and all variables at the end.
    The last row of a recipe shows how far one device differs from itself if all weights are changed
    by 1e-7, which is their rounding: what grows like this cannot agree for long.
    """
    parser = _parser_of("", virtual.__doc__)
    parser.add_argument("names", nargs="*", help="recipes; default: those listed in this file")
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args(arguments)
    print("| recipe | devices | values of steps | variables | largest in |")
    print("| --- | --- | --- | --- | --- |")
    for name in given.names or SMALL:
        values, state = trained(name, 1, given.steps)
        for devices, change in ((2, 0.0), (4, 0.0), (1, 1e-7)):
            other = trained(name, devices, given.steps, change)
            (steps, _), (ends, where) = difference(other[0], values), difference(other[1], state)
            what = "1, changed by 1e-7" if change else str(devices)
            print(f"| {name} | {what} | {steps:.1e} | {ends:.1e} | {where} |", flush=True)


def _parser_of(command: str, description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"scripts/devices {command}".strip(),
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


# What several devices and processes must show

MOST_SECONDS = 15.0
LEAST_RATIO = 0.98
LINES = {
    1: "results within 1e-5 of one device, and the same bits in all processes",
    2: "batches of 1, 3 and 41 rows, fewer rows than workers, validation over 333 rows",
    3: "a killed process ends all within 15 s, and all resume; 2, 4 and 1 workers",
    4: "a slow process, intervals of time, and a signal to one process",
    5: "certify names a step that processes cannot divide",
    6: "split weights load on another mesh, on one device, and on PyTorch",
    7: "at most 1.1 of the processor time of a loop by hand, 2 % for exchanges",
    8: "other launchers start the same processes, with the same bits",
}
FAULTS = ("kill@0@10", "kill@1@10", "save@0@14", "save@1@14")


@dataclass(frozen=True)
class Check:
    """A command that shows a part of a line.

    Attributes:
        line: The number of the line.
        backend: The backend.
        command: The words of the command: a file of tests with options of pytest, or the name of
            another command of `scripts/devices` or `scripts/bench`, with its options.
        short: What `--short` runs instead: other words, or nothing.
    """

    line: int
    backend: str
    command: Sequence[str]
    short: Sequence[str] = ()

    def words(self, is_short: bool) -> Sequence[str]:
        """The words of the command."""
        return self.short if is_short else self.command


def tests(file: str, chosen: str = "") -> list[str]:
    """The words of a command that runs tests, also long ones."""
    return [f"tests/{file}", "--all", *(["-k", chosen] if chosen else [])]


SHARED, GROUPS = "conformance/test_processes.py", "conformance/test_groups.py"
DEVICES, SPLIT = "conformance/test_devices.py", "conformance/test_split_checkpoints.py"
CERTIFY = "testing/test_certify_workers.py"
ROWS = "reference or short-batch or fewer-rows"
CHECKS = (
    *(
        Check(
            1, name, ["agreement", "--backend", name], ["agreement", "--short", "--backend", name]
        )
        for name in BACKENDS
    ),
    Check(2, "torch", tests(SHARED, ROWS), [f"tests/{SHARED}", "-k", "reference"]),
    Check(2, "jax", tests(SHARED, ROWS), tests(SHARED, "short-batch-1 or fewer-rows")),
    Check(2, "jax", tests(DEVICES, ROWS)),
    Check(2, "tensorflow", tests(SHARED, ROWS)),
    Check(3, "torch", ["killed"], ["killed", FAULTS[1], FAULTS[2]]),
    *(
        Check(3, name, tests(GROUPS, "killed or another_number"), tests(GROUPS, short))
        for name, short in (("torch", "(killed and save) or another_number"), ("jax", "killed"))
    ),
    Check(3, "tensorflow", tests(GROUPS, "killed or another_number")),
    Check(3, "jax", tests(SPLIT, "killed")),
    *(
        Check(4, name, tests(GROUPS, "slow_process or signal_to_one"), tests(GROUPS, short))
        for name, short in (("torch", "slow_process"), ("jax", "signal_to_one"))
    ),
    Check(4, "tensorflow", tests(GROUPS, "slow_process or signal_to_one")),
    Check(5, "torch", tests(CERTIFY), tests(CERTIFY, "cannot_divide")),
    Check(5, "torch", tests(SHARED, "refused")),
    Check(5, "tensorflow", tests(SHARED, "refused")),
    Check(6, "jax", tests(SPLIT), tests(SPLIT, "any_backend")),
    Check(6, "jax", tests(DEVICES, "model_parallel"), tests(DEVICES, "model_parallel")),
    *(
        Check(
            *(7, name, ["processes", "--backend", name]),
            ["processes", "--backend", name, "--rounds", "7", "--steps", "20"],
        )
        for name in BACKENDS
    ),
    Check(8, "torch", tests("distribute/test_launching.py"), tests("distribute/test_launching.py")),
    Check(
        *(8, "torch", tests(GROUPS, "torchrun or started_by_others")),
        tests(GROUPS, "by_torchrun or (started_by_others and SLURM)"),
    ),
    *(Check(8, name, tests(GROUPS, "started_by_others")) for name in ("jax", "tensorflow")),
)


def shown(words: Sequence[str]) -> str:
    """A command as one types it."""
    text = " ".join(f'"{word}"' if " " in word else word for word in words)
    if words[0].startswith("tests/"):
        return f"pytest {text}"
    return f"scripts/{'bench' if words[0] in ('processes', 'against') else 'devices'} {text}"


def run(backend: str, words: Sequence[str]) -> tuple[bool, str, str]:
    """Run a command, and return whether it succeeded, its result, and all that it printed."""
    if words[0].startswith("tests/"):
        command = ["-m", "pytest", "-q", *words]
    else:
        command = ["-c", START, *words]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    succeeded = done.returncode == 0
    if words[0] == "against":
        ratios = re.findall(r"(\d\.\d{3}) \(", done.stdout)
        succeeded = succeeded and bool(ratios) and min(map(float, ratios)) >= LEAST_RATIO
    return succeeded, result(words[0], done.stdout), done.stdout


def result(kind: str, printed: str) -> str:
    """The result of a command, in a line."""
    if kind == "processes":
        ratios = re.findall(r"^ *([^:\n]+): .*\n +Treadle takes ([\d.]+)", printed, re.MULTILINE)
        share = re.search(r"^exchanges: ([\d.]+)", printed, re.MULTILINE)
        parts = [f"{ratio} of {name}" for name, ratio in ratios]
        return ", ".join([*parts, f"exchanges {share[1]} %" if share else "did not end"])
    if kind == "against":
        return "; ".join(re.findall(r"\d\.\d{3} \(.*\)", printed))
    lines = [line for line in printed.splitlines() if line.strip()]
    return lines[-1].strip("= ") if lines else ""


def killed(faults: Iterable[str]) -> bool:
    """Kill processes of a run, and return whether all ended within 15 s; prints the slowest."""
    slowest, where, ended_well = 0.0, "", True
    for fault in faults:
        with TemporaryDirectory() as folder:
            launch = [sys.executable, "-m", "treadle", "launch", "--workers", "2", "--"]
            program = str(ROOT / "tests" / "conformance" / "group_run.py")
            done = subprocess.run(
                [*launch, program, str(Path(folder, "run"))],
                env={**os.environ, "FAULT": fault},
                capture_output=True,
            )
            marks = [path.stat().st_mtime for path in Path(folder).glob("*.fault")]
            seconds = time.time() - marks[0] if marks else float("inf")
        ended_well = ended_well and done.returncode != 0
        if seconds >= slowest:
            slowest, where = seconds, fault
    print(f"all processes ended {slowest:.1f} s after one was killed, at most ({where})")
    return ended_well and slowest <= MOST_SECONDS


def everything(arguments: list[str]) -> None:
    """Show what several devices and processes must show, line by line: `scripts/devices all`.

    Prints a table of the lines, with the commands that show them and their results: comparisons
    with one device (`scripts/devices agreement`), tests, and measurements. `--short` runs a part of
    each line in some minutes, and all of it takes an hour on two cores.

    The exit code is 1 if a line does not hold. The output of its commands is printed then.
    """
    parser = _parser_of("all", everything.__doc__)
    parser.add_argument("--short", action="store_true", help="a part of each line")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="only this backend")
    parser.add_argument("--line", type=int, choices=[*LINES], action="append", help="only this one")
    parser.add_argument(
        "--before", type=Path, help="another checkout, which must not be faster on one device"
    )
    chosen = parser.parse_args(arguments)
    checks = [*CHECKS]
    if chosen.before is not None:
        against = ["against", str(chosen.before.resolve()), "--workload", "mlp-adam", "--backend"]
        checks += [Check(7, name, [*against, name], [*against, name]) for name in BACKENDS]
    started, wrong = time.monotonic(), list[str]()
    print("| line | backend | command | result |\n| --- | --- | --- | --- |")
    for line in chosen.line or LINES:
        print(f"| {line} | | {LINES[line]} | |", flush=True)
        for check in checks:
            words = check.words(chosen.short)
            if check.line != line or not words or check.backend not in (chosen.backend or BACKENDS):
                continue
            succeeded, found, printed = run(check.backend, words)
            verdict = "" if succeeded else "FAILED: "
            print(f"| | {check.backend} | `{shown(words)}` | {verdict}{found} |", flush=True)
            if not succeeded:
                wrong.append(f"== {check.backend}: {shown(words)}\n{printed[-6000:]}")
    print(f"\n{len(wrong)} failed, in {(time.monotonic() - started) / 60:.0f} min", flush=True)
    sys.exit("\n".join(wrong) if wrong else 0)


def main(arguments: list[str]) -> None:
    """Run a command of `scripts/devices`, or a benchmark that a line needs."""
    command, *options = arguments or [""]
    if command == "killed":
        sys.exit(not killed(options or FAULTS))
    if command == "all":
        everything(options)
    elif command in ("agreement", *BENCHMARKS):
        importlib.import_module(f"benchmarks.{command}").main(options)
    else:
        virtual(arguments)
