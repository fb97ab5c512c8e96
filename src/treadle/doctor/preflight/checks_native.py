"""Checks of native steps, which differentiate by themselves: signs and pairs of gradients."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from ..numbers import Array, as_floats, norm_of
from .guarding import guarded
from .recording import APPLY, GRADIENTS, Event
from .report import Finding
from .trials import Trials

STEP: Final = 1e-2
"""The size of the trial steps along a gradient, relative to the weights."""

MOST_VARIABLES: Final = 6
"""How many variables are tried with the gradients of others."""


def check(trials: Trials) -> Iterator[Finding]:
    """Move variables along the gradients that optimizers get: a returned loss must rise."""
    if trials.last.of(GRADIENTS) or not trials.last.of(APPLY):
        return
    for event in trials.last.of(APPLY):
        gradients = {p: as_floats(g) for p, g in event.arrays.items() if as_floats(g).any()}
        if gradients:
            slopes = _slopes(trials, gradients)
            if not slopes:
                continue
            name = max(slopes, key=lambda name: abs(slopes[name]))
            found = guarded(trials, _pairs, trials, event, gradients, name)
            yield from found
            own = {n: slope for n, slope in slopes.items() if abs(abs(slope) - 1) < 0.03}
            judged = own or slopes  # of several values, the one that these gradients are of
            rising = any(slope > 0.02 for slope in judged.values())
            name = min(judged, key=lambda name: judged[name])
            if judged[name] < -0.02 and not rising and not found:
                alone = len(trials.last.of(APPLY)) == 1  # adversaries may climb what others descend
                yield _ascent(event, name, len(gradients), alone)


def _ascent(event: Event, name: str, count: int, alone: bool) -> Finding:
    is_loss = any(word in name.lower() for word in ("loss", "error"))
    return Finding(
        "O-ascent",
        ("error" if alone else "warning") if is_loss else "note",
        event.info.path,
        f"along the gradients that it gets for {count} variables, {name} falls",
        "optimizers go against the gradients, so the step climbs this value",
        "apply the gradients of the loss; optimizers descend",
        event.info.line,
    )


def _slopes(trials: Trials, gradients: dict[str, Array]) -> dict[str, float]:
    """Return the slope of each returned value along gradients, relative to their own size.

    It is 1 for the gradients of this value. The values are those of two steps from moved variables.
    """
    before = trials.last.before
    gradients = {path: g for path, g in gradients.items() if path in before}
    size = sum(norm_of(g.ravel()) ** 2 for g in gradients.values()) ** 0.5
    weights = sum(norm_of(as_floats(before[p]).ravel()) ** 2 for p in gradients) ** 0.5
    if not size or not np.isfinite(size):
        return {}
    length = STEP * max(weights, 1.0) / size
    ends: list[dict[str, float]] = []
    for sign in (1, -1):
        moved = {
            p: (as_floats(before[p]) + sign * length * g).astype(before[p].dtype)
            for p, g in gradients.items()
        }
        trial = trials.attempt("O-ascent, O-wrong-pairs", trials.last.batch, moved)
        if trial is None:
            return {}
        ends.append({n: float(x) for n, x in trial.values.items() if x.size == 1})
    found: dict[str, float] = {}
    for name, high in ends[0].items():
        low = ends[1].get(name, high)
        middle = float(as_floats(trials.last.values[name]).reshape(()))
        if abs(high - low) > 1e-5 * max(abs(middle), 1e-3):
            found[name] = (high - low) / (2 * length * size**2)
    return found


def _pairs(
    trials: Trials, event: Event, gradients: dict[str, Array], name: str
) -> Iterator[Finding]:
    """Try for each variable the gradients that others of its shape get."""
    tried = 0
    for path, own in gradients.items():
        others = {
            p: g for p, g in gradients.items() if p != path and g.shape == own.shape and g.size > 1
        }
        if not others or tried >= MOST_VARIABLES:
            continue
        tried += 1
        slope = _slopes(trials, {path: own}).get(name, 0.0)
        if slope > 0.7:
            continue
        for other, gradient in list(others.items())[:MOST_VARIABLES]:
            if abs(_slopes(trials, {path: gradient}).get(name, 0.0) - 1) < 0.1:
                yield Finding(
                    "O-wrong-pairs",
                    "error",
                    path,
                    f"{name} has the slope along it that the gradient for {other} tells; along its "
                    f"own it is {slope:.2f} of what it should be",
                    "both variables move in directions that reduce no loss",
                    "pass gradients and variables to apply in the same order",
                    event.info.line,
                )
                break
