"""Combining sources: grouping consecutive batches, and zipping several sources."""

from dataclasses import dataclass
from typing import Any

from ..backends.window import Window
from ..errors import DataError, whole_number
from .epochs import LimitedSource
from .foreign.sources import as_source
from .leaves import sliced, window_of
from .reader import CountingReader, refuse_beyond
from .source import (
    BaseSource,
    DerivedReader,
    DerivedSource,
    Position,
    Reader,
    ReadRequest,
    Source,
    finish,
    position_of,
    read_from,
    shards_of,
)


def groups(source: Any, n: int) -> "GroupSource":
    """Group `n` consecutive batches into a tuple, for several updates in one step.

    The batches of a group may differ in shape, such as a shorter last batch. A last group of fewer
    than `n` batches is dropped.

    Args:
        source: A source, or any object that `as_source` accepts.
        n: The number of batches in a group.

    Raises:
        DataError: If `n` is not a positive integer, the source has fewer than `n` batches, or each
            process reads its own share of it.

    Example:
        >>> import numpy as np
        >>> source = groups([np.zeros(2), np.ones(2), np.ones(2)], 2)
        >>> source.length
        1
    """
    n = whole_number("n", n, DataError)
    source = as_source(source)
    refuse_shards(source, "groups")
    if source.length is not None and source.length < n:
        raise DataError(f"the source has {source.length} batches: too few for one group of {n}")
    return GroupSource(source, n)


def zipped(*sources: Any, **named: Any) -> "ZippedSource":
    """Zip several sources: each batch is a tuple or a dict of one batch from each source.

    An epoch ends when the shortest source ends. A source without end continues: each epoch starts
    where the previous one has left it. A generator function starts again in each epoch, unless
    `limited` makes a stream of it. Array sources of equal length have the same order,
    so `zipped(from_arrays(x, …), from_arrays(y, …))` stays aligned. Pass different seeds to
    `from_arrays` for different orders.

    Args:
        *sources: Sources, or any objects that `as_source` accepts; batches are tuples.
        **named: The same, as keyword arguments; batches are dicts.

    Raises:
        DataError: If there are no sources, or both positional and named ones, or each process reads
            its own share of one.

    Example:
        >>> import numpy as np
        >>> source = zipped(real=[np.zeros(2)], noise=[np.ones(3)])
        >>> {name: x.shape for name, x in source.read(epoch=0).take(1).batches.items()}
        {'real': (1, 2), 'noise': (1, 3)}
    """
    if bool(sources) == bool(named):
        raise DataError(
            "zipped takes sources either by position (batches are tuples) or by name (dicts): "
            + ("got both" if sources else "got none")
        )
    parts = [as_source(source) for source in (*sources, *named.values())]
    for part in parts:
        refuse_shards(part, "zipped")
    if not all(part.endless for part in parts):  # an epoch ends, and the streams continue
        lengths = [part.length for part in parts if not part.endless]
        varies = any(getattr(part, "length_varies", False) for part in parts)
        least = None if varies else min((n for n in lengths if n is not None), default=None)
        parts = [LimitedSource(part, least) if part.endless else part for part in parts]
    return ZippedSource(dict(zip(named, parts, strict=True)) if named else tuple(parts))


def refuse_shards(source: Source, function: str) -> None:
    """Reject a source of `sharded`, whose readers agree with those of other processes.

    Raises:
        DataError: It is one.
    """
    if shards_of(source) is not None:
        raise DataError(
            f"{function} cannot combine a source of sharded: combine the sources inside, as in "
            f"sharded(lambda shard_index, shard_count: {function}(…))"
        )


@dataclass(frozen=True, eq=False)
class GroupSource(DerivedSource):
    """A source of tuples of consecutive batches; created by `groups`.

    The examples of the first batch of a group count for the group.
    """

    source: Source
    n: int

    @property
    def length(self) -> int | None:
        """The number of complete groups in an epoch."""
        return None if self.source.length is None else self.source.length // self.n

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the source's data, or None if it has none."""
        return getattr(self.source, "fingerprint", None)

    def open(self, request: ReadRequest) -> "GroupReader":
        """Open a reader of groups. The position is that of the underlying source.

        Raises:
            DataError: If the epoch has fewer than `start` groups.
        """
        epoch, start = request.epoch, request.start
        refuse_beyond(start, None if self.length_varies else self.length, epoch)
        part = read_from(self.source, request.at(epoch, start * self.n, request.position))
        return GroupReader(part, self, epoch, start)


class GroupReader(DerivedReader, CountingReader):
    """Reads groups: slices of one window if possible, otherwise joined from several windows."""

    def __init__(self, part: Reader, source: GroupSource, epoch: int, start: int) -> None:
        DerivedReader.__init__(self, part)
        CountingReader.__init__(self, epoch, start)
        self._source, self._n = source, source.n

    def position(self, ahead: int = 0) -> Position | None:
        """Return the position of the source's reader."""
        return position_of(self._reader, ahead * self._n)

    def _draw(self, most: int) -> Window | None:
        length = self._source.length
        if length is not None:  # do not read batches of a dropped last group
            most = min(most, length - self.given)
        window = self._reader.take(most * self._n) if most else None
        if window is None:
            self.finish()
            return None
        count = window.count // self._n
        if count == 0:
            return self._joined(window)
        whole, rest = window.split(count * self._n)
        if rest.count:
            self._reader.put_back(rest)
        members = tuple(sliced(whole.batches, slice(i, None, self._n)) for i in range(self._n))
        return Window(members, count, window.examples)

    def _return(self, window: Window) -> None:
        for index in reversed(range(window.count)):
            for member in reversed(window.batches):
                batch = sliced(member, slice(index, index + 1))
                self._reader.put_back(window_of(batch, 1))

    def _joined(self, first: Window) -> Window | None:
        """Return one group that starts with a window shorter than the group."""
        windows, missing = [first], self._n - first.count
        while missing:
            try:
                following = self._reader.take(missing)
            except Exception:
                for window in reversed(windows):
                    self._reader.put_back(window)
                raise
            if following is None:
                return None
            windows.append(following)
            missing -= following.count
        members = tuple(
            sliced(window.batches, slice(i, i + 1))
            for window in windows
            for i in range(window.count)
        )
        return Window(members, 1, first.examples)


