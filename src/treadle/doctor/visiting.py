"""Repeating steps of a past run with a loop that resumes from one of its checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import hooks
from ..backends.window import Window
from ..checkpoint import SavedState
from ..core.directory import LOG, RUN, differences
from ..core.hook import DetailedHook, Hook, LoopView
from ..core.identity import source_facts
from ..core.logs import StepLogs
from ..core.options import Options
from ..core.progress import Progress
from ..core.randomness import random_states
from ..core.triggers import Scheduled, Span, When
from ..data import as_source
from ..errors import DirectoryError
from ..hooks.tracking import Tracker
from ..loop import loop_with
from ..run.dispatch import HookDispatcher
from ..run.prefetch import Feed
from ..run.reporter import Reporter
from ..run.services import Services, StartPoint
from ..run.state import RunState
from ..steps.python_values import PythonValues, Values
from ..steps.state import State
from .numbers import Array, as_floats, is_float

# These hooks do not change training: they write, show or save something, or stop the run.
LEFT_OUT = (
    *(hooks.Checkpoint, hooks.Console, hooks.CSV, hooks.FinalModel, hooks.GradientHealth),
    *(hooks.JSONLines, hooks.LearningCurve, hooks.LossSpikes, hooks.NonFinite, hooks.Watchdog),
    Tracker,
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
        left: The steps after which training continued with another source.
    """

    def __init__(
        self,
        train: Any,
        validation: Any,
        calls: Sequence[Mapping[str, Any]],
        directory: Path,
        left: Sequence[int] = (),
    ) -> None:
        by_call = isinstance(train, Mapping) and all(isinstance(key, int) for key in train)
        train = train if by_call else dict.fromkeys(range(len(calls)), as_source(train))
        self._train: Mapping[int, Any] = train
        self.validation, self.calls, self._directory = validation, calls, directory
        self.left = left

    def of(self, call: int) -> Any:
        """Return the training source of a call.

        Raises:
            DirectoryError: The source differs from the recorded one, or is missing.
        """
        if call not in self._train:
            raise DirectoryError(
                f"the run in {self._directory} made {len(self.calls)} calls of the loop, but there "
                f"is no source for call {call}: pass a dict with the source of each call, from 0"
            )
        source = as_source(self._train[call])
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


