"""The `treadle certify` command: tests whether a task resumes exactly with its own data.

With `--workers`, it compares training in several processes with training in one.
"""

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import typer

from ..core.directory import LOG, read_run
from ..core.signals import handled_signals
from ..core.terminal import clean
from . import environment, output
from .commands import command
from .options import TaskOptions, deterministic_flag, option

if TYPE_CHECKING:  # importing it imports NumPy and Keras
    from ..testing.certify.certificate import Certificate
    from ..testing.certify.drill import Subject

INEXACT = 1
DEFAULT_STEPS: Final = 16
# By how much values may differ, relative to the largest of an array if that exceeds 1: as between
# compiled and eager steps, since sums are added in another order.
CLOSE, CLOSE_MIXED = 1e-4, 3e-2
MOST_NAMED = 5
PATIENCE: Final = 10.0  # seconds that a training has to end after a signal
# The first message of a process about its own failure; others say which process has failed, and
# why. If several fail at once, all of them may say that of another one.
_ERROR = re.compile(r"^(?:\[\d+\] )?error: (?!process \d+ failed: )(.*)$", re.MULTILINE)
_OF_ANOTHER = re.compile(r"error: process \d+ failed: (?:\w+: )?(.*?)\. This process ends too")


@dataclass(frozen=True, kw_only=True)
class Certify(TaskOptions):
    """Options of `treadle certify`."""

    steps: int | None = option(
        "Steps before the checkpoint; the same number of steps follows it. Default: 8, or "
        "one and a half epochs if an epoch has at most 24 batches.",
        "K",
        min=1,
    )
    deterministic: bool = deterministic_flag()
    workers: int | None = option(
        "Compare training in N processes with training in one instead, over 16 steps or those "
        "of --steps.",
        "N",
        min=2,
    )


@command(
    "Exit codes: 0 exact, 1 something is not exact or was not checked, 2 wrong usage, "
    "configuration, backend, data or directory, 130 interrupted."
)
def certify(options: Certify) -> None:
    """Verify that a task resumes bit for bit with its own data.

    One process trains straight through 2K steps. Another saves a checkpoint at step K and is
    killed, and a third resumes from there. Every batch, logged value, variable and random state is
    compared; so are many steps in one call with single steps, and compiled steps with eager ones.
    On a GPU this needs --deterministic: without it, equal runs differ in rounding.

    With --workers N, training in N processes is compared with training in one instead: logged
    values and variables after K steps must be equal within rounding.

    Examples:
      treadle certify digits
      treadle certify my_task.py --steps 20 --backend torch
      treadle certify my_task.py --workers 2
    """
    recipe = options.recipe()
    recipe.settings(options.set_ or [])  # reject invalid settings before a process starts
    found = (
        _resumed(options, recipe.source, recipe.name)
        if options.workers is None
        else _in_processes(options, recipe.source, recipe.name, options.workers)
    )
    if options.json:
        output.print_json(found.facts())
    else:
        for line in found.lines():
            output.print_line(clean(line))
    if not found.exact:
        raise typer.Exit(INEXACT)


def _resumed(options: Certify, source: str, name: str) -> "Certificate":
    """Compare an uninterrupted training with one that is resumed."""
    from ..testing.certify.certificate import Maker
    from ..testing.certify.certificate import certify as examine

    folder = options.data_dir
    arguments = {**asdict(options), "task": source, "data_dir": str(folder) if folder else None}
    with environment.showing("training in three processes", options.json, at_once=True):
        return examine(Maker(f"{__name__}:make", arguments, name), options.steps)


def _in_processes(options: Certify, source: str, name: str, workers: int) -> "Comparison":
    """Train in one process and in several, and compare logged values and variables."""
    steps = options.steps or DEFAULT_STEPS
    words = [text for setting in options.set_ or [] for text in ("--set", setting)]
    for option_name in ("backend", "precision", "seed", "data_dir"):
        value = getattr(options, option_name)
        if value is not None:
            words += [f"--{option_name.replace('_', '-')}", str(value)]
    words += ["--deterministic"] if options.deterministic else []
    run = ["run", source, "--steps", str(steps), "--quiet", *words, "--directory"]
    launch = ["launch", "--workers", str(workers), "--"]
    showing = f"training in one process, and in {workers}"
    with environment.showing(showing, options.json, at_once=True), TemporaryDirectory() as folder:
        one, several = Path(folder, "one"), Path(folder, "several")
        for command in ([*run, str(one)], [*launch, *run, str(several)]):
            error = _error_of(command) or _incomparable(one, workers)
            if error:
                return Comparison(name, steps, workers, "", CLOSE, {}, error)
        found, expected = _values(several), _values(one)
        tolerance = CLOSE if read_run(one).get("precision") == "float32" else CLOSE_MIXED
    logged = sum(path.startswith("logged ") for path in expected)
    compared = f"logged values {logged}, variables {len(expected) - logged}"
    apart = {path: _difference(found.get(path), value) for path, value in expected.items()}
    ordered = dict(sorted(apart.items(), key=lambda item: -item[1]))
    return Comparison(name, steps, workers, compared, tolerance, ordered)


