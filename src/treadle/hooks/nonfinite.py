"""The `NonFinite` hook, which detects NaN and infinity in step values and weights."""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from ..core import schema
from ..core.directory import RUN, read_run
from ..core.hook import Hook, LoopView, RolledBack, Variables
from ..core.logs import LOSS_SCALE, UNDONE, Record, StepLogs
from ..core.progress import Progress
from ..core.structures import with_paths
from ..core.triggers import Span, When
from ..data.leaves import named
from ..errors import ConfigurationError, DataError, NonFiniteError, did_you_mean, listed

ACTIONS = ("raise", "stop", "skip", "rollback")
ROWS_NAMED = 5
# Batches that rollbacks may exclude one after another. If the step fails with each of them, single
# batches are not the cause, and without a limit a run on such data would never end.
MOST_EXCLUDED = 10
# float16's smallest normal number. A value that overflows even at this scale is larger than 1e9, or
# was not finite before scaling.
SMALLEST_SCALE = 2.0**-14


class NonFinite(Hook):
    """Ends a run, or undoes a step, when a step value or a weight becomes NaN or infinite.

    The values returned by steps are checked after each window, which requires no extra transfer;
    the weights are then those at the end of the window. At the end of each epoch, at each
    validation and at the end of the run (before the final model is written), all float variables
    except those of metrics are checked, since NaN in the data can corrupt weights while the loss
    stays finite. A non-trainable variable may contain NaN or infinity from the start. If an epoch
    or a validation records NaN or infinity, a warning is logged.

    A step that loss scaling undid (`mixed_float16`) is ignored, unless its batch contains values
    that are not finite, or the loss scale is already down to 2**-14.

    Args:
        action: How the run reacts to a value that is not finite:

            - `"raise"` ends the run with an error.
            - `"stop"` stops the run like `loop.stop`.
            - `"skip"` undoes the step within the compiled step: only the states of seed generators
              advance. Its values are logged with `undone` and excluded from means.
            - `"rollback"` has no cost until it is needed, besides a checkpoint at the beginning of
              each call of `Loop.fit`. The run rolls back to the newest checkpoint of this call,
              checks every step to find the one that failed, rolls back again, and skips
              the batch of this step. Variables, random states, data, hooks and logs are then those
              of a run whose data lacks the batch. The excluded batch is recorded, so that resuming
              and replaying skip it too. This requires `Loop.fit` and a run directory. After ten
              batches in a row the run ends with an error.

    Attributes:
        when: The triggers at which windows end for this hook: every step while it searches for the
            failed step.

    Raises:
        ConfigurationError: If the action is unknown.
        NonFiniteError: If a step returned a value that is not finite, or a variable contains one.

    Example:
        >>> import treadle
        >>> guard = treadle.hooks.NonFinite(action="stop")
    """

    def __init__(self, action: Literal["raise", "stop", "skip", "rollback"] = "raise") -> None:
        if action not in ACTIONS:
            raise ConfigurationError(f"unknown action {action!r}.{did_you_mean(action, ACTIONS)}")
        self._action = action
        self.when: When | None = None
        self._search_ends = 0
        self._excluded, self._excluded_at = 0, 0  # batches in a row, and the step they failed
        self._skipped = 0
        self._checked_step = 0  # the step at which the variables were last checked
        self._exempt: set[str] = set()  # paths that were not finite at the start
        self._warned: set[str] = set()
        self._before: tuple[set[str], set[str], int] | None = None
        self._acted = False

    @property
    def skips(self) -> bool:
        """Whether steps that produce non-finite values are undone."""
        return self._action == "skip"

    @property
    def rolls_back(self) -> bool:
        """Whether the run rolls back to a checkpoint and excludes the batch."""
        return self._action == "rollback"

    def start(self, loop: LoopView) -> None:
        """Remember which non-trainable variables are not finite at the start."""
        self._checked_step, self._acted = loop.progress.step, False
        if self._before is not None:  # the run is resumed
            self._warned, self._exempt, self._skipped = self._before
            self._before = None
            return
        self._warned = set()
        found = not_finite(loop.state)
        self._exempt = {p for p, v in found.items() if not getattr(v, "trainable", True)}

    def state(self) -> dict[str, Any]:
        """Return the logged warnings, the variables non-finite at the start, and the skip count."""
        return {
            "warned": sorted(self._warned),
            "meant": sorted(self._exempt),
            "skipped": self._skipped,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state`."""
        schema.whole()(state["skipped"], "skipped")
        self._before = set(state["warned"]), set(state["meant"]), state["skipped"]

    def record(self, loop: LoopView, record: Record) -> None:
        """Check the recorded values and the variables."""
        if record.kind == "log":
            return
        self._warn(loop, record.values)
        self._check_variables(loop, ended=False)

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Check the variables before the final model is written."""
        if error is None:
            self._check_variables(loop, ended=True)

    def steps(self, loop: LoopView, logs: StepLogs) -> None:
        """Check every step value of the window."""
        if self.skips and LOSS_SCALE not in logs.values:
            self._log_skipped(loop, logs)
            return
        step, message = _explained(loop, logs)
        if message:
            self._act(loop, message, step)
        elif self.when is not None:
            self._check_variables(loop, ended=False)
            if loop.progress.step >= self._search_ends:
                self.when = None
                loop.log(
                    {
                        "warning": f"rolled back to find the cause of the non-finite value at step "
                        f"{self._search_ends}, but it did not occur again: this run is not "
                        "deterministic"
                    }
                )

    def _log_skipped(self, loop: LoopView, logs: StepLogs) -> None:
        """Log a warning with the steps that were undone."""
        undone = np.flatnonzero(logs.values[UNDONE])
        if not len(undone):
            return
        self._skipped += len(undone)
        steps = listed([logs.first_step + i for i in undone], ROWS_NAMED)
        rows = _bad_inputs(loop, logs.first_step + int(undone[0]))
        where = f": its batch held {'; '.join(rows)}" if rows else ", whose batch was finite"
        loop.log(
            {
                "warning": f"skipped step {steps}, after which something was not finite{where} "
                f"({self._skipped} of {logs.progress.step} so far)"
            }
        )

    def _act(
        self, loop: LoopView, message: str, step: int | None, path: str = "", ended: bool = False
    ) -> None:
        self._acted = True
        if self.rolls_back:
            self._roll_back(loop, message)
        message += replay_instruction(loop, step, path)
        if self._action != "stop":
            raise NonFiniteError(message)
        if ended:
            loop.log({"warning": message})
        else:
            loop.stop(message)

    def _roll_back(self, loop: LoopView, message: str) -> None:
        """Make the loop roll back: first to find the failed step, then to exclude its batch."""
        at = loop.progress
        if self.when is None:
            self.when, self._search_ends = When(Span.parse("1 step")), at.step
            raise RolledBack(message)
        self.when = None
        if at.step != self._excluded_at:  # excluded batches are not counted as steps
            self._excluded, self._excluded_at = 0, at.step
        if self._excluded == MOST_EXCLUDED:
            raise NonFiniteError(
                f"{message}. The {MOST_EXCLUDED} batches before it failed at this step too and "
                "were excluded, so single batches are not the cause: examine the data, the "
                "learning rate, and the weights of the newest checkpoint"
            )
        self._excluded += 1
        raise RolledBack(message, replace(at, step=at.step - 1, batch=at.batch - 1))

    def _check_variables(self, loop: LoopView, ended: bool) -> None:
        """Check the variables, unless they were already checked after this step."""
        clean, self._checked_step = self._checked_step, loop.progress.step
        if clean == loop.progress.step or self._acted:
            return
        # Steps change no other variables than those known; at the end, all are written to a file.
        found = not_finite(loop.state if ended else loop.known_state)
        bad = {path: v for path, v in found.items() if path not in self._exempt}
        if bad:
            path, last = next(iter(bad)), loop.progress.step
            known = last == clean + 1
            message = _ruined(loop, bad, clean)
            self._act(loop, message, last if known else None, path, ended)

    def _warn(self, loop: LoopView, values: Mapping[str, Any]) -> None:
        floats = {name: value for name, value in values.items() if isinstance(value, float)}
        bad = {name: value for name, value in floats.items() if not np.isfinite(value)}
        new = [name for name in bad if name not in self._warned]
        self._warned = set(bad)
        if new:
            described = ", ".join(f"{name} is {bad[name]}" for name in new)
            loop.log(
                {
                    "warning": f"{described} after {loop.progress}: look for values that are not "
                    "finite in the data it was computed on, and check the step or metric that "
                    "computed it"
                }
            )


def _explained(loop: LoopView, logs: StepLogs) -> tuple[int, str]:
    """Return the first failed step and a message that explains it, or `(0, "")` if there is none.

    A step fails if it returns a non-finite value that loss scaling does not explain.
    """
    scaled = LOSS_SCALE in logs.values
    bad = {
        name: ~np.isfinite(array)
        for name, array in logs.values.items()
        if array.dtype.kind == "f" and not np.isfinite(array).all()
    }
    if not bad and not (scaled and logs.values[UNDONE].any()):
        return 0, ""
    undone = logs.values[UNDONE] if scaled else np.zeros(logs.steps)
    for offset in range(logs.steps):
        step = logs.first_step + offset
        at = Progress(step, logs.progress.epoch, logs.progress.batch - logs.steps + offset + 1)
        if undone[offset] and logs.values[LOSS_SCALE][offset] <= SMALLEST_SCALE:
            return step, (
                f"gradients are not finite at {at}, not even with a loss scale of 2**-14, so it is "
                "not the scale that is too large for float16. Look for a division by zero, or a "
                "logarithm or a root of zero, or train in mixed_bfloat16"
            )
        names = [name for name, flags in bad.items() if flags[offset]]
        rows = _bad_inputs(loop, step) if names else []
        if names and (rows or not undone[offset]):
            value = logs.values[min(names)][offset]
            reason = _reason(rows, scaled)
            return step, f"{min(names)} is {value} at {at}. {reason}"
    return 0, ""


def replay_instruction(loop: LoopView, step: int | None, path: str = "") -> str:
    """Return the instruction to replay the step, or "" if the run has no directory.

    Args:
        loop: The loop.
        step: The step that failed, or None if it is unknown.
        path: The path of the non-finite variable, to search for an unknown step.
    """
    if loop.directory is None or not (loop.directory / RUN).exists():
        return ""
    directory, condition = str(loop.directory), f"not isfinite({path})"
    if "recipe" in read_run(loop.directory)["configuration"]:
        which = f"--step {step}" if step else f"--bisect {shlex.quote(condition)}"
        how = f"treadle replay {shlex.quote(directory)} {which}"
    else:
        which = f"step={step}" if step else f"bisect={condition!r}"
        how = f"print(treadle.doctor.replay(task, train, {directory!r}, {which}))"
    return f". To inspect the step: {how}"


def _reason(rows: list[str], narrow: bool) -> str:
    if rows:
        return (
            f"The batch held it already: {'; '.join(rows)}. Fix or remove these rows (numbered "
            "within the batch)"
        )
    half = "Compute the loss in float32, since float16 ends at 65,504. " if narrow else ""
    return (
        f"All inputs of this batch are finite, so the step caused it. {half}Lower the learning "
        "rate, or clip gradients (clipnorm=1.0 in the optimizer); treadle.Options(checked=True) "
        "finds labels and indices out of range; "
        'treadle.Options(execution="eager") lets you debug the step'
    )


def not_finite(state: Variables) -> dict[str, Any]:
    """Return the float variables (except of metrics) that contain NaN or infinity, by path."""
    import keras  # late: it fixes the backend, which may not be chosen yet at import

    from ..backends.base import active

    metrics = {id(v) for metric in state.metrics.values() for v in metric.variables}
    chosen = {
        path: v
        for path, v in state.variables.items()
        if id(v) not in metrics and "float" in keras.backend.standardize_dtype(v.dtype)
    }
    flags = active().finite(list(chosen.values()))
    return {path: v for (path, v), finite in zip(chosen.items(), flags, strict=True) if not finite}


def _ruined(loop: LoopView, bad: Mapping[str, Any], clean: int) -> str:
    """Return a message with the non-finite variables, since when, and the suspected batches."""
    from ..backends.base import active

    path, last = next(iter(bad)), loop.progress.step
    flags = ~np.isfinite(active().read(bad[path]))
    others = f"{len(bad) - 1} more variable{'s do' if len(bad) > 2 else ' does'}"
    more = f" (and {others})" if len(bad) > 1 else ""
    since = f"step {last}" if last == clean + 1 else f"some step from {clean + 1} to {last}"
    where = _bad_batches(loop, clean)
    why = (
        f"{where}. Fix or remove these rows (numbered within the batch)"
        if where
        else "Look for such values in the data, as with numpy.isfinite(x).all(); if there are "
        "none, lower the learning rate, or clip gradients (clipnorm=1.0 in the optimizer)"
    )
    return (
        f"{path} holds {int(flags.sum())} of {flags.size} values that are not finite{more}, since "
        f"{since}, although every step returned finite values. {why}"
    )


def _bad_batches(loop: LoopView, clean: int) -> str:
    """Describe the first batch of the last window that contains non-finite values, if any."""
    found = ""
    for step in range(loop.progress.step, clean, -1):
        try:
            rows = _bad_inputs(loop, step)
        except DataError:
            break
        if rows:
            found = f"The batch of step {step} held some already: {'; '.join(rows)}"
    return found


def _bad_inputs(loop: LoopView, step: int) -> list[str]:
    """Return the leaves and rows of a step's batch that contain non-finite floats."""
    found = {named(path): _bad_rows(leaf) for path, leaf in with_paths(loop.batch_at(step))}
    return [_with_rows(name, rows) for name, rows in found.items() if rows]


def _bad_rows(leaf: Any) -> list[int]:
    """Return the rows of an array with non-finite floats; [-1] for a number that is not finite."""
    array = np.asarray(leaf)
    # V: bfloat16 and the other narrow floats
    if leaf is None or array.dtype.kind not in "fVc":
        return []
    bad = ~np.isfinite(array)
    if not bad.ndim:
        return [-1] if bad else []
    return np.flatnonzero(bad.reshape(len(bad), -1).any(axis=1)).tolist() if len(bad) else []


def _with_rows(name: str, rows: list[int]) -> str:
    if rows == [-1]:
        return name
    return f"{name}, row{'s' if len(rows) > 1 else ''} {listed(rows, ROWS_NAMED)}"
