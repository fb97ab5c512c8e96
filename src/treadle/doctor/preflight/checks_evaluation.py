"""Checks of randomness in evaluation: layers and inputs that random numbers change."""

from collections.abc import Iterator

from .checks_losses import same
from .checks_pairs import is_target
from .guarding import guarded
from .recording import LAYER, Event
from .report import Finding
from .trials import Trial, Trials, leaves_of


def check(trials: Trials) -> Iterator[Finding]:
    """Repeat the evaluation with other random numbers."""
    yield from guarded(trials, _random, trials)


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
