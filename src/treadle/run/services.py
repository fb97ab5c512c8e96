"""The services of a run: its directory, checkpoints, messages, guards and hooks."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import keras

from .. import hooks as default_hooks
from ..checkpoint import SavedState
from ..core.hook import Hook, LoopView
from ..core.identity import identity, in_json_types
from ..core.processes import process_group
from ..core.progress import Progress
from ..core.signals import missing_handlers
from ..core.triggers import Scheduled
from ..core.user_code import importing
from ..errors import ConfigurationError
from ..hooks.log_file import Mark
from ..hooks.run_record import RunRecord
from ..steps.python_values import PythonValues
from .dispatch import HookDispatcher, is_own
from .habits import check_methods
from .prefetch import Feed
from .reporter import Reporter

_H = TypeVar("_H", bound=Hook)


@dataclass(frozen=True)
class StartPoint:
    """A checkpoint of a past run, from which a replay starts.

    Attributes:
        checkpoint: The checkpoint.
        log: The log of the run.
        values: The Python values of the task, from before the first replay.
        excluded: The batches that rollbacks excluded; see `RunRecord.passed_over`.
    """

    checkpoint: SavedState
    log: Path
    values: PythonValues
    excluded: Mapping[tuple[int, int, int], str]


@dataclass(frozen=True, kw_only=True)
class Services:
    """What a run uses besides its task and its data.

    Attributes:
        hooks: Dispatches to all hooks, including those below.
        directory: The run directory, or None.
        record: Claims the directory and writes `run.json`; None without a directory.
        checkpointer: Saves checkpoints; None without a directory.
        reporter: Prints messages and warnings.
        guards: The hooks that react to values that are not finite.
        callbacks: The hooks that run Keras callbacks.
        log: The file that the history of a resumed run is read from, or None.
        start: The checkpoint that a replay starts from, or None.
        feed: Reads the training source.
    """

    hooks: HookDispatcher
    directory: Path | None = None
    record: RunRecord | None = None
    checkpointer: default_hooks.Checkpoint | None = None
    reporter: Reporter = field(default_factory=Reporter)
    guards: Sequence[default_hooks.NonFinite] = ()
    callbacks: Sequence[default_hooks.KerasCallbacks] = ()
    log: Path | None = None
    start: StartPoint | None = None
    feed: Feed = field(default_factory=Feed)

    @property
    def rolls_back(self) -> bool:
        """Whether the run rolls back to a checkpoint when a value is not finite."""
        return any(guard.rolls_back for guard in self.guards)

    @property
    def swapped_optimizers(self) -> list[Any]:
        """The optimizers whose averages a Keras callback has temporarily put into the weights."""
        return [o for hook in self.callbacks for o in hook.swapped_optimizers]

    def newest_checkpoint(self) -> SavedState | None:
        """Return the newest valid checkpoint of this run, or None if none was saved.

        Raises:
            CheckpointError: If there are checkpoints, but none can be read.
        """
        if self.checkpointer is None:
            return None
        saved, group = self.checkpointer.saved, process_group()
        group.on_chief(saved.settle, "looking for the newest checkpoint")  # it may be writing one
        found = saved.latest(together=group.size > 1)
        group.require_equal(
            f"newest checkpoint in {self.directory}, which must be the same directory,",
            None if found is None else found.progress.step,
        )
        for name, reason in saved.rejected:
            self.reporter.warn(f"skipped checkpoint {name}: {reason}")
        if found is not None and found.progress.step == 0:
            readable = "readable " if saved.rejected else ""
            self.reporter.print(
                f"there is no {readable}checkpoint after step 0: the run restarts from step 0. To "
                "lose less, save more often: hooks=[treadle.hooks.Checkpoint(every='10 s')]"
            )
        return found

    def recovery(self) -> str:
        """Describe what the next process will resume from, after an error that ends this one."""
        steps = self.checkpointer.saved.steps() if self.checkpointer is not None else []
        if not steps:
            return (
                "there is no checkpoint: the next process starts from step 0. To lose less, train "
                "with a run directory, and save more often with treadle.hooks.Checkpoint"
            )
        return (
            f"the newest checkpoint is that of step {steps[-1]}: start the same script again, and "
            f"the run in {self.directory} resumes from it"
        )

    def recorded_log(self, at: SavedState | None) -> tuple[Path | None, list[Mark]]:
        """Return the log of the run, and what its checkpoints note about it.

        Args:
            at: The checkpoint up to which the log is read; None for all of it.
        """
        states = self.checkpointer.saved.hook_states() if self.checkpointer is not None else {}
        if at is not None:
            states = {step: found for step, found in states.items() if step < at.progress.step}
            states[at.progress.step] = at.hooks
        return (self.log if self.start is None else self.start.log), Mark.all_of(states)

    def save(self, loop: LoopView) -> None:
        """Save a checkpoint and wait until it is on disk, if the run has a directory."""
        if self.checkpointer is not None:
            self.checkpointer.save(loop, wait=True)

    def save_beginning(self, loop: LoopView) -> None:
        """Save the state with which a call begins, if the call may roll back to it.

        As for other checkpoints, a full disk is a warning: only a rollback will miss this one.
        """
        if self.rolls_back and self.checkpointer is not None:
            self.checkpointer.save(loop, begins=True)

    def save_if_due(
        self, loop: LoopView, before: Progress, after: Progress, epoch_ended: bool = False
    ) -> None:
        """Save a checkpoint if one became due."""
        if self.checkpointer is not None:
            self.checkpointer.save_if_due(loop, before, after, epoch_ended)

    def warn_of_signals(self) -> None:
        """Warn if signals cannot be handled, unless the launcher runs all code in threads."""
        if self.directory is not None and not process_group().in_thread:
            self.reporter.warn(missing_handlers())

    def require_checkpoints(self) -> None:
        """Check that checkpoints can be saved.

        Raises:
            ConfigurationError: If the run has no directory.
        """
        if self.checkpointer is None:
            raise ConfigurationError(
                "loop.save needs a directory: pass one to the loop, as treadle.Loop(task, 'runs/1')"
            )


def open_services(
    task: Any,
    directory: Path | None,
    given: Sequence[Hook | Scheduled],
    configuration: Mapping[str, Any],
    fresh: bool,
    override: bool | Collection[str],
    console: bool,
) -> Services:
    """Claim the run directory, add the default hooks, and return the services of a run.

    Args:
        task: The task.
        directory: The run directory. If None, default hooks that write files are left out.
        given: The user's hooks. A hook replaces the default hook of the same class or of a base
            class.
        configuration: Additional settings of the run.
        fresh: Start from scratch in a directory that already holds a run.
        override: Resume a run although its configuration differs.
        console: Whether to show progress.

    Raises:
        DirectoryError: If the directory holds another run, or is not writable.
        ConfigurationError: If an element of `given` is not a hook, or `NonFinite` is to roll back
            in a run without a directory. Or if a command only imports the script that trains.
    """
    if directory is not None and importing:
        raise ConfigurationError(
            f"{importing[-1]} trains in {directory} when it is imported: put the lines that train "
            'under `if __name__ == "__main__":`, so that commands can use its task'
        )
    _check(_sorted(given)[1])  # before `fresh` removes an earlier run
    process_group().require_equal(
        "configuration",
        in_json_types({**identity(task), **configuration, "directory": str(directory)}),
    )
    record = None
    if directory is not None:
        record = RunRecord(directory, task, configuration, fresh, override)
    try:
        return services_of(given, directory, console, record)
    except ConfigurationError:
        if record is not None:
            record.leave()
        raise


def services_of(
    given: Sequence[Hook | Scheduled],
    directory: Path | None,
    console: bool,
    record: RunRecord | None = None,
) -> Services:
    """Return the services of a run with the default hooks that the user's hooks do not replace.

    Args:
        given: The user's hooks.
        directory: The run directory. If None, default hooks that write files are left out.
        console: Whether to show progress.
        record: The hook that writes the run record. Its `start` is called first, its `end` last.

    Raises:
        ConfigurationError: If an element of `given` is not a hook, if there are several
            `Checkpoint` or `NonFinite`, or if `NonFinite` is to roll back in a run without a
            directory.
    """
    group, (scheduled, own) = process_group(), _sorted(given)
    writes_files = group.rank == 0
    defaults = default_hooks.defaults(directory, quiet=not console)
    kept = [hook for hook in defaults if not any(_replaces(other, hook) for other in own)]
    hooks: list[Hook] = [*([record] if record is not None else []), *kept, *own]
    saver, guard = _check(hooks)
    if saver is not None:
        saver.open(directory)
    for hook in hooks:
        if isinstance(hook, default_hooks.Images) and record is not None:
            hook.run = record.id
    logs = [hook for hook in hooks if isinstance(hook, default_hooks.JSONLines)]
    services = Services(
        hooks=HookDispatcher(hooks, scheduled, writes_files),
        directory=directory,
        record=record,
        checkpointer=saver,
        reporter=Reporter(
            [hook for hook in hooks if isinstance(hook, default_hooks.Console) and writes_files],
            silent=not writes_files,
        ),
        guards=[] if guard is None else [guard],
        callbacks=[hook for hook in hooks if isinstance(hook, default_hooks.KerasCallbacks)],
        log=(logs or [default_hooks.JSONLines()])[0].path_in(directory) if directory else None,
        feed=Feed(even=group.size > 1),
    )
    if services.rolls_back and directory is None:
        raise ConfigurationError(
            "NonFinite(action='rollback') needs checkpoints, but this run has no directory: "
            "pass one to the loop, as treadle.Loop(task, 'runs/1')"
        )
    return services


def _check(
    hooks: Sequence[Hook],
) -> tuple[default_hooks.Checkpoint | None, default_hooks.NonFinite | None]:
    """Return the hook that saves, and the one that guards.

    Raises:
        ConfigurationError: If there are several of them.
    """
    return (
        _only(hooks, default_hooks.Checkpoint, "one with all that it is to keep"),
        _only(hooks, default_hooks.NonFinite, "one with the action that you want"),
    )


def _only(hooks: Sequence[Hook], kind: type[_H], advice: str) -> _H | None:
    """Return the hook of a class, or None.

    Raises:
        ConfigurationError: If there are several.
    """
    found = [hook for hook in hooks if isinstance(hook, kind)]
    if len(found) > 1:
        names = " and ".join(type(hook).__name__ for hook in found)
        raise ConfigurationError(
            f"a run has one {kind.__name__} hook, but was given {len(found)} ({names}): pass "
            f"{advice}"
        )
    return found[0] if found else None


def _sorted(given: Sequence[Any]) -> tuple[list[Scheduled], list[Hook]]:
    """Return the scheduled functions and the hooks.

    Raises:
        ConfigurationError: If an element is neither.
    """
    for hook in given:
        if isinstance(hook, keras.callbacks.Callback):
            raise ConfigurationError(
                f"{type(hook).__name__} is a Keras callback, not a hook: write "
                "hooks=[treadle.hooks.KerasCallbacks([…])] around it"
            )
        if isinstance(hook, (list, tuple)):
            raise ConfigurationError(
                f"hooks={given!r:.120} has a list in it: write its hooks one by one, and Keras "
                "callbacks as treadle.hooks.KerasCallbacks([…])"
            )
        if isinstance(hook, type):
            name = hook.__name__
            raise ConfigurationError(f"{name} is a class, not a hook: write hooks=[{name}(…)]")
        if not isinstance(hook, (Scheduled, Hook)):
            raise ConfigurationError(
                f"{hook!r} is not a hook: schedule a function with treadle.every('200 steps', "
                "function), or pass a treadle.Hook"
            )
        identity: Any = getattr(hook, "identity", "")
        if not isinstance(identity, str):
            raise ConfigurationError(
                f"{type(hook).__name__}.identity must be a text that tells the hook from others of "
                f"its class, not {identity!r}"
            )
        if isinstance(hook, Hook) and not is_own(hook):
            check_methods(hook)
    scheduled = [hook for hook in given if isinstance(hook, Scheduled)]
    return scheduled, [hook for hook in given if isinstance(hook, Hook)]


def _replaces(hook: Hook, default: Hook) -> bool:
    """Return whether a user's hook replaces a default hook, by its class or by `replaces`."""
    callbacks = isinstance(hook, default_hooks.KerasCallbacks)
    return isinstance(hook, type(default)) or (callbacks and isinstance(default, hook.replaces))
