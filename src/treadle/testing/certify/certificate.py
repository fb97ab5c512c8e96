"""The certificate: a report on whether a task's runs are reproducible and resume bit for bit.

Three processes train. The first trains for 2k steps without interruption. The second saves a
checkpoint at step k and is killed soon after. The third resumes from it and trains to step 2k. The
processes differ in hash seeds and in the time at which they run. Their run artifacts are compared
bit for bit:

- the first with the second, until step k: do the results depend on the seed alone?
- the first with the third, until step 2k: does a resumed run equal an uninterrupted one?

The first process also compares windows with single steps, and compiled steps with eager steps.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from ... import errors
from ...errors import ConfigurationError, TreadleError, whole_number
from .causes import OWN, cause, suspects
from .comparing import RunArtifacts, differences_between, read_artifacts

GPUS: Final = ("/dev/nvidia0", "/dev/kfd")
"""GPU device files. If one exists, processes run one at a time, as each may take all GPU memory."""

EXACT, WITHIN, DIFFERS, REFUSED, SKIPPED = (
    "exact",
    "within rounding",
    "differs",
    "refused",
    "not checked",
)
REPEATED, RESUMED = "two fresh processes", "resumed = never interrupted"
IN_ONE_PROCESS: Final = {
    "windows": ("many steps in one call = single steps", EXACT),
    "eager": ("compiled = eager", WITHIN),
}
LINES: Final = 12
ROUNDED: Final = frozenset({"value", "record", "metrics", "variable"})
"""The kinds of differences that may be of rounding; batches and random states are never rounded."""
UNORDERED: Final = (
    "this device adds sums in a varying order, so that equal runs differ in rounding. Certify with "
    "--deterministic or treadle.setup(deterministic=True), or on a CPU"
)


@dataclass(frozen=True)
class Maker:
    """A function that creates the task and its data in another process.

    Attributes:
        function: `module:name` of a function that sets the backend and returns a `Subject`.
        arguments: Its arguments, in JSON's types.
        name: The name used in messages.
    """

    function: str
    arguments: Mapping[str, Any]
    name: str


@dataclass(frozen=True)
class Finding:
    """A difference or an error that was found.

    Attributes:
        kind: `start`, `batch`, `value`, `record`, `metrics`, `variable`, `random` or `refused`.
        step: The first step that differs, or None.
        path: The variable, value, or array of the batch.
        text: A sentence with both values.
    """

    kind: str
    step: int | None
    path: str
    text: str


@dataclass(frozen=True)
class Check:
    """A check of one property, and its result.

    Attributes:
        name: The property.
        result: `exact`, `within rounding`, `differs`, `refused` or `not checked`.
        compared: What was compared, or why nothing was.
        findings: The first difference of each kind, in the order of steps.
        cause: The likely cause of the differences.
        suspects: Differences in plain Python attributes, which no checkpoint holds.
    """

    name: str
    result: str
    compared: str
    findings: tuple[Finding, ...] = ()
    cause: str = ""
    suspects: tuple[str, ...] = ()


@dataclass(frozen=True)
class Certificate:
    """The results of all checks of a task on its data.

    Attributes:
        task: The name of the task.
        steps: Steps until the checkpoint; the same number follows.
        place: The checkpoint's epoch and batch.
        checks: The checks.
        inexact: The source's own warning that its position cannot be restored exactly, or None.
        holds_for: Backend, plan, devices, threads, precision and versions that the results hold
            for.
        repeats: Whether equal steps give equal bits: True on a CPU and with deterministic
            algorithms. Otherwise nothing can be certified to be exact.
    """

    task: str
    steps: int
    place: str
    checks: tuple[Check, ...]
    inexact: str | None
    holds_for: Mapping[str, Any]
    repeats: bool = True

    @property
    def exact(self) -> bool:
        """Whether every check was made and passed, and would pass again."""
        return self.repeats and all(check.result in (EXACT, WITHIN) for check in self.checks)

    def facts(self) -> dict[str, Any]:
        """Return the certificate in JSON's types."""
        return {"exact": self.exact, **asdict(self)}

    def lines(self) -> list[str]:
        """Return the certificate as lines of text."""
        drill = (
            f"{self.steps} steps, a checkpoint ({self.place}), {self.steps} more in another process"
        )
        lines = [f"{self.task}: {drill if self.steps else 'no checkpoint was reached'}"]
        for check in self.checks:
            lines.append(f"{check.result:<16}{check.name}: {check.compared}")
            lines += [f"{'':<16}{finding.text}" for finding in check.findings]
            lines += [f"{'':<16}why: {check.cause}"] if check.cause else []
            lines += [f"{'':<16}look at: {suspect}" for suspect in check.suspects]
        lines += [f"note: {self.inexact}"] if self.inexact else []
        lines += [] if self.repeats else [f"note: {UNORDERED}"]
        lines += [f"holds for: {_described(self.holds_for)}"] if self.holds_for else []
        return [*lines, self._verdict()]

    def _verdict(self) -> str:
        if self.exact:
            return "exact"
        differs = any(check.result in (DIFFERS, REFUSED) for check in self.checks)
        return f"{'not exact' if differs else 'not verified'}: see above"


