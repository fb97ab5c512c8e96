"""The check that comes before all others: numbers that become NaN or infinite."""

from collections.abc import Iterator, Sequence

import numpy as np

from ..numbers import Array, as_floats
from .recording import GRADIENTS, LAYER, OBJECTIVE, Event
from .report import Finding
from .trials import Trial, Trials, leaves_of

CODE = "G-not-finite"


def check(trials: Trials) -> Iterator[Finding]:
    """Find losses and trained variables that are NaN or infinite, and what was so first in a step.

    Returned values alone may be infinite on purpose, and gradients of float16 overflow until the
    loss scale fits, which leaves the loss and all variables finite.
    """
    for number, trial in enumerate(trials.base, 1):
        trained = trial.gradients.keys() | trial.applied.keys()
        broken = sorted(
            path
            for path in trained & trial.before.keys() & trial.after.keys()
            if _finite(trial.before[path]) and not _finite(trial.after[path])
        )
        if not broken and all(_finite(event["loss"]) for event in trial.of(OBJECTIVE)):
            continue
        where, what, fix, line = _first(trial, trials.base[: number - 1])
        if broken:
            what += f"; then {len(broken)} of {len(trained)} trained variables are NaN or infinite"
        seen, why = f"in step {number} {what}", "nothing is learned from such numbers"
        yield Finding(CODE, "error", where, seen, why, fix, line)
        return


def _first(trial: Trial, earlier: Sequence[Trial]) -> tuple[str, str, str, str]:
    """Return where numbers were not finite first, what was seen, the usual fix, and the line."""
    # Missing labels or masks, with which the steps before were right.
    intended = {x.name for t in earlier for x in leaves_of(t.batch) if not _finite(x.array)}
    for leaf in leaves_of(trial.batch):
        if leaf.name not in intended and not _finite(leaf.array):
            bad = int((~np.isfinite(as_floats(leaf.array))).sum())
            text = f"the batch has {bad} values that are NaN or infinite"
            return leaf.name, text, "leave these examples out, or replace the values", ""
    for event in trial.of(LAYER):
        if _all_finite(event, "inputs") and not _all_finite(event, "outputs"):
            text = "its inputs are finite and its outputs are not"
            return event.info.path, text, "look for a division by zero in it", event.info.line
    for event in trial.of(OBJECTIVE):
        if not _finite(event["loss"]):
            text = "the loss is not finite, although all outputs of layers are"
            fix = "look for the logarithm of zero, a division by zero or an overflow in the loss"
            return "loss", text, fix, event.info.line
    for event in trial.of(GRADIENTS):
        if not all(_finite(array) for array in event.arrays.values()):
            text = "the gradients are not finite, although the loss is"
            fix = (
                "look for the square root or the norm of zeros, whose gradient is infinite, and "
                "for a `where` that hides such a value: add a small number inside of the root"
            )
            return "gradients", text, fix, event.info.line
    return "update", "the update is not finite", "look at the optimizer and its learning rate", ""


def _all_finite(event: Event, part: str) -> bool:
    return all(_finite(array) for name, array in event.arrays.items() if name.startswith(part))


def _finite(array: Array) -> bool:
    """Return whether no number is NaN or infinite; true of integers and text."""
    kind = array.dtype.kind
    return kind in "biuSUO" or bool(np.isfinite(as_floats(array)).all())
