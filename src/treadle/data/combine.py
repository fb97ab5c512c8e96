"""Sources made of sources: groups of batches, and several sources side by side."""

from dataclasses import dataclass
from typing import Any

from ..backends.window import Window
from ..core.hook import LoopView
from ..errors import DataError, whole_number
from .foreign.sources import as_source
from .leaves import sliced, window_of
from .reader import CountingReader, refuse_beyond
from .source import Position, Reader, Source, position_of, read_from


def groups(source: Any, n: int) -> "GroupSource":
    """Make a tuple of `n` consecutive batches each batch: several updates in one step.

    The batches of a group may differ in form (a shorter last one). A last group of fewer than `n`
    batches is left out.

    Args:
        source: Anything that is accepted as a source.
        n: Batches in a group.

    Raises:
        DataError: `n` is no whole number from 1, or the source has fewer than `n` batches.

    Example:
        >>> import numpy as np
        >>> source = groups([np.zeros(2), np.ones(2), np.ones(2)], 2)
        >>> source.length
        1
    """
    n = whole_number("n", n, DataError)
    source = as_source(source)
    if source.length is not None and source.length < n:
        raise DataError(f"the source has {source.length} batches: too few for one group of {n}")
    return GroupSource(source, n)


def zipped(*sources: Any, **named: Any) -> "ZippedSource":
    """Draw from several sources side by side: a batch is a tuple or a dict of their batches.

    An epoch ends with the shortest. Array sources of equal length shuffle alike, so that
    `zipped(from_arrays(x, …), from_arrays(y, …))` stays aligned; give one a `seed` of its own where
    they must differ.

    Args:
        *sources: Anything that is accepted as a source; batches are tuples.
        **named: The same by name; batches are dicts.

    Raises:
        DataError: No sources, or both kinds at once.

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
    if named:
        return ZippedSource({name: as_source(source) for name, source in named.items()})
    return ZippedSource(tuple(as_source(source) for source in sources))


@dataclass(frozen=True, eq=False)
class GroupSource:
    """Tuples of consecutive batches; made by `groups`."""

    source: Source
    n: int

    @property
    def length(self) -> int | None:
        """Whole groups in an epoch."""
        return None if self.source.length is None else self.source.length // self.n

    @property
    def endless(self) -> bool:
        """Whether an epoch is known never to end."""
        return self.source.endless

    @property
    def batch_examples(self) -> int | None:
        """Examples in the first batch of a group, which counts for the group."""
        return self.source.batch_examples

    @property
    def fingerprint(self) -> str | None:
        """What tells other data of the same shapes, where the source can tell."""
        return getattr(self.source, "fingerprint", None)

    @property
    def inexact(self) -> str | None:
        """Why the source cannot be resumed exactly."""
        return self.source.inexact

    @property
    def closed(self) -> bool:
        """Whether the source's batches depend on the state of the run."""
        return self.source.closed

    def read(
        self,
        epoch: int,
        start: int = 0,
        *,
        seed: int = 0,
        loop: LoopView | None = None,
        ordered: bool = False,
        position: Position | None = None,
    ) -> "GroupReader":
        """Read an epoch from its group number `start` on; the position is the source's.

        Raises:
            DataError: The epoch has fewer groups than `start`.
        """
        refuse_beyond(start, self.length, epoch)
        first = start * self.n
        part = read_from(self.source, epoch, first, position, seed=seed, loop=loop, ordered=ordered)
        return GroupReader(part, self.n, self.length, epoch, start)


