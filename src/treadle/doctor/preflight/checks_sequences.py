"""Checks of models of sequences: predictions that see the tokens they are to predict."""

from collections.abc import Iterator

import numpy as np

from ..numbers import as_floats
from .checks_losses import same
from .guarding import guarded
from .recording import ENTROPY, LAYER
from .report import Finding
from .trials import Trial, Trials, leaves_of


def check(trials: Trials) -> Iterator[Finding]:
    """Check the targets of models of sequences."""
    yield from guarded(trials, _not_shifted, trials.last)
    yield from guarded(trials, _sees_the_future, trials)
    yield from guarded(trials, _sees_its_target, trials)


def _not_shifted(trial: Trial) -> Iterator[Finding]:
    """Find a model of sequences whose targets are its own inputs, not shifted by one position."""
    inputs = [e.get("inputs[0]") for e in trial.of(LAYER) if e.info.kind == "Embedding"]
    sequences = [x for x in inputs if x is not None and x.ndim > 1 and x.shape[1] > 2]
    for event in trial.of(ENTROPY):
        true, pred = event.get("true"), event.get("pred")
        if true is None or pred is None or pred.ndim != 3 or len(np.unique(true)) < 3:
            continue
        # Other inputs, as those of a decoder of its own, may be shifted.
        if sequences and all(x.shape == true.shape and same(x, true) for x in sequences):
            yield Finding(
                "D-label-in-inputs",
                "warning",
                event.info.path,
                f"the targets, of shape {true.shape}, equal the input of the embedding at every "
                "position",
                "the model copies its input; it does not learn to predict the next token",
                "shift them: inputs tokens[:, :-1], targets tokens[:, 1:]",
                event.info.line,
            )


def _sees_the_future(trials: Trials) -> Iterator[Finding]:
    """Change the second half of the tokens: predictions in the first half must stay the same.

    Only if the one input of the embeddings holds each target one position later: an encoder, which
    may read all tokens, has an input of its own. Batch normalization mixes positions by design.
    """
    last = trials.last
    if any(hasattr(event.info.of, "moving_mean") for event in last.of(LAYER)):
        return
    inputs = [e.get("inputs[0]") for e in last.of(LAYER) if e.info.kind == "Embedding"]
    for number, event in enumerate(last.of(ENTROPY)):
        true, pred = event.get("true"), event.get("pred")
        if true is None or pred is None or pred.ndim != 3 or true.shape != pred.shape[:2]:
            continue
        rows, length = true.shape
        tokens = [x for x in inputs if x is not None and x.ndim > 1 and len(x) == rows]
        if rows < 2 or length < 4 or not tokens or any(x.shape != true.shape for x in tokens):
            continue
        if any(not same(x[:, 1:], true[:, :-1]) for x in tokens):
            continue
        half = length // 2
        for leaf in leaves_of(last.batch):
            x = leaf.array
            if x.ndim != 2 or x.shape[1] < length or not same(x[:, :length], tokens[0]):
                continue
            changed = np.concatenate([x[:, :half], np.roll(x[:, half:], 1, axis=0)], axis=1)
            trial = trials.attempt("D-label-in-inputs", leaf.with_(changed))
            again = trial.of(ENTROPY)[number].get("pred") if trial is not None else None
            if again is None or again.shape != pred.shape:
                continue
            before, after = as_floats(pred)[:, :half], as_floats(again)[:, :half]
            if np.abs(after - before).max() > 1e-2 * np.abs(before).max():
                yield Finding(
                    "D-label-in-inputs",
                    "warning",
                    event.info.path,
                    f"with other tokens from position {half} on, the predictions before it change",
                    "the model reads the tokens that it is to predict; it cannot generate text",
                    "use a causal mask (use_causal_mask=True, padding='causal'), and no "
                    "bidirectional layer",
                    event.info.line,
                )
                return


def _sees_its_target(trials: Trials) -> Iterator[Finding]:
    """Change the second half of the targets: if only later predictions change, they must lag.

    A decoder gets the target before; one that gets the target itself copies it. An encoder of the
    same tokens would change earlier predictions, too.
    """
    last = trials.last
    inputs = [e.get("inputs[0]") for e in last.of(LAYER) if e.info.kind == "Embedding"]
    inputs = [x for x in inputs if x is not None and x.ndim > 1]
    for number, event in enumerate(last.of(ENTROPY)):
        true, pred = event.get("true"), event.get("pred")
        if true is None or pred is None or pred.ndim != 3 or true.shape != pred.shape[:2]:
            continue
        half, given = true.shape[1] // 2, [x for x in inputs if same(x, true)]
        if half < 2 or len(np.unique(true)) < 3 or not given or len(given) == len(inputs):
            continue  # without other inputs `_not_shifted` finds it
        for leaf in leaves_of(last.batch):
            x = leaf.array
            if not same(x, true):
                continue
            changed = np.concatenate([x[:, :half], np.roll(x[:, half:], 1, axis=0)], axis=1)
            trial = trials.attempt("D-label-in-inputs", leaf.with_(changed))
            again = trial.of(ENTROPY)[number].get("pred") if trial is not None else None
            if again is None or again.shape != pred.shape:
                continue
            moves = np.abs(as_floats(again) - as_floats(pred)).max(axis=(0, 2))
            if moves[:half].max() < 1e-5 < 1e-3 * np.abs(pred).max() < moves[half]:
                yield Finding(
                    "D-label-in-inputs",
                    "warning",
                    event.info.path,
                    f"with another target at position {half}, the prediction at this position "
                    "changes, and those before it do not",
                    "the decoder gets the token that it is to predict, and copies it",
                    "shift its input by one position: a start token, then target[:, :-1]",
                    event.info.line,
                )
                return
