"""Re-running steps of a past run: a loop that resumes from one of its checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..backends.window import Window
from ..checkpoint import Checkpoint
from ..core.directory import differences, read_run
from ..core.hook import Hook, LoopView
from ..core.identity import source_facts
from ..core.logs import StepLogs
from ..core.options import Options
from ..core.progress import Progress
from ..core.randomness import random_states
from ..core.triggers import Scheduled, at, every
from ..data import as_source
from ..errors import DirectoryError
from ..hooks import CSV, Console, FinalModel, JSONLines, LearningCurve, NonFinite, Watchdog
from ..hooks import Checkpoint as CheckpointHook
from ..hooks.run_record import passed_over
from ..loop import Loop
from ..run.dispatch import HookDispatcher
from ..run.restoring import Restoring
from ..run.resume import Resuming
from ..steps.saved_constants import SavedConstants, Values
from ..steps.state import State
from .numbers import Array, as_floats

# These hooks do not change training: they write, show or save something, or stop the run.
LEFT_OUT = (
    CheckpointHook,
    Console,
    CSV,
    FinalModel,
    JSONLines,
    LearningCurve,
    NonFinite,
    Watchdog,
)


@dataclass(frozen=True)
class StepInputs:
    """The step inputs: everything that one step started from.

    Attributes:
        progress: The run's progress before the step.
        window: The step's batch, as a window of one.
        state: Every variable by path.
        random: The states of random generators that are not variables.
        constants: The task's Python values.
        changed: Variables that became non-finite between the previous step and this one. None if
            that is unknown.
    """

    progress: Progress
    window: Window
    state: Mapping[str, Array]
    random: Mapping[str, Any]
    constants: Values
    changed: frozenset[str] | None

    @property
    def step(self) -> int:
        """The number of the step."""
        return self.progress.step + 1

    @property
    def rows(self) -> list[int] | None:
        """The batch's rows in the data set; None if the source does not read arrays."""
        rows = self.window.rows
        return None if rows is None else [int(i) for i in rows.indices[0]]


class Sources:
    """The sources of a run's calls of the loop.

    Args:
        train: The training source of every call, or a dict of sources by the number of the call,
            from 0.
        validation: The validation data; only needed if hooks use the results.
        calls: The calls of the loop that the run recorded.
        directory: The run directory, for messages.
    """

    def __init__(
        self, train: Any, validation: Any, calls: Sequence[Mapping[str, Any]], directory: Path
    ) -> None:
        by_call = isinstance(train, Mapping) and all(isinstance(key, int) for key in train)
        self._train: Mapping[int, Any] | None = train if by_call else None
        self._every = None if by_call else as_source(train)
        self.validation, self.calls, self._directory = validation, calls, directory

    def of(self, call: int) -> Any:
        """Return the training source of a call.

        Raises:
            DirectoryError: The source differs from the recorded one, or is missing.
        """
        if self._train is None:
            source = self._every
        elif call in self._train:
            source = as_source(self._train[call])
        else:
            raise DirectoryError(
                f"the run in {self._directory} made {len(self.calls)} calls of the loop, but there "
                f"is no source for call {call}: pass a dict with the source of each call, from 0"
            )
        recorded = self.calls[call].get("train")
        found = [] if recorded is None else differences(recorded, source_facts(source), "train.")
        if found:
            several = (
                f" Its {len(self.calls)} calls of the loop may have used different sources: pass a "
                "dict of sources by the number of the call, from 0"
            )
            raise DirectoryError(
                f"call {call} of the loop in {self._directory} trained on other data: "
                f"{'; '.join(found)}.{several if len(self.calls) > 1 else ''}"
            )
        return source


