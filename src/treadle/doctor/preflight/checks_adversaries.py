"""Checks of adversaries: what the losses of a generator and a discriminator want of a score."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..numbers import Array, as_floats
from .checks_losses import same
from .guarding import guarded
from .intervening import changed_outputs, constant, held, losses_of, outer_calls
from .recording import GRADIENTS, OBJECTIVE, Event
from .report import Finding
from .trials import Trials, leaves_of

CODE: Final = "L-adversary"


def check(trials: Trials) -> Iterator[Finding]:
    """Check pairs of models of which one judges what the other returns."""
    yield from guarded(trials, _adversaries, trials)


@dataclass(frozen=True, eq=False)
class _Pair:
    """A discriminator and a generator.

    Attributes:
        judge: The first call of the discriminator.
        real: Numbers of the calls of the discriminator on the data.
        fake: Numbers of its calls on what the generator returned.
        own: The number of the loss that trains the discriminator.
        other: The number of the loss that trains the generator.
    """

    judge: Event
    real: list[int]
    fake: list[int]
    own: int
    other: int


def _pair(trials: Trials) -> _Pair | None:
    last = trials.last
    calls, leaves = outer_calls(last), leaves_of(last.batch)
    trained = [
        {path for path in event.info.more["paths"] if path in event.arrays}
        for event in last.of(GRADIENTS)
    ]
    for judge in calls.values():
        theirs = {n: e for n, e in calls.items() if e.info.of is judge.info.of}
        makers = [e for n, e in calls.items() if n not in theirs]
        real = [n for n, e in theirs.items() if any(same(_input(e), x.array) for x in leaves)]
        fake = {
            n: maker
            for n, e in theirs.items()
            for maker in makers
            if _input(e).size
            and same(_input(e), as_floats(maker.arrays.get("outputs", np.zeros(0))))
        }
        if not real or not fake:
            continue
        mine = _paths(trials, judge)
        makes = _paths(trials, next(iter(fake.values())))
        own = [i for i, paths in enumerate(trained) if paths & mine and not paths & makes]
        other = [i for i, paths in enumerate(trained) if paths & makes and not paths & mine]
        if len(own) == 1 and len(other) == 1:
            return _Pair(judge, real, list(fake), own[0], other[0])
    return None


def _input(event: Event) -> Array:
    return event.arrays.get("inputs[0]", np.zeros(0))


def _paths(trials: Trials, event: Event) -> set[str]:
    return {trials.state.path_of(variable) for variable in event.info.of.trainable_variables}


def _adversaries(trials: Trials) -> Iterator[Finding]:
    """Raise the scores of data and of generated examples, other calls held.

    The loss of the discriminator must want one raised and the other lowered, and the loss of the
    generator the opposite for generated examples. Scores are compared far from both sides, since an
    error has its least value in between.
    """
    pair = _pair(trials)
    if pair is None or len(losses_of(trials.last)) != len(trials.last.of(GRADIENTS)):
        return
    on_real = _slopes(trials, pair, pair.real)
    on_fake = _slopes(trials, pair, pair.fake)
    if on_real is None or on_fake is None:
        return
    lines = [event.info.line for event in trials.last.of(OBJECTIVE)]
    if on_real[pair.own] * on_fake[pair.own] > 0:
        yield Finding(
            CODE,
            "warning",
            pair.judge.info.path,
            f"its loss {'falls' if on_real[pair.own] < 0 else 'rises'} with the scores of the data "
            "and with those of generated examples alike",
            "it learns to return the same for both, and tells nothing apart",
            "give data and generated examples opposite targets, such as ones and zeros",
            lines[pair.own],
        )
    elif on_fake[pair.own] * on_fake[pair.other] > 0:
        yield Finding(
            CODE,
            "warning",
            pair.judge.info.path,
            f"the losses of both models {'fall' if on_fake[pair.own] < 0 else 'rise'} with the "
            "scores of generated examples",
            "the generator helps the discriminator, and learns to be recognized",
            "give the generator's loss the target that the data have in the discriminator's",
            lines[pair.other],
        )


def _slopes(trials: Trials, pair: _Pair, numbers: list[int]) -> Array | None:
    """Return by how much each loss rises if the scores of some calls are high instead of low."""
    last, calls = trials.last, outer_calls(trials.last)
    scores = np.concatenate([as_floats(calls[n]["outputs"]).ravel() for n in numbers])
    shares = bool(scores.min() >= 0 and scores.max() <= 1)  # after a sigmoid
    found: list[Array] = []
    for value in (0.1, 0.9) if shares else (-1.0, 2.0):
        # Those of the generator's own calls of the discriminator are held as well.
        changes = {n: held(e) for n, e in calls.items()}
        changes |= {n: _all(value) for n in numbers}
        with changed_outputs(changes):
            trial = trials.attempt(CODE, last.batch)
        if trial is None or len(losses_of(trial)) != len(losses_of(last)):
            return None
        found.append(np.array(losses_of(trial)))
    return found[1] - found[0]


def _all(value: float) -> Any:
    return lambda name, tensor: constant(np.full(tensor.shape, value, "float32"), tensor)
