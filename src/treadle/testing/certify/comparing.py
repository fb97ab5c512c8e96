"""Comparing the run artifacts of two processes bit for bit: the first difference of each kind."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from ...checkpoint import Checkpoint, Checkpoints
from ...core.directory import CHECKPOINTS, LOG
from ...errors import CheckpointError
from ...hooks.lines import read_log
from ..trace import differing_bits
from .child import OUTCOME
from .digests import digests, leaves_of

OWN = ("kind", "epoch", "step")
KINDS = ("start", "batch", "value", "record", "metrics", "variable", "random")


@dataclass(frozen=True)
class RunArtifacts:
    """The run artifacts of one process.

    Attributes:
        steps: The line of every step in the log.
        records: The log lines of epochs, validations and the user's own records.
        saved: Checkpoints by their step.
        outcome: The content of the process's outcome file; empty if it was killed.
        output: The last lines that the process printed.
        code: The process's exit code.
    """

    steps: Sequence[Mapping[str, Any]] = ()
    records: Sequence[Mapping[str, Any]] = ()
    saved: Mapping[int, Checkpoint] = field(default_factory=dict[int, Checkpoint])
    outcome: Mapping[str, Any] = field(default_factory=dict[str, Any])
    output: str = ""
    code: int = 0

    @property
    def last(self) -> Checkpoint | None:
        """The newest checkpoint."""
        return self.saved[max(self.saved)] if self.saved else None

    def noted(self, step: int) -> Mapping[str, Any]:
        """Return the recorder's state in the checkpoint of a step."""
        return self.saved[step].hooks["DrillRecorder"]


@dataclass(frozen=True)
class Difference:
    """The first difference of one kind between two processes.

    Attributes:
        kind: One of `KINDS`.
        step: The step, or None if it is unknown.
        path: The leaf of the batch, the name of the value, or the path of the variable.
        text: A sentence with both values.
    """

    kind: str
    step: int | None
    path: str
    text: str


def read_artifacts(directory: Path, folder: Path, output: str, code: int) -> RunArtifacts:
    """Read a process's run directory, and the outcome file next to its order file."""
    outcome = folder / OUTCOME
    content = json.loads(outcome.read_text()) if outcome.exists() else {}
    log = directory / LOG
    steps, records = read_log(log) if log.exists() else ([], [])
    saved: dict[int, Checkpoint] = {}
    if (directory / CHECKPOINTS).is_dir():
        checkpoints = Checkpoints(directory / CHECKPOINTS)
        for step in checkpoints.steps():
            try:
                found = checkpoints.before(step)
            except CheckpointError:
                continue
            if found is not None:
                saved[found.progress.step] = found
    return RunArtifacts(steps, records, saved, content, output, code)


def differences_between(
    a: RunArtifacts, b: RunArtifacts, first: int, last: int, names: tuple[str, str]
) -> list[Difference]:
    """Return the first difference of each kind between two checkpoints, in the order of steps.

    Args:
        a: The reference.
        b: The process to compare with it.
        first: The step to compare from: both saved it, or `b` resumed from it.
        last: The step to compare up to; both saved it.
        names: The names of the two processes in messages.
    """
    found = [
        *_of_start(a, b, first, names),
        *_of_batches(a, b, first, last),
        *_of_values(a, b, last, names),
        *_of_records(a, b, last, names),
        *_of_saved(a.saved[last], b.saved[last], last, names),
    ]
    far = last + 1
    return sorted(found, key=lambda d: (far if d.step is None else d.step, KINDS.index(d.kind)))


def _of_start(
    a: RunArtifacts, b: RunArtifacts, first: int, names: tuple[str, str]
) -> Iterator[Difference]:
    if first == 0:  # both started from scratch
        for found in _of_arrays(a.saved[0].state, b.saved[0].state, names):
            yield Difference("start", 0, found.path, f"before the first step, {found.text}")
            return
        return
    begun = b.noted(max(b.saved))["begun"]
    if begun:
        saved = a.saved[first]
        right = digests(saved.state) | digests(leaves_of(saved.loop["random"]))
        there = {**begun["variables"], **begun["random"]}
        for path in [*right, *there]:
            if right.get(path) != there.get(path):
                text = (
                    f"{path} differed from the checkpoint of step {first} when the resumed run "
                    "started"
                )
                yield Difference("start", first, path, text)
                return


def _of_batches(a: RunArtifacts, b: RunArtifacts, first: int, last: int) -> Iterator[Difference]:
    these, those = a.noted(last), b.noted(last)
    for step in range(first + 1, last + 1):
        one, other = these["batches"].get(str(step)), those["batches"].get(str(step))
        if one == other:
            continue
        leaves = [x for x in {**(one or {}), **(other or {})} if not _equal_at(one, other, x)]
        epoch, batch = (these["places"].get(str(step)) or those["places"][str(step)])[:2]
        place = f"step {step} (epoch {epoch}, batch {batch})"
        text = f"{place} was trained on other data: {' and '.join(leaves)} differ" + (
            "s" if len(leaves) == 1 else ""
        )
        yield Difference("batch", step, leaves[0] if leaves else "", text)
        return