class Visit(DetailedHook):
    """Repeats the steps of a past run from a checkpoint, without writing to its directory.

    Windows, validations, ends of epochs and hooks are repeated in the same order, so that every
    step gets the same inputs as in the run. As the last hook, it sees what the others do.

    Args:
        task: The task of the run; it is changed.
        found: The checkpoint.
        run: The run's directory, which is only read.
        place: A folder for files that the task's own hooks write.
        own_hooks: The run's own hooks; those of `LEFT_OUT` are excluded.
        options: Execution options.
        constants: The task's Python values, from before the first visit.
        excluded: The batches that rollbacks excluded.
        last: The last step to run.
        watch: A condition on the state; the loop stops at the first step where it is true.

    Attributes:
        loop: The loop that repeats the steps.
        values: The values that each step returned, by its number.
        inputs: The inputs of the last step; None before it.
        after: Every variable after the last step.
        met: The first step before or after which `watch` was true; None if there was none.
        executed: How the steps were executed, as fields; None before the first window.
    """

    def __init__(
        self,
        task: Any,
        found: SavedState,
        run: Path,
        place: Path,
        own_hooks: Sequence[Hook | Scheduled],
        options: Options,
        constants: PythonValues,
        excluded: Mapping[tuple[int, int, int], str],
        last: int,
        watch: Callable[[State], bool] | None = None,
    ) -> None:
        self.values: dict[int, dict[str, float]] = {}
        self.inputs: StepInputs | None = None
        self.after: Mapping[str, Array] = {}
        self.met: int | None = None
        self.executed: Mapping[str, Any] | None = None
        self._constants, self._last, self._watch = constants, last, watch
        self._spoiled: frozenset[str] | None = None
        # Windows end around the last step, or at every step.
        ends = [step for step in (last - 1, last) if step > 0]
        self.when = [When(Span(step, "step"), repeat=False) for step in ends]
        if watch is not None:
            self.when = [When(Span(1, "step"))]
        kept = [hook for hook in own_hooks if not isinstance(hook, LEFT_OUT)]
        self._wants_validation = bool(kept)
        objects = [hook for hook in kept if isinstance(hook, Hook)]
        scheduled = [hook for hook in kept if isinstance(hook, Scheduled)]
        self._run, self._start = run, found.path.name
        begun = _begun(found)
        self._first = RunState.of(begun)
        self._next_call = self._first.call
        self._feed = _RecordingFeed()
        start = StartPoint(begun, run / LOG, constants, excluded)
        services = Services(
            hooks=HookDispatcher([*objects, self], scheduled),
            directory=place,
            reporter=Reporter(silent=True),
            guards=[hooks.NonFinite(action="skip")] if options.skip_nonfinite else [],
            callbacks=[hook for hook in objects if isinstance(hook, hooks.KerasCallbacks)],
            start=start,
            feed=self._feed,
        )
        self.loop = loop_with(task, options, services)

    def go(self, sources: Sources) -> None:
        """Repeat the run's calls of the loop, up to the last step.

        Raises:
            DirectoryError: The recorded calls end before that step.
        """
        with suppress(_VisitEnded):
            while not self._has_ended():
                self._repeat_call(sources, self._next_call)
                self._next_call += 1

    def _repeat_call(self, sources: Sources, number: int) -> None:
        if number >= len(sources.calls):
            raise DirectoryError(
                f"{self._run} is damaged: the recorded calls of the loop, from that of the "
                f"checkpoint {self._start} on, end at step {self.loop.progress.step}, before step "
                f"{self._last}. Restore copies of {RUN} and of this checkpoint"
            )
        call = sources.calls[number]
        # `loop.steps` outside of `loop.epochs` has a span `every`.
        epochs, steps = 1 if "every" in call else call.get("epochs"), call.get("steps")
        left = self._left_after(number, sources.left)
        if left is not None:  # a time limit or a `break` may have ended this call
            steps = left if steps is None else min(steps, left)
        if epochs is None and steps is None:
            steps = self._last
        span = call.get("validate_every", {"amount": 1, "of": "epoch"})
        self.loop.fit(
            sources.of(number),
            sources.validation if self._wants_validation else None,
            epochs=epochs,
            steps=steps,
            validate_every=When.from_facts(span),
        )

    def _left_after(self, number: int, left: Sequence[int]) -> int | None:
        """Return how many steps a call may have before training continues with another source."""
        at, begun = self.loop.progress, self.loop.progress.step
        # A checkpoint within an epoch is from before the next call, which ends that epoch.
        least = at.step + 1
        if number == self._first.call:
            begun, least = self._first.begun.step, at.step if at.batch else least
        return min((step - begun for step in left if step >= least), default=None)

    def before(self, loop: LoopView) -> None:
        """Record the inputs of the last step, or end the visit if the condition holds already."""
        before, state = self.loop.progress, self.loop.state
        if self._watch is not None and self._watch(state):
            self.met = before.step + 1  # the state was changed between the steps
            raise _VisitEnded
        if before.step == self._last - 1:
            arrays = state.arrays()
            changed = None if self._spoiled is None else _spoiled(arrays) - self._spoiled
            window, constants = self._feed.last, self._constants.values()
            assert window is not None  # it is about to run
            self.inputs = StepInputs(before, window, arrays, random_states(), constants, changed)

    def steps(self, loop: LoopView, logs: StepLogs) -> None:
        """Record the results of a window, and end the visit after the last step."""
        self.executed = loop.executed
        self.values.update(logs.rows())
        step, state = self.loop.progress.step, self.loop.state
        if self._watch is not None and self._watch(state):
            self.met = step
        if step >= self._last - 1:
            self.after = state.arrays()
            self._spoiled = _spoiled(self.after)
        if self._has_ended():
            raise _VisitEnded

    def _has_ended(self) -> bool:
        return self.met is not None or self.loop.progress.step >= self._last


class _RecordingFeed(Feed):
    """A feed that keeps the window that was taken last."""

    last: Window | None = None

    def take(self, most: int, progress: Progress) -> Window | None:
        """Return a window, and keep it."""
        self.last = super().take(most, progress)
        return self.last


class _VisitEnded(Exception):
    """Ends a visit in the middle of a call."""


def _begun(found: SavedState) -> SavedState:
    """Return a checkpoint to resume from; if its call had finished, the next call begins."""
    saved = RunState.of(found)
    if saved.ended_by is None:
        return found
    following = replace(saved, call=saved.call + 1, begun=found.progress, ended_by=None)
    return following.checkpoint()


def _spoiled(state: Mapping[str, Array]) -> frozenset[str]:
    """Return the paths of the variables that hold NaN or infinity."""
    floats = [path for path, x in state.items() if is_float(x)]
    return frozenset(path for path in floats if not np.isfinite(as_floats(state[path])).all())
