"""Sources of which each of several processes reads its own share.

A batch of the run consists of the rows that all processes read for it, in the order of their ranks.
For each batch, the processes first exchange how many rows each has read. Usually a process has read
the rows that it computes, and holds only these, in their places. Otherwise, because a last batch is
shorter or a share has ended, the processes exchange the rows, and each holds the whole batch. So no
example is padded, repeated or left out.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends.window import Shares, Window, own_rows
from ..checkpoint.batch_forms import described, zeros
from ..checkpoint.structure import decode, encode
from ..core import structures
from ..core.processes import process_group
from ..core.tracebacks import in_one_line
from ..data.epochs import DISCARDED_AT_ONCE
from ..data.foreign.sources import as_source
from ..data.iterables import type_name
from ..data.leaves import Array, named, sliced
from ..data.source import BaseSource, Position, Reader, ReadRequest, Source, position_of, read_from
from ..errors import DataError
from .dividing.collectives import group_backend


def sharded(source: Callable[[int, int], Any]) -> "ShardedSource":
    """Let each of several processes read its own share of the data, and not all of it.

    Other sources are read as a whole by every process, in the order of one process. That is exact
    for any number of processes, but as fast as one of them reads. With `sharded`, batches depend on
    the number of processes: a run that resumes with another number continues with other batches. On
    the same number, it resumes exactly. In one process, the source is read as usual.

    The batches of all processes together are a batch of the run: divide the batch size by
    `shard_count`. An epoch ends when all shares have ended. Shares of equal size are fastest: for a
    batch that is not divided evenly, the processes exchange its rows.

    Args:
        source: A function of `shard_index` and `shard_count`, which returns the share of this
            process: a source, or any object that `as_source` accepts, whose arrays all have the
            examples on their first axis. It is called once, and all processes must call `sharded`
            at the same point.

    Raises:
        DataError: If `source` is not a function.

    Example:
        >>> import numpy as np
        >>> def files(shard_index, shard_count):
        ...     for file in range(12)[shard_index::shard_count]:
        ...         yield np.full((8 // shard_count, 2), file)
        >>> source = sharded(lambda *shard: lambda: files(*shard))
        >>> source.read(epoch=0).take(3).batches.shape
        (3, 8, 2)
    """
    _check_function(source)
    group = process_group()
    return ShardedSource(as_source(source(group.rank, group.size)))


def _check_function(source: Any) -> None:
    """Check that something is a function of two arguments.

    Raises:
        DataError: It is not.
    """
    try:
        if isinstance(source, Source) or not callable(source):
            wrong = f"a {type_name(source)}"
        else:
            inspect.signature(source).bind(0, 1)
            return
    except TypeError as error:
        wrong = f"{getattr(source, '__name__', type_name(source))}, which has {error}"
    except ValueError:  # it is not known which arguments it takes
        return
    raise DataError(
        "sharded takes a function of shard_index and shard_count that returns the share of a "
        f"process, such as sharded(lambda shard_index, shard_count: …), not {wrong}"
    )


class ShardedSource(BaseSource):
    """A source of which each process reads its own share; created by `sharded`.

    Attributes:
        share: The share of this process.
        shards: The number of shares, one for each process.
        length: The number of batches in an epoch, which is that of the longest share; None if
            unknown or endless.
        endless: Whether an epoch is known never to end.
        batch_examples: The number of examples in a full batch; None if unknown.
        inexact: The reason why a share cannot be resumed exactly on as many processes, or None.
        closed_loop: Whether the batches of a share depend on the state of the run.
    """

    def __init__(self, share: Source) -> None:
        self.share, self.shards = share, process_group().size
        mine = [share.length, share.endless, share.batch_examples, share.inexact]
        found = process_group().exchange([*mine, share.closed_loop], "making a sharded source")
        lengths, endless, examples, reasons, closed = map(list, zip(*found, strict=True))
        self.endless = any(endless)
        self.length: int | None = None if None in lengths or self.endless else max(lengths)
        self.batch_examples: int | None = None if None in examples else sum(examples)
        self.closed_loop = any(closed)
        self.inexact: str | None = next(filter(None, reasons), None)

    def open(self, request: ReadRequest) -> Reader:
        """Open a reader of the share, at the position of this process.

        On another number of processes, reading begins with the same batch number.
        """
        position = request.position
        known = position is not None and position.get("shards") is not None
        if self.shards == 1 and not known:
            return read_from(self.share, request)
        start, part = request.start, None
        if position is not None and known and position["shards"] == self.shards:
            part = position["parts"][process_group().rank]
            inside = position["epoch"] == request.epoch
            start = position["batches"][process_group().rank] if inside else start
        elif start:
            return self._skipped(request)
        reader = read_from(self.share, request.at(request.epoch, start, part))
        return reader if self.shards == 1 else ShardedReader(reader, request, start)

    def _skipped(self, request: ReadRequest) -> Reader:
        """Open a reader without a position: as many batches as were trained on are left out.

        If the share may end before, they are read, to find out.
        """
        start, length = request.start, self.share.length
        skipped = min(start, length or 0)
        if self.share.endless:
            skipped = start
        reader = read_from(self.share, request.at(request.epoch, skipped))
        while length is None and skipped < start:
            window = reader.take(min(DISCARDED_AT_ONCE, start - skipped))
            if window is None:
                break
            skipped += window.count
        return reader if self.shards == 1 else ShardedReader(reader, request, skipped)


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a process has read: some batches of equal form, or none at the end of its share.

    Attributes:
        count: The number of batches; 0 at the end.
        rows: The number of rows of each.
        form: The form of a batch, without its rows.
        error: Why the process cannot read its share, or "".
    """

    count: int
    rows: int
    form: Any
    error: str


class ShardedReader:
    """Reads one epoch of a share, together with the other processes.

    All processes must make the same calls.

    Args:
        reader: The reader of this process's share.
        request: What is read by all.
        start: The number of batches of the share that were given before.
    """

    def __init__(self, reader: Reader, request: ReadRequest, start: int) -> None:
        self._reader, self._epoch, self._given = reader, request.epoch, request.start
        self._own, self._ended = start, start < request.start
        self._empty: Any = None  # the batches taken last, without rows, for the structure
        self._filled: set[str] = set()

    def take(self, most: int) -> Window | None:
        """Return up to `most` batches, of which this process holds its rows; None at the end.

        Raises:
            DataError: A process cannot read its share, or the batches of two have other forms.
        """
        window, failure = None, None
        try:
            window = None if self._ended else self._reader.take(most)
            offer = self._offer(window)
        except Exception as error:
            offer, failure = _Offer(0, 0, None, in_one_line(error)), error
        at = f"reading batch {self._given + 1} of epoch {self._epoch + 1} of a sharded source"
        mine = [offer.count, offer.rows, offer.form, offer.error]
        offers = [_Offer(*each) for each in process_group().exchange(mine, at)]
        try:
            _check(offers, failure)
        except Exception:
            if window is not None:
                self._reader.put_back(window)
            raise
        reading = [each for each in offers if each.count]
        self._ended = window is None
        if not reading:
            return None
        count = min(each.count for each in reading)
        if window is not None and window.count > count:
            window, rest = window.split(count)
            self._reader.put_back(rest)
        self._given += count
        self._own += 0 if window is None else count
        if window is None:
            self._empty = zeros(reading[0].form)  # forms may differ from batch to batch
        return self._together(window, count, [each.rows for each in offers], at)

    def put_back(self, window: Window) -> None:
        """Put back a window; the next `take` returns it again."""
        assert window.shares is not None
        self._filled.clear()  # the step may be built from these batches when they are taken again
        self._given -= window.count
        counts, rank = window.shares.counts, process_group().rank
        first = sum(counts[:rank])
        if counts[rank]:
            own = structures.mapped(lambda x: x[:, first : first + counts[rank]], window.batches)
            self._own -= window.count
            self._ended = False
            self._reader.put_back(Window(own, window.count, counts[rank]))

    def position(self, ahead: int = 0) -> Position:
        """Return the positions of all processes."""
        # In the batches that were taken last, a share may have ended: it has none of these.
        own = min(self._own, self._given - ahead) if self._ended else self._own - ahead
        arrays: list[Array] = []
        part = encode(position_of(self._reader, self._own - own), "the source", arrays)
        at = "saving the position in a sharded source"
        found = process_group().exchange([own, part], at)
        everyone = process_group().exchange_arrays(arrays, at)
        return {
            "shards": process_group().size,
            "epoch": self._epoch,
            "batches": [batches for batches, _ in found],
            "parts": [decode(p, x) for (_, p), x in zip(found, everyone, strict=True)],
        }

    def close(self) -> None:
        """Close the reader of the share."""
        self._reader.close()

    def _offer(self, window: Window | None) -> _Offer:
        """Describe what this process has read.

        Raises:
            DataError: An array has no row for each example, or the batch is of another class.
        """
        if window is None:
            return _Offer(0, 0, None, "")
        for path, leaf in structures.with_paths(window.batches):
            if leaf.ndim < 2 or leaf.shape[1] != window.examples:
                raise DataError(
                    f"{named(path)} of a batch has the shape {leaf.shape[1:]}, but the batch has "
                    f"{window.examples} examples: in a sharded source, all arrays need the "
                    "examples on their first axis"
                )
        if not window.examples:
            raise DataError("a share has a batch without examples: leave it out")
        self._empty = sliced(sliced(window.batches, 0), slice(0, 0))
        form = described(self._empty)
        if form is None:
            raise DataError(
                f"a batch is a {type_name(self._empty)}: in a sharded source, batches consist of "
                "dicts with strings as keys, lists, tuples and dataclasses, which hold the arrays"
            )
        return _Offer(window.count, window.examples, form, "")

    def _together(self, window: Window | None, count: int, rows: Sequence[int], at: str) -> Window:
        """Return batches for all processes, with the rows of this one or of all.

        Args:
            window: The batches of this process, or None.
            count: The number of batches.
            rows: The number of rows that each process has read of each batch.
            at: What this process is doing, for messages.
        """
        examples, rank, size = sum(rows), process_group().rank, process_group().size
        batches = None if window is None else window.batches
        own: list[Array] = (
            [np.empty((count, *x.shape), x.dtype) for x in structures.flatten(self._empty)]
            if batches is None
            else structures.flatten(batches)
        )
        even = all(own_rows(examples, r, size)[1] == n > 0 for r, n in enumerate(rows))
        if even and group_backend().computes_own_rows(examples):
            first = own_rows(examples, rank, size)[0]
            new = f"{described(self._empty)} {rows}"
            fill = new not in self._filled  # such a batch is used to build the step
            self._filled.add(new)
            leaves = [_placed(x, first, examples, fill) for x in own]
        else:
            everyone = process_group().exchange_arrays(own, at)
            leaves = [np.concatenate(parts, axis=1) for parts in zip(*everyone, strict=True)]
            even = False
        shares = Shares(tuple(rows), whole=not even)
        return Window(structures.pack(self._empty, leaves), count, examples, shares=shares)


def _placed(own: Array, first: int, examples: int, fill: bool) -> Array:
    """Return stacked batches that hold rows in their places, and zeros in the others.

    The system provides memory when it is written to: the rows of others cost little.

    Args:
        own: The rows, as stacked batches.
        first: The place of the first one.
        examples: The number of rows of the whole batch.
        fill: Repeat the rows of the first batch instead of its zeros.
    """
    whole = np.zeros((own.shape[0], examples, *own.shape[2:]), own.dtype)
    if fill:
        whole[0] = np.resize(own[0], whole.shape[1:])
    whole[:, first : first + own.shape[1]] = own
    return whole


def _check(offers: Sequence[_Offer], failure: Exception | None) -> None:
    """Check that all processes could read, and have read batches of the same form.

    Raises:
        DataError: They have not. In the process that cannot read, the error itself.
    """
    if failure is not None:
        raise failure
    for rank, offer in enumerate(offers):
        if offer.error:
            raise DataError(f"process {rank} cannot read its share: {offer.error}")
    reading = [(rank, offer) for rank, offer in enumerate(offers) if offer.count]
    for rank, offer in reading:
        first, expected = reading[0]
        if offer.form != expected.form:
            raise DataError(
                f"the batches of process {rank} have the form {offer.form}, and those of process "
                f"{first} {expected.form}: all shares need the same arrays, with equal shapes "
                "after the first axis, and equal dtypes"
            )
