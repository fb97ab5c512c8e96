"""Checks of gradients that a step computes and does not use."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from keras import ops

from ..numbers import Array, as_floats
from .changed_gradients import gradient_calls
from .recording import APPLY, BRANCH, Event
from .report import Finding
from .trials import Trial, Trials, distance

CODE: Final = "G-unused"

MOST: Final = 6
"""How many calls are changed, each in a step of its own."""

OTHER_TIMES: Final = (720720, 720719)
"""Step numbers at which a part of a step that runs every few steps, or later, does so."""


def check(trials: Trials, calls: Sequence[Event]) -> Iterator[Finding]:
    """Change the gradients that one call returns: something that the step does must change.

    Args:
        trials: The trials.
        calls: The calls of the step that differentiate.
    """
    last = trials.last
    if last.of(BRANCH) or not last.applied:
        return  # the branch that uses them may not have been taken
    updates = last.of(APPLY)
    updated = {p for p in last.applied if all(_is_nonzero(e.get(p)) for e in updates)}
    for call in calls[:MOST]:
        number, paths = call.info.more["number"], call.info.more["paths"]
        # Gradients that are not due in this step, or masked, are applied as zeros or not at all.
        if not updated.issuperset(paths) or len(calls) == 1:
            continue
        if all(_without_effect(trials, number, step) for step in (None, *OTHER_TIMES)):
            what = f"{len(paths)} variables" if paths else "inputs"
            yield Finding(
                CODE,
                "warning",
                "treadle.gradients" if paths else "treadle.input_gradients",
                f"with other gradients of {what} from it, the step returns and updates the same",
                "they are computed, and not used: the updates are those of the other gradients",
                "use what it returns: apply the second gradients of a two-pass update, or train "
                "with the inputs that were moved",
                call.info.line,
            )
            return


def _is_nonzero(gradient: Array | None) -> bool:
    return gradient is None or bool(as_floats(gradient).any())


def _without_effect(trials: Trials, number: int, step: int | None) -> bool:
    """Return whether other gradients from a call change nothing, in a step of any number."""
    counters = {
        trials.state.path_of(optimizer.iterations): np.array(step)
        for optimizer in trials.state.optimizers.values()
    }
    variables: Mapping[str, Array] = {} if step is None else _of_known(trials, counters)
    try:
        usual = trials.again(variables=variables, step=step)
        with gradient_calls(number, _other):
            other = trials.again(variables=variables, step=step)
    except Exception:
        return False
    return _same(usual, other)


def _of_known(trials: Trials, values: Mapping[str, Array]) -> Mapping[str, Array]:
    before = trials.last.before
    return {p: x.astype(before[p].dtype) for p, x in values.items() if p in before}


def _same(a: Trial, b: Trial) -> bool:
    parts = ((a.values, b.values), (a.after, b.after), (a.applied, b.applied))
    return all(
        x.keys() == y.keys() and all(distance(x[key], y[key]) <= 1e-6 for key in x)
        for x, y in parts
    )


def _other(gradient: Any) -> Any:
    """Return noise of the size of a gradient."""
    noise = np.random.default_rng(0).normal(size=gradient.shape)
    size = ops.sqrt(ops.mean(ops.square(gradient))) + 1e-3
    return size * ops.cast(ops.convert_to_tensor(noise.astype("float32")), gradient.dtype)