@dataclass(frozen=True, eq=False)
class ZippedSource(BaseSource):
    """A source that zips several sources; created by `zipped`.

    Attributes:
        sources: A tuple or a dict of sources.
    """

    sources: tuple[Source, ...] | dict[str, Source]

    @property
    def parts(self) -> list[tuple[str, Source]]:
        """The sources with their names or indices, in the order of the batch."""
        if isinstance(self.sources, dict):
            return list(self.sources.items())
        return [(str(position), source) for position, source in enumerate(self.sources)]

    @property
    def length(self) -> int | None:
        """The length of the shortest source; None if one of unknown length may be shorter."""
        if any(part.length is None and not part.endless for _, part in self.parts):
            return None
        return self.shortest

    @property
    def endless(self) -> bool:
        """Whether all sources are endless."""
        return all(part.endless for _, part in self.parts)

    @property
    def batch_examples(self) -> int | None:
        """The number of examples in a batch of the first source, which counts for all."""
        return self.parts[0][1].batch_examples

    @property
    def fingerprint(self) -> str | None:
        """The joined fingerprints of the sources, or None if none has one."""
        found = [getattr(part, "fingerprint", None) for _, part in self.parts]
        return "+".join(each or "-" for each in found) if any(found) else None

    @property
    def inexact(self) -> str | None:
        """The reasons why sources cannot be resumed exactly, with their names, or None."""
        reasons = [f"source {name}: {part.inexact}" for name, part in self.parts if part.inexact]
        return "; ".join(reasons) or None

    @property
    def closed_loop(self) -> bool:
        """Whether the batches of any source depend on the state of the run."""
        return any(part.closed_loop for _, part in self.parts)

    @property
    def shortest(self) -> int | None:
        """The length of the shortest source of known length, or None."""
        return min((part.length for _, part in self.parts if part.length is not None), default=None)

    def open(self, request: ReadRequest) -> "ZippedReader":
        """Open a reader of all sources. The position has that of each source by name or index.

        Raises:
            DataError: If the epoch of a source has fewer than `start` batches.
        """
        epoch, start, positions = request.epoch, request.start, request.position or {}
        refuse_beyond(start, None if self.length_varies else self.shortest, epoch)
        readers = {
            name: read_from(part, request.at(epoch, start, positions.get(name)))
            for name, part in self.parts
        }
        return ZippedReader(readers, self, epoch, start)


class ZippedReader(CountingReader):
    """Takes the same number of batches from each source, and puts back excess batches.

    Args:
        readers: The readers by name or index, in the order of the batch.
        source: The source, whose shortest part may have another length in each epoch.
        epoch: The number of the epoch.
        start: The number of the first batch.
    """

    def __init__(
        self, readers: dict[str, Reader], source: ZippedSource, epoch: int, start: int
    ) -> None:
        super().__init__(epoch, start)
        self._readers, self._source = readers, source
        self._is_named = isinstance(source.sources, dict)  # else batches are tuples

    def position(self, ahead: int = 0) -> Position | None:
        """Return the positions of the readers by name or index, or None if no reader has one."""
        found = {name: position_of(reader, ahead) for name, reader in self._readers.items()}
        return {name: at for name, at in found.items() if at is not None} or None

    def finish(self) -> None:
        """End the epoch of all readers."""
        for reader in self._readers.values():
            finish(reader)

    def close(self) -> None:
        """Close the readers of all sources."""
        for reader in self._readers.values():
            reader.close()

    def _draw(self, most: int) -> Window | None:
        shortest = self._source.shortest
        if shortest is not None:  # do not read batches beyond the shortest source
            most = min(most, shortest - self.given)
        windows: dict[str, Window] = {}
        for name, reader in self._readers.items():
            try:
                window = reader.take(most) if most else None
            except Exception:  # an iterator yields each batch only once
                for taken, part in windows.items():
                    self._readers[taken].put_back(part)
                raise
            if window is None:
                most = 0
                break
            windows[name], most = window, window.count
        for name, window in windows.items():
            if window.count > most:
                windows[name], rest = window.split(most)
                self._readers[name].put_back(rest)
        if most == 0:
            self.finish()
            return None
        first = next(iter(windows.values()))
        batches: Any = {name: window.batches for name, window in windows.items()}
        if not self._is_named:
            batches = tuple(batches.values())
        return Window(batches, most, first.examples)

    def _return(self, window: Window) -> None:
        for place, (name, reader) in enumerate(self._readers.items()):
            batches = window.batches[name if self._is_named else place]
            reader.put_back(window_of(batches, window.count))
