"""Going on where another process ended: in which call of the loop, and with what.

A script that is run again makes the same calls of the loop in the same order. Those that were over
before the checkpoint do nothing, and the one that it lies in goes on from there.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from ..backends.base import active
from ..checkpoint import Checkpoint
from ..core.directory import differences
from ..core.identity import versions
from ..core.options import backend_name
from ..core.progress import Progress
from ..core.randomness import random_states, set_random_states
from ..errors import ConfigurationError, StateError
from ..steps.state import State


class Resuming:
    """Which call of the loop runs, and what is still to be taken over from another process.

    Args:
        found: The checkpoint to go on from; None where the run begins.
        call: The number of the call that was over last.

    Attributes:
        found: The same, until all of it has been taken over.
        call: The number of the call that runs, from 0; -1 before the first.
        begun: Where the run stood when that call began.
    """

    def __init__(self, found: Checkpoint | None, call: int = -1) -> None:
        self.found = found
        self.call, self.begun = call, Progress()
        self._left: dict[str, Any] = {}
        self._saved = found  # as it was saved

    def is_later(self, call: int) -> bool:
        """Say whether a call comes after the one that the checkpoint lies in."""
        return self.found is not None and call > self.found.loop["call"]

    def end_with(self, arrays: Mapping[str, Any]) -> None:
        """Say what variables the run had when it had come to its end, if that is known.

        Its last checkpoint was saved before hooks ended: early stopping puts the best weights back.
        """
        if arrays and self.found is not None:
            self.found = replace(self.found, state=arrays)
        self.show(arrays)

    def reopen(self) -> Checkpoint | None:
        """Return the last checkpoint as it was saved: a finished run is made longer.

        What hooks did at its end, and averages of weights, are not part of a longer run.
        """
        if self.found is not None:
            self.found = self._saved
        return self.found

    def show(self, arrays: Mapping[str, Any]) -> None:
        """Say what variables are to hold before anything is trained on."""
        self._left = dict(arrays)

    @property
    def forms(self) -> Mapping[str, Any]:
        """Forms of batch that brought variables before the checkpoint, by the step's name."""
        return self.found.loop.get("forms", {}) if self.found is not None else {}

    @property
    def waits(self) -> bool:
        """Whether variables are still to be set to what they were."""
        return bool(self._left)

    @property
    def over(self) -> bool:
        """Whether the next call was over before the checkpoint."""
        return self.found is not None and self.call + 1 < self.found.loop["call"]

    def begin(self, progress: Progress) -> None:
        """Take note that a call begins, or goes on."""
        self.call += 1
        self.begun = progress
        if self.found is not None and self.call == self.found.loop["call"]:
            self.begun = Progress(**self.found.loop["begun"])

    def assign_what_exists(self, state: State) -> None:
        """Set the variables that exist already: nobody may see them as they were initialized."""
        fits = {path: self._left[path] for path in state.variables if path in self._left}
        if fits:
            _assign(state, fits, among=list(fits))
            self._left = {path: x for path, x in self._left.items() if path not in fits}

    def refuse_unbuilt(self, state: State) -> None:
        """Refuse to look at a model that was not yet built, and so has not its weights again.

        Raises:
            ConfigurationError: There is one.
        """
        slots = tuple(f"{path}/" for path in (*state.optimizers, *state.accumulators))
        left = [path for path in self._left if not path.startswith(slots or ("\0",))]
        if left:
            raise ConfigurationError(
                f"{left[0]} was not yet built, so it could not be taken over from the earlier run: "
                "give the model an Input, so that it is built at once, or call "
                "loop.prepare(source) first"
            )

    def take_over(self, state: State, initial: Mapping[str, Any]) -> Checkpoint | None:
        """Set all variables and random states, once; returns the rest of what was found.

        Args:
            state: Of the task.
            initial: Values for variables that are newer than the checkpoint, when a run is rolled
                back.

        Raises:
            StateError: The checkpoint does not fit the task; nothing was changed.
        """
        found, self.found = self.found, None
        if found is not None:
            try:
                # A rollback may have put back an object that has other variables.
                newer = {p: value for p, value in initial.items() if p in state.variables}
                _assign(state, {**newer, **found.state}, among=None)
            except StateError:
                self.found = found
                raise
            self._left = {}
            set_random_states(found.loop["random"])
        return found


def _assign(state: State, arrays: Mapping[str, Any], among: list[str] | None) -> None:
    try:
        state.assign(arrays, among)
    except StateError as error:
        raise StateError(f"this run cannot go on with its last checkpoint: {error}") from error


def circumstances() -> dict[str, Any]:
    """Return what the bits of a run depend on beside its configuration."""
    return {"backend": backend_name(), **active().computes_on(), "versions": versions()}


def lost_guarantee(before: Mapping[str, Any], plan: str) -> str:
    """Say why a run does not go on bit for bit, if so: what its checkpoint tells is not as now."""
    now = {**circumstances(), "plan": plan}
    # The plan is not known before the first step.
    found = differences({name: before.get(name) or now[name] for name in now}, now)
    if not found:
        return ""
    return (
        f"this run goes on, but not bit for bit as it would have: {'; '.join(found)}. All values "
        "are those of the checkpoint; from here on they may be rounded otherwise"
    )


def about_call(resuming: Resuming) -> dict[str, Any]:
    """Return what a checkpoint holds of the call that runs, and the random states."""
    return {
        "call": resuming.call,
        "begun": asdict(resuming.begun),
        "random": random_states(),
    }
