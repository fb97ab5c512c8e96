"""Sources defined by functions: synthetic data, and batches that depend on the run."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..core.hook import LoopView
from ..errors import DataError, whole_number, whole_number_or_none
from .order import hashed
from .reader import BatchSource, lasting
from .source import ReadRequest
from .states import generators_of, keeper_of, keeper_of_all

PURPOSE = 1
"""Distinguishes these hashes from those in `random_states`, which hash as many numbers."""


def from_function(
    fn: Callable[[np.random.Generator], Any], length: int, seed: int | None = None
) -> BatchSource:
    """Create a source whose batches are computed by a function of a random generator.

    The generator (Philox) is keyed by the seed, the epoch and the batch number, so any batch can be
    computed without the previous ones. `fn` must not depend on other changing state, unless it is
    an object (or a method of one) with `state()` and `restore(state)`, which checkpoints then save,
    as they save random generators that `fn` uses.

    Args:
        fn: Given a `numpy.random.Generator`, returns one batch: any structure of arrays.
        length: The number of batches in an epoch.
        seed: The seed of the generators; None derives it from the seed of the run.

    Raises:
        DataError: If `length` is not a positive integer, or `seed` is not a non-negative integer.

    Example:
        >>> source = from_function(lambda rng: rng.normal(size=(8, 2)), length=100)
        >>> source.read(epoch=0).take(4).batches.shape
        (4, 8, 2)
    """
    length = whole_number("length", length, DataError)
    seed = whole_number_or_none("seed", seed, DataError, least=0)

    def batches(reading: ReadRequest) -> Iterator[Any]:
        for index in range(reading.first, length):
            key = hashed(PURPOSE, reading.seed, reading.epoch, index)
            yield fn(np.random.Generator(np.random.Philox(key=key)))

    return BatchSource(lasting(batches, keeper_of(fn) or generators_of(fn)), length, seed=seed)


def closed_loop(
    fn: Callable[[LoopView], Any], length: int | None = None, keeps: Any = None
) -> BatchSource:
    """Create a source whose batches depend on the training state, and are never prefetched.

    Use this for environments, replay buffers and curricula, whose next batch depends on the current
    weights. Every batch is computed after the previous step, so each step is a separate window.

    A run resumes exactly if `fn`, or the object of which it is a method, has `state()` and
    `restore(state)`, or if such objects are passed as `keeps`. A state may contain numbers,
    strings, arrays, and lists, tuples and dicts of these. NumPy's global generator need not be
    saved: it is seeded for each batch.

    Args:
        fn: Given the running loop, returns one batch: any structure of arrays.
        length: The number of batches in an epoch; None for an endless epoch.
        keeps: The state that `fn` changes between batches: an object with `state()` and
            `restore(state)`, such as `Environments`, or a list of such objects. An empty list means
            that `fn` has no state.

    Raises:
        DataError: If `length` is not a positive integer, or an object in `keeps` has no `state()`
            and `restore(state)`. When reading: if no loop is running.

    Example:
        >>> source = closed_loop(lambda loop: np.array([loop.progress.step]), length=10)
        >>> source.length
        10
    """
    length = whole_number_or_none("length", length, DataError)

    def batches(reading: ReadRequest) -> Iterator[Any]:
        if reading.loop is None:
            raise DataError(
                "a closed-loop source calls its function with the running loop, but no loop is "
                "running"
            )
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
        else "the batches of a closed-loop source depend on the state of its function, which has "
        "no state() and restore(state) for checkpoints: pass objects that have them as keeps=[…]",
        closed_loop=True,
    )