def make(**arguments: Any) -> "Subject":
    """Make a task and its data, as `treadle run` does, in a process of the certificate.

    Args:
        **arguments: The fields of `Certify`, in JSON's types.

    Raises:
        TreadleError: As for `treadle run`, or the task has no data.
    """
    if arguments["data_dir"] is not None:
        arguments["data_dir"] = Path(arguments["data_dir"])
    options = Certify(**arguments)
    first = options.made(True)
    import keras  # late: the backend must be chosen before Keras is imported

    from ..testing.certify.drill import Subject

    def again() -> Any:
        """Make the task again, from the same initial state as the first one."""
        # The task's file may call setup again, which is rejected while layers exist.
        keras.backend.clear_session()
        return options.made(True).task

    data = first.datasets()
    return Subject(first.task, data.train, again, data.validation, tuple(first.hooks()))


@dataclass(frozen=True)
class Comparison:
    """How training in several processes differs from training in one.

    Attributes:
        task: The name of the task.
        steps: The number of steps.
        workers: The number of processes.
        compared: What was compared, in words; empty if a training failed.
        tolerance: The largest difference that rounding explains.
        differences: The largest difference of each logged value and variable, the largest first.
        error: Why a training failed; empty if none did.
    """

    task: str
    steps: int
    workers: int
    compared: str
    tolerance: float
    differences: Mapping[str, float]
    error: str = ""

    @property
    def exact(self) -> bool:
        """Whether both trainings succeeded, with results that are equal within rounding."""
        return not self.error and all(d <= self.tolerance for d in self.differences.values())

    def facts(self) -> dict[str, Any]:
        """Return the comparison in JSON's types; an infinite difference becomes a text."""
        parts = asdict(self)
        found = {name: d if d < float("inf") else "inf" for name, d in self.differences.items()}
        return {"exact": self.exact, **parts, "differences": found}

    def lines(self) -> list[str]:
        """Return the comparison as lines of text."""
        lines = [f"{self.task}: {self.steps} steps in one process, and in {self.workers}"]
        same = f"{self.workers} processes = one"
        if self.error:
            return [*lines, f"{'failed':<16}{same}: {self.error}", "not verified: see above"]
        apart = {n: d for n, d in self.differences.items() if d > self.tolerance}
        if not apart:
            worst, largest = next(iter(self.differences.items()))
            text = f"{self.compared}; the largest difference is {largest:.1e}, of {worst}"
            return [*lines, f"{'within rounding':<16}{same}: {text}", "equal within rounding"]
        lines.append(f"{'differs':<16}{same}: {self.compared}, of which {len(apart)} differ")
        for name, difference in list(apart.items())[:MOST_NAMED]:
            lines.append(f"{'':<16}{name} differs by {difference:.1e}")
        return [*lines, "not equal: see above"]


def _error_of(command: Sequence[str]) -> str:
    """Run a command of treadle, and return its error message, or an empty text.

    Raises:
        KeyboardInterrupt, Terminated: If a signal was received. The command has been ended.
    """
    with (
        handled_signals() as request,
        subprocess.Popen(
            [sys.executable, "-m", "treadle", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        try:
            printed: str | None = None
            while printed is None:
                if request.signal is not None:
                    raise request.error()
                with suppress(subprocess.TimeoutExpired):
                    printed = process.communicate(timeout=0.2)[1]
        except BaseException:
            _end(process)
            raise
    if process.returncode == 0:
        return ""
    message = _ERROR.search(printed) or _OF_ANOTHER.search(printed)
    # The folder of the training is removed, so the advice to replay a step in it is left out.
    shown = message and message[1].partition(" To inspect the step: ")[0]
    return shown or f"exit code {process.returncode}: {printed[-2000:]}".strip()


def _incomparable(directory: Path, workers: int) -> str:
    """Return why processes train on other batches than the run of one process, or an empty text."""
    calls = read_run(directory).get("calls", [])
    if not any((call.get("train") or {}).get("sharded") for call in calls):
        return ""
    return (
        f"{workers} processes read other batches than one, since each reads its own share of the "
        "data (treadle.data.sharded): give all processes the whole data to compare them"
    )


def _end(process: "subprocess.Popen[str]") -> None:
    """End a command and the processes that it has started, which SIGKILL would leave running.

    The first signal asks it to end, the second one makes `treadle launch` kill its processes.
    """
    for _ in range(2):
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=PATIENCE)
            return
    process.kill()


def _values(directory: Path) -> dict[str, Any]:
    """Return the values of all steps, by name, and the variables, by path."""
    from ..checkpoint.run_files import learned
    from ..hooks.log_file import read  # late: they import NumPy

    log = read(directory / LOG)
    found = {f"logged {name}": log.column(name, log.steps)[0] for name in log.names}
    return {**found, **learned(directory)[0]}


def _difference(found: Any, expected: Any) -> float:
    """Return the largest difference of two arrays, relative to the largest value above 1."""
    import numpy as np

    from ..exporting.comparing import difference  # late: it imports NumPy

    if found is None or np.shape(found) != np.shape(expected):
        return float("inf")
    a, b = np.asarray(found), np.asarray(expected)
    if b.dtype.kind in "iub":
        return 0.0 if bool((a == b).all()) else float("inf")
    a, b = np.atleast_1d(a.astype("float64"), b.astype("float64"))
    return difference(b, a)
