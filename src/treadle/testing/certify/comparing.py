"""Comparing the lines of two processes: the first difference of each kind, and its likely cause."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import Any, Final, NamedTuple

from ...core.directory import differences
from .attributes import differing, root_of

KINDS: Final = ("start", "batch", "value", "record", "variable", "random")
"""What is compared, in the order in which training computes it."""
DIGESTS: Final = {"batch": " was trained on other data", "random": ", generators have other states"}
"""Kinds whose values are digests, which messages do not show, and what these say instead."""
NAMED: Final = 4


class Entry(NamedTuple):
    """Values of a step that equal processes share.

    Attributes:
        kind: One of `KINDS`; `saved` ends the lines of a checkpoint, with what the values
            depend on; `attribute` and `call` help to find causes.
        step: The step.
        title: What the values are, as the beginning of a sentence.
        values: The values by name; arrays are digests.
    """

    kind: str
    step: int
    title: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Written:
    """What one process has written.

    Attributes:
        lines: Its lines, in order.
        outcome: The content of its outcome file; empty if it was killed.
    """

    lines: Sequence[Entry] = ()
    outcome: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def saved(self) -> dict[int, Entry]:
        """The last line of each checkpoint, by its step."""
        return {line.step: line for line in reversed(self.lines) if line.kind == "saved"}

    def split(self, step: int) -> tuple[Sequence[Entry], Sequence[Entry]]:
        """Return the lines up to the checkpoint of a step, and those after it."""
        end = self.lines.index(self.saved[step]) + 1
        return self.lines[:end], self.lines[end:]


@dataclass(frozen=True)
class Mismatch:
    """A difference or an error that was found.

    Attributes:
        kind: One of `KINDS`, or `refused` for an error.
        step: The first step that differs, or None if it is unknown.
        path: The array of the batch, the name of the value, or the path of the variable.
        text: A sentence with both values.
    """

    kind: str
    step: int | None
    path: str
    text: str


def compared_lines(
    a: Written, b: Written, first: int, last: int
) -> tuple[Sequence[Entry], Sequence[Entry]]:
    """Return the lines of two processes between two checkpoints.

    Args:
        a: The reference.
        b: The process to compare with it.
        first: The step to compare from: 0, or the step from which `b` resumed. Both then run to
            their end.
        last: The step to compare up to; both saved it.
    """
    if first == 0:
        return a.split(last)[0], b.split(last)[0]
    before, after = a.split(first)
    # What the resumed process restored is the last state before it.
    state = [x.values for x in before if x.step == first and x.kind in ("variable", "random")]
    start = {path: value for values in state for path, value in values.items()}
    return [Entry("start", first, "", start), *after], b.lines


def differences_between(
    these: Sequence[Entry], those: Sequence[Entry], names: tuple[str, str]
) -> list[Mismatch]:
    """Return the first difference of each kind, in the order of steps.

    Args:
        these: The lines of the reference.
        those: The lines of the process to compare with it.
        names: The names of the two processes in messages.
    """
    found: list[Mismatch] = []
    for kind in KINDS:
        pairs = zip_longest(*([x for x in part if x.kind == kind] for part in (these, those)))
        each = (_difference(kind, one, other, names) for one, other in pairs)
        different = (finding for finding in each if finding is not None)
        found += islice(different, 1)
    return sorted(found, key=lambda finding: (finding.step or 0, KINDS.index(finding.kind)))


def _difference(
    kind: str, one: Entry | None, other: Entry | None, names: tuple[str, str]
) -> Mismatch | None:
    """Return how two lines differ: in their places, or in the bits of a value."""
    if one is None or other is None or (one.step, one.title) != (other.step, other.title):
        lines = [(x.step, i, x.title) for i, x in enumerate((one, other)) if x is not None]
        step, i, title = min(lines)
        return Mismatch(kind, step, "", f"only {names[i]} has {title}")
    missing = object()
    these, those = one.values, other.values
    paths = [
        path
        for path in {**these, **those}
        # -0.0 differs from 0.0, and NaN equals NaN.
        if repr(these.get(path, missing)) != repr(those.get(path, missing))
    ]
    if not paths:
        return None
    path = paths[0]
    if kind in DIGESTS or not one.title:
        begun = f"the resumed run started in another state than that after step {one.step}"
        text = f"{one.title}{DIGESTS[kind]}" if one.title else begun
        text += f": {' and '.join(paths[:NAMED])} differ{'s'[: len(paths) == 1]}"
    elif path not in these or path not in those:
        text = f"{one.title}: only {names[path in those]} has {path}"
    else:
        begun = one.title + ("," if kind in ("start", "variable") else ":")
        both = f"{these[path]} in {names[0]}, but {those[path]} in {names[1]}"
        text = f"{begun} {path} is {both}"
    return Mismatch(kind, one.step, path, text)


_UNSEEDED = "on something that no seed controls: the time, or a generator without a seed"
_UNSAVED = "on something that is not part of the checkpoint: "
_CAUSES: Final[Mapping[str, tuple[str, str]]] = {
    "start": (
        f"the initial values depend {_UNSEEDED}",
        "a hook changed it in its start method; or it was not restored, which is a bug in "
        "Treadle: please report it",
    ),
    "batch": (
        "the data depends on something that no seed controls: the time, a generator without a "
        "seed, the order of a set",
        f"the data depends {_UNSAVED}a counter, a list, a separate random generator. Give the "
        "object that makes it state() and restore(state), or draw from the generator that "
        "treadle.data.from_function passes",
    ),
    "step": (
        f"the step depends {_UNSEEDED}",
        f"the step depends {_UNSAVED}a hook's attribute or a global variable. Keep it as an "
        "attribute of the task, or give the hook state() and restore(state)",
    ),
}
"""The likely cause of a difference between two fresh processes, and after a resume."""
_ALWAYS: Final[Mapping[str, str]] = {
    "record": "training is equal, but the records differ: validation, or what a hook logs, "
    "depends on something that is not part of the checkpoint",
    "random": "all values are equal, but a global generator was drawn from outside of training: "
    "by a hook, or by a source that draws batches in advance",
}


def cause(
    found: Sequence[Mismatch],
    first: int,
    inexact: str | None,
    about: Mapping[str, Any],
    about_other: Mapping[str, Any],
) -> str:
    """Return the likely cause of the first difference.

    Args:
        found: Differences in the order of steps, at least one.
        first: The step of the checkpoint; 0 if both processes started from scratch.
        inexact: The source's own warning that its position cannot be restored exactly, or None.
        about: Backend, plan, devices, threads and versions of one process.
        about_other: Those of the other process.
    """
    conditions = differences(about, about_other)
    if conditions:
        return f"the two processes ran under different conditions: {'; '.join(conditions)}"
    kind, step = found[0].kind, found[0].step
    if kind in _ALWAYS:
        return _ALWAYS[kind]
    if kind == "batch" and inexact:
        return f"the source cannot be restored exactly: {inexact}"
    if kind in ("start", "batch"):
        return _CAUSES[kind][first > 0]
    has_equal = all(finding.kind != "batch" for finding in found)
    begun = "the batches are equal" if has_equal else f"step {step} had equal data"
    return f"{begun}, and {_CAUSES['step'][first > 0]}"


def suspects(
    a: Written, b: Written, between: tuple[int, int], found: Sequence[Mismatch]
) -> list[str]:
    """Describe the user's plain Python values that differ, the likely causes first.

    Args:
        a: The uninterrupted run.
        b: The other process.
        between: The steps of the checkpoints between which they were compared.
        found: The differences.
    """
    first, last = between
    step = first or last
    names = f"at step {step} of the first process", "in the other one"
    if first:
        names = f"at step {step} of the straight run", "when the resumed run started"

    def noted(run: Written, kind: str) -> Mapping[str, str]:
        return next((x.values for x in run.lines if (x.kind, x.step) == (kind, step)), {})

    order = ("train", "task", "hooks", "validation")
    if found[0].kind != "batch":
        order = ("task", "hooks", "train", "validation")
    changed = sorted(
        differing(noted(a, "attribute"), noted(b, "attribute")),
        key=lambda d: order.index(root_of(d[0])),
    )
    lines = [f"{path} was {x} {names[0]}, and {y} {names[1]}" for path, x, y in changed[:NAMED]]
    if len(changed) > NAMED:
        lines.append(f"and {len(changed) - NAMED} more")
    calls = sorted(noted(a, "call").items(), key=lambda call: order.index(root_of(call[0])))
    return lines + [f"{path} calls {functions}" for path, functions in calls[:NAMED]]
