"""Batches from a stream of examples of different lengths, in the order in which they come."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from .collating import Collating, Example
from .leaves import each_of
from .reader import BatchReader, BatchSource
from .source import BaseSource, Position, Reader, ReadRequest, Source, position_of, read_from
from .states import Resumable

TAKEN_AT_ONCE: Final = 64
"""Examples of a stream that are taken together."""


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

    def __init__(self, source: Source, joining: "Buckets | Rows") -> None:
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
            try:
                yield from self._joining.batches(examples, reading.ordered)
            finally:
                reader.close()

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
class Rows:
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
