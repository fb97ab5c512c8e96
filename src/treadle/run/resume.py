"""Resuming from a checkpoint: which call of the loop resumes, and with which values.

A script that runs again makes the same calls of the loop in the same order. Calls that were
complete before the checkpoint do nothing, and the call during which it was saved resumes from it.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..backends.base import active
from ..checkpoint import Checkpoint
from ..core.directory import differences
from ..core.identity import planned_shards, versions
from ..core.options import backend_name
from ..core.progress import Progress
from ..core.randomness import set_random_states
from ..errors import ConfigurationError, StateError
from ..steps.state import State
from .saved_state import LoopState


class Resuming:
    """The number of the current call of the loop, and the values that remain to be restored.

    Args:
        found: The checkpoint to resume from; None for a new run.
        call: The number of the last completed call.

    Attributes:
        found: The checkpoint, until it has been restored completely; then None.
        call: The number of the current call, from 0; -1 before the first.
        begun: The progress when that call began.
    """

    def __init__(self, found: Checkpoint | None, call: int = -1) -> None:
        self.found = found
        self.call, self.begun = call, Progress()
        self._pending: dict[str, Any] = {}
        self._saved = found  # unchanged, for `use_last_checkpoint`
        self._loop_state = LoopState.decode(found) if found is not None else None

    @property
    def saved(self) -> LoopState | None:
        """The state of the loop in the checkpoint, until the checkpoint has been restored."""
        return self._loop_state if self.found is not None else None

    def is_later(self, call: int) -> bool:
        """Return whether a call comes after the call during which the checkpoint was saved."""
        return self.saved is not None and call > self.saved.call

    @property
    def is_of_this_call(self) -> bool:
        """Whether the checkpoint was saved during the current call."""
        return self.saved is not None and self.call == self.saved.call

    def use_final_state(self, arrays: Mapping[str, Any]) -> None:
        """Restore variables from the end of a finished run instead of its last checkpoint.

        The two may differ: the last checkpoint is saved before hooks end, and early stopping
        restores the best weights at the end.

        Args:
            arrays: The variables at the end of the run, by path; empty if unknown.
        """
        if arrays and self.found is not None:
            self.found = replace(self.found, state=arrays)
        self.set_pending(arrays)

    def use_last_checkpoint(self) -> Checkpoint | None:
        """Return the last checkpoint as it was saved, to extend a finished run.

        An extended run includes neither the changes by hooks at the end nor averaged weights.
        """
        if self.found is not None:
            self.found = self._saved
        return self.found

    def set_pending(self, arrays: Mapping[str, Any]) -> None:
        """Set the values that variables must have before the first step, by path."""
        self._pending = dict(arrays)

    @property
    def forms(self) -> Mapping[str, Any]:
        """The batch forms for which variables were created before the checkpoint, by step name."""
        return self.saved.forms if self.saved is not None else {}

    @property
    def has_pending(self) -> bool:
        """Whether some variables have not been restored yet."""
        return bool(self._pending)

    @property
    def next_call_was_complete(self) -> bool:
        """Whether the next call was complete before the checkpoint."""
        return self.saved is not None and self.call + 1 < self.saved.call

    def next_begun(self, progress: Progress) -> Progress:
        """Return the progress when the next call begins, or when it began if it is resumed."""
        return self.saved.begun if self.saved and self.call + 1 == self.saved.call else progress

    def begin(self, progress: Progress) -> None:
        """Begin the next call, or resume it."""
        self.begun = self.next_begun(progress)
        self.call += 1

    def assign_what_exists(self, state: State) -> None:
        """Restore the variables that exist already, so that their initial values are never used."""
        fits = {path: self._pending[path] for path in state.variables if path in self._pending}
        if fits:
            _assign(state, fits, among=list(fits))
            self._pending = {path: x for path, x in self._pending.items() if path not in fits}

    def check_built(self, state: State) -> None:
        """Check that no model is still unbuilt, because its weights could not be restored.

        Raises:
            ConfigurationError: If there is such a model.
        """
        later = (*state.optimizers, *state.accumulators, *state.built_by_steps)
        slots = tuple(f"{path}/" for path in later)
        left = [path for path in self._pending if not path.startswith(slots or ("\0",))]
        if left:
            raise ConfigurationError(
                f"{left[0]} was not yet built, so it could not be restored from the earlier run: "
                "give the model an Input, so that it is built at once, or call "
                "loop.prepare(source) first"
            )

    def restore_variables(self, state: State, initial: Mapping[str, Any]) -> Checkpoint | None:
        """Restore all variables and random states, once.

        Args:
            state: The variables of the task.
            initial: Values for variables created after the checkpoint, for a rollback.

        Returns:
            The checkpoint, or None if it was already restored or there is none.

        Raises:
            StateError: If the checkpoint does not match the task. Nothing is changed then.
        """
        found, self.found = self.found, None
        if found is not None:
            try:
                # A rollback may have restored an object that has other variables.
                newer = {p: value for p, value in initial.items() if p in state.variables}
                _assign(state, {**newer, **found.state}, among=None)
            except StateError:
                self.found = found
                raise
            self._pending = {}
            assert self._loop_state is not None
            with found.reading("loop.random"):
                set_random_states(self._loop_state.random)
        return found


def _assign(state: State, arrays: Mapping[str, Any], among: list[str] | None) -> None:
    try:
        state.assign(arrays, among)
    except StateError as error:
        text = f"this run cannot resume from its last checkpoint: {error}"
        needed = state.variables if among is None else among
        # If values are missing too, the task is another one.
        if all(path in arrays for path in needed) and any(p not in state.variables for p in arrays):
            text += (
                ". A layer that only predict_step or loop.call uses must be built in __init__, for "
                "example with an Input"
            )
        raise StateError(text) from error


def circumstances() -> dict[str, Any]:
    """Return what the exact values of a run depend on, in addition to its configuration."""
    return {"backend": backend_name(), **active().computes_on(), "versions": versions()}


def without_reason(plan: str) -> str:
    """Return a plan without the reason in parentheses, which does not affect values.

    The number of devices, which the circumstances contain too, is also omitted.

    Example:
        >>> without_reason("windows of up to 8, graph (XLA convolves slower), data streamed")
        'windows of up to 8, graph, data streamed'
        >>> without_reason("windows of up to 8, XLA, data on each of 4 devices")
        'windows of up to 8, XLA, data on the device'
    """
    plan = re.sub(r" \((?!single steps|windows|eager).*\)", "", plan)
    plan = re.sub(r"on each of \d+ devices", "on the device", plan)
    return re.sub(r",? (to|on) \d+ devices", "", plan)


def lost_guarantee(before: Mapping[str, Any], plan: str) -> str:
    """Return a warning if a resumed run may not be bit-for-bit exact, or "".

    Args:
        before: The circumstances and the plan in the checkpoint.
        plan: The current plan.
    """
    now = {**circumstances(), "plan": without_reason(plan)}
    # The plan is not known before the first step.
    known = {**before, "plan": without_reason(before.get("plan") or "")}
    found = differences({name: known.get(name) or now[name] for name in now}, now)
    if not found:
        return ""
    moved = known.get("devices") not in (None, now["devices"])
    same = ", and the batches are the same" if moved else ""
    if moved and planned_shards(before.get("plan") or "") != planned_shards(plan):
        same = (
            ", but the batches differ from here on, since treadle.data.sharded divides the data "
            "among another number of processes"
        )
    return (
        f"this run resumes, but may not be bit-for-bit exact: {'; '.join(found)}. All values were "
        f"restored exactly from the checkpoint{same}; later steps may round differently"
    )
