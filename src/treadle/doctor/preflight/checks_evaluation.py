"""Checks of evaluation: layers and inputs that random numbers change, values of unpaired rows."""

from collections.abc import Iterator

import numpy as np

from ..numbers import Array
from .checks_losses import enters_a_layer, same
from .checks_pairs import is_target
from .guarding import guarded
from .recording import LAYER, Event
from .report import Finding
from .trials import Leaf, Trial, Trials, distance, leaves_of, rows_of


def check(trials: Trials) -> Iterator[Finding]:
    """Repeat the evaluation with other random numbers."""
    yield from guarded(trials, _random, trials)
    yield from guarded(trials, _paired_with_all, trials)


def _random(trials: Trials) -> Iterator[Finding]:
    first, second = trials.evaluation, trials.evaluated_with_other_seeds()
    if first is None or second is None:
        return
    calls = list(zip(first.of(LAYER), second.of(LAYER), strict=False))
    for event, other in calls:
        if event.info.path != other.info.path:
            return
        # Keras' own layers have a mode, and T-on-in-eval reports them. A layer that samples, as a
        # variational autoencoder's, returns another shape than its first input, or has several.
        inputs, outputs = event.get("inputs[0]"), event.get("outputs")
        if type(event.info.of).__module__.startswith("keras.") or inputs is None or outputs is None:
            continue
        alike = inputs.shape == outputs.shape and _same_inputs(event, other)
        inner = any(_is_inner(e, event) and _is_random(e, o) for e, o in calls)
        if alike and _is_random(event, other) and not inner:
            yield Finding(
                "T-on-in-eval",
                "warning",
                event.info.path,
                f"{event.info.kind} changes its inputs at random in eval_step",
                "the evaluation is noisy: the layer ignores training=False",
                "give its call a training argument, and return the inputs without training",
                event.info.line,
            )
    yield from _random_inputs(trials, first, second)


def _same_inputs(event: Event, other: Event) -> bool:
    names = [name for name in event.arrays if name.startswith("inputs")]
    return all(same(event[name], other[name]) for name in names)


def _is_random(event: Event, other: Event) -> bool:
    x, y = event.get("outputs"), other.get("outputs")
    return x is not None and y is not None and not same(x, y)


def _is_inner(event: Event, of: Event) -> bool:
    return event.info.path.startswith(of.info.path + "/")


def _random_inputs(trials: Trials, first: Trial, second: Trial) -> Iterator[Finding]:
    """Find examples that `eval_step` changes at random before the first layer gets them.

    Only if they are no targets: a denoising or diffusion model needs the noise, and views of an
    image are compared with each other. The batch must have another array that is a target.
    """
    leaves = leaves_of(trials.last.batch)
    for event, other in zip(first.of(LAYER), second.of(LAYER), strict=False):
        x, y = event.get("inputs[0]"), other.get("inputs[0]")
        if x is None or y is None:
            continue
        if same(x, y):
            return  # what is random comes later
        places = [i for i, leaf in enumerate(leaves_of(first.batch)) if leaf.array.shape == x.shape]
        if len(places) != 1 or len(leaves) < 2 or places[0] >= len(leaves):
            return
        others = [i for i in range(len(leaves)) if i != places[0]]
        if is_target(trials, places[0]) or not is_target(trials, *others):
            return
        yield Finding(
            "E-random",
            "warning",
            leaves[places[0]].name,
            f"eval_step changes it at random before {event.info.path} gets it",
            "examples are augmented in evaluation too: its results are noisy, and often worse",
            "augment in train_step only",
            event.info.line,
        )
        return


def _paired_with_all(trials: Trials) -> Iterator[Finding]:
    """Find values that compare each output with the labels of all rows, as shapes (N,) and (N, 1).

    Such a value is a mean over all pairs: the order of the labels does not matter, half of the
    labels counts half, and what a label counts depends on the outputs. Differences of two means,
    or distances of distributions, have only some of these properties.
    """
    evaluation = trials.evaluation
    rows = None if evaluation is None else rows_of(evaluation.batch)
    if evaluation is None or rows is None or rows < 8 or len(leaves_of(evaluation.batch)) < 2:
        return
    rng, number = np.random.default_rng(4), len(leaves_of(evaluation.batch))
    for leaf in (leaves_of(evaluation.batch)[i] for i in range(number)):
        y = leaf.array
        if y.size != rows or enters_a_layer(evaluation, leaf) or len(np.unique(y)) < 2:
            continue
        names = [name for name, x in evaluation.values.items() if x.size == 1]
        for _ in range(3):
            trial = trials.evaluated_again({}, leaf.with_(rng.permutation(y)))
            names = [n for n in names if distance(trial.values[n], evaluation.values[n]) < 1e-6]
            if not names:
                break
        found = [name for name in names if _is_mean_over_pairs(trials, leaf, name)]
        if found:
            yield Finding(
                "L-unpaired",
                "warning",
                found[0],
                f"the value that eval_step returns stays the same if the rows of {leaf.name} are "
                "shuffled, and is a mean over all pairs of outputs and labels",
                "each output is compared with the labels of all rows",
                "give outputs and labels the same shape: (N,) and (N, 1) broadcast to (N, N)",
            )
            return


def _is_mean_over_pairs(trials: Trials, leaf: Leaf, name: str) -> bool:
    y = leaf.array
    a, b = np.full_like(y, np.unique(y)[0]), np.full_like(y, np.unique(y)[-1])

    def value(labels: Array, of_one_row: bool = False) -> float:
        batch = leaf.with_(labels)
        for i in range(len(leaves_of(batch)) if of_one_row else 0):
            other = leaves_of(batch)[i]
            if other.name != leaf.name:
                batch = other.with_(np.broadcast_to(other.array[:1], other.array.shape))
        return float(trials.evaluated_again({}, batch).values[name])

    of_a, of_b = value(a), value(b)
    gap = of_a - of_b
    half = len(y) // 2
    for seed in (0, 1):
        chosen = np.zeros(y.shape, bool)
        chosen[np.random.default_rng(seed).permutation(len(y))[:half]] = True
        mean = of_b + gap * half / len(y)
        if not abs(value(np.where(chosen, a, b)) - mean) < 1e-4 * abs(gap):
            return False
    return abs(value(a, True) - value(b, True) - gap) > 0.01 * abs(gap)
