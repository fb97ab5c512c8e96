"""Resuming: the only place that restores the state of the task, and random states.

When a run resumes, this happens in this order:

1. `open_services` claims the directory, compares the configuration, and finds the checkpoint.
2. `Run.restore_progress` restores progress, history, the states of hooks and compilers at once.
3. `Calls.skip_completed_call` skips the calls that were complete.
4. `Calls._begin_call` restores Python values and the validation of the call.
5. `Engine._open` opens the source at its position.
6. `Engine.build_and_start` calls `Resume.restore`, which builds the step and restores Python
   values, variables, random states and means. Then hooks start, and the first window runs.

Variables that exist already are assigned earlier, where code may read them
(`assign_what_exists`). A run that is finished restores no hooks (`Run._restore_end`).

A script that runs again makes the same calls of the loop in the same order. Calls that were
complete before the checkpoint do nothing, and the call during which it was saved resumes from it. A
rollback within one process restores a checkpoint in the same way.

The script also runs its own code again: the code before a call of the loop, the bodies of its `for`
loops, and the `start` methods of hooks. What that code had set before the checkpoint was saved is
replaced by the values of the checkpoint:

- The state of the task is restored before the first window of the resumed call, and Python values
  also when the call begins.
- The body of `loop.epochs` runs before the first window. If the checkpoint was saved at the end of
  an epoch, that body is the one of the next epoch: everything is restored when the call begins, and
  what the body sets stays. The same holds for code after a call that was complete, and between
  calls of `loop.step`. It needs a step that can be built without a batch; if it cannot, what that
  code sets before the first window is replaced.
- Variables and plain Python values that hooks change in `start` are reverted.
- From a checkpoint of step 0 no Python values are restored, because all of that code runs again.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from ..backends.window import Window
from ..checkpoint import SavedState
from ..core.progress import Progress
from ..core.randomness import set_random_states
from ..errors import ConfigurationError, StateError
from ..hooks.run_record import RunRecord
from ..steps.constants import Changed
from ..steps.optimizers import build_as_saved
from ..steps.python_values import Change, PythonValues, Values, described, is_within
from ..steps.state import State
from .evaluation import Evaluation
from .state import RunState
from .training import Training

T = TypeVar("T")


class Resume:
    """What remains to be restored of a run, and the number of the current call of the loop.

    Args:
        task: The task.
        values: Its Python values.
        training: Runs the train step.
        evaluation: Runs the other steps.
        record: The record of the run, or None.
        prepare: Builds the steps for a window, with the batch forms of the state.

    Attributes:
        state: The state to restore; None in a new run, and once it has been restored.
        call: The number of the current call, from 0; -1 before the first.
        begun: The progress when that call began.
        values_begun: All Python values when the call began, before hooks started; None before the
            first call.
        recompile: Changes of Python values before the checkpoint for which the step was not yet
            compiled.
        rolled_back: Whether the run rolls back within this process.
        code_had_run: Whether the checkpoint already includes the effects of the code that the
            script ran before the first window.
    """

    def __init__(
        self,
        task: Any,
        values: PythonValues,
        training: Training,
        evaluation: Evaluation,
        record: RunRecord | None,
        prepare: Callable[[Window], None],
    ) -> None:
        self._task, self._values, self._record = task, values, record
        self._training, self._evaluation, self._prepare = training, evaluation, prepare
        self.state: RunState | None = None
        self.call, self.begun = -1, Progress()
        self.values_begun: Values | None = None
        self.recompile: Changed = {}
        self.rolled_back = self.code_had_run = False
        self._saved: RunState | None = None  # unchanged, for `use_last_checkpoint`
        self._pending: Mapping[str, Any] = {}  # the values of variables that are not yet restored
        self._restored_early = False  # whether it was restored when the call of `loop.epochs` began
        self._script_values: Values | None = None  # as the script set them
        self._values_at_call: Values | None = None  # as restored at the beginning of the call
        self._body_values: Values = {}  # what the user's code has set since then
        self._missing: dict[str, Change] = {}
        self._hooks_had_started = False  # before the checkpoint

    # What is restored, and in which call

    def use(self, found: SavedState | None, call: int) -> None:
        """Resume from a checkpoint in the call after `call`; None begins a new run."""
        self.state = self._saved = RunState.of(found) if found is not None else None
        self.call, self.begun = call, Progress()
        self._pending, self._restored_early = {}, False

    def use_final_state(self, arrays: Mapping[str, Any]) -> None:
        """Restore variables from the end of a finished run instead of its last checkpoint.

        The two may differ: the last checkpoint is saved before hooks end, and early stopping
        restores the best weights at the end.

        Args:
            arrays: The variables at the end of the run, by path; empty if unknown.
        """
        if arrays and self.state is not None:
            self.state = replace(self.state, arrays=arrays)
        self._pending = arrays

    def use_last_checkpoint(self) -> RunState | None:
        """Return the state as it was saved, to extend a finished run.

        An extended run includes neither the changes by hooks at the end nor averaged weights.
        """
        if self.state is not None:
            self.state, self._pending = self._saved, self._saved.arrays if self._saved else {}
        return self.state

    def is_later(self, call: int) -> bool:
        """Return whether a call comes after the call during which the checkpoint was saved."""
        return self.state is not None and call > self.state.call

    @property
    def is_of_this_call(self) -> bool:
        """Whether the checkpoint was saved during the current call."""
        return self.state is not None and self.call == self.state.call

    @property
    def forms(self) -> Mapping[str, Any]:
        """The batch forms for which variables were created before the checkpoint, by step name."""
        return self.state.forms if self.state is not None else {}

    def next_begun(self, progress: Progress) -> Progress:
        """Return the progress when the next call begins, or when it began if it is resumed."""
        resumes = self.state is not None and self.call + 1 == self.state.call
        return self.state.begun if self.state is not None and resumes else progress

    def next_call(self, progress: Progress) -> None:
        """Begin the next call, or resume it."""
        self.begun = self.next_begun(progress)
        self.call += 1

    # Restoring

    def restore_python_values(self, early: bool = False) -> str:
        """Restore Python values at the beginning of a call, before more of the user's code runs.

        Args:
            early: Whether the code that runs before the first window had not run before the
                checkpoint was saved, such as the body of `loop.epochs` for another epoch: then
                everything is restored, if the step can be built without a batch.

        Returns:
            A description of the values that could not be restored, or "".
        """
        state = self.state
        if state is None or state.progress.step == 0 or self.rolled_back:
            return ""
        if self._script_values is None:
            self._script_values = self._values.values()
        changes = self._changes(state)
        changes = _without(changes, self._values.edited(changes))
        self._values.restore(changes)
        missing = described(self._values.missing(changes))
        window = self._training.zeros(state.forms) if early else None
        if window is not None:
            self._restore_early(window)
        self._values_at_call = self._values.values()
        return missing

    def _restore_early(self, window: Window) -> None:
        """Build the step with a batch of zeros, and restore everything, if possible."""
        try:
            self.build(window)
            self._restore_state(window)
            self._restored_early, self._pending = True, {}
        except Exception:  # the body may first set what the step needs; else the build fails again
            self._training.prepared = None

    def build(self, window: Window) -> None:
        """Build the step with the script's values, then rebuild it if the current values differ.

        The values at the beginning of the run determine which variables an optimizer has.
        """
        now = self._values.values()
        if self._training.prepared is None:
            if self._script_values is not None:
                self._values.set(self._script_values)
            try:
                self._prepare(window)
            finally:
                self._values.set(now)
        if self._training.changed_constants():
            self._prepare(window)

    def restore(self, window: Window) -> RunState | None:
        """Restore the state before the first step of the current call, once.

        Returns:
            The state; None if it was already restored, or there is none.

        Raises:
            StateError: If the checkpoint does not match the task. Nothing is changed then.
            DirectoryError: If the script starts with other Python values than the run, and no
                override allows it.
        """
        state, self.code_had_run = self.state, False
        if state is None:
            return None
        new_code = state.progress.batch == 0 or self.is_later(self.call)
        self.code_had_run = state.progress.step > 0 and not (self._restored_early and new_code)
        self._restore_values(state, window)
        if self.code_had_run or not state.progress.step:
            try:
                self._restore_state(window)
            except StateError:
                self.check_none_lost()  # a replaced object may have other variables
                raise
        self.state, self._pending, self._restored_early = None, {}, False
        return state

    def _restore_values(self, state: RunState, window: Window) -> None:
        """Restore Python values before the first step of the current call."""
        values, earlier, step = self._values, self.is_later(self.call), state.progress.step
        by_body = values.values()
        self._hooks_had_started = step > 0
        if self._training.prepared is None:
            self.build(window)
        changes: dict[str, Change] = {}
        if step or self.rolled_back:  # else the code that changed them runs again
            changes = self._unedited(state)
            at_call = self._values_at_call if earlier or state.progress.batch == 0 else None
            if at_call is None:
                values.restore(changes, everything=self.rolled_back)
            else:
                values.set(at_call)
                self._body_values = {
                    p: x for p, x in by_body.items() if not x.is_like(at_call.get(p))
                }
        if self._training.changed_constants():
            self._prepare(window)
        self._missing = values.missing(changes)
        self.recompile = state.recompile if self._hooks_had_started else {}
        self._script_values = self._values_at_call = None
        self.rolled_back = False

    def _restore_state(self, window: Window) -> None:
        """Restore all variables, what the step changes besides them, random states and means."""
        saved, training = self.state, self._training
        assert saved is not None
        if build_as_saved(self._task, saved.arrays):
            training.prepared = None  # built without the new slots
            self._prepare(window)
        assert training.prepared is not None
        training.prepared.effects.restore(saved.stores)
        state = State.discover(self._task)
        # A rollback may have restored an object that has other variables.
        initial = {**training.initial, **self._evaluation.initial}
        newer = {path: x for path, x in initial.items() if path in state.variables}
        # Checkpoints of older versions lack the number of skipped groups.
        newer |= {f"{path}/skipped": np.zeros((), "int32") for path in state.accumulators}
        _assign(state, {**newer, **saved.arrays}, among=None)
        restore_random_states(saved)
        training.restore_means(saved.means)

    def assign_what_exists(self) -> None:
        """Restore the variables that exist already, so that their initial values are never used."""
        if not self._pending:
            return
        state = State.discover(self._task)
        fits = {path: self._pending[path] for path in state.variables if path in self._pending}
        if fits:
            _assign(state, fits, among=list(fits))
            self._pending = {path: x for path, x in self._pending.items() if path not in fits}

    def restore_without_training(self) -> None:
        """Restore what `evaluate`, `predict` and `call` need before the first step.

        Raises:
            ConfigurationError: If a model is not built, so that its weights cannot be restored.
        """
        if self.state is not None and self.state.stores and self._training.prepared is None:
            window = self._training.zeros(self.forms)  # only the step knows what it changes
            if window is not None:
                self.build(window)
        if not self._pending:
            return
        self.assign_what_exists()
        state = State.discover(self._task)
        later = (*state.optimizers, *state.accumulators, *state.built_by_steps)
        slots = tuple(f"{path}/" for path in later)
        left = [path for path in self._pending if not path.startswith(slots or ("\0",))]
        if left:
            raise ConfigurationError(
                f"{left[0]} was not yet built, so it could not be restored from the earlier run: "
                "give the model an Input, so that it is built at once, or call "
                "loop.prepare(source) first"
            )

    @contextmanager
    def starting(self, window: Window, may_assign: bool) -> Generator[list[str]]:
        """Let hooks start, as a context manager; revert what they change if they had started.

        Args:
            window: The next batches.
            may_assign: Whether hooks may assign variables; then these are copied.

        Yields:
            A list for warnings: it gets one that names attributes added by hooks to the task of
            the earlier process, which are not restored.

        Raises:
            StateError: If a value could not be restored.
        """
        warnings: list[str] = []
        self.values_begun = self._values.values()
        state = State.discover(self._task) if self._hooks_had_started else None
        kept = state.keep() if state is not None and may_assign else {}
        with self._values.starting(reverted=self._hooks_had_started):
            yield warnings
        if state is None:
            return
        state.put_back(kept)
        self._missing = self._values.missing(self._missing)
        self.check_none_lost()
        if self._training.changed_constants():
            self._prepare(window)
        # The engine compiles for these changes before the next window, and logs it.
        self._values.set(self._body_values)
        if self._missing:
            warnings.append(
                f"{described(self._missing)} during the run, and is not restored, because the task "
                "is created without it: set it in __init__ if a step uses it"
            )
        self._missing, self._body_values, self._hooks_had_started = {}, {}, False

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

    def _changes(self, state: RunState) -> dict[str, Change]:
        with state.checkpoint().reading("loop.python_values"):
            return self._values.read(state.python_values)

    def _unedited(self, state: RunState) -> dict[str, Change]:
        """Return the changes in a checkpoint, without values whose initial value was edited.

        Raises:
            DirectoryError: If the script was edited this way, and no override allows it.
        """
        changes = self._changes(state)
        edited = self._values.edited(changes)
        if edited and self._record is not None:
            self._record.compare_constants(
                {path: was for path, (was, _) in edited.items()},
                {path: now for path, (_, now) in edited.items()},
            )
        return _without(changes, edited)


def restore_random_states(saved: RunState) -> None:
    """Restore the states of the global random generators.

    Raises:
        CheckpointError: If they are damaged.
    """
    with saved.checkpoint().reading("loop.random"):
        set_random_states(saved.random)


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


def _without(values: Mapping[str, T], paths: Mapping[str, object]) -> dict[str, T]:
    """Return values without those at some paths or below them."""
    return {p: x for p, x in values.items() if p not in paths and not is_within(p, paths)}