class Visit(Loop):
    """A loop that resumes from a checkpoint of a past run, and does not write to its directory.

    Windows, validations, ends of epochs and hooks are repeated in the same order, so that every
    step gets the same inputs as in the run.

    Args:
        task: The task of the run; it is changed.
        found: The checkpoint.
        run: The run's directory, which is only read.
        place: A folder for files that the task's own hooks write.
        hooks: The run's own hooks; those of `LEFT_OUT` are excluded.
        options: Execution options.
        constants: The task's Python values, from before the first visit.
        last: The last step to run.
        watch: A condition on the state; the loop stops at the first step where it is true.

    Attributes:
        values: The values that each step returned, by its number.
        moment: The inputs of the last step.
        after: Every variable after the last step.
        met: The first step before or after which `watch` was true; None if there was none.
    """

    def __init__(
        self,
        task: Any,
        found: Checkpoint,
        run: Path,
        place: Path,
        hooks: Sequence[Hook | Scheduled],
        options: Options,
        constants: SavedConstants,
        last: int,
        watch: Callable[[State], bool] | None = None,
    ) -> None:
        skips = [NonFinite(action="skip")] if options.skip_nonfinite else []
        super().__init__(task, hooks=skips, options=options, console=False)
        self.values: dict[int, dict[str, float]] = {}
        self.moment: StepInputs | None = None
        self.after: Mapping[str, Array] = {}
        self.met: int | None = None
        self.directory = place
        self._constants = constants
        self._restoring = Restoring(constants, None)
        self._restoring.rolled_back = True  # an earlier visit may have changed the task
        self._last, self._watch = last, watch
        self._spoiled: frozenset[str] | None = None
        kept = [hook for hook in hooks if not isinstance(hook, LEFT_OUT)]
        stops = [at(f"{step} steps", _look) for step in (last - 1, last) if step > 0]
        stops = [every("1 step", _look)] if watch else stops
        self._dispatcher = HookDispatcher(
            [*kept, _Values(self.values), *stops], None, False, alone=True
        )
        self._resuming = Resuming(_begun(found))
        self._resuming.call = self._resuming.found.loop["call"] - 1  # type: ignore[union-attr]
        self._go_on_from(found, run)
        self._passed = passed_over(read_run(run))
        self._wants_validation = bool(kept)

    def go(self, sources: Sources) -> None:
        """Repeat the run's calls of the loop, up to the last step.

        Raises:
            DirectoryError: The recorded calls end before that step.
        """
        while not self._over():
            number = self._resuming.call + 1
            if number >= len(sources.calls):
                raise DirectoryError(
                    f"the calls of the loop that the run recorded end at step "
                    f"{self.progress.step}, before step {self._last}"
                )
            call = sources.calls[number]
            epochs, steps = call.get("epochs"), call.get("steps")
            if "every" in call:  # `loop.steps` outside of `loop.epochs`
                epochs = 1
            if epochs is None and steps is None:  # a time limit or a `break` ended it
                steps = self._last
            span = call.get("validate_every", {"amount": 1, "of": "epoch"})
            self.fit(
                sources.of(number),
                sources.validation if self._wants_validation else None,
                epochs=epochs,
                steps=steps,
                validate_every=f"{span['amount']} {span['of']}",
            )

    def _train(self, window: Window, meanwhile: Callable[..., None] | None = None) -> None:
        before = self.progress
        if self._watch is not None and self._watch(self.state):
            self.met = before.step + 1  # the state was changed between the steps
            return
        if before.step == self._last - 1:
            state = self.state.arrays()
            changed = None if self._spoiled is None else _spoiled(state) - self._spoiled
            constants = self._constants.values()
            self.moment = StepInputs(before, window, state, random_states(), constants, changed)
        super()._train(window, meanwhile)
        if self._watch is not None and self._watch(self.state):
            self.met = self.progress.step
        if self.progress.step >= self._last - 1:
            self.after = self.state.arrays()
            self._spoiled = _spoiled(self.after)

    def _over(self) -> bool:
        if self.met is not None or self.progress.step >= self._last:
            self._call.unfinished = True  # skips all that is done at the end of a call
            return True
        return super()._over()

    def _end_epoch(self) -> None:
        if not self._over():
            super()._end_epoch()


class _Values(Hook):
    """Records the values that every step returned."""

    def __init__(self, values: dict[int, dict[str, float]]) -> None:
        self._values = values

    def steps(self, loop: LoopView, logs: StepLogs) -> None:
        """Record the values of a window's steps."""
        self._values.update(logs.rows())


def _look(loop: LoopView) -> None:
    """Do nothing: a scheduled hook ends the window at its step."""


def _begun(found: Checkpoint) -> Checkpoint:
    """Return a checkpoint to resume from; if its call had finished, the next call begins."""
    if found.loop["reason"] is None:
        return found
    begun = {name: getattr(found.progress, name) for name in found.loop["begun"]}
    following = {"call": found.loop["call"] + 1, "begun": begun, "reason": None}
    return replace(found, loop={**found.loop, **following})


def _spoiled(state: Mapping[str, Array]) -> frozenset[str]:
    """Return the paths of the variables that hold NaN or infinity."""
    floats = {path: x for path, x in state.items() if x.dtype.kind in "fV"}
    return frozenset(path for path, x in floats.items() if not np.isfinite(as_floats(x)).all())
