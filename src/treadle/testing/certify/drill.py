"""One process of a drill: a run of the user's task that writes a log, checkpoints and digests.

`certify` compares these run artifacts; this module only writes them. The digests of batches and the
texts of attributes are saved in the checkpoints, as the state of a hook.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from ...backends.base import repeats_exactly
from ...core.attributes import attributes_of
from ...core.determinism import is_deterministic
from ...core.hook import Hook, LoopView
from ...core.logs import StepLogs
from ...core.options import precision_name
from ...core.randomness import random_states
from ...core.structures import with_paths
from ...core.triggers import Span, When
from ...data import as_source
from ...data.leaves import named
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
    subject: Subject, directory: Path, part: Part, asked: int | None, only_resume: bool
) -> dict[str, Any]:
    """Run one part of the drill; the killed part does not return.

    Args:
        subject: The task to check, with its data and hooks.
        directory: The run directory.
        part: The part to run.
        asked: Steps until the checkpoint, or None.
        only_resume: Skip the checks of windows and eager execution.

    Returns:
        `inexact`, the source's own warning that its position cannot be restored exactly, or None;
        `checks`, which the straight run fills: for windows and for eager execution the difference,
        or an empty text; `repeats`, whether equal steps give equal bits; and `deterministic`.
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
    return {
        "inexact": train.inexact,
        "checks": checks,
        "repeats": repeats_exactly(),
        "deterministic": is_deterministic(),
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
    """Records digests of the batches, and the plain Python values at each checkpoint.

    Args:
        subject: The task to check, with its data and hooks.
        checkpoint: The hook that saves checkpoints.
        middle: The step of the checkpoint.
        part: The part of the drill that this process runs.

    Attributes:
        batches: The first batches of the straight run.
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
        """Record the restored state before the first step of a resumed process."""
        if loop.progress.step:
            self._begun = {
                **self._attributes(),
                "variables": digests(loop.state.arrays()),
                "random": digests(leaves_of(random_states())),
            }

    def steps(self, loop: LoopView, logs: StepLogs) -> None:
        """Record each batch; the process to be killed exits after the checkpoint."""
        for step in range(logs.first_step, logs.progress.step + 1):
            batch = loop.batch_at(step)
            self._digests[str(step)] = digests({named(path): x for path, x in with_paths(batch)})
            batches = logs.progress.batch - (logs.progress.step - step)
            self._places[str(step)] = [logs.progress.epoch + 1, batches]
            if self._part == "straight" and len(self.batches) < COMPARED:
                self.batches.append(batch)
        if logs.progress.step >= self._middle:
            # Wait until the checkpoint of step 0 is written, so that the next one is not delayed.
            self._checkpoint.saved.wait()
        if self._part == "killed" and logs.progress.step > self._middle:
            os._exit(0)

    def state(self) -> dict[str, Any]:
        """Return the records, for each checkpoint."""
        return {
            "batches": self._digests,
            "places": self._places,
            "begun": self._begun,
            **self._attributes(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the records of the killed process."""
        self._digests = {step: dict(found) for step, found in state["batches"].items()}
        self._places = {step: list(place) for step, place in state["places"].items()}

    def _attributes(self) -> dict[str, Any]:
        attributes = Attributes()
        for name, part in attributes_of(self._subject.task).items():
            attributes.take(part, f"task.{name}")
        attributes.take(self._subject.task, "task")
        attributes.take(self._subject.train, "train")
        attributes.take(self._subject.validation, "validation")
        for hook in self._subject.hooks:
            attributes.take(hook, "hooks")
        return {"attributes": attributes.found, "calls": attributes.calls}
