"""Sources that are functions: synthetic data that seeks, and batches that depend on the run."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..core.hook import LoopView
from ..errors import DataError, whole_number
from .order import hashed
from .reader import BatchSource, lasting
from .reading import Reading
from .states import keeper_of, keeper_of_all

PURPOSE = 1
"""Tells these hashes from those of `random_states`, which are of as many numbers."""


def from_function(
    fn: Callable[[np.random.Generator], Any], length: int, seed: int | None = None
) -> BatchSource:
    """Make every batch by a function of a random generator.

    The generator (Philox) is keyed by seed, epoch and the batch's number in the epoch, so that any
    batch can be made again without those before it. `fn` must draw from nothing else that changes,
    or be an object with `state()` and `restore(state)`: then it goes on, after a resume too.

    Args:
        fn: Given a `numpy.random.Generator`, returns one batch: any structure of arrays.
        length: Batches in an epoch.
        seed: Seed of the generators; None derives it from the run's.

    Raises:
        DataError: A length that is no whole number from 1, or a seed that is none from 0.

    Example:
        >>> source = from_function(lambda rng: rng.normal(size=(8, 2)), length=100)
        >>> source.read(epoch=0).take(4).batches.shape
        (4, 8, 2)
    """
    length = whole_number("length", length, DataError)
    if seed is not None:
        seed = whole_number("seed", seed, DataError, least=0)

    def batches(reading: Reading) -> Iterator[Any]:
        for index in range(reading.first, length):
            key = hashed(PURPOSE, reading.seed, reading.epoch, index)
            yield fn(np.random.Generator(np.random.Philox(key=key)))

    return BatchSource(lasting(batches, keeper_of(fn)), length, seed=seed)


def closed(
    fn: Callable[[LoopView], Any], length: int | None = None, keeps: Any = None
) -> BatchSource:
    """Ask for every batch when it is needed, after the step before it: never ahead.

    For environments, replay buffers and curricula, whose next batch depends on what was learned.
    Each step is then a window of its own, since the next batch needs the weights after it.

    A resumed run goes on exactly where `fn`, or the object whose method it is, has `state()`, which
    returns numbers, texts, arrays, and lists, tuples and dicts of them, and `restore(state)`. Or
    `keeps` names the objects that have them. NumPy's global generator needs no keeping: it is
    seeded anew for each batch.

    Args:
        fn: Given the running loop, returns one batch: any structure of arrays.
        length: Batches in an epoch; None for an epoch without end.
        keeps: What `fn` changes from one batch to the next: an object with `state()` and
            `restore(state)`, as `Environments` are, or a list of such. An empty list says that `fn`
            changes nothing.

    Raises:
        DataError: A length that is no whole number from 1, or something in `keeps` without
            `state()` and `restore(state)`; on reading, that no loop is running.

    Example:
        >>> source = closed(lambda loop: np.array([loop.progress.step]), length=10)
        >>> source.length
        10
    """
    if length is not None:
        length = whole_number("length", length, DataError)

    def batches(reading: Reading) -> Iterator[Any]:
        if reading.loop is None:
            raise DataError("a closed source asks its function with the running loop: none runs")
        index = reading.first
        while length is None or index < length:
            yield fn(reading.loop)
            index += 1

    keeper = keeper_of(fn) if keeps is None else keeper_of_all(keeps)
    return BatchSource(
        lasting(batches, keeper, costly=True),
        length,
        endless=length is None,
        inexact=None
        if keeper is not None
        else "what a closed source gives depends on what its function keeps, which has no state() "
        "and restore(state) for checkpoints: keeps=[…] names what has them",
        closed=True,
    )
