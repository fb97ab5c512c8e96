"""Batches from a sequence of examples of different lengths, at any position of an epoch.

The rows of packed examples are the same in each epoch, and shuffled: so any batch can be read
without those before it.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any, Final

import numpy as np

from ..core import structures
from ..errors import DataError
from . import random_states
from .collating import Collating, Example
from .order import Integers, Permutation, hashed
from .reader import BatchReader, BatchSource, lasting
from .source import BaseSource, ReadRequest
from .states import generators_of, keeper_of

_permutation: Final[Callable[[int, int, int], Permutation]] = lru_cache(maxsize=64)(Permutation)

SAMPLE: Final = 64
"""Examples that a fingerprint hashes; of the others, it hashes the bucket or the row."""
PURPOSE: Final = 3
"""Distinguishes these hashes from others of as many numbers."""


def chosen(examples: Any, numbers: Iterable[int], collating: Collating) -> Iterator[Example]:
    """Read the examples of these numbers."""
    return (collating.example(examples[number], f"example {number}") for number in numbers)


def of_all(examples: Any, collating: Collating, measure: Callable[[Example], int]) -> list[int]:
    """Measure all examples, one by one, without an effect on the global random states."""
    with random_states.preserved():
        return [measure(each) for each in chosen(examples, range(len(examples)), collating)]


@dataclass(frozen=True)
class Bucket:
    """Examples, or rows of packed examples, of which batches are made.

    Attributes:
        members: Their numbers, int64 of shape (members,).
        batch_size: How many make a batch.
    """

    members: Integers
    batch_size: int

    def batches(self, drop_last: bool) -> int:
        """Return the number of batches."""
        full, rest = divmod(len(self.members), self.batch_size)
        return full + (rest > 0 and not drop_last)


@dataclass(frozen=True, eq=False)
class RaggedSource(BaseSource):
    """A source of batches from a sequence of examples of different lengths.

    Attributes:
        data: The sequence of examples.
        buckets: What batches are made of; a batch has members of one bucket.
        collating: How examples become batches.
        shuffle: Whether each epoch has another order.
        drop_last: Whether the shorter last batch of a bucket is dropped.
        seed: The seed of the order, or None for the seed of the run.
        in_a_row: How many batches of a bucket follow one another.
        rows: The numbers of the examples in each row, if examples are packed.
        fingerprint: A hash of some examples, and of how all become batches (their buckets or
            rows); None if the sequence is no list or tuple.
        length: The number of batches in an epoch.
        endless: Always False.
        inexact: Always None: reading can start at any position.
        closed_loop: Always False.
        seeks: Always True.
    """

    data: Any
    buckets: Sequence[Bucket]
    collating: Collating
    shuffle: bool
    drop_last: bool
    seed: int | None
    in_a_row: int = 1
    rows: Sequence[Sequence[int]] | None = None

    fingerprint: str | None = field(init=False)
    length: int = field(init=False)
    endless = closed_loop = False
    inexact = None
    seeks = True

    def __post_init__(self) -> None:
        """Count the batches.

        Raises:
            DataError: If there are none.
        """
        length = sum(bucket.batches(self.drop_last) for bucket in self.buckets)
        if length == 0:
            raise DataError(
                f"{len(self.data)} examples make no full batch, and drop_last drops shorter "
                "batches: use a smaller batch_size"
                if len(self.data)
                else "there are no examples"
            )
        object.__setattr__(self, "length", length)
        object.__setattr__(self, "fingerprint", self._fingerprint())

    @property
    def examples(self) -> int:
        """The number of examples."""
        return len(self.data)

    @property
    def batch_examples(self) -> int:
        """The number of examples, or of packed rows, in the largest batch."""
        return max(min(len(each.members), each.batch_size) for each in self.buckets)

    def open(self, request: ReadRequest) -> BatchReader:
        """Open a reader. If the request is for the stored order, buckets have no effect.

        Raises:
            DataError: If the epoch has fewer than `start` batches.
        """
        batches = lasting(self._batches, keeper_of(self.data) or generators_of(self.data))
        length = None if request.ordered else self.length
        return BatchSource(batches, length, seed=self.seed).open(request)

    def _batches(self, reading: ReadRequest) -> Iterator[Any]:
        """Yield the batches of an epoch from `reading.first`."""
        if reading.ordered:
            members = np.sort(np.concatenate([bucket.members for bucket in self.buckets]))
            size = min(bucket.batch_size for bucket in self.buckets)
            for start in range(reading.first * size, len(members), size):
                yield self._joined(members[start : start + size])
            return
        seed, epoch = reading.seed, reading.epoch
        for place, number in islice(self._order(seed, epoch), reading.first, None):
            yield self._joined(self._members(place, number, seed, epoch))

    def _joined(self, members: Integers) -> Any:
        if self.rows is None:
            return self.collating.padded([*self._chosen(members.tolist())])
        rows = [self.rows[row] for row in members.tolist()]
        return self.collating.packed([[*self._chosen(row)] for row in rows])

    def _chosen(self, numbers: Iterable[int]) -> Iterator[Example]:
        return chosen(self.data, numbers, self.collating)

    def _order(self, seed: int, epoch: int) -> Iterator[tuple[int, int]]:
        """Yield the bucket of each batch, and the number of the batch within it."""
        runs: list[tuple[int, range]] = []
        for place, bucket in enumerate(self.buckets):
            count = bucket.batches(self.drop_last)
            starts = range(0, count, self.in_a_row)
            runs += [(place, range(i, min(i + self.in_a_row, count))) for i in starts]
        order = np.arange(len(runs))
        if self.shuffle:
            order = _permutation(len(runs), hashed(PURPOSE, seed), epoch)(order)
        for run in order.tolist():
            place, numbers = runs[run]
            yield from ((place, number) for number in numbers)

    def _members(self, place: int, number: int, seed: int, epoch: int) -> Integers:
        """Return the members of a batch of a bucket."""
        bucket = self.buckets[place]
        start, size = number * bucket.batch_size, len(bucket.members)
        at = np.arange(start, min(start + bucket.batch_size, size))
        if self.shuffle:
            at = _permutation(size, hashed(PURPOSE, seed, place), epoch)(at)
        return bucket.members[at]

    def _fingerprint(self) -> str | None:
        if not isinstance(self.data, list | tuple):
            return None
        found = hashlib.sha256(repr((self.collating, self.in_a_row, self.rows)).encode())
        for bucket in self.buckets:
            found.update(repr(bucket.batch_size).encode() + bucket.members.tobytes())
        last = len(self.data) - 1
        sample = np.unique(np.linspace(0, last, min(SAMPLE, last + 1)).astype(np.int64))
        for each in self._chosen(sample.tolist()):
            whole = structures.pack(each.outline, each.leaves)
            form = structures.form(whole, lambda leaf: (leaf.shape, leaf.dtype.name))
            found.update(repr(form).encode() + b"".join(leaf.tobytes() for leaf in each.leaves))
        return found.hexdigest()[:16]
