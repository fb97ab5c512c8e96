"""Ending a run whose values are no longer numbers."""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from ..core.directory import RUN, read_run
from ..core.hook import Hook, LoopView
from ..core.logs import LOSS_SCALE, UNDONE, Record, StepLogs
from ..core.progress import Progress
from ..core.rollback import RolledBack
from ..core.triggers import Span, When
from ..data.leaves import flattened, named
from ..errors import ConfigurationError, DataError, NonFiniteError, did_you_mean

ACTIONS = ("raise", "stop", "skip", "rollback")
ROWS_NAMED = 5
# Batches that a run passes over: one that needs more has another trouble than its data.
MOST_PASSED = 10
# float16's smallest normal number. What overflows even at this scale is larger than 1e9, or was no
# number before it was scaled.
SMALLEST_SCALE = 2.0**-14


class NonFinite(Hook):
    """Ends a run whose steps return NaN or infinity, or whose weights become so.

    Looks at what the steps returned after each window, which costs no transfer; the weights are
    then those at the end of the window. At the end of each epoch, at each validation and at the end
    of the run, before the final model is written, it looks at all float variables but those of
    metrics: NaN in the data can ruin weights while the loss stays a number. A variable that is not
    trainable may hold NaN or infinity from the start on. What an epoch or a validation records as
    NaN or infinity is told as a warning in the log.

    A step that loss scaling undid (`mixed_float16`) did no harm and ends nothing, unless its batch
    held what is not finite, or a scale of 2**-14 was still too large for it.

    Args:
        action: `"raise"` ends the run with an error; `"stop"` ends it as if it had been asked to
            stop; `"skip"` undoes such a step within the compiled step, as if its batch had not
            come: its values are logged, beside `undone`, and count in no mean. `"rollback"` costs
            nothing until it happens: the run goes back to its newest checkpoint, looks at every
            step to find the one that did it, goes back once more, and passes over this one's
            batch: variables, random states, data, hooks and logs are those of a run whose data
            lacks it. It is recorded, so that a resume and a replay pass over it too. Ten times at
            most, in `Loop.fit`, and with a directory.

    Attributes:
        when: The moments at which windows are to end for it: every step while it looks for one.

    Raises:
        ConfigurationError: The action is not known.
        NonFiniteError: A step returned a value that is not finite, or a variable holds one.

    Example:
        >>> import treadle
        >>> guard = treadle.hooks.NonFinite(action="stop")
    """

    def __init__(self, action: Literal["raise", "stop", "skip", "rollback"] = "raise") -> None:
        if action not in ACTIONS:
            raise ConfigurationError(f"unknown action {action!r}.{did_you_mean(action, ACTIONS)}")
        self._action = action
        self.when: When | None = None
        self._search_ends = self._passed = 0
        self._skipped = 0
        self._looked = 0  # the step at which the variables were last looked at
        self._meant: set[str] = set()
        self._warned: set[str] = set()
        self._before: tuple[set[str], set[str], int] | None = None
        self._acted = False

    @property
    def skips(self) -> bool:
        """Whether steps are to be undone after which something is not finite."""
        return self._action == "skip"

    @property
    def rolls_back(self) -> bool:
        """Whether the run is to go back to a checkpoint, and on without the batch."""
        return self._action == "rollback"

    def start(self, loop: LoopView) -> None:
        """Take note of what is not finite on purpose."""
        self._looked, self._acted = loop.progress.step, False
        if self._before is not None:  # goes on where another process ended
            (self._warned, self._meant, self._skipped), self._before = self._before, None
            return
        self._warned = set()
        self._meant = {p for p, v in not_finite(loop).items() if not getattr(v, "trainable", True)}

    def state(self) -> dict[str, Any]:
        """Return what was told already, what is not finite on purpose, and how much was skipped."""
        return {
            "warned": sorted(self._warned),
            "meant": sorted(self._meant),
            "skipped": self._skipped,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned."""
        skipped = state.get("skipped", 0)  # the first version did not say
        self._before = set(state["warned"]), set(state["meant"]), skipped

    def record(self, loop: LoopView, record: Record) -> None:
        """Look at the variables, and at what was recorded."""
        if record.kind == "log":
            return
        self._warn(loop, record.values)
        self._look(loop, ended=False)

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Look at the variables once more, before the final model is written."""
        if error is None:
            self._look(loop, ended=True)

    def steps(self, loop: LoopView, logs: StepLogs) -> None:
        """Look at every value of the window."""
        if self.skips and LOSS_SCALE not in logs.values:
            self._tell_skipped(loop, logs)
            return
        step, message = _explained(loop, logs)
        if message:
            self._act(loop, message, step)
        elif self.when is not None:
            self._look(loop, ended=False)
            if loop.progress.step >= self._search_ends:
                self.when = None
                loop.log(
                    {
                        "warning": f"went back to look for what was not finite at step "
                        f"{self._search_ends}, and met nothing: this run does not repeat itself "
                        "exactly"
                    }
                )

    def _tell_skipped(self, loop: LoopView, logs: StepLogs) -> None:
        """Log a warning that names the steps that were undone."""
        undone = np.flatnonzero(logs.values[UNDONE])
        if not len(undone):
            return
        self._skipped += len(undone)
        steps = ", ".join(str(logs.first_step + i) for i in undone[:ROWS_NAMED])
        more = f" and {len(undone) - ROWS_NAMED} more" if len(undone) > ROWS_NAMED else ""
        rows = _bad_inputs(loop.batch_at(logs.first_step + int(undone[0])))
        where = f": its batch held {'; '.join(rows)}" if rows else ", whose batch was finite"
        loop.log(
            {
                "warning": f"skipped step {steps}{more}, after which something was not finite"
                f"{where} ({self._skipped} of {logs.progress.step} so far)"
            }
        )

    def _act(
        self,
        loop: LoopView,
        message: str,
        step: int | None,
        path: str = "",
        ended: bool = False,
    ) -> None:
        self._acted = True
        if self.rolls_back:
            self._go_back(loop, message)
        message += _how_to_look(loop, step, path)
        if self._action != "stop":
            raise NonFiniteError(message)
        if ended:
            loop.log({"warning": message})
        else:
            loop.stop(message)

    def _go_back(self, loop: LoopView, message: str) -> None:
        """Have the loop go back: first to find the step, then without its batch."""
        at = loop.progress
        if self._passed == MOST_PASSED:
            raise NonFiniteError(
                f"{message}. {MOST_PASSED} batches were passed over before this one, so it is not "
                "the data alone"
            )
        if self.when is None:
            self.when, self._search_ends = When(Span.parse("1 step")), at.step
            raise RolledBack(message)
        self.when = None
        self._passed += 1
        raise RolledBack(message, replace(at, step=at.step - 1, batch=at.batch - 1))

    def _look(self, loop: LoopView, ended: bool) -> None:
        """Look at the variables, unless that was done after this very step."""
        clean, self._looked = self._looked, loop.progress.step
        if clean == loop.progress.step or self._acted:
            return
        bad = {path: v for path, v in not_finite(loop).items() if path not in self._meant}
        if bad:
            path, last = next(iter(bad)), loop.progress.step
            known = last == clean + 1
            told = _ruined(loop, bad, clean)
            self._act(loop, told, last if known else None, path, ended)

    def _warn(self, loop: LoopView, values: Mapping[str, Any]) -> None:
        floats = {name: value for name, value in values.items() if isinstance(value, float)}
        bad = {name: value for name, value in floats.items() if not np.isfinite(value)}
        new = [name for name in bad if name not in self._warned]
        self._warned = set(bad)
        if new:
            told = ", ".join(f"{name} is {bad[name]}" for name in new)
            loop.log(
                {
                    "warning": f"{told} after {loop.progress}: look for values that are not finite "
                    "in the set that it was measured on, and at the step or metric that made it"
                }
            )


def _explained(loop: LoopView, logs: StepLogs) -> tuple[int, str]:
    """Return the first step that is a reason to end the run, and what is wrong; else nothing."""
    bad = {
        name: ~np.isfinite(array)
        for name, array in logs.values.items()
        if array.dtype.kind == "f" and not np.isfinite(array).all()
    }
    undone = logs.values[UNDONE] if LOSS_SCALE in logs.values else np.zeros(logs.steps)
    if not bad and not undone.any():
        return 0, ""
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
        rows = _bad_inputs(loop.batch_at(step)) if names else []
        if names and (rows or not undone[offset]):
            value = logs.values[min(names)][offset]
            reason = _reason(rows, LOSS_SCALE in logs.values)
            return step, f"{min(names)} is {value} at {at}. {reason}"
    return 0, ""


def _how_to_look(loop: LoopView, step: int | None, path: str = "") -> str:
    """Say how to go back to the step; nothing where the run has no directory to go back in.

    Args:
        loop: The run.
        step: The step, where it is known.
        path: What is not finite, where it is not.
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
    return f". To see all that it computed: {how}"


def _reason(rows: list[str], narrow: bool) -> str:
    if rows:
        return (
            f"The batch held it already: {'; '.join(rows)}. Mend or leave out these rows (their "
            "numbers count within the batch)"
        )
    half = "Compute the loss in float32, since float16 ends at 65,504. " if narrow else ""
    return (
        f"All inputs of this batch are finite, so it was the step. {half}Lower the learning rate, "
        "or clip gradients (clipnorm=1.0 in the optimizer); make sure that labels lie in the range "
        'of the classes; treadle.Options(execution="eager") lets you look inside the step'
    )


def not_finite(loop: LoopView) -> dict[str, Any]:
    """Return the float variables, but those of metrics, that hold NaN or infinity, by path."""
    import keras  # late: it fixes the backend, which nobody may have chosen at import

    from ..backends.base import active

    state = loop.state
    metrics = {id(v) for metric in state.metrics.values() for v in metric.variables}
    chosen = {
        path: v
        for path, v in state.variables.items()
        if id(v) not in metrics and "float" in keras.backend.standardize_dtype(v.dtype)
    }
    flags = active().finite(list(chosen.values()))
    return {path: v for (path, v), finite in zip(chosen.items(), flags, strict=True) if not finite}


def _ruined(loop: LoopView, bad: Mapping[str, Any], clean: int) -> str:
    """Say which variables are not finite, since when, and which batches may have done it."""
    from ..backends.base import active

    path, last = next(iter(bad)), loop.progress.step
    flags = ~np.isfinite(active().read(bad[path]))
    others = f"{len(bad) - 1} more variable{'s do' if len(bad) > 2 else ' does'}"
    more = f" (and {others})" if len(bad) > 1 else ""
    since = f"step {last}" if last == clean + 1 else f"some step from {clean + 1} to {last}"
    where = _bad_batches(loop, clean)
    why = (
        f"{where}. Mend or leave out these rows (their numbers count within the batch)"
        if where
        else "Look for such values in the data, as with numpy.isfinite(x).all(); where there are "
        "none, lower the learning rate, or clip gradients (clipnorm=1.0 in the optimizer)"
    )
    return (
        f"{path} holds {int(flags.sum())} of {flags.size} values that are not finite{more}, since "
        f"{since}, though every step returned finite ones. {why}"
    )


def _bad_batches(loop: LoopView, clean: int) -> str:
    """Name the first batch at hand, which are those of the last window, that is not finite."""
    found = ""
    for step in range(loop.progress.step, clean, -1):
        try:
            rows = _bad_inputs(loop.batch_at(step))
        except DataError:
            break
        if rows:
            found = f"The batch of step {step} held some already: {'; '.join(rows)}"
    return found


def _bad_inputs(batch: Any) -> list[str]:
    """Return which rows of which leaves hold floats that are not finite."""
    found: list[str] = []
    for path, leaf in flattened(batch):
        # V: bfloat16 and the other narrow floats
        if leaf is None or np.asarray(leaf).dtype.kind not in "fVc":
            continue
        array = np.asarray(leaf)
        bad = ~np.isfinite(array)
        if not bad.any():
            continue
        rows = np.flatnonzero(bad.reshape(bad.shape[0], -1).any(axis=1)) if bad.ndim else []
        numbers = ", ".join(str(row) for row in rows[:ROWS_NAMED])
        more = f" and {len(rows) - ROWS_NAMED} more" if len(rows) > ROWS_NAMED else ""
        where = f", row{'s' if len(rows) > 1 else ''} {numbers}{more}" if len(rows) else ""
        found.append(f"{named(path)}{where}")
    return found
