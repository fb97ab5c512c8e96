"""Checks of terms of a loss that fall without bound: penalties that work as rewards."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import numpy as np
from keras import ops

from ..numbers import Array, as_floats
from .changed_losses import CODE, Losses, line_of, scaled_output
from .checks_losses import enters_a_layer
from .intervening import (
    MOST_CALLS,
    Change,
    changed_outputs,
    constant,
    floats_of,
    held,
    losses_of,
    outer_calls,
)
from .recording import GRADIENTS, Event
from .report import Finding
from .trials import Trial, Trials, leaves_of

MOST_COLUMNS: Final = 4
"""The largest number of outputs that are shifted one by one."""

CONSTANT: Final = "G-constant-term"


def outputs_without_bound(trials: Trials) -> Iterator[Finding]:
    """Scale one output of a call, and hold other calls: the loss must not fall ever faster.

    Several outputs at once may be multiplied with each other, as likelihoods and values are.
    """
    last, losses = trials.last, Losses(trials)
    calls = outer_calls(last)
    for number, event in list(calls.items())[-MOST_CALLS:]:
        others = {n: held(e) for n, e in calls.items() if n != number}
        for name in floats_of(event):
            which = _falling(
                lambda scale, n=number, e=event, o=others, name=name: losses.of(
                    changes={**o, n: scaled_output(e, scale, name)}
                )
            )
            if which is not None:
                yield _without_bound(event.info.path, "its outputs", last, *which)
                return


def columns_without_bound(trials: Trials) -> Iterator[Finding]:
    """Shift one column of the last outputs: a loss of labels must not fall forever on a side.

    The logarithm of a variance with a wrong sign falls in proportion on one side, and grows like an
    exponential function on the other. All calls of the layer are shifted, since differences of
    scores stay the same. Rewards that actions are weighted with are left out: labels have none.
    """
    last, losses = trials.last, Losses(trials)
    calls = outer_calls(last)
    leaves = [leaf for leaf in leaves_of(last.batch) if not enters_a_layer(last, leaf)]
    labels = [leaf for leaf in leaves if leaf.array.dtype.kind == "f"]
    if not calls or losses.count != 1 or len(leaves_of(last.batch)) != 2 or not labels:
        return
    event = calls[max(calls)]
    outputs = event.get("outputs")
    if outputs is None or outputs.ndim != 2 or outputs.shape[1] > MOST_COLUMNS:
        return
    own = [number for number, e in calls.items() if e.info.of is event.info.of]
    for column in range(outputs.shape[1]):
        row = np.zeros((1, outputs.shape[1]), "float32")
        row[0, column] = 1.0

        def shifted(by: float, row: Array = row) -> float:
            changes = {
                n: lambda name, tensor: tensor + ops.cast(by * row, tensor.dtype) for n in own
            }
            return float(losses.of(changes=changes)[0])

        for side in (1.0, -1.0):
            near, at = shifted(4 * side), shifted(16 * side)
            slope = (near - at) / 12
            if not slope > 1e-3:
                continue
            far = shifted(64 * side)
            if not abs((at - far) / 48 - slope) < 0.05 * slope:
                continue
            if not shifted(-side * 16) - near < 100 * 16 * slope:
                yield Finding(
                    CODE,
                    "warning",
                    event.info.path,
                    f"with column {column} of its outputs {'larger' if side > 0 else 'smaller'} by "
                    f"64, the loss is {far:.4g} instead of {near:.4g}, and falls without bound",
                    "the loss is least where the output is far away from where it should be",
                    "check the signs of its terms: exp(-s) * error**2 + s for s = log(variance)",
                    line_of(last, 0),
                )
                return


def weights_without_bound(trials: Trials) -> Iterator[Finding]:
    """Scale the trained variables, and hold the outputs of layers: what is left are penalties."""
    last, losses = trials.last, Losses(trials)
    # Calls in `input_gradients` are not held: a gradient penalty depends on weights through them.
    calls = {n: e for n, e in outer_calls(last).items() if not e.info.more["nested"]}
    changes = {number: held(event) for number, event in calls.items()}
    # Variables that the step uses by itself, or in calls that are not recorded, act on its outputs.
    paths = {
        trials.state.path_of(v) for e in outer_calls(last).values() for v in e.info.of.variables
    }
    before = {
        p: as_floats(last.before[p])
        for p in last.gradients
        if p in paths and last.before[p].size > 1
    }
    if not before:
        return

    def scaled(scale: float) -> Array:
        values = {p: (scale * x).astype(last.before[p].dtype) for p, x in before.items()}
        return losses.of(changes=changes, variables=values)

    if (which := _falling(scaled)) is not None:
        yield _without_bound(min(before), "the weights", last, *which)


def _falling(losses: Callable[[float], Array]) -> tuple[int, float, float] | None:
    """Return the number of a loss that falls ever faster, and two of its values.

    A loss with a lower bound may fall faster at first, as an error of products of small numbers;
    so may one in proportion, as the logarithm of a probability times a negative advantage.
    """
    one, four = losses(1.0), losses(4.0)
    if not (four < one - 1e-6 * np.abs(one)).any():
        return None
    sixteen = losses(16.0)
    falls = (four - one < -1e-6 * np.abs(one)) & (sixteen - one < 10 * (four - one))
    if not falls.any():
        return None
    with np.errstate(invalid="ignore"):  # twice as much as in proportion, as before
        falls &= (losses(256.0) - sixteen < 40 * (sixteen - four)) | np.isneginf(sixteen)
    for number in np.flatnonzero(falls):
        return int(number), float(one[number]), float(sixteen[number])
    return None


def constant_terms(trials: Trials) -> Iterator[Finding]:
    """Change the trained weights with all outputs of layers held: what changes needs a gradient.

    What it adds to the loss must not depend on the outputs: factors of terms are often held on
    purpose.
    """
    last, losses, state = trials.last, Losses(trials), trials.state
    # Calls in `input_gradients` are not held: a gradient penalty depends on weights through them.
    calls = {n: e for n, e in outer_calls(last).items() if not e.info.more["nested"]}
    owned = {state.path_of(v) for e in outer_calls(last).values() for v in e.info.of.variables}
    fixed = {number: held(event) for number, event in calls.items()}
    smaller = {number: _smaller(event) for number, event in calls.items()}

    def larger(paths: Iterable[str]) -> dict[str, Array]:
        before = {p: last.before[p] for p in paths}
        return {p: (1.5 * as_floats(x)).astype(x.dtype) for p, x in before.items()}

    with changed_outputs(fixed):
        trial = trials.attempt(CONSTANT, last.batch)
    if trial is None or len(trial.of(GRADIENTS)) != len(last.of(GRADIENTS)):
        return
    stopped = [
        number
        for number, event in enumerate(trial.of(GRADIENTS))
        if not any(as_floats(gradient).any() for gradient in event.arrays.values())
    ]
    paths = {
        number: [p for p in event.info.more["paths"] if p in owned and last.before[p].size > 1]
        for number, event in enumerate(last.of(GRADIENTS))
    }
    every = larger({p for number in stopped for p in paths[number]})
    if not every:
        return
    before, after = losses_of(trial), losses.of(changes=fixed, variables=every)
    for number in stopped:
        if not paths[number] or not abs(after[number] - before[number]) > 1e-6 * abs(
            before[number]
        ):
            continue  # the loss is one of outputs alone, as most are
        other, at = larger(paths[number]), before[number]
        with_outputs = float(losses.of(changes=smaller)[number])
        added = float(losses.of(changes=fixed, variables=other)[number]) - at
        again = float(losses.of(changes=smaller, variables=other)[number]) - with_outputs
        rounding = 1e-5 * max(abs(at), abs(with_outputs))
        if abs(added) > 100 * rounding and abs(again - added) < 0.01 * abs(added) + rounding:
            yield Finding(
                CONSTANT,
                "warning",
                min(paths[number]),
                f"with 1.5 times the weights, and the outputs of layers as before, the loss is "
                f"{at + added:.4g} instead of {at:.4g}, but no gradient flows through this term",
                "the term is a constant: it is logged with the loss, and trains nothing",
                "compute it inside the objective, without stop_gradient",
                line_of(last, number),
            )
            return


def _smaller(event: Event) -> Change:
    """Return a change to nine tenths of what a call returned before, without gradients."""

    def change(name: str, value: Any) -> Any:
        if name not in event.arrays:
            return value
        return constant((0.9 * as_floats(event[name])).astype("float32"), value)

    return change


def _without_bound(
    path: str, what: str, trial: Trial, number: int, first: float, last: float
) -> Finding:
    return Finding(
        CODE,
        "warning",
        path,
        f"with 16 times {what}, and other layers as before, the loss is {last:.4g} instead of "
        f"{first:.4g}: a term of it falls without bound",
        "the loss is smallest where this part is largest, so a penalty works as a reward",
        "change the sign of the term: losses are minimized, so distances and penalties are added",
        line_of(trial, number),
    )


def proportional_weights(trials: Trials) -> Iterator[Finding]:
    """Find variables of the task itself that a loss is a linear function of, as weights of terms.

    Without a bound the loss is least where they are far below zero. A multiplier or a temperature,
    whose own loss is linear too, has a loss that trains nothing else, or climbs it.
    """
    last, losses, state = trials.last, Losses(trials), trials.state
    owned = {state.path_of(v) for layer in state.layers for v in layer.variables}
    changes = {n: held(e) for n, e in outer_calls(last).items() if not e.info.more["nested"]}
    for number, event in enumerate(last.of(GRADIENTS)):
        gradients = {p: as_floats(event[p]) for p in event.info.more["paths"] if p in event.arrays}
        if not any(p in owned and g.any() for p, g in gradients.items()):
            continue
        for path, gradient in gradients.items():
            applied = last.applied.get(path)
            own = path not in owned and path in last.before and gradient.size > 0
            if not own or applied is None or not (gradient > 0).all():
                continue
            if float(np.vdot(as_floats(applied), gradient)) <= 0:
                continue  # it climbs
            before = as_floats(last.before[path])

            def shifted(by: float, path: str = path, before: Array = before) -> float:
                values = {path: (before + by).astype(last.before[path].dtype)}
                return float(losses.of(changes=changes, variables=values)[number])  # noqa: B023

            up, down, at, far = shifted(8.0), shifted(-8.0), shifted(0.0), shifted(-64.0)
            slope = (up - down) / 16
            linear = abs(up + down - 2 * at) + abs(far - at + 64 * slope) < 1e-3 * abs(slope)
            if slope > 0 and linear:
                yield Finding(
                    CODE,
                    "warning",
                    path,
                    f"the loss is a linear function of it: {at:.4g}, or {far:.4g} if it is smaller "
                    "by 64",
                    "the loss is least where these weights of its terms are far below zero",
                    "keep them constant, or learn s with exp(-s) * loss + s",
                    line_of(last, number),
                )
                return
