"""Putting the Python values of a task back when a run resumes, rolls back or is replayed."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from ..checkpoint import Checkpoint
from ..errors import StateError
from ..hooks.run_record import RunRecord
from ..steps.saved_constants import CONTAINERS, Change, SavedConstants, Values, described, is_within
from .training import Training

T = TypeVar("T")

SIMPLE = ("plain", "enum", "array", *CONTAINERS)


class Restoring:
    """Decides which Python values a task has when a call of the loop begins.

    A script that runs again runs its own code again: what comes before a call of the loop, the
    bodies of its loops, and the `start` of hooks. The values are those of the checkpoint where that
    code had run before the checkpoint, and those that it sets where it had not:

    - at the beginning of a resumed call they are those of the checkpoint;
    - before the first step too, unless the checkpoint was saved at the end of an epoch: the body of
      the next epoch has then run since;
    - what hooks change in `start` is put back, since they had started before the checkpoint.

    Args:
        constants: The values, and what checkpoints hold of them.
        record: Of the run; None where there is none.

    Attributes:
        begun: All values when the call began, before hooks started; None before the first call.
        recompile: What had changed before the checkpoint, and the step was not yet compiled for.
        rolled_back: The run goes back within this process.
    """

    def __init__(self, constants: SavedConstants, record: RunRecord | None) -> None:
        self._constants, self._record = constants, record
        self.begun: Values | None = None
        self.rolled_back = False
        self._script: Values | None = None  # what the script itself has made of the task
        self._early: Values | None = None  # after they were put back at the beginning of the call
        self._left: dict[str, Change] = {}
        self._set_since: Values = {}
        self.recompile: list[str] = []
        self._started = False  # hooks had started before the checkpoint

    def begin_call(self, found: Checkpoint | None) -> str:
        """Put values back before the user's code goes on; returns what could not be.

        From a checkpoint of step 0 all of that code runs again.
        """
        if found is None or found.progress.step == 0 or self.rolled_back:
            return ""
        if self._script is None:
            self._script = self._constants.values()
        changes = self._changes(found)
        for path in self._constants.edited(changes):
            changes = _without(changes, path)
        self._constants.restore(changes)
        self._left = self._constants.missing(changes)
        self._early = self._constants.values()
        return described(self._left)

    def build(self, training: Training, prepare: Callable[[], object]) -> None:
        """Build the step as at the beginning of the run, then as the values are now.

        What is trained at the beginning decides which variables an optimizer has.
        """
        now = self._constants.values()
        if training.prepared is None:
            if self._script is not None:
                self._constants.put_back(self._script)
            prepare()
            self._constants.put_back(now)
        if training.changed_constants():
            prepare()

    def restore(
        self, found: Checkpoint, call: int, training: Training, prepare: Callable[[], object]
    ) -> None:
        """Put values back before the first step.

        Args:
            found: The checkpoint.
            call: The number of the call that begins.
            training: What runs the step.
            prepare: Builds it.

        Raises:
            DirectoryError: The script begins with another value than the run, and no override
                allows that.
        """
        constants, rolled_back = self._constants, self.rolled_back
        earlier, wanted = found.loop["call"] < call, constants.values()
        self._started = found.progress.step > 0 and not (rolled_back and earlier)
        if training.prepared is None:
            self.build(training, prepare)
        left: dict[str, Change] = {}
        self._set_since = {}
        if rolled_back and earlier and self.begun is not None:
            constants.put_back(self.begun)
        elif found.progress.step or rolled_back:  # else all that changed them is done again
            left = self._unedited(found)
            if self._early is not None and (earlier or found.progress.batch == 0):
                early = self._early
                constants.put_back(early)
                left = {path: change for path, change in self._left.items() if path in left}
                self._set_since = {p: x for p, x in wanted.items() if not x.is_like(early.get(p))}
            constants.restore(left, everything=rolled_back)
        if training.changed_constants():
            prepare()
        self._left = constants.missing(left)
        notes = found.loop.get("recompile") if self._started else None
        self.recompile = [str(note) for note in notes] if isinstance(notes, list) else []  # type: ignore[reportUnknownVariableType]
        self._script = self._early = None
        self.rolled_back = False

    def refuse_lost(self) -> None:
        """Refuse to resume without changes that cannot be put back.

        Raises:
            StateError: There are some, and no override allows that.
        """
        lost = {path: c for path, c in self._left.items() if not self._is_new(path)}
        heads = {
            path: described({path: c}) for path, c in lost.items() if not is_within(path, lost)
        }
        if not lost or (self._record is not None and self._record.may_lose(heads)):
            return
        raise StateError(
            f"this run cannot resume from its checkpoint: {described(lost)} during the run, and "
            "checkpoints hold no objects of these classes. Give the task every object that it will "
            "use from the start, as attributes, and let hooks change a number or a flag that "
            "selects one; fresh=True (--fresh) trains anew, and override=True (--override) resumes "
            "with the values of this script"
        )

    def before_start(self) -> None:
        """Take note of all values before hooks start."""
        self.begun = self._constants.values()

    def after_start(self, training: Training, prepare: Callable[[], object]) -> str:
        """Put back what hooks changed as they started, if they had started before the checkpoint.

        An object that a hook puts into the task as it starts is taken for the one that it put there
        before.

        Returns:
            A warning that names attributes which a hook has added to the task.

        Raises:
            StateError: Something could not be put back.
        """
        started, self._started = self._started, False
        if not started:
            return ""
        assert self.begun is not None
        kept = {path: value for path, value in self.begun.items() if value.kind in SIMPLE}
        for path in self._left:
            kept = _without(kept, path)
        self._constants.put_back(kept)
        self._constants.restore(self._left)
        self._left = self._constants.missing(self._left)
        self.refuse_lost()
        if training.changed_constants():
            prepare()
        # The step is compiled for these when it is about to run, as it always is, which is logged.
        self._constants.put_back(self._set_since)
        new = {path: c for path, c in self._left.items() if self._is_new(path)}
        self._left, self._set_since = {}, {}
        if not new:
            return ""
        return (
            f"{described(new)} during the run, and is not put back, since the task is made without "
            "it: set it in __init__ if a step uses it"
        )

    def _is_new(self, path: str) -> bool:
        """Return whether a value is an attribute that a hook has added, or lies within one."""
        return all(
            change.was is None
            for other, change in self._left.items()
            if f"{path}/".startswith(f"{other}/")
        )

    def _changes(self, found: Checkpoint) -> dict[str, Change]:
        if self.rolled_back:  # objects too, where this process saved it
            saved = self._constants.saved(found.progress.step)
            if saved is not None:
                return dict(saved)
        return self._constants.read(found.loop.get("constants", {}))  # older ones hold none

    def _unedited(self, found: Checkpoint) -> dict[str, Change]:
        """Return what a checkpoint holds, but for values that the script now begins with otherwise.

        Raises:
            DirectoryError: There are some, and no override allows that.
        """
        changes = self._changes(found)
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
    """Return values without that of a path, and of what lies below it."""
    return {
        other: value
        for other, value in values.items()
        if other != path and not other.startswith(f"{path}/")
    }
