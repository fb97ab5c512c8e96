"""Checks of accumulation: gradients of several batches, or of parts of one, in one update."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from ..numbers import Array, as_floats
from .guarding import guarded
from .recording import APPLY, BRANCH, CLIP, GRADIENTS, LOOP, Event
from .report import Finding
from .trials import Trials, distance, leaves_of, rows_of

PARTS: Final = "O-summed, O-clips-parts"

MOST: Final = 16
"""The largest number of batches for one update that are tried."""


def check(trials: Trials) -> Iterator[Finding]:
    """Compare what is applied with the gradients since the last update."""
    last = trials.last
    if last.of(APPLY):
        yield from guarded(trials, _parts_of_a_batch, trials)
    elif last.of(BRANCH) and trials.applied and last.of(GRADIENTS):
        try:
            done = trials.until_applied(MOST)
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            trials.failed[PARTS] = f"the repeated steps end with {text}"
            return
        if not done:
            trials.failed[PARTS] = f"{MOST} batches are not applied"
            return
        events = [event for trial in done for event in trial.of(GRADIENTS)]
        clips = [trial.of(CLIP) for trial in done[:-1]]
        yield from guarded(
            trials, _judged, events, done[-1].of(APPLY), "batches", clips[0] if all(clips) else []
        )
        yield from guarded(trials, _not_reset, trials, len(done))


def _not_reset(trials: Trials, length: int) -> Iterator[Finding]:
    """Find a second update that gets the gradients of the first one again."""
    done = trials.until_applied(2 * length, 2)
    first, second = done[:length], done[length:]
    if not second:
        return
    for old, new in zip(first[-1].of(APPLY), second[-1].of(APPLY), strict=False):
        before, after = (
            _sums([e for trial in cycle for e in trial.of(GRADIENTS)], list(old.arrays))[0]
            for cycle in (first, second)
        )
        paths = [p for p in before if p in after and new.get(p) is not None]
        share = {p: _share(old[p], before[p]) for p in paths}
        if not paths or any(distance(old[p], share[p] * before[p]) > 1e-3 for p in paths):
            continue  # they are clipped, or processed in other ways
        expected = {p: share[p] * after[p] for p in paths}
        if all(
            distance(new[p], as_floats(old[p]) + expected[p]) < 1e-3 < distance(new[p], expected[p])
            for p in paths
        ):
            yield Finding(
                "O-not-reset",
                "error",
                new.info.path,
                "the second update gets the gradients of the first one again, together with those "
                f"of the {len(second)} batches since then",
                "every update repeats all gradients before it",
                "assign zeros to the accumulators after the update, or use treadle.Accumulator",
                new.info.line,
            )


def _share(applied: Array, total: Array) -> float:
    """Return the factor of a sum that fits what was applied best."""
    x, y = as_floats(applied).ravel(), as_floats(total).ravel()
    return float(x @ y / (y @ y))


def _parts_of_a_batch(trials: Trials) -> Iterator[Finding]:
    """Find one update for gradients of parts of the batch, each computed at the same line."""
    inlined = bool(trials.last.of(LOOP))
    last = trials.attempt(PARTS, trials.last.batch, inlined=True) if inlined else trials.last
    if last is None:
        return
    events = last.of(GRADIENTS)
    lines = {(e.info.line, tuple(e.info.more["paths"])) for e in events}
    rows = rows_of(last.batch)
    if len(events) < 2 or len(lines) > 1 or rows is None or rows < 2:
        return
    # A loop over views or tasks takes all rows each time; one over parts of the batch does not.
    batch = last.batch
    for number in range(len(leaves_of(batch))):
        leaf = leaves_of(batch)[number]
        batch = leaf.with_(np.concatenate([leaf.array[-1:], leaf.array[1:]]))
    trial = trials.attempt(PARTS, batch, inlined=inlined)
    if trial is None or len(trial.of(GRADIENTS)) != len(events):
        return
    changed = [_differ(a, b) for a, b in zip(trial.of(GRADIENTS), events, strict=True)]
    if sum(changed) == 1:
        clips = last.of(CLIP)
        yield from _judged(
            events, last.of(APPLY), "parts of the batch", clips if len(clips) >= len(events) else []
        )


def _differ(a: Event, b: Event) -> bool:
    return any(distance(x, b.arrays[path]) > 1e-5 for path, x in a.arrays.items())


def _judged(
    events: list[Event], applied: list[Event], what: str, clips: list[Event]
) -> Iterator[Finding]:
    """Compare applied gradients with the sum of those that were computed."""
    for update in applied:
        sums, counts = _sums(events, list(update.arrays))
        if not sums or min(counts.values()) < 2:
            continue
        count = min(counts.values())
        if all(distance(as_floats(update[path]), total) < 1e-3 for path, total in sums.items()):
            yield Finding(
                "O-summed",
                "warning",
                update.info.path,
                f"it gets the sum of the gradients of {count} {what}, not their mean",
                f"the update is that of a learning rate {count} times as large, and clipping and "
                "weight decay count otherwise",
                f"divide by {count}, or use treadle.Accumulator, which applies the mean",
                update.info.line,
            )
        if clips:
            yield Finding(
                "O-clips-parts",
                "warning",
                clips[0].info.path,
                f"it clips the gradients of each of {count} {what} before they are accumulated",
                "large and small gradients then count alike, and the mean is not clipped",
                "clip what is applied: inside the function that treadle.Accumulator.add calls",
                clips[0].info.line,
            )


def _sums(events: list[Event], paths: list[str]) -> tuple[dict[str, Array], dict[str, int]]:
    """Return the sum and the number of the gradients of each variable."""
    sums: dict[str, Array] = {}
    counts: dict[str, int] = {}
    for event in events:
        for path in paths:
            gradient = event.get(path)
            if gradient is not None and as_floats(gradient).any():
                sums[path] = sums.get(path, 0.0) + as_floats(gradient)
                counts[path] = counts.get(path, 0) + 1
    return sums, counts
