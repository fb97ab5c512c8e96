"""The certificate: a report on whether a task's runs are reproducible and resume bit for bit.

Three processes train. The first trains for 2k steps without interruption. The second saves a
checkpoint at step k and is killed soon after. The third resumes from it and trains to step 2k. The
processes differ in hash seeds and in the time at which they run. What they write is compared bit
for bit:

- the first with the second, until step k: do the results depend on the seed alone?
- the first with the third, until step 2k: does a resumed run equal an uninterrupted one?

The first process also compares windows with single steps, and compiled steps with eager steps.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from ...errors import ConfigurationError, whole_number_or_none
from .comparing import Mismatch, Written, cause, compared_lines, differences_between, suspects
from .processes import Maker, run_all

EXACT, WITHIN, DIFFERS = "exact", "within rounding", "differs"
REFUSED, SKIPPED = "refused", "not checked"
REPEATED, RESUMED = "two fresh processes", "resumed = never interrupted"
NOT_EQUAL: Final = "uninterrupted runs already differ"
IN_ONE_PROCESS: Final = {
    "windows": ("many steps in one call = single steps", EXACT),
    "eager": ("compiled = eager", WITHIN),
}
ON_THIS_DATA: Final = "every value and variable, of some steps on this data"
ROUNDED: Final = frozenset({"value", "record", "variable"})
"""The kinds of differences that may be of rounding; batches and random states are never rounded."""
UNORDERED: Final = (
    "this device adds sums in a varying order, so that equal runs differ in rounding. Certify with "
    "--deterministic or treadle.setup(deterministic=True), or on a CPU"
)


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
    findings: tuple[Mismatch, ...] = ()
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
    steps = whole_number_or_none("steps", steps, ConfigurationError)
    return judged(maker.name, *run_all(maker, steps, only_resume))


def judged(name: str, straight: Written, killed: Written, resumed: Written) -> Certificate:
    """Return the certificate that follows from what the three processes have written."""
    middle, saved = max(killed.saved, default=0), straight.saved
    checks = [_repeated(straight, killed, middle), Check(RESUMED, SKIPPED, NOT_EQUAL)]
    if checks[0].result == EXACT:
        checks[1] = _resumed(straight, resumed, middle)
    for which, text in straight.outcome.get("checks", {}).items():
        what, good = IN_ONE_PROCESS[which]
        found = (Mismatch("value", None, "", text),) if text else ()
        checks.append(Check(what, DIFFERS if text else good, ON_THIS_DATA, found))
    holds_for = dict(saved[max(saved)].values) if saved else {}
    if straight.outcome.get("deterministic"):
        holds_for["algorithms"] = "deterministic"
    repeats = bool(straight.outcome.get("repeats", True))
    if not repeats:
        checks = [_without_rounding(check) for check in checks]
    place = saved[middle].title if middle in saved else "nowhere"
    inexact = straight.outcome.get("inexact")
    return Certificate(name, middle, place, tuple(checks), inexact, holds_for, repeats)


def _without_rounding(check: Check) -> Check:
    """Return a check as not made if its differences may be of sums in another order."""
    if check.result == DIFFERS and {finding.kind for finding in check.findings} <= ROUNDED:
        return replace(check, result=SKIPPED, cause=UNORDERED, suspects=())
    return check


def _repeated(straight: Written, killed: Written, middle: int) -> Check:
    """Compare two uninterrupted processes up to step `middle`, where the second was killed."""
    names = "the first process", "another process"
    for run, who in zip((straight, killed), names, strict=True):
        if run.outcome.get("error"):
            return _refused(REPEATED, "the run did not finish", run, who)
    if not killed.outcome and middle and middle in straight.saved:
        return _compared(REPEATED, straight, killed, (0, middle), names)
    last, why = max(straight.saved, default=0), straight.outcome.get("reason")
    text = f"the run stopped after {last} steps ({why or 'no reason was given'}): use fewer --steps"
    return Check(REPEATED, SKIPPED, text if last else "the run took no step")


def _resumed(straight: Written, resumed: Written, middle: int) -> Check:
    """Compare an uninterrupted process with one that resumed at step `middle`."""
    last = max(straight.saved)
    if resumed.outcome.get("error"):
        return _refused(RESUMED, "the resumed run did not finish", resumed, "the resumed run")
    if last not in resumed.saved:
        end = max(resumed.saved, default=0)
        text = f"one run ended after {last} steps, the resumed one after {end}"
        return Check(RESUMED, DIFFERS, "the logs", (Mismatch("value", None, "", text),))
    names = "the straight run", "the resumed run"
    return _compared(RESUMED, straight, resumed, (middle, last), names)


def _compared(
    name: str, a: Written, b: Written, between: tuple[int, int], names: tuple[str, str]
) -> Check:
    these, those = compared_lines(a, b, *between)
    found = differences_between(these, those, names)
    last = between[1]
    batches, records = (sum(x.kind == kind for x in these) for kind in ("batch", "record"))
    values = sum(len(x.values) for x in these if x.kind == "value")
    held = {x.kind: len(x.values) for x in a.lines}
    compared = (
        f"batches {batches:,}, logged values {values:,}, records {records:,}, variables "
        f"{held['variable']:,}, random states {held['random']}"
    )
    if not found:
        return Check(name, EXACT, compared)
    about = a.saved[last].values, b.saved[last].values
    why = cause(found, between[0], a.outcome.get("inexact"), *about)
    look_at = tuple(suspects(a, b, between, found))
    return Check(name, DIFFERS, compared, tuple(found), why, look_at)


def _refused(name: str, compared: str, run: Written, who: str) -> Check:
    """Return the check of a process that failed."""
    error = run.outcome["error"]
    text = "; ".join([f"{error['type']}: {error['message']}", *error["notes"]])
    finding = Mismatch("refused", None, error["type"], f"{who} failed with {text}")
    return Check(name, REFUSED, compared, (finding,))


def _described(facts: Mapping[str, Any]) -> str:
    parts = [
        ", ".join(f"{name} {version}" for name, version in value.items())
        if isinstance(value, dict)
        else f"{name} {value}"
        for name, value in facts.items()
    ]
    return "; ".join(parts)
