"""Detecting a call that trains without changing a weight."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import keras
import numpy as np

from ..backends.base import active
from ..backends.types import Variable
from ..core.logs import UNDONE, StepLogs
from ..errors import listed
from ..schedules import learning_rate_of, optimizers_of
from ..steps.compiled_step import CompiledStep
from ..steps.state import State

NAMED: Final = 3  # variables in the message


class WeightCheck:
    """Compares the trainable variables at the end of a call that trains with those at its start.

    It keeps one checksum per variable and reads each variable once per call; nothing happens per
    step. A checkpoint stores the checksums only while all variables are still unchanged, so that a
    resumed call is compared with the state in which the call began.

    Steps that `NonFinite("skip")` or loss scaling undid do not count: both report them themselves.
    """

    def __init__(self) -> None:
        self._before: dict[str, int] = {}  # empty: nothing to check, or a change was found
        self._steps = 0

    def start(self, state: State) -> None:
        """Take the checksums of all trainable variables."""
        weights = {
            path: variable
            for path, variable in state.variables.items()
            if getattr(variable, "trainable", False)
            and "float" in keras.backend.standardize_dtype(variable.dtype)
        }
        self._before = {path: checksum(variable) for path, variable in weights.items()}
        self._steps = 0

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Continue a call that began in another process, from what `state` returned there."""
        self._before = dict(saved["checksums"]) if saved else {}
        self._steps = saved["steps"] if saved else 0

    def state(self, state: State) -> dict[str, Any] | None:
        """Return what `restore` needs; None once a variable has changed."""
        if self._has_changed(state):
            return None
        return {"checksums": self._before, "steps": self._steps}

    def ran(self, logs: StepLogs) -> None:
        """Count the steps of a window that were not undone."""
        undone = logs.values.get(UNDONE)
        self._steps += logs.steps - (0 if undone is None else int(undone.sum()))

    def warning(self, prepared: CompiledStep) -> str:
        """Return a warning if no trainable variable has changed since the start, or ""."""
        state = prepared.state
        if self._steps < _steps_to_change(state) or self._has_changed(state):
            return ""
        written = [path for path in self._before if path in prepared.assigned]
        trains = prepared.returns and (prepared.differentiates or state.optimizers)
        if not written and not trains:  # it only updates metrics or computes values
            return ""
        named = listed(written or list(self._before), NAMED)
        plural = "s" if self._steps > 1 else ""
        return (
            f"no weight changed in {self._steps:,} step{plural}: the values of {named} are the "
            f"same as before. {_reason(written, state)}"
        )

    def _has_changed(self, state: State) -> bool:
        """Return whether a variable has ever differed at a check, even if it changed back."""
        for path, before in self._before.items():
            variable = state.variables.get(path)
            if variable is None or checksum(variable) != before:
                self._before = {}
                break
        return not self._before


def checksum(variable: Variable) -> int:
    """Return the CRC-32 of a variable's bytes, which are not copied if they are in main memory."""
    tensor = keras.ops.convert_to_tensor(variable)  # TensorFlow copies variables, but no tensors
    values = np.asarray(active().to_numpy(tensor), order="C")
    return zlib.crc32(values.reshape(-1).view(np.uint8).data)


def _steps_to_change(state: State) -> int:
    """Return how many steps a call needs before some weight must have changed.

    Accumulated gradients wait for the last step of an update, and the first update of a warm-up has
    a learning rate of 0.
    """
    optimizers = [] if not state.optimizers else optimizers_of(state.all_optimizers).values()
    waits = [accumulator.steps for accumulator in state.accumulators.values()]
    waits += [optimizer.gradient_accumulation_steps or 1 for optimizer in optimizers]
    scheduled = any(callable(learning_rate_of(optimizer)) for optimizer in optimizers)
    return max([1, *waits]) * (2 if scheduled else 1)


def _reason(written: Sequence[str], state: State) -> str:
    """Return why the weights may not have changed, and what to do."""
    if not written:
        return (
            "train_step applies no optimizer to them and assigns none of them: call "
            "treadle.minimize, or optimizer.apply with the gradients"
        )
    optimizers = optimizers_of(state.all_optimizers) if state.optimizers else {}
    rates = {
        path: float(active().to_numpy(optimizer.learning_rate))
        for path, optimizer in optimizers.items()
    }
    zero = [path for path, rate in rates.items() if rate == 0]
    if zero:
        return f"The learning rate of {', '.join(zero)} is 0"
    shown = ", ".join(f"{path} {rate:.3g}" for path, rate in rates.items())
    return (
        "Either no update was made (a branch of treadle.cond that was never taken), or every "
        "update was zero: the loss does not depend on these weights (stop_gradient, argmax and "
        "rounding have gradients of zero), or the learning rate is too small for their dtype"
        + (f" (learning rates: {shown})" if shown else "")
    )
