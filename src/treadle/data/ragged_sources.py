"""Batches from a sequence or a stream of examples of different lengths.

Of a sequence, the rows of packed examples are the same in each epoch, and shuffled: so any batch
can be read without those before it. Of a stream, batches come in the order of the examples.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice
from typing import Any, Final

import numpy as np

from ..core import structures
from ..errors import DataError
from . import random_states
from .collating import Collating, Example
from .leaves import each_of
from .order import Integers, Permutation, hashed
from .reader import BatchReader, BatchSource, lasting
from .source import BaseSource, Position, Reader, ReadRequest, Source, position_of, read_from
from .states import Resumable, generators_of, keeper_of

_permutation: Final[Callable[[int, int, int], Permutation]] = lru_cache(maxsize=64)(Permutation)

SAMPLE: Final = 64
"""Examples that a fingerprint hashes; of the others, it hashes the bucket or the row."""
TAKEN_AT_ONCE: Final = 64
"""Examples of a stream that are taken together."""
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


class RaggedStream(BaseSource):
    """A source of batches from a stream of examples of different lengths.

    A resumed run draws the examples of the epoch again, up to its position.

    Attributes:
        source: The source of examples.
        length: None: the number of batches is not known.
        fingerprint: A hash of how examples become batches.
        endless: Whether the stream is known never to end.
        batch_examples: The number of examples, or of packed rows, in the largest batch.
        inexact: The reason why the stream cannot be resumed exactly, or None.
        closed_loop: Whether examples depend on the state of the run.
        seeks: Always False.
    """

    length = None
    seeks = False

    def __init__(self, source: Source, joining: "Buckets | RowPacker") -> None:
        self.source, self._joining = source, joining
        self.fingerprint = hashlib.sha256(repr(joining).encode()).hexdigest()[:16]
        self.endless, self.inexact = source.endless, source.inexact
        self.closed_loop, self.batch_examples = source.closed_loop, joining.batch_examples

    def open(self, request: ReadRequest) -> BatchReader:
        """Open a reader of the batches of an epoch."""
        closed = self.source.closed_loop
        return BatchSource(self._batches, None, seeks=False, closed_loop=closed).open(request)

    def _batches(self, reading: ReadRequest) -> Iterator[Any]:
        state = reading.last_state()
        position: Position | None = None if state is None else state["part"]
        reader = read_from(self.source, reading.at(reading.epoch, 0, position))
        most = 1 if self.source.closed_loop else TAKEN_AT_ONCE
        first = _taken(reader, most)

        items = chain(first, chain.from_iterable(iter(lambda: _taken(reader, most), [])))
        example = self._joining.collating.example
        examples = (example(item, f"example {i} of the epoch") for i, item in enumerate(items))

        def batches() -> Iterator[Any]:
            with closing(reader):
                yield from self._joining.batches(examples, reading.ordered)

        # A source may open its iterator at the first batch: before, it has no position.
        opening = position_of(reader, len(first))
        return Resumable(
            batches(),
            lambda: {"part": position_of(reader)},
            name="stream of examples",
            lasting=True,
            opening={"part": opening},
        )


def _taken(reader: Reader, most: int) -> list[Any]:
    """Return up to `most` examples; none at the end."""
    return reader.take_each(most) if isinstance(reader, BatchReader) else each_of(reader.take(most))


@dataclass(frozen=True)
class Buckets:
    """Joins the examples of a stream that have similar lengths.

    Attributes:
        collating: How examples become a batch.
        lengths: The lengths of buckets; None for one bucket.
        sizes: The number of examples in a batch of each bucket.
        drop_last: Whether examples that make no full batch at the end are dropped.
    """

    collating: Collating
    lengths: Sequence[int] | None
    sizes: Sequence[int]
    drop_last: bool

    @property
    def batch_examples(self) -> int:
        """The number of examples in the largest batch."""
        return max(self.sizes)

    def batches(self, examples: Iterator[Example], ordered: bool) -> Iterator[Any]:
        """Yield batches as soon as they are full; buckets have no effect on the stored order."""
        sizes = [min(self.sizes)] if ordered else self.sizes
        waiting: list[list[Example]] = [[] for _ in sizes]
        for example in examples:
            place = 0 if ordered or self.lengths is None else self.collating.place(example)
            waiting[place].append(example)
            if len(waiting[place]) == sizes[place]:
                yield self.collating.padded(waiting[place])
                waiting[place] = []
        if ordered or not self.drop_last:
            yield from (self.collating.padded(rest) for rest in waiting if rest)


@dataclass(frozen=True)
class RowPacker:
    """Packs the examples of a stream into rows.

    Attributes:
        collating: How rows become a batch.
        length: The length of a row.
        batch_examples: The number of rows in a batch.
        drop_last: Whether a last batch with fewer rows is dropped.
    """

    collating: Collating
    length: int
    batch_examples: int
    drop_last: bool

    def batches(self, examples: Iterator[Example], ordered: bool) -> Iterator[Any]:
        """Yield a batch when the next example fits in none of its rows."""
        rows: list[list[Example]] = []
        room: list[int] = []
        for example in examples:
            length = self.collating.used(example)
            row = next((i for i, left in enumerate(room) if left >= length), len(rows))
            if row == self.batch_examples:
                yield self.collating.packed(rows)
                rows, room, row = [], [], 0
            if row == len(rows):
                rows.append([])
                room.append(self.length)
            rows[row].append(example)
            room[row] -= length
        if rows and (ordered or len(rows) == self.batch_examples or not self.drop_last):
            yield self.collating.packed(rows)
