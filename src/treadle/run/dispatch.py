"""Hook dispatch: the hooks of a run, and when each is called."""

import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .. import hooks as default_hooks
from ..checkpoint import Checkpoint as Saved
from ..core.error_notes import noting
from ..core.hook import Hook, LoopView
from ..core.images import Image
from ..core.logs import History, Plain, Record, StepLogs, loggable
from ..core.progress import Progress
from ..core.triggers import Scheduled, When
from ..errors import ConfigurationError, DirectoryError, TreadleWarning
from ..hooks.checkpoint import Checkpoint
from ..hooks.lines import JSONLines, read_log


class HookDispatcher:
    """All hooks of a run: notifies them, runs scheduled functions, saves checkpoints.

    Args:
        given: The user's hooks. A hook replaces the default hook of the same class or of a base
            class.
        directory: The run directory. If None, default hooks that write files are left out.
        console: Whether to show progress.
        run: The hook that writes the run record; its `end` is called last.
        alone: Use no default hooks, and issue no warnings.

    Raises:
        ConfigurationError: If an element of `given` is not a hook, or `NonFinite` is to roll back
            in a run without a directory.
    """

    def __init__(
        self,
        given: Sequence[Any],
        directory: Path | None,
        console: bool,
        run: Hook | None = None,
        alone: bool = False,
    ) -> None:
        self._hooks: list[Hook] = []
        self._alone = alone
        self._running = ""  # the name of the running hook, or ""
        first = [run] if run is not None else []
        self._scheduled: list[Scheduled] = []
        for hook in given:
            if isinstance(hook, Scheduled):
                self._scheduled.append(hook)
            elif isinstance(hook, Hook):
                self._hooks.append(hook)
            else:
                raise ConfigurationError(
                    f"{hook!r} is not a hook: schedule a function with treadle.every('200 steps', "
                    "function), or pass a treadle.Hook"
                )
        defaults = [] if alone else default_hooks.defaults(directory, quiet=not console)
        own = tuple(self._hooks)
        self._hooks[:0] = first + [
            hook for hook in defaults if not any(_replaces(x, hook) for x in own)
        ]
        self._checkpoint: Checkpoint | None = None
        for hook in self._hooks:
            if isinstance(hook, Checkpoint):
                hook.open(directory)
                self._checkpoint = hook

        if self.rolls_back and directory is None:
            raise ConfigurationError(
                "NonFinite(action='rollback') needs checkpoints, but this run has no directory: "
                "pass one to the loop, as treadle.Loop(task, 'runs/1')"
            )

    @property
    def swapped_optimizers(self) -> list[Any]:
        """The optimizers whose averages a hook has temporarily put into the weights."""
        return [o for hook in self._keras_callbacks() for o in hook.swapped_optimizers]

    @property
    def skip_nonfinite(self) -> bool:
        """Whether steps with non-finite results are undone."""
        return any(hook.skips for hook in self._guards())

    @property
    def rolls_back(self) -> bool:
        """Whether the run rolls back to a checkpoint when a value is not finite."""
        return any(hook.rolls_back for hook in self._guards())

    @property
    def has_console(self) -> bool:
        """Whether progress and logged values are shown in the console."""
        return any(isinstance(hook, default_hooks.Console) for hook in self._hooks)

    def _guards(self) -> list[default_hooks.NonFinite]:
        return [hook for hook in self._hooks if isinstance(hook, default_hooks.NonFinite)]

    def _keras_callbacks(self) -> list[default_hooks.KerasCallbacks]:
        return [hook for hook in self._hooks if isinstance(hook, default_hooks.KerasCallbacks)]

    def newest_checkpoint(self) -> Saved | None:
        """Return the newest valid checkpoint of this run, or None if none was saved.

        Raises:
            CheckpointError: If there are checkpoints, but none can be read.
        """
        if self._checkpoint is None:
            return None
        found = self._checkpoint.saved.latest()
        for name, reason in self._checkpoint.saved.rejected:
            self.warn(f"skipped checkpoint {name}: {reason}")
        if found is not None and found.progress.step == 0:
            readable = "readable " if self._checkpoint.saved.rejected else ""
            self.print(
                f"there is no {readable}checkpoint after step 0: the run restarts from step 0"
            )
        return found

    def save(self, loop: LoopView) -> None:
        """Save a checkpoint and wait until it is on disk, if the run has a directory."""
        if self._checkpoint is not None:
            self._checkpoint.save(loop, wait=True)

    def require_checkpoints(self) -> None:
        """Check that checkpoints can be saved.

        Raises:
            ConfigurationError: If the run has no directory.
        """
        if self._checkpoint is None:
            raise ConfigurationError(
                "loop.save needs a directory: pass one to the loop, as treadle.Loop(task, 'runs/1')"
            )

    def save_if_due(
        self, loop: LoopView, before: Progress, after: Progress, epoch_ended: bool = False
    ) -> None:
        """Save a checkpoint if one became due."""
        if self._checkpoint is not None:
            self._checkpoint.save_if_due(loop, before, after, epoch_ended)

    def states(self) -> dict[str, dict[str, Any]]:
        """Return the state of each hook for checkpoints, by the hook's name."""
        return {name: hook.state() for name, hook in self._named()}

    def restore(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the state of each hook that has a saved state under its name."""
        for name, hook in self._named():
            if states.get(name):
                hook.restore(states[name])

    def history(
        self,
        directory: Path,
        step: int | None = None,
        states: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> History:
        """Return the history of a run from its log.

        Args:
            directory: The run directory.
            step: The last step to read; None reads to the end.
            states: The states of the hooks at that step, which include the size of the log.
        """
        logs = [hook for hook in self._hooks if isinstance(hook, JSONLines)] or [JSONLines()]
        return _recorded_history(logs[0].path_in(directory), step, states)

    def _named(self) -> Iterator[tuple[str, Hook]]:
        counts: Counter[str] = Counter()
        for hook in self._hooks:
            name = type(hook).__name__
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
        """Notify the hooks: call the method named `what` of every hook that overrides it."""
        nothing = getattr(Hook, what)
        for hook in self._hooks:
            method = getattr(hook, what)
            if getattr(method, "__func__", None) is nothing:  # a call per window would cost time
                continue
            with self._run(f"{type(hook).__name__}.{what}", loop):
                method(loop, *arguments)

    def evaluation(self, loop: LoopView, results: Mapping[str, float] | None) -> None:
        """Notify Keras callbacks that `loop.evaluate` begins (`results` is None) or has results.

        This is not a method of `Hook`, because other hooks expect only results of validation sets.
        """
        for hook in self._keras_callbacks():
            with self._run(f"{type(hook).__name__}.evaluation", loop):
                hook.evaluation(loop, results)

    def print(self, text: str, style: str = "dim") -> None:
        """Print a text in the console, if progress is shown and the text is not empty."""
        for hook in self._hooks:
            if text and isinstance(hook, default_hooks.Console):
                hook.say(text, style)

    @contextmanager
    def activity(self, text: str) -> Generator[None]:
        """Show an activity before the first step in the console, if progress is shown."""
        with ExitStack() as stack:
            for hook in self._hooks:
                if isinstance(hook, default_hooks.Console):
                    stack.enter_context(hook.activity(text))
            yield

    def warn(self, text: str) -> None:
        """Print a warning in the console if progress is shown, else issue a Python warning.

        An empty text does nothing.
        """
        if self._alone:  # a replay of another run: its caller reports the findings
            return
        if self.has_console:
            self.print(text and f"warning: {text}", "yellow")
        elif text:
            warnings.warn(text, TreadleWarning, stacklevel=2)

    def run_due(self, loop: LoopView, before: Progress, epoch_ended: bool = False) -> None:
        """Run scheduled functions that became due since `before`, and log what they return."""
        for scheduled in self._scheduled:
            if scheduled.when.due(before, loop.progress, epoch_ended):
                function: Callable[[Any], Any] = scheduled.function
                name = getattr(function, "__name__", type(function).__name__)
                with self._run(name, loop):
                    result = _values_to_log(function(loop), f"the hook {name}")
                    if result:
                        loop.log(result)

    def refuse_training(self, method: str) -> None:
        """Check that no hook is running: hooks must not train.

        Raises:
            ConfigurationError: If called from a hook.
        """
        if self._running:
            raise ConfigurationError(
                f"loop.{method} trains, and was called by the hook {self._running} while the loop "
                "trains: a hook may call evaluate, predict and call. To train between steps, write "
                "the loop yourself: `for logs in loop.steps(train, every='200 steps')`"
            )

    @contextmanager
    def _run(self, name: str, loop: LoopView) -> Generator[None]:
        before, self._running = self._running, name  # a hook may log, which calls other hooks
        try:
            with noting(name, loop.progress), _reporting_missing_directory(loop.directory):
                yield
        finally:
            self._running = before

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Call `end` of every hook, also if some of them raise.

        The order is reversed, as for context managers: early stopping restores the best weights
        before the final model is written.
        """
        failures: list[Exception] = []
        for hook in reversed(self._hooks):
            try:
                with self._run(f"{type(hook).__name__}.end", loop):
                    hook.end(loop, error or next(iter(failures), None))
            except Exception as failure:
                failures.append(failure)
        if failures and error is None:
            raise failures[0]
        for failure in failures:
            error.add_note(f"and then {failure!r}")  # type: ignore[union-attr]


def _replaces(hook: Hook, default: Hook) -> bool:
    """Return whether a user's hook replaces a default hook, by its class or by `replaces`."""
    callbacks = isinstance(hook, default_hooks.KerasCallbacks)
    return isinstance(hook, type(default)) or (callbacks and isinstance(default, hook.replaces))


@contextmanager
def _reporting_missing_directory(directory: Path | None) -> Generator[None]:
    """Raise a `DirectoryError` for a file system error if the run directory is missing."""
    try:
        yield
    except OSError as error:
        if directory is None or directory.exists():
            raise
        raise DirectoryError(
            f"the run directory {directory} is gone: it was removed while the run trained into it, "
            "or its disk was. Nothing more can be saved there; run the script again to start from "
            "scratch"
        ) from error


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


def _recorded_history(
    path: Path, step: int | None, hooks: Mapping[str, Mapping[str, Any]] | None
) -> History:
    """Return the history of a run from its log file; empty if the file does not exist.

    Args:
        path: The log file.
        step: The last step to read; None reads to the end.
        hooks: The states of the hooks at that step, which include the size of the log.
    """
    history = History()
    if not path.exists():
        return history
    size = (hooks or {}).get("JSONLines", {}).get("size")
    steps, records = read_log(path, size)
    if step is not None:
        steps = [line for line in steps if line["step"] <= step]
        records = [line for line in records if line["step"] <= step]
    if steps:
        names = dict.fromkeys(name for line in steps for name in line if name != "step")
        columns = {n: np.array([line.get(n, np.nan) for line in steps]) for n in names}
        ones = {n: np.array([float(n in line) for line in steps]) for n in names}
        last = Progress(step=steps[-1]["step"])
        history.add_steps(StepLogs(steps[0]["step"], columns, ones, 1, last))
    for line in records:
        at = Progress(line["step"], line["epoch"] - 1, seconds=line["seconds"])
        own = ("kind", "step", "epoch", "seconds")
        values = {name: value for name, value in line.items() if name not in own}
        history.add(Record(line["kind"], at, values))
    return history
