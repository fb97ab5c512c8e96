"""`treadle certify --workers`: compares training in several processes with training in one."""

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from ..core.directory import LOG, read_run
from ..core.signals import handled_signals

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


def compare(
    task: str, name: str, arguments: Sequence[str], steps: int | None, workers: int
) -> Comparison:
    """Train a task in one process and in several, and compare logged values and variables.

    Args:
        task: The task, as `treadle run` takes it.
        name: Its name.
        arguments: Further arguments of `treadle run`.
        steps: The number of steps; None for 16.
        workers: The number of processes.
    """
    steps = steps or DEFAULT_STEPS
    with TemporaryDirectory() as folder:
        one, several = Path(folder, "one"), Path(folder, "several")
        run = ["run", task, "--steps", str(steps), "--quiet", *arguments, "--directory"]
        launch = ["launch", "--workers", str(workers), "--"]
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
            # Raised while the process started, an exception would have left it running.
            request.over = True
            if request.signal is not None:
                raise request.error()
            _, printed = process.communicate()
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

    if found is None or np.shape(found) != np.shape(expected):
        return float("inf")
    a, b = np.asarray(found), np.asarray(expected)
    if b.dtype.kind in "iub":
        return 0.0 if bool((a == b).all()) else float("inf")
    a, b = np.atleast_1d(a.astype("float64"), b.astype("float64"))
    finite = np.isfinite(b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if not np.array_equal(finite, np.isfinite(a)) or not bool(same[~finite].all()):
        return float("inf")
    size = float(np.max(np.abs(b[finite]), initial=1.0))
    return float(np.max(np.abs(a[finite] - b[finite]), initial=0.0)) / size