def certify(maker: Maker, steps: int | None = None, only_resume: bool = False) -> Certificate:
    """Run a task on its data in three processes, and compare the results.

    Args:
        maker: The function that creates the task and its data in each process.
        steps: Steps until the checkpoint; by default 8, or one and a half epochs if an epoch has
            at most 24 batches.
        only_resume: Skip the checks of windows and eager execution.

    Raises:
        ConfigurationError: `steps` is less than one, or the task cannot be created.
        TreadleError: Any error of Treadle's that creating the task raises.
    """
    if steps is not None:
        steps = whole_number("steps", steps, ConfigurationError)
    with TemporaryDirectory(prefix="treadle-certify-") as temporary:
        folder = Path(temporary)
        at_once = 1 if any(Path(gpu).exists() for gpu in GPUS) else 2
        drill = _Drill(maker, folder, steps, only_resume)
        with ThreadPoolExecutor(at_once) as pool:
            first = pool.submit(drill.leave, "straight", "straight")
            second = pool.submit(drill.interrupted)
            straight, (killed, resumed) = first.result(), second.result()
    return judged(maker.name, straight, killed, resumed)


@dataclass(frozen=True)
class _Drill:
    maker: Maker
    folder: Path
    steps: int | None
    only_resume: bool

    def interrupted(self) -> tuple[RunArtifacts, RunArtifacts]:
        """Run the process that is killed, then the process that resumes."""
        killed = self.leave("interrupted", "killed")
        if killed.outcome:  # it failed, or finished before it could be killed
            return killed, RunArtifacts()
        return killed, self.leave("interrupted", "resumed")

    def leave(self, directory: str, part: str) -> RunArtifacts:
        """Run one part in a separate process, and read its run artifacts."""
        place, run = self.folder / part, self.folder / directory
        place.mkdir()
        order = place / "order.json"
        asked = {
            "maker": self.maker.function,
            "arguments": dict(self.maker.arguments),
            "directory": str(run),
            "part": part,
            "steps": self.steps,
            "only_resume": self.only_resume,
            "path": [entry for entry in sys.path if entry],
        }
        order.write_text(json.dumps(asked))
        hashes = str(1 + ("straight", "killed", "resumed").index(part))
        with (place / "output.txt").open("w+b") as output:
            done = subprocess.run(
                [sys.executable, "-m", "treadle.testing.certify.child", str(order)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONHASHSEED": hashes},
            )
            output.seek(0)
            printed = output.read().decode(errors="replace").splitlines()[-LINES:]
        left = read_artifacts(run, place, "\n".join(printed), done.returncode)
        _raise_if_unmade(self.maker, left)
        return left


def _raise_if_unmade(maker: Maker, left: RunArtifacts) -> None:
    """Raise the error that creating the task raised, if it failed: there is nothing to check."""
    if left.code and not left.outcome:
        raise ConfigurationError(
            f"the process that examined {maker.name} ended with code {left.code}:\n{left.output}"
        )
    error = left.outcome.get("error")
    if error is None or left.outcome["made"]:
        return
    kind = getattr(errors, error["type"], None)
    if isinstance(kind, type) and issubclass(kind, TreadleError):
        raise kind(error["message"])
    raise ConfigurationError(
        f"{maker.name} cannot be made: {error['type']}: {error['message']}\n{left.output}"
    )


def judged(
    name: str, straight: RunArtifacts, killed: RunArtifacts, resumed: RunArtifacts
) -> Certificate:
    """Return the certificate that follows from the run artifacts of the three processes."""
    middle = max(killed.saved, default=0)
    last = max(straight.saved, default=0)
    repeated = _repeated(straight, killed, middle)
    if repeated.result == EXACT:
        again = _resumed(straight, resumed, middle, last)
    else:
        again = Check(RESUMED, SKIPPED, "uninterrupted runs already differ")
    checks = [repeated, again]
    if "checks" in straight.outcome:
        texts: Mapping[str, str] = straight.outcome["checks"]
        checks += [_in_process(which, texts[which]) for which in IN_ONE_PROCESS if which in texts]
    about = dict(straight.last.about) if straight.last else {}
    for own in OWN:
        about.pop(own, None)
    if straight.outcome.get("deterministic"):
        about["algorithms"] = "deterministic"
    repeats = bool(straight.outcome.get("repeats", True))
    if not repeats:
        checks = [_without_rounding(check) for check in checks]
    return Certificate(
        name,
        middle,
        _place(straight, middle),
        tuple(checks),
        straight.outcome.get("inexact"),
        about,
        repeats,
    )


def _without_rounding(check: Check) -> Check:
    """Return a check as not made if its differences may be of sums in another order."""
    if check.result == DIFFERS and {finding.kind for finding in check.findings} <= ROUNDED:
        return replace(check, result=SKIPPED, cause=UNORDERED, suspects=())
    return check


def _repeated(straight: RunArtifacts, killed: RunArtifacts, middle: int) -> Check:
    """Compare two uninterrupted processes up to step `middle`, where the second was killed."""
    refused = _refused(straight, "the first process") or _refused(killed, "another process")
    if refused is not None:
        return Check(REPEATED, REFUSED, "the run did not finish", (refused,))
    if killed.outcome or not middle or middle not in straight.saved:
        return Check(REPEATED, SKIPPED, _too_short(straight))
    return _compared(
        REPEATED, straight, killed, (0, middle), ("the first process", "another process")
    )


def _resumed(straight: RunArtifacts, resumed: RunArtifacts, middle: int, last: int) -> Check:
    """Compare an uninterrupted process with one that resumed at `middle`, up to step `last`."""
    refused = _refused(resumed, "the resumed run")
    if refused is not None:
        return Check(RESUMED, REFUSED, "the resumed run did not finish", (refused,))
    if last not in resumed.saved:
        text = f"one run ended after {last} steps, the resumed one after {max(resumed.saved)}"
        return Check(RESUMED, DIFFERS, "the logs", (Finding("value", None, "", text),))
    names = "the straight run", "the resumed run"
    return _compared(RESUMED, straight, resumed, (middle, last), names)


def _compared(
    name: str, a: RunArtifacts, b: RunArtifacts, between: tuple[int, int], names: tuple[str, str]
) -> Check:
    first, last = between
    found = differences_between(a, b, first, last, names)
    state = a.saved[last].state
    values = sum(len(line) - 1 for line in a.steps if line["step"] <= last)
    records = sum(line["step"] <= last for line in a.records)
    compared = (
        f"batches {last - first:,}, logged values {values:,}, records {records:,}, variables "
        f"{len(state):,}, random states {len(a.saved[last].loop['random'])}"
    )
    if not found:
        return Check(name, EXACT, compared)
    findings = tuple(Finding(d.kind, d.step, d.path, d.text) for d in found)
    return Check(
        name,
        DIFFERS,
        compared,
        findings,
        cause(found, first, a.outcome.get("inexact"), a.saved[last].about, b.saved[last].about),
        tuple(suspects(a, b, between, found)),
    )


def _in_process(which: str, text: str) -> Check:
    name, good = IN_ONE_PROCESS[which]
    compared = "every value and variable, of some steps on this data"
    if not text:
        return Check(name, good, compared)
    return Check(name, DIFFERS, compared, (Finding("value", None, "", text),))


def _refused(left: RunArtifacts, who: str) -> Finding | None:
    error = left.outcome.get("error")
    if error is None:
        return None
    parts: Sequence[str] = [f"{error['type']}: {error['message']}", *error["notes"]]
    return Finding("refused", None, error["type"], f"{who} failed with {'; '.join(parts)}")


def _too_short(straight: RunArtifacts) -> str:
    last = straight.last
    if last is None:
        return "the run took no step"
    why = last.loop["reason"] or "no reason was given"
    return f"the run stopped after {last.progress.step} steps ({why}): use fewer --steps"


def _place(straight: RunArtifacts, middle: int) -> str:
    if middle not in straight.saved:
        return "nowhere"
    progress = straight.saved[middle].progress
    return f"epoch {progress.epoch + 1}, after {progress.batch} of its batches"


def _described(facts: Mapping[str, Any]) -> str:
    parts = [
        ", ".join(f"{name} {version}" for name, version in value.items())
        if isinstance(value, dict)
        else f"{name} {value}"
        for name, value in facts.items()
    ]
    return "; ".join(parts)
