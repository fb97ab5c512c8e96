"""Restoring the Python values of a task when a run resumes, rolls back or is replayed."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from ..errors import StateError
from ..hooks.run_record import RunRecord
from ..steps.saved_constants import CONTAINERS, Change, SavedConstants, Values, described, is_within
from .resume import Resuming
from .training import Training

T = TypeVar("T")

SIMPLE = ("plain", "enum", "array", *CONTAINERS)


class Restoring:
    """Restores the Python values of a task when a call of the loop begins.

    A script that runs again also runs its own code again: the code before a call of the loop, the
    bodies of its `for` loops, and the `start` methods of hooks. If that code had run before the
    checkpoint was saved, the checkpoint's values win; otherwise the values that the code sets win:

    - At the beginning of a resumed call, the values of the checkpoint are restored.
    - They are restored again before the first step, unless the checkpoint was saved at the end of
      an epoch, because the body of the next epoch has run since then.
    - Changes that hooks make in `start` are reverted, because the hooks had started before the
      checkpoint.

    Args:
        constants: The Python values of the task, and how checkpoints store them.
        record: The record of the run, or None.

    Attributes:
        begun: All values when the call began, before hooks started; None before the first call.
        recompile: Changes made before the checkpoint for which the step was not yet compiled.
        rolled_back: Whether the run rolls back within this process.
    """

    def __init__(self, constants: SavedConstants, record: RunRecord | None) -> None:
        self._constants, self._record = constants, record
        self.begun: Values | None = None
        self.rolled_back = False
        self._script_values: Values | None = None  # as the script set them
        self._values_at_call: Values | None = None  # as restored at the beginning of the call
        self._missing: dict[str, Change] = {}
        self._set_since_call: Values = {}
        self.recompile: list[str] = []
        self._hooks_had_started = False  # hooks had started before the checkpoint

    def begin_call(self, resuming: Resuming) -> str:
        """Restore values at the beginning of a call, before more of the user's code runs.

        With a checkpoint of step 0, nothing is restored, because all of that code runs again.

        Returns:
            A description of the values that could not be restored, or "".
        """
        found = resuming.found
        if found is None or found.progress.step == 0 or self.rolled_back:
            return ""
        if self._script_values is None:
            self._script_values = self._constants.values()
        changes = self._changes(resuming)
        for path in self._constants.edited(changes):
            changes = _without(changes, path)
        self._constants.restore(changes)
        self._missing = self._constants.missing(changes)
        self._values_at_call = self._constants.values()
        return described(self._missing)

    def build(self, training: Training, prepare: Callable[[], object]) -> None:
        """Build the step with the script's values, then rebuild it if the current values differ.

        The values at the beginning of the run determine which variables an optimizer has.

        Args:
            training: Runs the step.
            prepare: Builds the step.
        """
        now = self._constants.values()
        if training.prepared is None:
            if self._script_values is not None:
                self._constants.put_back(self._script_values)
            prepare()
            self._constants.put_back(now)
        if training.changed_constants():
            prepare()

    def restore(
        self, resuming: Resuming, training: Training, prepare: Callable[[], object]
    ) -> None:
        """Restore values before the first step of the current call.

        Args:
            resuming: The call, and the checkpoint.
            training: Runs the step.
            prepare: Builds the step.

        Raises:
            DirectoryError: If the script starts with other values than the run, and no override
                allows it.
        """
        found, saved = resuming.found, resuming.saved
        assert found is not None and saved is not None
        rolled_back, earlier = self.rolled_back, resuming.is_later(resuming.call)
        wanted = self._constants.values()
        self._hooks_had_started = found.progress.step > 0 and not (rolled_back and earlier)
        if training.prepared is None:
            self.build(training, prepare)
        left: dict[str, Change] = {}
        self._set_since_call = {}
        if rolled_back and earlier and self.begun is not None:
            self._constants.put_back(self.begun)
        elif found.progress.step or rolled_back:  # else the code that changed them runs again
            left = self._unedited(resuming)
            if self._values_at_call is not None and (earlier or found.progress.batch == 0):
                left = self._restore_values_at_call(left, wanted)
            self._constants.restore(left, everything=rolled_back)
        if training.changed_constants():
            prepare()
        self._missing = self._constants.missing(left)
        self.recompile = list(saved.recompile) if self._hooks_had_started else []
        self._script_values = self._values_at_call = None
        self.rolled_back = False

    def _restore_values_at_call(
        self, changes: Mapping[str, Change], wanted: Values
    ) -> dict[str, Change]:
        """Restore the values of the beginning of the call, and return the changes still missing.

        Args:
            changes: The changes in the checkpoint.
            wanted: The current values; those that the script set since then are set again later.
        """
        early = self._values_at_call or {}
        self._constants.put_back(early)
        self._set_since_call = {p: x for p, x in wanted.items() if not x.is_like(early.get(p))}
        return {path: change for path, change in self._missing.items() if path in changes}

    def check_none_lost(self) -> None:
        """Check that no changed value is lost on resume.

        Raises:
            StateError: If a change cannot be restored, and no override allows it.
        """
        lost = {path: c for path, c in self._missing.items() if not self._is_new(path)}
        heads = {
            path: described({path: c}) for path, c in lost.items() if not is_within(path, lost)
        }
        if not lost or (self._record is not None and self._record.may_lose(heads)):
            return
        raise StateError(
            f"this run cannot resume from its checkpoint: {described(lost)} during the run, and "
            "checkpoints hold no objects of these classes. Give the task every object that it will "
            "use from the start, as attributes, and let hooks change a number or a flag that "
            "selects one; fresh=True (--fresh) trains from scratch, and override=True (--override) "
            "resumes with the values of this script"
        )

    def before_start(self) -> None:
        """Save all values before hooks start."""
        self.begun = self._constants.values()

    def after_start(self, training: Training, prepare: Callable[[], object]) -> str:
        """Revert what hooks changed in `start`, if they had started before the checkpoint.

        An object that a hook adds to the task in `start` is assumed to be the same object as in the
        earlier process.

        Returns:
            A warning that names the attributes added by hooks that were not restored, or "".

        Raises:
            StateError: If a value could not be restored.
        """
        started, self._hooks_had_started = self._hooks_had_started, False
        if not started:
            return ""
        assert self.begun is not None
        kept = {path: value for path, value in self.begun.items() if value.kind in SIMPLE}
        for path in self._missing:
            kept = _without(kept, path)
        self._constants.put_back(kept)
        self._constants.restore(self._missing)
        self._missing = self._constants.missing(self._missing)
        self.check_none_lost()
        if training.changed_constants():
            prepare()
        # `Training.recompiled` compiles for these changes before the next window, and logs it.
        self._constants.put_back(self._set_since_call)
        new = {path: c for path, c in self._missing.items() if self._is_new(path)}
        self._missing, self._set_since_call = {}, {}
        if not new:
            return ""
        return (
            f"{described(new)} during the run, and is not restored, because the task is created "
            "without it: set it in __init__ if a step uses it"
        )

    def _is_new(self, path: str) -> bool:
        """Return whether a value is an attribute added by a hook, or part of one."""
        return all(
            change.was is None
            for other, change in self._missing.items()
            if f"{path}/".startswith(f"{other}/")
        )

    def _changes(self, resuming: Resuming) -> dict[str, Change]:
        assert resuming.found is not None and resuming.saved is not None
        if self.rolled_back:  # includes objects, if this process saved it
            saved = self._constants.saved(resuming.found.progress.step)
            if saved is not None:
                return dict(saved)
        with resuming.found.reading("loop.constants"):
            return self._constants.read(resuming.saved.constants)

    def _unedited(self, resuming: Resuming) -> dict[str, Change]:
        """Return the changes in a checkpoint, without values whose initial value was edited.

        Raises:
            DirectoryError: If the script was edited this way, and no override allows it.
        """
        changes = self._changes(resuming)
        edited = self._constants.edited(changes)
        if edited and self._record is not None:
            self._record.compare_constants(
                {path: was for path, (was, _) in edited.items()},
                {path: now for path, (_, now) in edited.items()},
            )
            for path in edited:
                changes = _without(changes, path)
        return changes


def _without(values: Mapping[str, T], path: str) -> dict[str, T]:
    """Return values without those at a path or below it."""
    return {
        other: value
        for other, value in values.items()
        if other != path and not other.startswith(f"{path}/")
    }
