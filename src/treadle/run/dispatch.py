"""The hooks of a run: which there are, and when each is called."""

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


class Watchers:
    """All hooks of a run.

    Args:
        given: The user's; a hook replaces the default one of its class, or of one that it is
            derived from.
        directory: Where default hooks write; None leaves those out that write.
        console: Show progress.
        run: The run's own record, told last of its end.
        alone: Leave out the default hooks, and warn of nothing.

    Raises:
        ConfigurationError: Something that is no hook.
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
        self._running = ""  # the name of the hook that runs
        first = [run] if run is not None else []
        self._scheduled: list[Scheduled] = []
        for hook in given:
            if isinstance(hook, Scheduled):
                self._scheduled.append(hook)
            elif isinstance(hook, Hook):
                self._hooks.append(hook)
            else:
                raise ConfigurationError(
                    f"{hook!r} is no hook: say when a function runs, as treadle.every('200 steps', "
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
                "NonFinite(action='rollback') goes back to a checkpoint, but this run has no "
                "directory for any: pass one to the loop, as treadle.Loop(task, 'runs/1')"
            )

    @property
    def swapped_optimizers(self) -> list[Any]:
        """The optimizers whose averages a hook has put into the weights for now."""
        return [o for hook in self._keras_callbacks() for o in hook.swapped_optimizers]

    @property
    def skip_nonfinite(self) -> bool:
        """Whether steps are to be undone after which something is not finite."""
        return any(hook.skips for hook in self._guards())

    @property
    def rolls_back(self) -> bool:
        """Whether the run is to go back to a checkpoint when something is not finite."""
        return any(hook.rolls_back for hook in self._guards())

    @property
    def has_console(self) -> bool:
        """Whether progress is shown, and what is logged with it."""
        return any(isinstance(hook, default_hooks.Console) for hook in self._hooks)

    def _guards(self) -> list[default_hooks.NonFinite]:
        return [hook for hook in self._hooks if isinstance(hook, default_hooks.NonFinite)]

    def _keras_callbacks(self) -> list[default_hooks.KerasCallbacks]:
        return [hook for hook in self._hooks if isinstance(hook, default_hooks.KerasCallbacks)]

    def newest_checkpoint(self) -> Saved | None:
        """Return what an earlier process of this run has saved last; None where it has not yet.

        Raises:
            CheckpointError: None of its checkpoints can be read.
        """
        if self._checkpoint is None:
            return None
        found = self._checkpoint.saved.latest()
        for name, reason in self._checkpoint.saved.rejected:
            self.warn(f"passed over {name}: {reason}")
        if found is not None and found.progress.step == 0:
            damaged = " that can be read" if self._checkpoint.saved.rejected else ""
            self.say(f"nothing later than step 0 was saved{damaged}: the run begins there again")
        return found

    def save(self, loop: LoopView) -> None:
        """Save a checkpoint and wait for it, where the run has a directory."""
        if self._checkpoint is not None:
            self._checkpoint.save(loop, wait=True)

    def require_checkpoints(self) -> None:
        """Refuse to save where there is no place for it.

        Raises:
            ConfigurationError: The run has no directory.
        """
        if self._checkpoint is None:
            raise ConfigurationError(
                "loop.save needs a directory: pass one to the loop, as treadle.Loop(task, 'runs/1')"
            )

    def save_if_due(
        self, loop: LoopView, before: Progress, after: Progress, epoch_ended: bool = False
    ) -> None:
        """Save a checkpoint where one became due."""
        if self._checkpoint is not None:
            self._checkpoint.save_if_due(loop, before, after, epoch_ended)

    def states(self) -> dict[str, dict[str, Any]]:
        """Return what each hook keeps for another process to go on with, by the hook's name."""
        return {name: hook.state() for name, hook in self._named()}

    def restore(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Give each hook what it kept, where there is a hook of the same name."""
        for name, hook in self._named():
            if states.get(name):
                hook.restore(states[name])

    def history(
        self,
        directory: Path,
        step: int | None = None,
        states: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> History:
        """Return what an earlier process of a run has logged.

        Args:
            directory: Of the run.
            step: Up to this step, where not to the end.
            states: What hooks kept at that step: a log says how long it was.
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
        """Return the moments at which some hook looks at the state."""
        events = [scheduled.when for scheduled in self._scheduled]
        for hook in self._hooks:
            when: When | Sequence[When] | None = getattr(hook, "when", None)
            events += [when] if isinstance(when, When) else when or ()
        return events

    def tell(self, what: str, loop: LoopView, *arguments: Any) -> None:
        """Call a method of every hook that has its own."""
        nothing = getattr(Hook, what)
        for hook in self._hooks:
            method = getattr(hook, what)
            if getattr(method, "__func__", None) is nothing:  # of many windows, each costs its time
                continue
            with self._run(f"{type(hook).__name__}.{what}", loop):
                method(loop, *arguments)

    def evaluation(self, loop: LoopView, results: Mapping[str, float] | None) -> None:
        """Notify the hooks that run callbacks of Keras: `loop.evaluate` begins, or has results.

        Not a method of `Hook`: other hooks expect results of the validation sets alone.
        """
        for hook in self._keras_callbacks():
            with self._run(f"{type(hook).__name__}.evaluation", loop):
                hook.evaluation(loop, results)

    def say(self, text: str, style: str = "dim") -> None:
        """Show a sentence, if it is one, where progress is shown."""
        for hook in self._hooks:
            if text and isinstance(hook, default_hooks.Console):
                hook.say(text, style)

    @contextmanager
    def activity(self, text: str) -> Generator[None]:
        """Show what happens before the first step, where progress is shown."""
        with ExitStack() as stack:
            for hook in self._hooks:
                if isinstance(hook, default_hooks.Console):
                    stack.enter_context(hook.activity(text))
            yield

    def warn(self, text: str) -> None:
        """Warn, if there is something to say: where progress is shown, else as Python does."""
        if self._alone:  # no run of its own: whoever looks on tells what it finds
            return
        if self.has_console:
            self.say(text and f"warning: {text}", "yellow")
        elif text:
            warnings.warn(text, TreadleWarning, stacklevel=2)

    def run_due(self, loop: LoopView, before: Progress, epoch_ended: bool = False) -> None:
        """Run scheduled functions that became due since `before`; what they return is logged."""
        for scheduled in self._scheduled:
            if scheduled.when.due(before, loop.progress, epoch_ended):
                function: Callable[[Any], Any] = scheduled.function
                name = getattr(function, "__name__", type(function).__name__)
                with self._run(name, loop):
                    result = _returned(function(loop), f"the hook {name}")
                    if result:
                        loop.log(result)

    def refuse_training(self, method: str) -> None:
        """Refuse to train where a hook runs: the loop is in the midst of a call.

        Raises:
            ConfigurationError: One runs.
        """
        if self._running:
            raise ConfigurationError(
                f"loop.{method} trains, and was called by the hook {self._running} while the loop "
                "trains: a hook may call evaluate, predict and call. To train on in between, write "
                "the loop yourself: `for logs in loop.steps(train, every='200 steps')`"
            )

    @contextmanager
    def _run(self, name: str, loop: LoopView) -> Generator[None]:
        before, self._running = self._running, name  # a hook may log, which is told to hooks
        try:
            with noting(name, loop.progress), _directory_there(loop.directory):
                yield
        finally:
            self._running = before

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Tell every hook that training ended, whatever the others do.

        The last comes first, as with contexts: early stopping puts the best weights back before
        the final model is written.
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
    """Return whether a user's hook replaces a default one: by its class, or by `replaces`."""
    callbacks = isinstance(hook, default_hooks.KerasCallbacks)
    return isinstance(hook, type(default)) or (callbacks and isinstance(default, hook.replaces))


@contextmanager
def _directory_there(directory: Path | None) -> Generator[None]:
    """Say of an error of the file system that the run directory is gone, if it is."""
    try:
        yield
    except OSError as error:
        if directory is None or directory.exists():
            raise
        raise DirectoryError(
            f"the run directory {directory} is gone: it was removed while the run trained into it, "
            "or its disk was. Nothing more can be saved there; run the script again to begin anew"
        ) from error


def _returned(result: Any, hook: str) -> dict[str, Plain | Image]:
    """Return what a hook wants to be logged.

    Tensors are passed over: `lambda loop: loop.task.scale.assign(2.0)` returns one.

    Raises:
        ConfigurationError: It returned a number, a text or an image without a name, or something
            else under one.
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
    """Return the history of a run from the log that it left; empty where it left none.

    Args:
        path: The log.
        step: Up to this step, where not to the end.
        hooks: What hooks kept at that step: a log says how long it was.
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
