"""The findings of an examination, and the report that lists them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ...core import views

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class Finding:
    """A mistake, or what looks like one.

    Attributes:
        code: The code of the check, such as `L-unpaired`; `docs/doctor.md` describes each.
        severity: `error`: certainly wrong. `warning`: probably wrong. `note`: worth knowing.
        where: The variable, layer, optimizer, metric or part of a batch, by path.
        seen: What was seen, with numbers.
        why: Why it matters.
        fix: The usual fix.
        line: The line of the user's code, as `file.py:12`; empty if unknown.

    Example:
        >>> texts = ("shapes (8, 1) and (8,)", "rows are not paired", "add an axis to the labels")
        >>> found = Finding("L-unpaired", "error", "loss", *texts)
        >>> print(found.lines()[0])
        error   L-unpaired  loss
    """

    code: str
    severity: Severity
    where: str
    seen: str
    why: str
    fix: str
    line: str = ""

    def lines(self) -> list[str]:
        """Return the finding as lines of text."""
        place = f" ({self.line})" if self.line else ""
        return [
            f"{self.severity:<8}{self.code}  {self.where}{place}",
            f"{'':<8}seen: {self.seen}",
            f"{'':<8}why:  {self.why}",
            f"{'':<8}fix:  {self.fix}",
        ]


@dataclass(frozen=True)
class Report:
    """The result of an examination.

    Attributes:
        task: The name of the task.
        findings: The findings, errors first.
        silenced: Findings whose codes the task lists in `doctor_ignore`.
        skipped: The checks that could not run, by code, with the reason.
        steps: The number of training steps that ran, repetitions included.
        seconds: The duration.

    Example:
        >>> import keras, numpy as np, treadle
        >>> x = np.random.default_rng(0).normal(size=(64, 2)).astype("float32")
        >>> unscaled = treadle.data.from_arrays(100 * x, x[:, :1] + x[:, 1:], batch_size=16)
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> task = treadle.Supervised(model, "mse", keras.optimizers.SGD(1e-5))
        >>> report = treadle.doctor.examine(task, unscaled)
        >>> report.codes(), report.findings[0].severity, report.errors
        (['D-unscaled'], 'warning', [])
    """

    task: str
    findings: Sequence[Finding]
    silenced: Sequence[Finding]
    skipped: Mapping[str, str]
    steps: int
    seconds: float

    @property
    def errors(self) -> list[Finding]:
        """The findings that are certainly wrong."""
        return [finding for finding in self.findings if finding.severity == "error"]

    def codes(self) -> list[str]:
        """Return the code of each finding."""
        return [finding.code for finding in self.findings]

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        found = [line for finding in self.findings for line in finding.lines()]
        found += [
            f"silenced by doctor_ignore: {finding.code}  {finding.where}: {finding.seen}"
            for finding in self.silenced
        ]
        found += [f"not checked: {code}: {reason}" for code, reason in self.skipped.items()]
        counts = {kind: sum(f.severity == kind for f in self.findings) for kind in SEVERITIES}
        texts = [f"{n} {kind}{'' if n == 1 else 's'}" for kind, n in counts.items()]
        return [
            *found,
            f"{self.task}: {', '.join(texts)} ({self.steps} steps, {self.seconds:.1f} s)",
        ]

    def __str__(self) -> str:
        """Return the report as text."""
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        """Return the findings as a table, which a notebook displays."""
        header = ("severity", "code", "where", "seen", "why", "fix")
        rows = [
            [f.severity, f.code, f.where + (f" ({f.line})" if f.line else ""), f.seen, f.why, f.fix]
            for f in self.findings
        ]
        rest = self.lines()[sum(len(finding.lines()) for finding in self.findings) :]
        return views.block(rest[-1], views.table(header, rows), *map(views.paragraph, rest[:-1]))

    def facts(self) -> dict[str, Any]:
        """Return the report in JSON's types."""
        return {
            "task": self.task,
            "findings": [asdict(finding) for finding in self.findings],
            "silenced": [asdict(finding) for finding in self.silenced],
            "skipped": dict(self.skipped),
            "steps": self.steps,
            "seconds": self.seconds,
        }


def ordered(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings without repetitions, errors first."""
    unique = list(dict.fromkeys(findings))
    return sorted(unique, key=lambda finding: SEVERITIES.index(finding.severity))