class GroupReader(CountingReader):
    """Reads groups: cut out of one window where it can, else joined from several."""

    def __init__(self, part: Reader, n: int, length: int | None, epoch: int, start: int) -> None:
        super().__init__(epoch, start)
        self._part = part
        self._n = n
        self._length = length

    def position(self, ahead: int = 0) -> Position | None:
        """Return the position of the source's reader."""
        return position_of(self._part, ahead * self._n)

    def close(self) -> None:
        """Close the source's reader."""
        self._part.close()

    def _draw(self, most: int) -> Window | None:
        if self._length is not None:  # nothing is drawn of a last group that is left out
            most = min(most, self._length - self.given)
        window = self._part.take(most * self._n) if most else None
        if window is None:
            return None
        count = window.count // self._n
        if count == 0:
            return self._joined(window)
        whole, rest = window.split(count * self._n)
        if rest.count:
            self._part.put_back(rest)
        members = tuple(sliced(whole.batches, slice(i, None, self._n)) for i in range(self._n))
        return Window(members, count, window.examples)

    def _return(self, window: Window) -> None:
        for index in reversed(range(window.count)):
            for member in reversed(window.batches):
                batch = sliced(member, slice(index, index + 1))
                self._part.put_back(window_of(batch, 1))

    def _joined(self, first: Window) -> Window | None:
        """Return one group that begins with a window too short for it."""
        windows, missing = [first], self._n - first.count
        while missing:
            following = self._part.take(missing)
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
class ZippedSource:
    """Several sources side by side; made by `zipped`.

    Attributes:
        sources: A tuple or a dict of them.
    """

    sources: tuple[Source, ...] | dict[str, Source]

    @property
    def parts(self) -> list[tuple[str, Source]]:
        """The sources with their names or positions, in the order of `keras.tree`."""
        if isinstance(self.sources, dict):
            return sorted(self.sources.items())
        return [(str(position), source) for position, source in enumerate(self.sources)]

    @property
    def length(self) -> int | None:
        """Batches of the shortest; None where one that cannot tell may be shorter."""
        if any(part.length is None and not part.endless for _, part in self.parts):
            return None
        return self._shortest

    @property
    def endless(self) -> bool:
        """Whether all are endless."""
        return all(part.endless for _, part in self.parts)

    @property
    def batch_examples(self) -> int | None:
        """Examples in a batch of the first source, which counts."""
        return self.parts[0][1].batch_examples

    @property
    def fingerprint(self) -> str | None:
        """The fingerprints of the sources that have one, side by side."""
        found = [getattr(part, "fingerprint", None) for _, part in self.parts]
        return "+".join(told or "-" for told in found) if any(found) else None

    @property
    def inexact(self) -> str | None:
        """Why the sources that cannot be resumed exactly cannot, each named."""
        told = [f"source {name}: {part.inexact}" for name, part in self.parts if part.inexact]
        return "; ".join(told) or None

    @property
    def closed(self) -> bool:
        """Whether some source's batches depend on the state of the run."""
        return any(part.closed for _, part in self.parts)

    @property
    def _shortest(self) -> int | None:
        return min((part.length for _, part in self.parts if part.length is not None), default=None)

    def read(
        self,
        epoch: int,
        start: int = 0,
        *,
        seed: int = 0,
        loop: LoopView | None = None,
        ordered: bool = False,
        position: Position | None = None,
    ) -> "ZippedReader":
        """Read an epoch of all sources from batch number `start` on; each has its position.

        Raises:
            DataError: A source has fewer batches in this epoch than `start`.
        """
        refuse_beyond(start, self._shortest, epoch)
        at = position or {}
        readers = {
            name: read_from(part, epoch, start, at.get(name), seed=seed, loop=loop, ordered=ordered)
            for name, part in self.parts
        }
        order = list(self.sources) if isinstance(self.sources, dict) else None
        return ZippedReader(readers, order, self._shortest, epoch, start)


class ZippedReader(CountingReader):
    """Takes as many batches of each source as all have, and puts the others back.

    Args:
        readers: By name or position, in the order of `keras.tree`.
        names: The keys of batches that are dicts, in their own order; None makes tuples.
        length: Batches after which none of the sources is asked again, or None.
        epoch: The epoch's number.
        start: The number of the batch that comes first.
    """

    def __init__(
        self,
        readers: dict[str, Reader],
        names: list[str] | None,
        length: int | None,
        epoch: int,
        start: int,
    ) -> None:
        super().__init__(epoch, start)
        self._readers = readers
        self._names = names
        self._length = length

    def position(self, ahead: int = 0) -> Position | None:
        """Return the positions of all sources' readers by name, where there are any."""
        told = {name: position_of(reader, ahead) for name, reader in self._readers.items()}
        return {name: at for name, at in told.items() if at is not None} or None

    def close(self) -> None:
        """Close the readers of all sources."""
        for reader in self._readers.values():
            reader.close()

    def _draw(self, most: int) -> Window | None:
        if self._length is not None:  # a source that is asked for nothing draws nothing
            most = min(most, self._length - self.given)
        windows: dict[str, Window] = {}
        for name, reader in self._readers.items():
            window = reader.take(most) if most else None
            if window is None:
                most = 0
                break
            windows[name], most = window, window.count
        for name, window in windows.items():
            if window.count > most:
                windows[name], rest = window.split(most)
                self._readers[name].put_back(rest)
        if most == 0:
            return None
        first = next(iter(windows.values()))
        if self._names is None:
            batches: Any = tuple(window.batches for window in windows.values())
        else:
            batches = {name: windows[name].batches for name in self._names}
        return Window(batches, most, first.examples)

    def _return(self, window: Window) -> None:
        for place, (name, reader) in enumerate(self._readers.items()):
            batches = window.batches[place if self._names is None else name]
            reader.put_back(window_of(batches, window.count))
