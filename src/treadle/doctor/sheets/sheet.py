"""The sheet of a task, as data and as text."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Final

from ...core import views
from .differences import Difference, differences
from .findings import Finding
from .lines import GROUPS, Line

SCHEMA: Final = 2
"""The version of the JSON of a sheet."""

MOST: Final = 12
"""How many subjects of a group the text shows at most."""


@dataclass(frozen=True)
class Sheet:
    """Facts about one step of a task, and the mistakes in it that are certain.

    Attributes:
        task: The name of the task.
        backend: The Keras backend.
        lines: The facts.
        findings: The certain mistakes.
        silenced: Findings whose codes the task lists in `doctor_ignore`.
        not_measured: What could not be measured, with the reason.
        steps: The number of steps that ran.
        seconds: The duration.

    Example:
        >>> import keras, numpy as np, treadle
        >>> x = np.random.default_rng(0).normal(size=(64, 2)).astype("float32")
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> task = treadle.Supervised(model, "mse", keras.optimizers.SGD(0.1))
        >>> data = treadle.data.from_arrays(x, x[:, :1] + x[:, 1:], batch_size=16)
        >>> sheet = treadle.doctor.inspect(task, data)
        >>> [line.value for line in sheet.of("loss") if line.fact == "reduced over rows:"]
        ['mean']
    """

    task: str
    backend: str
    lines: Sequence[Line]
    findings: Sequence[Finding]
    silenced: Sequence[Finding]
    not_measured: Mapping[str, str]
    steps: int
    seconds: float

    def of(self, subject: str) -> list[Line]:
        """Return the facts about one subject, such as `batch[0]` or `model/layers/0`."""
        return [line for line in self.lines if line.subject == subject]

    def diff(self, other: "Sheet") -> list[Difference]:
        """Return what another sheet shows differently, the most telling first: at most eight lines.

        Args:
            other: The sheet of another version of the task.
        """
        return differences(self.lines, other.lines)

    def text(self, how: bool = False, whole: bool = False) -> str:
        """Return the sheet as text, one subject a line; unusual facts are marked with `!`.

        Args:
            how: Whether to add below each line how its facts were measured.
            whole: Whether to show every subject of a group, and the facts that are usual.
        """
        return "\n".join(
            [*self._facts(how, whole), *self._unusual(), *self._mistakes(), self.summary]
        )

    def _facts(self, how: bool, whole: bool) -> Iterator[str]:
        for group in GROUPS:
            subjects, left = self._subjects(group, whole)
            if subjects or left:
                yield group
            for subject, lines in subjects.items():
                yield from _subject(subject, lines, how)
            if left:
                yield f"    … {len(left)} more, as {left[0]}"

    def _subjects(self, group: str, whole: bool) -> tuple[dict[str, list[Line]], list[str]]:
        """Return the facts to show of each subject of a group, and the subjects left out."""
        subjects: dict[str, list[Line]] = {}
        for line in self.lines:
            if line.group == group:
                subjects.setdefault(line.subject, []).append(line)
        marked = [name for name, lines in subjects.items() if any(x.mark for x in lines)]
        first = [*dict.fromkeys((*marked, *subjects))][:MOST]
        left = [name for name in subjects if not whole and name not in first]
        shown = {
            name: [line for line in lines if whole or line.shown or line.mark]
            for name, lines in subjects.items()
            if name not in left
        }
        return {name: lines for name, lines in shown.items() if lines}, left

    def _unusual(self) -> Iterator[str]:
        """Yield the marked facts again, without the usual ones of their subjects."""
        marked = [line for line in self.lines if line.mark]
        for line in marked[:MOST]:
            yield f"unusual {line.subject}: {line.text}  ({line.mark})"
        if marked[MOST:]:
            yield f"unusual … {len(marked) - MOST} more"

    def _mistakes(self) -> Iterator[str]:
        for what, reason in self.not_measured.items():
            yield f"not measured: {what}: {reason}"
        for finding in self.findings:
            yield from finding.lines()
        for finding in self.silenced:
            yield f"silenced by doctor_ignore: {finding.code}  {finding.where}: {finding.seen}"

    @property
    def summary(self) -> str:
        """How many mistakes and unusual facts there are, as a line."""
        marks, count = sum(bool(line.mark) for line in self.lines), len(self.findings)
        return (
            f"{self.task} on {self.backend}: {count} certain mistake{'' if count == 1 else 's'}, "
            f"{marks} unusual fact{'' if marks == 1 else 's'} ({self.steps} steps, "
            f"{self.seconds:.1f} s)"
        )

    def __str__(self) -> str:
        """Return the sheet as text."""
        return self.text()

    def facts(self) -> dict[str, Any]:
        """Return the sheet in JSON's types; `docs/doctor.md` describes the schema."""
        return {
            "schema": SCHEMA,
            **vars(self),
            "lines": [_in_json(line) for line in self.lines],
            "findings": [asdict(finding) for finding in self.findings],
            "silenced": [asdict(finding) for finding in self.silenced],
            "not_measured": dict(self.not_measured),
        }

    def to_json(self) -> str:
        """Return the sheet as JSON."""
        return json.dumps(self.facts(), indent=1)

    def _repr_html_(self) -> str:
        """Return the mistakes and a table of the facts, which a notebook displays."""
        rows = [
            (group, subject, "; ".join(line.text for line in lines), _marks(lines))
            for group in GROUPS
            for subject, lines in self._subjects(group, whole=False)[0].items()
        ]
        texts = [text for finding in self.findings for text in finding.lines()]
        table = views.table(("group", "subject", "facts", "unusual"), rows, longest=2000)
        return views.block(self.summary, *map(views.paragraph, texts), table)


def _in_json(line: Line) -> dict[str, Any]:
    value = line.value
    if isinstance(value, float) and not isfinite(value):
        value = str(value)
    names = ("group", "subject", "fact", "text", "how", "mark", "weight")
    return {name: getattr(line, name) for name in names} | {"about": [*line.about], "value": value}


def _marks(lines: Sequence[Line]) -> str:
    return "; ".join(dict.fromkeys(line.mark for line in lines if line.mark))


def _subject(subject: str, lines: Sequence[Line], how: bool) -> Iterator[str]:
    marks, text = _marks(lines), "; ".join(line.text for line in lines)
    unusual = f"  ({marks})" if marks else ""
    yield f"{'!' if marks else ' '}   {subject}: {text}{unusual}"
    if how:
        for reason in dict.fromkeys(line.how for line in lines):
            facts = ", ".join(line.name or str(line.value) for line in lines if line.how == reason)
            yield f"        {facts}: {reason}"
