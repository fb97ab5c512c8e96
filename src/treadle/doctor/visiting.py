"""Being at a step of a past run once more: a loop that goes on from a checkpoint of it."""

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
from ..run.dispatch import Watchers
from ..run.restoring import Restoring
from ..run.resume import Resuming
from ..steps.saved_constants import SavedConstants, Values
from ..steps.state import State
from .numbers import Array, as_floats

# What these do leaves training as it is: they write, show, save, or end what is no run here.
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
class Moment:
    """All that one step began with.

    Attributes:
        progress: Where the run stood.
        window: The step's batch, as a window of one.
        state: Every variable by path.
        random: The states of the generators that are no variables.
        constants: The task's Python values.
        changed: Variables that became non-finite since the step before had ended: something
            between the steps made them so. None where that is not known.
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
        """Which rows of the data set the batch is, where the source is arrays."""
        rows = self.window.rows
        return None if rows is None else [int(i) for i in rows.indices[0]]


class Sources:
    """The data of a run's calls of the loop.

    Args:
        train: What every call trained on, or a dict of sources by the number of the call, from 0.
        validation: What they validated on; needed only where hooks look at the results.
        calls: What the run recorded of its calls.
        directory: Of the run, for messages.
    """

    def __init__(
        self, train: Any, validation: Any, calls: Sequence[Mapping[str, Any]], directory: Path
    ) -> None:
        by_call = isinstance(train, Mapping) and all(isinstance(key, int) for key in train)
        self._train: Mapping[int, Any] | None = train if by_call else None
        self._every = None if by_call else as_source(train)
        self.validation, self.calls, self._directory = validation, calls, directory

    def of(self, call: int) -> Any:
        """Return what a call trained on.

        Raises:
            DirectoryError: It is not what was given, or nothing was given for this call.
        """
        if self._train is None:
            source = self._every
        elif call in self._train:
            source = as_source(self._train[call])
        else:
            raise DirectoryError(
                f"{self._directory} made {len(self.calls)} calls of the loop, and there is no "
                f"source for call {call}: pass a dict with the source of each, from 0"
            )
        recorded = self.calls[call].get("train")
        found = [] if recorded is None else differences(recorded, source_facts(source), "train.")
        if found:
            several = (
                f" Its {len(self.calls)} calls of the loop may have had other data: pass a dict "
                "of sources by the number of the call, from 0"
            )
            raise DirectoryError(
                f"call {call} of the loop in {self._directory} trained on other data: "
                f"{'; '.join(found)}.{several if len(self.calls) > 1 else ''}"
            )
        return source


class Visit(Loop):
    """A loop that goes on from a checkpoint of a run, and writes nothing.

    Windows, validations, ends of epochs and hooks come as they came, so that every step begins with
    what it began with in the run.

    Args:
        task: The task of the run; it is changed.
        found: The checkpoint.
        run: The run's directory, which is only read.
        place: A folder for what the task's own hooks write.
        hooks: The run's own hooks; those of `LEFT_OUT` are left out.
        options: How steps are executed.
        constants: The task's Python values, from before the first visit.
        last: The step to end with.
        watch: Ends it at the first step after which this says so of the state.

    Attributes:
        values: What each step returned, by its number.
        moment: What the last step began with.
        after: Every variable after it.
        met: The step that made `watch` say so, or that began with it; None while none did.
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
        self.moment: Moment | None = None
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
        self._watchers = Watchers([*kept, _Values(self.values), *stops], None, False, alone=True)
        self._resuming = Resuming(_begun(found))
        self._resuming.call = self._resuming.found.loop["call"] - 1  # type: ignore[union-attr]
        self._go_on_from(found, run)
        self._passed = passed_over(read_run(run))
        self._wants_validation = bool(kept)

    def go(self, sources: Sources) -> None:
        """Make the run's calls of the loop again, up to the last step.

        Raises:
            DirectoryError: The calls that it recorded end before.
        """
        while not self._over():
            number = self._resuming.call + 1
            if number >= len(sources.calls):
                raise DirectoryError(
                    f"the calls of the loop that this run recorded end at step "
                    f"{self.progress.step}, and not at step {self._last}"
                )
            call = sources.calls[number]
            epochs, steps = call.get("epochs"), call.get("steps")
            if "every" in call:  # `loop.steps` by itself
                epochs = 1
            if epochs is None and steps is None:  # it was ended by time, or by a `break`
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
            self.met = before.step + 1  # it was made so between the steps
            return
        if before.step == self._last - 1:
            state = self.state.arrays()
            changed = None if self._spoiled is None else _spoiled(state) - self._spoiled
            constants = self._constants.values()
            self.moment = Moment(before, window, state, random_states(), constants, changed)
        super()._train(window, meanwhile)
        if self._watch is not None and self._watch(self.state):
            self.met = self.progress.step
        if self.progress.step >= self._last - 1:
            self.after = self.state.arrays()
            self._spoiled = _spoiled(self.after)

    def _over(self) -> bool:
        if self.met is not None or self.progress.step >= self._last:
            self._call.unfinished = True  # nothing of what comes at the end of a call is done
            return True
        return super()._over()

    def _end_epoch(self) -> None:
        if not self._over():
            super()._end_epoch()


class _Values(Hook):
    """Keeps what every step returned."""

    def __init__(self, values: dict[int, dict[str, float]]) -> None:
        self._values = values

    def steps(self, loop: LoopView, logs: StepLogs) -> None:
        """Take note of a window's steps."""
        self._values.update(logs.rows())


def _look(loop: LoopView) -> None:
    """Do nothing: that this is due ends a window."""


def _begun(found: Checkpoint) -> Checkpoint:
    """Return a checkpoint from which training goes on, also where the call had come to its end."""
    if found.loop["reason"] is None:
        return found
    begun = {name: getattr(found.progress, name) for name in found.loop["begun"]}
    following = {"call": found.loop["call"] + 1, "begun": begun, "reason": None}
    return replace(found, loop={**found.loop, **following})


def _spoiled(state: Mapping[str, Array]) -> frozenset[str]:
    """Return the paths of the variables that hold NaN or infinity."""
    floats = {path: x for path, x in state.items() if x.dtype.kind in "fV"}
    return frozenset(path for path, x in floats.items() if not np.isfinite(as_floats(x)).all())
