"""Mistakes of gradients, optimizers, random numbers and evaluation that are certain."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import numpy as np

from ...steps.probes import APPLY, CLIP, DRAW, GRADIENTS, LAYER
from ..numbers import Array, apart, as_floats, scalar
from ..recording import Event
from ..trials import ROUNDING, Trials, TriedStep, differs, leaves_of
from .certain import mistake_in
from .findings import Finding
from .influences import effects, is_used
from .layers import scaled
from .optimizers import exchanged

LITTLE: Final = 1e-3
"""The relative change of a variable whose gradient is zero."""


def not_finite(trials: Trials) -> Iterator[Finding]:
    """Yield what was NaN or infinite first, if losses or trained variables are."""
    for number, trial in enumerate(trials.base, 1):
        trained = trial.gradients.keys() | trial.applied.keys()
        broken = [
            path
            for path in trained & trial.before.keys() & trial.after.keys()
            if _finite(trial.before[path]) and not _finite(trial.after[path])
        ]
        if not broken and all(_finite(event.arrays["loss"]) for event in trial.of(GRADIENTS)):
            continue
        where, what, fix, line = _first(trial, trials.base[: number - 1])
        if broken:
            what += f"; then {len(broken)} of {len(trained)} trained variables are NaN or infinite"
        seen, why = f"in step {number} {what}", "nothing is learned from such numbers"
        yield Finding("G-not-finite", where, seen, why, fix, line)
        return


def _first(trial: TriedStep, earlier: Sequence[TriedStep]) -> tuple[str, str, str, str]:
    """Return where numbers were not finite first, what was seen, the usual fix, and the line."""
    # Missing labels or masks, with which the steps before were right.
    intended = {x.name for t in earlier for x in leaves_of(t.batch) if not _finite(x.array)}
    for leaf in leaves_of(trial.batch):
        if leaf.name not in intended and not _finite(leaf.array):
            bad = int((~np.isfinite(as_floats(leaf.array))).sum())
            text = f"the batch has {bad} values that are NaN or infinite"
            return leaf.name, text, "leave these examples out, or replace the values", ""
    for event in trial.of(LAYER):
        if _finite(*event.part("inputs").values()) and not _finite(*event.part("outputs").values()):
            text = "its inputs are finite and its outputs are not"
            return event.call.path, text, "look for a division by zero in it", event.call.line
    for event in trial.of(GRADIENTS):
        if not _finite(event.arrays["loss"]):
            text = "the loss is not finite, although all outputs of layers are"
            fix = "look for the logarithm of zero, a division by zero or an overflow in the loss"
            return "loss", text, fix, event.call.line
    for event in trial.of(GRADIENTS):
        if not _finite(*event.part("outputs").values()):
            text = "the gradients are not finite, although the loss is"
            fix = (
                "look for the square root or the norm of zeros, whose gradient is infinite, and "
                "for a `where` that hides such a value: add a small number inside of the root"
            )
            return "gradients", text, fix, event.call.line
    return "update", "the update is not finite", "look at the optimizer and its learning rate", ""


def _finite(*arrays: Array) -> bool:
    """Return whether no number is NaN or infinite; true of integers and text."""
    return all(x.dtype.kind in "biuSUO" or bool(np.isfinite(as_floats(x)).all()) for x in arrays)


def step_mistakes(trials: Trials) -> Iterator[Finding]:
    """Yield the mistakes of gradients, updates, random numbers and evaluation."""
    yield from _blocked(trials)
    yield from _updates(trials)
    yield from _clips(trials)
    yield from _random(trials)
    yield from _evaluation(trials)


def _blocked(trials: Trials) -> Iterator[Finding]:
    """Yield variables whose gradient is zero although the loss depends on them."""
    first, usual = trials.base[0].gradients, trials.usual
    for event in usual.of(GRADIENTS):
        zero = [
            path
            for path, x in event.by_path.items()
            if not (x.any() or usual.gradients[path].any() or first.get(path, np.ones(1)).any())
        ]
        if not zero:
            continue
        moved = [_loss_after_move(trials, event, zero, sign) for sign in (1, -1)]
        if None in moved:
            continue
        a, (b, c) = scalar(event.arrays["loss"]), cast(list[float], moved)
        odd, even = abs(b - c), abs(b + c - 2 * a)
        # At a minimum, where the gradient is truly zero, both moves raise the loss.
        if odd > even and odd > ROUNDING * abs(2 * a):
            more = f" and {len(zero) - 1} more" if len(zero) > 1 else ""
            yield Finding(
                "G-blocked",
                zero[0],
                f"the gradient of it{more} is zero in two steps, although the loss depends on it: "
                f"{a:.6g} becomes {b:.6g} after a small change",
                "something between them has no gradient: stop_gradient, rounding, argmax, sign, a "
                "conversion to NumPy or an integer",
                "leave that operation out, use a differentiable one, or do not train the variable",
                event.call.line,
            )
            return


def _loss_after_move(trials: Trials, event: Event, paths: Sequence[str], sign: int) -> float | None:
    """Return the loss of the same call after a small change of variables, or None."""
    before, noise = trials.last.before, np.random.default_rng(0)
    values = {p: _moved(before[p], noise, sign) for p in paths if before[p].dtype.kind == "f"}
    trial = trials.attempt("gradients of zero", variables=values)
    again = [] if trial is None else trial.of(GRADIENTS)
    found = [scalar(e.arrays["loss"]) for e in again if e.call.key == event.call.key]
    return found[0] if found else None


def _moved(array: Array, noise: Any, sign: int) -> Array:
    x = as_floats(array)
    size = sign * LITTLE * (np.sqrt((x * x).mean()) if x.any() else 1.0)
    return (x + size * noise.normal(size=x.shape)).astype(array.dtype)


def _updates(trials: Trials) -> Iterator[Finding]:
    """Yield gradients applied with the other sign, or to other variables."""
    for trial in trials.base:
        computed = trial.gradients
        if not computed:
            continue
        for event in trial.of(APPLY):
            given = {p: as_floats(x) for p, x in event.by_path.items() if x.any() and p in computed}
            if len(trial.of(APPLY)) == 1:  # of several, one may maximize, as an adversary does
                yield from _ascent(trial, event, given, computed)
            for path, other in exchanged(given, computed, LITTLE):
                yield Finding(
                    "O-wrong-pairs",
                    path,
                    f"{event.call.path} applies the gradient of {other} to it",
                    "each variable needs its own gradient",
                    "pass gradients and variables in one order, from the same list",
                    event.call.line,
                )
                break
        if trial.of(APPLY):
            return


def _ascent(
    trial: TriedStep, event: Event, given: Mapping[str, Array], computed: Mapping[str, Array]
) -> Iterator[Finding]:
    if not given or any(apart(x, -computed[p]) > LITTLE for p, x in given.items()):
        return
    losses = [e for e in trial.of(GRADIENTS) if set(given) & set(e.by_path)]
    value = trial.values.get("loss")
    if value is not None and any(not differs(value, e.arrays["loss"]) for e in losses):
        yield Finding(
            "O-ascent",
            next(iter(given)),
            f"the {len(given)} gradients that {event.call.path} applies have the opposite sign of "
            "those that were computed of the returned loss",
            "optimizers subtract gradients: this maximizes the loss",
            "apply the gradients as they are; to maximize, differentiate the negative",
            event.call.line,
        )


def _clips(trials: Trials) -> Iterator[Finding]:
    """Yield clipping functions whose results are not used; the norm alone may be wanted."""
    for event in trials.usual.of(CLIP):
        if event.call.path == "clip_by_global_norm":
            continue
        if not any(x.any() for x in event.floats().values()):
            continue  # zeros stay zeros
        if is_used(trials, "use of clipping", event, scaled) is False:
            yield mistake_in(
                event,
                "O-clip-unused",
                "with other results, each entry times another factor, updates and values stay the "
                "same",
                "the gradients that are applied are not clipped",
                "apply what it returns: gradients are not changed in place",
            )


def _random(trials: Trials) -> Iterator[Finding]:
    """Yield constant seeds, steps that do not repeat, and steps that change Python values."""
    seen = set[tuple[str, str]]()
    for event in trials.usual.of(DRAW):
        seed = event.call.facts["seed"]
        if seed is not None and (event.call.path, event.call.line) not in seen:
            seen.add((event.call.path, event.call.line))
            yield mistake_in(
                event,
                "R-constant-seed",
                f"seed={seed}: the numbers are the same in each step",
                "a number as seed begins again with each call",
                "pass a keras.random.SeedGenerator that the task holds",
            )
    for path, (old, new) in trials.moving.items():
        yield Finding(
            "R-python-state",
            path,
            f"train_step changes this Python value from {old} to {new}",
            "a compiled step does that only while it is traced, and a resumed run starts again",
            "store changing values in a keras.Variable, or compute them from treadle.step()",
        )
    found = effects(trials.last, trials.repeated)
    if not trials.moving and (found["losses"] or found["returned values"]):
        yield Finding(
            "R-not-repeatable",
            (found["losses"] or found["returned values"])[0],
            "a second run from equal state, batch and random numbers gives another value",
            "it depends on something else, such as the clock, NumPy's random numbers or Python "
            "values: a run cannot be resumed or replayed, and a compiled step keeps one value",
            "draw random numbers by keras.random, and keep state in variables of the task",
            next((e.call.line for e in trials.usual.of(GRADIENTS)), ""),
        )


def _evaluation(trials: Trials) -> Iterator[Finding]:
    """Yield evaluations that change trained weights."""
    evaluation = trials.evaluation
    if evaluation is None:
        return
    trained = trials.last.applied.keys() | trials.base[0].applied.keys()
    changed = [path for path in trained if evaluation.changed(path)]
    if changed:
        yield Finding(
            "E-trains",
            sorted(changed)[0],
            f"eval_step changes {len(changed)} variables that the optimizers train",
            "evaluations train the model",
            "compute losses and metrics in eval_step without applying gradients",
        )