def _equal_at(a: Mapping[str, str] | None, b: Mapping[str, str] | None, name: str) -> bool:
    return (a or {}).get(name) == (b or {}).get(name)


def _of_values(
    a: RunArtifacts, b: RunArtifacts, last: int, names: tuple[str, str]
) -> Iterator[Difference]:
    these = {line["step"]: line for line in a.steps if line["step"] <= last}
    those = {line["step"]: line for line in b.steps if line["step"] <= last}
    for step in sorted({*these, *those}):
        one, other = these.get(step), those.get(step)
        if one is None or other is None:
            where = names[1] if other is None else names[0]
            yield Difference("value", step, "", f"the log of {where} has no step {step}")
            return
        for name in {**one, **other}:
            if not _same(one.get(name), other.get(name)):
                text = f"step {step}: {name} is {_both(one.get(name), other.get(name), names)}"
                yield Difference("value", step, name, text)
                return


def _of_records(
    a: RunArtifacts, b: RunArtifacts, last: int, names: tuple[str, str]
) -> Iterator[Difference]:
    these, those = (
        [{k: v for k, v in line.items() if k != "seconds"} for line in x.records] for x in (a, b)
    )
    # A checkpoint is saved before the records of an epoch's end are written.
    last += last == max(b.saved) and bool(b.outcome)
    these, those = ([line for line in x if line["step"] < last] for x in (these, those))
    for one, other in zip_longest(these, those):
        if one is None or other is None or _form(one) != _form(other):
            line, who = (one, names[0]) if one is not None else (other or {}, names[1])
            values = ", ".join(f"{k} {v}" for k, v in line.items() if k not in OWN)
            text = f"only {who} has the {line['kind']} record of step {line['step']}: {values}"
            yield Difference("record", line["step"], line["kind"], text)
            return
        for name in one:
            if not _same(one[name], other[name]):
                text = (
                    f"the {one['kind']} record of step {one['step']}: {name} is "
                    f"{_both(one[name], other[name], names)}"
                )
                yield Difference("record", one["step"], name, text)
                return


def _form(line: Mapping[str, Any]) -> Any:
    return line["kind"], line["step"], sorted(line)


def _of_saved(
    a: Checkpoint, b: Checkpoint, step: int, names: tuple[str, str]
) -> Iterator[Difference]:
    for part, label in (("means", "the running means"), ("validation", "the last validation")):
        these, those = leaves_of(a.loop[part], part), leaves_of(b.loop[part], part)
        if not all(_same(these.get(path), those.get(path)) for path in {**these, **those}):
            text = f"after step {step}, {label} are {_both(a.loop[part], b.loop[part], names)}"
            yield Difference("metrics", step, part, text)
            break
    for found in _of_arrays(a.state, b.state, names):
        text = f"after step {step}, {found.text}"
        yield Difference("variable", step, found.path, text)
        break
    for found in _of_arrays(leaves_of(a.loop["random"]), leaves_of(b.loop["random"]), names):
        generator = "/".join(found.path.split("/")[:2])
        text = f"after step {step}, {generator} is not in the same state: {_whose(generator)}"
        yield Difference("random", step, generator, text)
        break


def _of_arrays(
    a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str]
) -> Iterator[Difference]:
    for path in {**a, **b}:
        if path not in a or path not in b:
            yield Difference("", None, path, f"only {names[path in b]} has {path}")
            continue
        one, other = np.asarray(a[path]), np.asarray(b[path])
        where = differing_bits(one, other)
        if where is None:
            forms = [f"{x.dtype} of shape {x.shape}" for x in (one, other)]
            yield Difference("", None, path, f"{path} is {_both(forms[0], forms[1], names)}")
        elif where.any():
            where = np.atleast_1d(where)
            at = np.unravel_index(int(np.argmax(where)), where.shape)
            entry = f"[{', '.join(map(str, at))}]" if one.shape else ""
            many = f" ({where.sum():,} of its {where.size:,} numbers differ)" if one.shape else ""
            values = _both(np.atleast_1d(one)[at], np.atleast_1d(other)[at], names)
            yield Difference("", None, path, f"{path}{entry} is {values}{many}")


def _whose(generator: str) -> str:
    owner = {"random/python": "Python's", "random/numpy": "NumPy's", "random/torch": "PyTorch's"}
    return (
        f"{owner.get(generator, 'a')} global generator was drawn from a different number of times"
    )


def _both(one: Any, other: Any, names: tuple[str, str]) -> str:
    one, other = (x.item() if isinstance(x, np.generic) else x for x in (one, other))
    return f"{one} in {names[0]}, but {other} in {names[1]}"


def _same(a: Any, b: Any) -> bool:
    return repr(a) == repr(b)  # bitwise: -0.0 differs from 0.0, and NaN equals NaN
