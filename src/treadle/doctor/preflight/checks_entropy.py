"""Checks of the entropy of a policy, as a bonus with the wrong sign."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..numbers import Array
from .changed_losses import CODE, Losses, line_of, scaled_output
from .intervening import MOST_CALLS, Change, floats_of, held, outer_calls
from .recording import Event
from .report import Finding
from .trials import Leaf, Trials, leaves_of, rows_of


def entropy(trials: Trials) -> Iterator[Finding]:
    """Without advantages, sharper policies must not have less loss: a bonus rewards entropy.

    Only where an array with one number for each row counts in proportion, as advantages do.
    """
    last, losses = trials.last, Losses(trials)
    rows, leaves = rows_of(last.batch), leaves_of(last.batch)
    calls = outer_calls(last)
    for number, event in list(calls.items())[-MOST_CALLS:]:
        for name, logits in floats_of(event).items():
            actions = [x for x in leaves if _names_columns(x, logits)]
            weights = [x for x in leaves if x.array.size == rows and x.array.dtype.kind == "f"]
            if not actions or rows is None or rows < 4:
                continue
            for leaf in weights:
                if np.isin(leaf.array, (0, 1)).all():
                    continue
                changes = _policy_alone(calls, number, name)
                which = _rewards_certainty(losses, leaf, changes)
                if which is not None:
                    yield Finding(
                        CODE,
                        "warning",
                        event.info.path,
                        f"with zeros in {leaf.name}, the loss falls if these logits are doubled "
                        f"(by {which[1]:.3g})",
                        "the entropy is subtracted as a bonus and not added: here the policy is "
                        "rewarded for certainty, and stops exploring",
                        "subtract the entropy from the loss: loss - 0.01 * entropy",
                        line_of(last, which[0]),
                    )
                    return


def _names_columns(leaf: Leaf, outputs: Array) -> bool:
    x = leaf.array
    return (
        x.dtype.kind in "iu"
        and outputs.ndim == 2
        and outputs.shape[1] > 1
        and x.size == len(outputs)
        and x.min() >= 0
        and x.max() < outputs.shape[1]
    )


def _policy_alone(calls: dict[int, Event], number: int, name: str) -> Callable[[float], Any]:
    """Return changes to multiples of some logits, with zeros for values of a single column."""

    def changes(scale: float) -> dict[int, Change]:
        own = scaled_output(calls[number], scale, name)
        found: dict[int, Change] = {}
        for n, event in calls.items():

            def change(key: str, tensor: Any, n: int = n, event: Event = event) -> Any:
                if n == number and key == name:
                    return own(key, tensor)
                if len(tensor.shape) > 1 and tensor.shape[-1] > 1:
                    return held(event)(key, tensor)
                return 0.0 * tensor

            found[n] = change
        return found

    return changes


def _rewards_certainty(
    losses: Losses, leaf: Leaf, changes: Callable[[float], Any]
) -> tuple[int, float] | None:
    """Return the number of a loss that sharper logits reduce without advantages, and how much."""
    zero = leaf.with_(np.zeros_like(leaf.array))
    flat, usual, sharp = (losses.of(zero, changes(scale)) for scale in (0.25, 1.0, 2.0))
    falls = (sharp < usual - 1e-6) & (usual < flat - 1e-6)
    if not falls.any():
        return None
    gains: list[Array] = [sharp - flat]
    for times in (1.0, 2.0):
        batch = leaf.with_((times * leaf.array).astype(leaf.array.dtype))
        gains.append(losses.of(batch, changes(2.0)) - losses.of(batch, changes(0.25)))
    none, once, twice = gains
    for number in np.flatnonzero(falls):
        share = float(once[number] - none[number])  # an advantage counts in proportion
        both = float(twice[number] - none[number])
        if abs(share) > 1e-6 and abs(both - 2 * share) < 0.05 * abs(share):
            return int(number), float(usual[number] - sharp[number])
    return None
