"""One process of a drill: a run of the user's task that leaves a log, checkpoints and digests.

What the processes leave is compared by `certify`; here nothing is judged. All of it lies in the run
directory, most of it in the checkpoints: what this module notes of batches and attributes is the
state of a hook.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from ...core.hook import Hook, LoopView
from ...core.logs import StepLogs
from ...core.options import precision_name
from ...core.randomness import random_states
from ...core.triggers import Span, When
from ...data import as_source
from ...data.leaves import flattened, named
from ...errors import OwnershipError, TreadleError
from ...hooks import Checkpoint
from ...loop import Loop
from .. import compiled_equals_eager, fused_equals_unfused
from .attributes import Attributes
from .digests import digests, leaves_of

Part = Literal["straight", "killed", "resumed"]

SHORT_EPOCH: Final = 24
FEW_STEPS: Final = 8
COMPARED: Final = 4
"""Batches for windows against single steps; two of them for compiled against eager."""

ROUNDING: Final = {"float32": (1e-4, 1e-6), "float64": (1e-4, 1e-6)}
COARSE: Final = (3e-2, 1e-3)


@dataclass(frozen=True)
class Subject:
    """What is examined.

    Attributes:
        task: A fresh task.
        train: A source.
        validation: A source, a dict of them, or None.
        hooks: The task's own.
        again: Makes another fresh task.
    """

    task: Any
    train: Any
    again: Callable[[], Any]
    validation: Any = None
    hooks: Sequence[Any] = field(default_factory=tuple[Any, ...])


def steps_until_checkpoint(asked: int | None, length: int | None) -> int:
    """Return how many steps lie before the checkpoint: in the midst of an epoch, if it has one.

    Args:
        asked: What the user says; None for a number that is small, and crosses the end of an epoch
            where epochs are short.
        length: Batches in an epoch, where that is known.

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
    subject: Subject, directory: Path, part: Part, asked: int | None, only_resume: bool
) -> dict[str, Any]:
    """Run one part of the drill; the killed part does not return.

    Args:
        subject: What is examined.
        directory: Of the run.
        part: Which part.
        asked: Steps until the checkpoint, or None.
        only_resume: Leave out what is compared within one process.

    Returns:
        `inexact`, what the source says of itself; and of the straight run `checks`: for windows and
        eager execution the difference, or an empty text.
    """
    train = as_source(subject.train)
    middle = steps_until_checkpoint(asked, train.length)
    checkpoint = Checkpoint(every=f"{middle} steps", keep_every=f"{middle} steps")
    recorder = DrillRecorder(subject, checkpoint, middle, part)
    hooks = [hook for hook in subject.hooks if not isinstance(hook, Checkpoint)]
    with Loop(subject.task, directory, hooks=[*hooks, checkpoint, recorder], console=False) as loop:
        loop.fit(train, subject.validation, steps=2 * middle)
    wanted = recorder.batches and not only_resume
    checks = in_one_process(subject, recorder.batches) if wanted else {}
    return {"inexact": train.inexact, "checks": checks}


def in_one_process(subject: Subject, batches: Sequence[Any]) -> dict[str, str]:
    """Compare windows with single steps, and compiled steps with eager ones."""
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
            found[name] = f"it was refused: {refusal}"
    return found


class DrillRecorder(Hook):
    """Notes what was trained on, and what stands in plain Python at each checkpoint.

    Args:
        subject: What is examined.
        checkpoint: What saves.
        middle: The step of the checkpoint.
        part: Which part of the drill this is.

    Attributes:
        batches: The first ones, of the straight run.
    """

    def __init__(self, subject: Subject, checkpoint: Checkpoint, middle: int, part: Part) -> None:
        self.when = When(Span(middle, "step"))
        self.batches: list[Any] = []
        self._subject, self._checkpoint = subject, checkpoint
        self._middle, self._part = middle, part
        self._digests: dict[str, dict[str, str]] = {}
        self._places: dict[str, list[int]] = {}
        self._begun: dict[str, Any] = {}

    def start(self, loop: LoopView) -> None:
        """Note what is there before the first step of this process."""
        if loop.progress.step:
            self._begun = {
                **self._attributes(),
                "variables": digests(loop.state.arrays()),
                "random": digests(leaves_of(random_states())),
            }

    def steps(self, loop: LoopView, logs: StepLogs) -> None:
        """Note each batch; the killed process ends where it stands."""
        for step in range(logs.first_step, logs.progress.step + 1):
            batch = loop.batch_at(step)
            self._digests[str(step)] = digests(
                {named(path): x for path, x in flattened(batch) if x is not None}
            )
            batches = logs.progress.batch - (logs.progress.step - step)
            self._places[str(step)] = [logs.progress.epoch + 1, batches]
            if self._part == "straight" and len(self.batches) < COMPARED:
                self.batches.append(batch)
        if logs.progress.step >= self._middle:
            self._checkpoint.saved.wait()  # for the one of step 0, so that the next is not late
        if self._part == "killed" and logs.progress.step > self._middle:
            os._exit(0)

    def state(self) -> dict[str, Any]:
        """Return all that was noted; asked for at each checkpoint."""
        return {
            "batches": self._digests,
            "places": self._places,
            "begun": self._begun,
            **self._attributes(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the notes of the killed process."""
        self._digests = {step: dict(found) for step, found in state["batches"].items()}
        self._places = {step: list(place) for step, place in state["places"].items()}

    def _attributes(self) -> dict[str, Any]:
        attributes = Attributes()
        for name, part in vars(self._subject.task).items():
            attributes.take(part, f"task.{name}")
        attributes.take(self._subject.task, "task")
        attributes.take(self._subject.train, "train")
        attributes.take(self._subject.validation, "validation")
        for hook in self._subject.hooks:
            attributes.take(hook, "hooks")
        return {"attributes": attributes.found, "calls": attributes.calls}
