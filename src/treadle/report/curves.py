"""Reducing curves to as many points as a screen shows, without losing spikes or gaps."""

from typing import Any

import numpy as np

from ..core.logs import Array

MOST_POINTS = 4000  # of a curve: about one for each pixel of a wide screen, and more if zoomed
DIGITS = 6  # significant digits of values, which are more than a screen can show


def reduced(steps: Array, values: Array, points: int = MOST_POINTS) -> dict[str, list[Any]]:
    """Reduce a curve to about `points` points.

    The steps are divided into buckets of equal length. Of each, the smallest and the largest value
    are kept at their steps, and the first value that is not finite, as a gap. So a spike of a
    single step is never lost, whatever the number of steps.

    Args:
        steps: The steps, increasing.
        values: The value at each step.
        points: The largest number of values; gaps are added to them.

    Returns:
        `x` and `y`, where a gap is None; if values were left out also `mx` and `my`, the mean of
        each bucket at its middle, which smoothing uses, since minima and maxima would distort it.

    Example:
        >>> steps = np.arange(1, 9)
        >>> reduced(steps, np.array([1.0, 2, 9, 2, 1, 1, np.nan, 3]), points=4)["y"]
        [1.0, 9.0, 1.0, None, 3.0]
    """
    values = np.asarray(values, np.float64)
    count = len(values)
    if count <= points:
        return {"x": steps.tolist(), "y": _numbers(values)}
    finite = np.isfinite(values)
    edges = np.linspace(0, count, max(1, points // 2) + 1).astype(np.int64)
    starts = edges[:-1][np.diff(edges) > 0]
    bucket = np.repeat(np.arange(len(starts)), np.diff([*starts, count]))
    kept = np.zeros(count, bool)
    # In order of bucket, then of value: the first of each bucket is its smallest, and so on.
    for filled in (np.where(finite, values, np.inf), np.where(finite, -values, np.inf)):
        kept[np.lexsort((filled, bucket))[starts]] = True
    kept &= finite
    gaps = np.flatnonzero(~finite)
    kept[gaps[np.unique(bucket[gaps], return_index=True)[1]]] = True
    totals = np.add.reduceat(np.where(finite, values, 0.0), starts)
    counts = np.add.reduceat(finite.astype(np.float64), starts)
    with np.errstate(invalid="ignore", over="ignore"):
        means = totals / np.where(counts > 0, counts, np.nan)
    middles = steps[(starts + np.append(starts[1:], count)) // 2]
    return {
        "x": steps[kept].tolist(),
        "y": _numbers(values[kept]),
        "mx": middles.tolist(),
        "my": _numbers(means),
    }


def _numbers(values: Array) -> list[float | None]:
    """Round to some significant digits; None for values that are not finite."""
    return [float(f"{v:.{DIGITS}g}") if np.isfinite(v) else None for v in values.tolist()]


def thinned(count: int, most: int = 1000) -> list[int]:
    """Return at most this many positions, with the first and the last."""
    if count <= most:
        return list(range(count))
    if most == 1:
        return [count - 1]
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]
