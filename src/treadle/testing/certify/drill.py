"""One process of a certificate: a run of the user's task that writes lines of what it computes.

`comparing` compares these lines; this module only writes them.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TextIO

import numpy as np

from ...backends.base import repeats_exactly
from ...core.hook import Hook, LoopView
from ...core.images import Image
from ...core.logs import Record, StepLogs
from ...core.options import precision_name
from ...core.process_settings import is_deterministic
from ...core.randomness import random_states
from ...core.structures import with_paths
from ...core.triggers import Span, When
from ...core.user_code import attributes_of
from ...data import as_source
from ...data.leaves import named
from ...errors import OwnershipError, TreadleError
from ...hooks import Checkpoint
from ...loop import Loop
from ...run.circumstances import circumstances
from .. import compiled_equals_eager, fused_equals_unfused
from .attributes import PlainValues
from .comparing import Entry

Part = Literal["straight", "killed", "resumed"]

SHORT_EPOCH: Final = 24
FEW_STEPS: Final = 8
COMPARED: Final = 4
"""How many batches windows and single steps are compared on; compiled and eager steps use two."""

ROUNDING: Final = {"float32": (1e-4, 1e-6), "float64": (1e-4, 1e-6)}
COARSE: Final = (3e-2, 1e-3)


@dataclass(frozen=True)
class Subject:
    """The task to check, with its data and hooks.

    Attributes:
        task: A fresh task.
        train: The training source.
        validation: A source, a dict of sources, or None.
        hooks: The task's own hooks.
        again: A function that creates another fresh task.
    """

    task: Any
    train: Any
    again: Callable[[], Any]
    validation: Any = None
    hooks: Sequence[Any] = field(default_factory=tuple[Any, ...])


def steps_until_checkpoint(asked: int | None, length: int | None) -> int:
    """Return the number of steps until the checkpoint, so that it is in the middle of an epoch.

    Args:
        asked: The number that the user gave; None for a small number, which crosses the end of an
            epoch if epochs are short.
        length: The number of batches in an epoch, or None if it is unknown.

    Example:
        >>> [steps_until_checkpoint(None, length) for length in (None, 469, 23, 2, 1)]
        [8, 8, 34, 3, 2]
    """
    if asked is not None:
        return asked
    if length is None or length > SHORT_EPOCH:
        return FEW_STEPS
    return length + max(1, length // 2)


def run(
    subject: Subject,
    directory: Path,
    lines: TextIO,
    part: Part,
    asked: int | None,
    only_resume: bool,
) -> dict[str, Any]:
    """Run one part of the drill; the killed part does not return.

    Args:
        subject: The task to check, with its data and hooks.
        directory: The run directory.
        lines: The file that gets the lines.
        part: The part to run.
        asked: Steps until the checkpoint, or None.
        only_resume: Skip the checks of windows and eager execution.

    Returns:
        `inexact`, the source's own warning that its position cannot be restored exactly, or None;
        `checks`, which the straight run fills: for windows and for eager execution the difference,
        or an empty text; `repeats`, whether equal steps give equal bits; `deterministic`; and
        `reason`, why the run stopped early, or None.
    """
    train = as_source(subject.train)
    middle = steps_until_checkpoint(asked, train.length)
    checkpoint = Checkpoint(every=f"{middle} steps", keep_every=f"{middle} steps")
    recorder = DrillRecorder(subject, checkpoint, middle, part, lines)
    hooks = [hook for hook in subject.hooks if not isinstance(hook, Checkpoint)]
    with Loop(subject.task, directory, hooks=[*hooks, recorder, checkpoint], console=False) as loop:
        loop.fit(train, subject.validation, steps=2 * middle)
    wanted = recorder.batches and not only_resume
    checks = in_one_process(subject, recorder.batches) if wanted else {}
    return {
        "inexact": train.inexact,
        "checks": checks,
        "repeats": repeats_exactly(),
        "deterministic": is_deterministic(),
        "reason": loop.reason,
    }


def in_one_process(subject: Subject, batches: Sequence[Any]) -> dict[str, str]:
    """Compare windows with single steps, and compiled steps with eager steps."""
    rtol, atol = ROUNDING.get(precision_name(), COARSE)
    checks: dict[str, Callable[[], None]] = {
        "windows": lambda: fused_equals_unfused(subject.again, batches),
        "eager": lambda: compiled_equals_eager(subject.again, batches[:2], rtol, atol),
    }
    found: dict[str, str] = {}
    for name, check in checks.items():
        try:
            check()
            found[name] = ""
        except (AssertionError, OwnershipError) as difference:
            found[name] = str(difference)
        except TreadleError as refusal:
            found[name] = f"refused: {refusal}"
    return found


class DrillRecorder(Hook):
    """Writes what is trained on and computed; at each checkpoint, also the state.

    Args:
        subject: The task to check, with its data and hooks.
        checkpoint: The hook that saves checkpoints.
        middle: The step of the checkpoint.
        part: The part of the drill that this process runs.
        lines: The file that gets the lines.

    Attributes:
        batches: The first batches of the straight run.
    """

    def __init__(
        self, subject: Subject, checkpoint: Checkpoint, middle: int, part: Part, lines: TextIO
    ) -> None:
        self.when = When(Span(middle, "step"))
        self.batches: list[Any] = []
        self._subject, self._checkpoint = subject, checkpoint
        self._middle, self._part, self._lines = middle, part, lines
        self._loop: LoopView | None = None

    def start(self, loop: LoopView) -> None:
        """Write the restored state before the first step of a resumed process."""
        self._loop = loop
        if loop.progress.step:
            values = {**_described(loop.state.arrays()), **_generators()}
            self._write("start", loop.progress.step, "", values)
            self._write_attributes(loop.progress.step)

    def steps(self, loop: LoopView, logs: StepLogs) -> None:
        """Write each batch and its values; the process to be killed exits after the checkpoint."""
        for step, values in logs.rows():
            batch = loop.batch_at(step)
            number = logs.progress.batch - (logs.progress.step - step)
            title = f"step {step} (epoch {logs.progress.epoch + 1}, batch {number})"
            arrays = {named(path): array for path, array in with_paths(batch)}
            self._write("batch", step, title, {n: _digest(array) for n, array in arrays.items()})
            self._write("value", step, f"step {step}", values)
            if self._part == "straight" and len(self.batches) < COMPARED:
                self.batches.append(batch)
        if logs.progress.step >= self._middle:
            # Wait until the checkpoint of step 0 is written, so that the next one is not delayed.
            self._checkpoint.saved.wait()
        if self._part == "killed" and logs.progress.step > self._middle:
            os._exit(0)

    def record(self, loop: LoopView, record: Record) -> None:
        """Write the values of a record."""
        step = record.progress.step
        self._write("record", step, f"the {record.kind} record of step {step}", record.values)

    def state(self) -> dict[str, Any]:
        """Write the state that a checkpoint saves; nothing has to be restored."""
        if self._loop is None:  # another hook captures the state before the run starts
            return {}
        progress, step = self._loop.progress, self._loop.progress.step
        title = f"after step {step}" if step else "before the first step"
        state = _described(self._loop.state.arrays())
        self._write("variable" if step else "start", step, title, state)
        self._write("random", step, title, _generators())
        self._write_attributes(step)
        place = f"epoch {progress.epoch + 1}, after {progress.batch} of its batches"
        self._write("saved", step, place, {**circumstances(), "plan": self._loop.plan})
        return {}

    def _write_attributes(self, step: int) -> None:
        attributes = PlainValues()
        for name, part in attributes_of(self._subject.task).items():
            attributes.take(part, f"task.{name}")
        attributes.take(self._subject.task, "task")
        attributes.take(self._subject.train, "train")
        attributes.take(self._subject.validation, "validation")
        for hook in self._subject.hooks:
            attributes.take(hook, "hooks")
        self._write("attribute", step, "", attributes.found)
        self._write("call", step, "", attributes.calls)

    def _write(self, kind: str, step: int, title: str, values: Mapping[str, Any]) -> None:
        line = json.dumps(Entry(kind, step, title, values), default=_plain)
        self._lines.write(line + "\n")
        self._lines.flush()


def _plain(value: Any) -> str:
    return _digest(value.pixels) if isinstance(value, Image) else str(value)


def _described(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Describe each array: numbers as text, larger arrays by dtype, shape and digest."""

    def described(array: Any) -> str:
        form = f"{array.dtype} of shape {array.shape}"
        return f"{form}, {_digest(array)}" if array.ndim else str(array)

    return {path: described(array) for path, array in arrays.items()}


def _generators() -> dict[str, str]:
    """Return a digest of the state of each global generator."""
    return {f"random/{name}": _digest(state) for name, state in random_states().items()}


def _digest(structure: Any) -> str:
    """Return a digest of the dtypes, shapes and bytes of nested arrays and numbers."""
    found = hashlib.sha256()
    for path, leaf in with_paths(structure):
        array = np.ascontiguousarray(leaf)
        found.update(f"{path} {array.dtype} {array.shape} ".encode() + array.tobytes())
    return found.hexdigest()[:16]
