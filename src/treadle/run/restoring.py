"""Restoring the Python values of a task when a run resumes, rolls back or is replayed."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from ..errors import StateError
from ..hooks.run_record import RunRecord
from ..steps.constants import Changed
from ..steps.python_values import Change, PythonValues, Values, described, is_within
from .resume import Resuming
from .training import Training

T = TypeVar("T")


class Restoring:
    """Restores the Python values of a task when a call of the loop begins.

    A script that runs again also runs its own code again: the code before a call of the loop, the
    bodies of its `for` loops, and the `start` methods of hooks. Values of the checkpoint replace
    what that code sets if it had run before the checkpoint was saved:

    - They are restored at the beginning of the resumed call, and once more before its first step,
      unless the checkpoint was saved at the end of an epoch: the body of the next epoch has run
      since then.
    - Plain values that hooks change in `start` are reverted.

    Args:
        values: The Python values of the task.
        record: The record of the run, or None.

    Attributes:
        begun: All values when the call began, before hooks started; None before the first call.
        recompile: Changes before the checkpoint for which the step was not yet compiled.
        rolled_back: Whether the run rolls back within this process.
    """

    def __init__(self, values: PythonValues, record: RunRecord | None) -> None:
        self._values, self._record = values, record
        self.begun: Values | None = None
        self.rolled_back = False
        self.recompile: Changed = {}
        self._of_script: Values | None = None  # as the script set them
        self._at_call: Values | None = None  # as restored at the beginning of the call
        self._of_body: Values = {}  # what the user's code has set since then
        self._missing: dict[str, Change] = {}
        self._hooks_had_started = False  # before the checkpoint

    def begin_call(self, resuming: Resuming) -> str:
        """Restore values at the beginning of a call, before more of the user's code runs.

        With a checkpoint of step 0, nothing is restored, because all of that code runs again.

        Returns:
            A description of the values that could not be restored, or "".
        """
        found = resuming.found
        if found is None or found.progress.step == 0 or self.rolled_back:
            return ""
        if self._of_script is None:
            self._of_script = self._values.values()
        changes = self._changes(resuming)
        changes = _without(changes, self._values.edited(changes))
        self._values.restore(changes)
        self._at_call = self._values.values()
        return described(self._values.missing(changes))

    def build(self, training: Training, prepare: Callable[[], object]) -> None:
        """Build the step with the script's values, then rebuild it if the current values differ.

        The values at the beginning of the run determine which variables an optimizer has.

        Args:
            training: Runs the step.
            prepare: Builds the step.
        """
        now = self._values.values()
        if training.prepared is None:
            if self._of_script is not None:
                self._values.set(self._of_script)
            prepare()
            self._values.set(now)
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
        found, saved, values = resuming.found, resuming.saved, self._values
        assert found is not None and saved is not None
        earlier, step = resuming.is_later(resuming.call), found.progress.step
        by_body = values.values()
        self._hooks_had_started = step > 0 and not (self.rolled_back and earlier)
        if training.prepared is None:
            self.build(training, prepare)
        changes: dict[str, Change] = {}
        if self.rolled_back and earlier and self.begun is not None:
            values.set(self.begun)
        elif step or self.rolled_back:  # else the code that changed them runs again
            changes = self._unedited(resuming)
            at_call = self._at_call if earlier or found.progress.batch == 0 else None
            if at_call is None:
                values.restore(changes, everything=self.rolled_back)
            else:
                values.set(at_call)
                self._of_body = {p: x for p, x in by_body.items() if not x.is_like(at_call.get(p))}
        if training.changed_constants():
            prepare()
        self._missing = values.missing(changes)
        self.recompile = saved.recompile if self._hooks_had_started else {}
        self._of_script = self._at_call = None
        self.rolled_back = False

    @contextmanager
    def starting(self, training: Training, prepare: Callable[[], object]) -> Generator[list[str]]:
        """Let hooks start, as a context manager; revert what they change if they had started.

        Yields:
            A list for warnings: it gets one that names attributes added by hooks to the task of
            the earlier process, which are not restored.

        Raises:
            StateError: If a value could not be restored.
        """
        warnings: list[str] = []
        self.begun = self._values.values()
        with self._values.starting(reverted=self._hooks_had_started):
            yield warnings
        if not self._hooks_had_started:
            return
        self._missing = self._values.missing(self._missing)
        self.check_none_lost()
        if training.changed_constants():
            prepare()
        # `Training.recompiled` compiles for these changes before the next window, and logs it.
        self._values.set(self._of_body)
        if self._missing:
            warnings.append(
                f"{described(self._missing)} during the run, and is not restored, because the task "
                "is created without it: set it in __init__ if a step uses it"
            )
        self._missing, self._of_body, self._hooks_had_started = {}, {}, False

    def check_none_lost(self) -> None:
        """Check that no changed value is lost on resume, except attributes that hooks added.

        Raises:
            StateError: If a change cannot be restored, and no override allows it.
        """
        lost = {path: change for path, change in self._missing.items() if change.was is not None}
        self._missing = {path: c for path, c in self._missing.items() if path not in lost}
        heads = {
            path: described({path: c}) for path, c in lost.items() if not is_within(path, lost)
        }
        if not lost or (self._record is not None and self._record.may_lose(heads)):
            return
        raise StateError(
            f"this run cannot resume from its checkpoint: {described(lost)} during the run, and "
            "the task of this script cannot be given that value. Create the task as before; "
            "fresh=True (--fresh) trains from scratch, and override=True (--override) resumes with "
            "the values of this script"
        )

    def _changes(self, resuming: Resuming) -> dict[str, Change]:
        assert resuming.found is not None and resuming.saved is not None
        with resuming.found.reading("loop.constants"):
            return self._values.read(resuming.saved.constants)

    def _unedited(self, resuming: Resuming) -> dict[str, Change]:
        """Return the changes in a checkpoint, without values whose initial value was edited.

        Raises:
            DirectoryError: If the script was edited this way, and no override allows it.
        """
        changes = self._changes(resuming)
        edited = self._values.edited(changes)
        if edited and self._record is not None:
            self._record.compare_constants(
                {path: was for path, (was, _) in edited.items()},
                {path: now for path, (_, now) in edited.items()},
            )
        return _without(changes, edited)


def _without(values: Mapping[str, T], paths: Mapping[str, object]) -> dict[str, T]:
    """Return values without those at some paths or below them."""
    return {p: x for p, x in values.items() if p not in paths and not is_within(p, paths)}
