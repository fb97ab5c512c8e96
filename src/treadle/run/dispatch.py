"""Hook dispatch: calls the hooks of a run."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from .. import hooks
from ..checkpoint import SavedState
from ..core.claims import gone
from ..core.hook import DetailedHook, Hook, LoopView
from ..core.images import Image
from ..core.logs import Plain, loggable
from ..core.progress import Progress
from ..core.tracebacks import add_note
from ..core.triggers import Scheduled, When
from ..errors import ConfigurationError, DirectoryError

_OWN = Hook.__module__.partition(".")[0]
_EMPTY = frozenset(
    vars(kind)[name]
    for kind, names in (
        (Hook, ("start", "steps", "record", "end")),
        (DetailedHook, ("before", "validation", "evaluation")),
    )
    for name in names
)


def _class_of(name: str) -> str:
    """Return the class in the name of a state, such as `EarlyStopping(val_loss min)`."""
    return re.split(r"[-(]", name)[0]


def _is_told(name: str) -> bool:
    return "(" in name or not hasattr(hooks, _class_of(name))


def is_own(hook: Hook) -> bool:
    """Return whether a hook's class is one of Treadle's."""
    return type(hook).__module__.startswith(f"{_OWN}.")


class HookDispatcher:
    """Notifies the hooks of a run, and runs scheduled functions.

    Args:
        hooks: The hooks, in the order in which they are called.
        scheduled: The functions with their triggers.
        writes_files: Whether this process writes files; of several, others call fewer hooks.

    Attributes:
        running: The name of the running hook, or "".
    """

    def __init__(
        self, hooks: Sequence[Hook], scheduled: Sequence[Scheduled] = (), writes_files: bool = True
    ) -> None:
        # Triggers of all hooks count: windows end at the same steps in all processes.
        self._hooks, self._scheduled = list(hooks), list(scheduled)
        self._called = [hook for hook in hooks if writes_files or not hook.chief_only]
        self.running = ""

    @property
    def start_users_code(self) -> bool:
        """Whether a hook that is not Treadle's own has a method `start`."""
        return any(
            not is_own(hook) and getattr(hook.start, "__func__", None) not in _EMPTY
            for hook in self._called
        )

    def states(self, loop: LoopView) -> dict[str, dict[str, Any]]:
        """Return the state of each hook for checkpoints, by the hook's name."""
        states: dict[str, dict[str, Any]] = {}
        for name, hook in self._named():
            if hook not in self._called:
                continue
            with _HookRun(self, f"{type(hook).__name__}.state", loop):
                states[name] = hook.state()
        return states

    def restore(self, found: SavedState) -> str:
        """Restore the state of each hook that has a saved state under its name.

        Returns:
            A sentence about the saved states that fit no hook, and the hooks that have no saved
            state; empty without them. Treadle's hooks whose names have no identity are left out:
            they only report, or are there by default.

        Raises:
            CheckpointError: If one of Treadle's own hooks cannot read its state.
        """
        named = dict(self._named())
        saved = dict(found.hooks)
        alone = [name for name, hook in named.items() if isinstance(hook, hooks.KerasCallbacks)]
        theirs = [name for name in saved if _class_of(name) == "KerasCallbacks"]
        if len(alone) == len(theirs) == 1:  # its state has a part for each callback
            saved[alone[0]] = saved.pop(theirs[0])
        for name, hook in named.items():
            state = saved.get(name)
            if not state or hook not in self._called:
                continue
            with found.reading(f"the state of the hook {name}") if is_own(hook) else nullcontext():
                hook.restore(state)
        lost = [x for x, state in saved.items() if state and x not in named and _is_told(x)]
        stateful = [x for x, hook in named.items() if type(hook).state is not Hook.state]
        new = [x for x in stateful if x not in saved and _is_told(x)]
        parts = [f"{', '.join(lost)} fits no hook of the script and is lost"] if lost else []
        parts += [f"{', '.join(new)} has none and begins"] if new else []
        what = f"states of hooks in the checkpoint of step {found.progress.step}"
        return f"{what}: {'; '.join(parts)}" if parts else ""

    def _named(self) -> Iterator[tuple[str, Hook]]:
        """Yield the hooks with the names of their states: class, identity, and a number if equal.

        Not the class alone: a script may remove, add or move a hook before it resumes a run.
        """
        counts: Counter[str] = Counter()
        for hook in self._hooks:
            name = type(hook).__name__
            if hook.identity:
                name += f"({hook.identity})"
            yield f"{name}-{counts[name] + 1}" if counts[name] else name, hook
            counts[name] += 1

    def events(self) -> list[When]:
        """Return all triggers of the hooks: windows must end where one is due."""
        events = [scheduled.when for scheduled in self._scheduled]
        for hook in self._hooks:
            when: When | Sequence[When] | None = getattr(hook, "when", None)
            events += [when] if isinstance(when, When) else when or ()
        return events

    def notify(self, what: str, loop: LoopView, *arguments: Any) -> None:
        """Notify the hooks: call the method named `what` of every hook that has or overrides it.

        Methods of `DetailedHook` are also called on hooks that define them without that base class,
        except for `after_end`.
        """
        for hook in self._called:
            method = getattr(hook, what, None)
            # Methods that do nothing are left out: a call of each per window would take time.
            if method is None or getattr(method, "__func__", None) in _EMPTY:
                continue
            with _HookRun(self, f"{type(hook).__name__}.{what}", loop):
                method(loop, *arguments)

    def run_due(self, loop: LoopView, before: Progress, epoch_ended: bool = False) -> None:
        """Run scheduled functions that became due since `before`, and log what they return."""
        for scheduled in self._scheduled:
            if scheduled.when.due(before, loop.progress, epoch_ended):
                function: Callable[[Any], Any] = scheduled.function
                name = getattr(function, "__name__", type(function).__name__)
                with _HookRun(self, name, loop):
                    result = _values_to_log(function(loop), f"the hook {name}")
                    if result:
                        loop.log(result)

    def refuse_training(self, method: str) -> None:
        """Check that no hook is running: hooks must not train.

        Raises:
            ConfigurationError: If called from a hook.
        """
        if self.running:
            raise ConfigurationError(
                f"loop.{method} trains, and was called by the hook {self.running} while the loop "
                "trains: a hook may call evaluate, predict and call. To train between steps, write "
                "the loop yourself: `for logs in loop.steps(train, every='200 steps')`"
            )

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Call `end` of every hook, also if some of them raise.

        The order is reversed, as for context managers: early stopping restores the best weights
        before the final model is written.
        """
        failures: list[Exception] = []
        for hook in reversed(self._called):
            try:
                with _HookRun(self, f"{type(hook).__name__}.end", loop):
                    hook.end(loop, error or next(iter(failures), None))
            except Exception as failure:
                failures.append(failure)
        # Now all files are written: hooks may send them.
        for hook in self._called:
            if isinstance(hook, DetailedHook):
                try:
                    with _HookRun(self, f"{type(hook).__name__}.after_end", loop):
                        hook.after_end(loop, error or next(iter(failures), None))
                except Exception as failure:
                    failures.append(failure)
        if failures and error is None:
            raise failures[0]
        for text in dict.fromkeys(repr(failure) for failure in failures):
            if text != repr(error):  # as of a directory that is gone
                error.add_note(f"and then {text}")  # type: ignore[union-attr]


class _HookRun:
    """A context manager around the call of a hook, which explains its exceptions.

    An exception gets a note with the run's progress; a file system error becomes a `DirectoryError`
    if the run directory is missing. Some hooks run in every step, so this is a class: a generator
    with `contextmanager` takes five times as long.
    """

    __slots__ = ("_before", "_dispatcher", "_loop", "_name", "_progress")

    def __init__(self, dispatcher: HookDispatcher, name: str, loop: LoopView) -> None:
        self._dispatcher, self._name, self._loop = dispatcher, name, loop
        self._progress, self._before = loop.progress, dispatcher.running

    def __enter__(self) -> None:
        """Note that the hook is running; another one may be, since a hook may log."""
        self._dispatcher.running = self._name

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Add a note, or raise a `DirectoryError`."""
        self._dispatcher.running = self._before
        if not isinstance(error, Exception):
            return
        directory = self._loop.directory
        cause = error.__cause__ if isinstance(error, DirectoryError) else error
        if not isinstance(cause, OSError) or directory is None or directory.exists():
            add_note(error, self._name, self._progress)
            return
        failure = gone(directory)
        add_note(failure, self._name, self._progress)
        raise failure from error


def _values_to_log(result: Any, hook: str) -> dict[str, Plain | Image]:
    """Return the values to log from the result of a hook.

    Tensors are ignored, since `lambda loop: loop.task.scale.assign(2.0)` returns one.

    Raises:
        ConfigurationError: If the hook returned a number, a string or an image without a name, or a
            dict with other values.
    """
    if isinstance(result, Mapping):
        return loggable(result, hook)
    if isinstance(result, (bool, int, float, str, np.generic, Image)):
        raise ConfigurationError(
            f"{hook} returned {result!r} without a name, so it cannot be logged: return a dict "
            "such as {'name': value}, or nothing"
        )
    return {}
