"""Checks of gradients with respect to inputs: penalties of their norm, and adversarial examples."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from keras import ops

from ..numbers import Array
from . import checks_unused
from .changed_gradients import CALL, gradient_calls
from .changed_losses import CODE
from .checks_losses import same
from .guarding import guarded
from .intervening import losses_of
from .recording import Event
from .report import Finding
from .trials import Trials, leaves_of

NORM: Final = "L-norm-over-batch"

MOST: Final = 4
"""How many calls of `input_gradients` are changed."""


def check(trials: Trials) -> Iterator[Finding]:
    """Change what `gradients` and `input_gradients` return, and compare what the step does."""
    with gradient_calls():
        calls = trials.again().of(CALL)
    yield from guarded(trials, checks_unused.check, trials, calls)
    slopes = [call for call in calls if "inputs[0]" in call.arrays]
    for call in slopes[:MOST]:
        if "inputs[1]" not in call.arrays and call["inputs[0]"].ndim > 1:
            yield from guarded(trials, _one_norm, trials, call)
            yield from guarded(trials, _downhill, trials, call)


def _losses(trials: Trials, call: Event, change: Callable[[Any], Any]) -> Array:
    """Return the losses of a step in which one call returns something else; empty if it failed."""
    with gradient_calls(call.info.more["number"], change):
        trial = trials.attempt(NORM, trials.last.batch)
    return np.array([] if trial is None else losses_of(trial))


def _one_norm(trials: Trials, call: Event) -> Iterator[Finding]:
    """Find a penalty that is least where all rows together, and not each of them, have norm 1."""
    rows = len(call["inputs[0]"])
    if rows < 4:
        return

    def of_size(size: float) -> Array:
        def change(gradient: Any) -> Any:
            flat = ops.reshape(gradient, (rows, -1))
            norms = ops.sqrt(ops.sum(flat**2, axis=1, keepdims=True)) + 1e-12
            return ops.reshape(size * flat / norms, gradient.shape)

        return _losses(trials, call, change)

    root = rows**-0.5
    least, below, above, one = (of_size(x) for x in (root, 0.9 * root, 1.1 * root, 1.0))
    if len({len(x) for x in (least, below, above, one)}) > 1:
        return
    for at, left, right, far in zip(least, below, above, one, strict=True):
        rises = min(left, right) - at
        # A norm of 1 is where a penalty of (norm - 1)^2 has its minimum, of equal slopes.
        if rises > 1e-5 * abs(at) and abs(left - right) < 0.1 * rises and far > max(left, right):
            yield Finding(
                NORM,
                "warning",
                "treadle.input_gradients",
                f"the loss is least where the gradients of all {rows} rows together have norm 1: "
                f"{at:.4g}, but {far:.4g} where each row has norm 1",
                "the penalty depends on the batch size, and keeps the slopes far too small",
                "take the norm of each row: sum the squares over all axes but the first",
                call.info.line,
            )
            return


def _downhill(trials: Trials, call: Event) -> Iterator[Finding]:
    """Find inputs of the batch that are moved down the loss that is then trained with them."""
    x, value = call["inputs[0]"], call.get("value")
    if value is None or value.size != 1:
        return
    if not any(same(leaf.array, x) for leaf in leaves_of(trials.last.batch)):
        return
    usual, none, opposite = (_losses(trials, call, lambda g, f=f: f * g) for f in (1.0, 0.0, -1.0))
    if not len(usual) == len(none) == len(opposite):
        return
    clean = float(value.reshape(()))
    for down, at, up in zip(usual, none, opposite, strict=True):
        trained = abs(at - clean) <= 1e-4 * abs(clean)  # the same loss, of inputs that are moved
        if trained and down < at - 1e-4 * abs(at) and up > at + 1e-4 * abs(at):
            yield Finding(
                CODE,
                "warning",
                "treadle.input_gradients",
                f"the inputs are moved so that the loss is {down:.4g} instead of {at:.4g}; with "
                f"the opposite sign it is {up:.4g}",
                "the moved examples are easier than those of the data, not adversarial",
                "add the sign of the gradient to the inputs: x + epsilon * ops.sign(gradient)",
                call.info.line,
            )
            return
